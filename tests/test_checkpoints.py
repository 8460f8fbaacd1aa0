"""Checkpoints: safetensors and nothing else, and a hub that does not answer is asked once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import HTTPError
from transformers import AutoModelForCausalLM

import mechkv
from mechkv import checkpoints
from mechkv.errors import ModelError
from tests.tiny import tiny_hf, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def folder(tmp_path):
    tiny_hf().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("content", [b"no pickle at all", None], ids=["corrupt", "sound"])
def test_pickled_weights_are_refused_unread(folder, content):
    weights = folder / "model.safetensors"
    torch.save(tiny_hf().state_dict(), folder / "pytorch_model.bin")
    if content is not None:
        (folder / "pytorch_model.bin").write_bytes(content)
    assert mechkv.load_model(folder, dtype="float32", device="cpu") is not None  # the twin: safetensors come first
    weights.unlink()
    with pytest.raises(
        ModelError,
        match=r"not in safetensors: got pytorch_model.bin and no .*expected model.safetensors.*save_pretrained",
    ):
        mechkv.load_model(folder, dtype="float32", device="cpu")


def test_a_stray_safetensors_file_lets_no_pickle_in(folder):
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    torch.save(tiny_hf().state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot load"):
        mechkv.load_model(folder, dtype="float32", device="cpu")


def test_a_hub_that_cannot_be_reached_is_asked_once(tmp_path):
    code = (
        "import mechkv\n"
        "try:\n    mechkv.load_model('nobody/nothing', dtype='float32', device='cpu')\n"
        "except mechkv.ModelError as error:\n    print(error)\n"
    )
    closed = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "NO_PROXY": "*"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | closed, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout
    assert "no complete copy on this computer, and the hub cannot be asked: " in words
    assert "refused" in words


class Hub:
    """Stands in for transformers and the hub, and notes what each was asked."""

    def __init__(self, monkeypatch, *, local: Exception | None, answer: Exception | None = None, there=None) -> None:
        self.asked: list[str] = []
        self.loads: list[dict] = []
        self.local, self.answer, self.there = local, answer, there
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", self.load)
        monkeypatch.setattr(checkpoints, "get_hf_file_metadata", self.ask)

    def load(self, name: str, **options):
        self.loads.append(options)
        found = self.local if options.get("local_files_only") else self.there
        if isinstance(found, Exception):
            raise found
        return tiny_hf(), {}

    def ask(self, url: str) -> None:
        self.asked.append(url)
        if self.answer is not None:
            raise self.answer


def read() -> object:
    return checkpoints.read_model(checkpoints.locate("owner/name", "v1"), torch.float32, {"": "cpu"})


def test_what_is_here_is_loaded_without_asking(monkeypatch):
    hub = Hub(monkeypatch, local=None)
    read()
    assert hub.asked == []
    assert [options["local_files_only"] for options in hub.loads] == [True]


def test_what_is_not_here_comes_from_the_hub_with_the_same_options(monkeypatch):
    hub = Hub(monkeypatch, local=OSError("not in the cache"))
    read()
    assert len(hub.asked) == 1
    assert hub.asked[0].endswith("owner/name/resolve/v1/config.json")
    first, second = hub.loads
    assert first.pop("local_files_only")
    assert first == second
    assert (second["revision"], second["device_map"], second["use_safetensors"]) == ("v1", {"": "cpu"}, True)


def test_a_hub_that_does_not_answer_ends_it(monkeypatch):
    hub = Hub(monkeypatch, local=OSError("not in the cache"), answer=HTTPError("no route"))
    with pytest.raises(ModelError, match=r"cannot load 'owner/name'.*cannot be asked: no route.*needs a network"):
        read()
    assert (len(hub.asked), len(hub.loads)) == (1, 1)


def test_a_hub_id_without_safetensors_says_so(monkeypatch):
    Hub(monkeypatch, local=OSError("not here"), there=OSError("Please do not set `use_safetensors=True`."))
    with pytest.raises(ModelError, match=r"not in safetensors: got no .safetensors file on the hub"):
        read()
