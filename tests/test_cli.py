"""The command line: quick help, exit codes, JSON on standard output and nothing else there."""

import json
import subprocess
import sys

import pytest
import torch
from tiny import tiny_hf, tiny_tokenizer

from mechkv import cli


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A tiny model in Hugging Face format; its tokenizer knows no English, so every word is <unk>."""
    place = tmp_path_factory.mktemp("model")
    tiny_hf("llama-gqa", max_position_embeddings=512).save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return str(place)


def run(*arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    return int(stop.value.code or 0)


def test_help_and_import_do_not_load_torch() -> None:
    code = (
        "import sys; sys.argv = ['mechkv', '--help']\n"
        "import mechkv\nfrom mechkv.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "heavy = {'torch', 'transformer_lens', 'transformers', 'pandas', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "drift" in done.stdout


def test_a_reader_who_has_seen_enough_is_no_crash() -> None:
    code = "import os, sys\nfrom mechkv import cli\nos.close(1)\n"
    code += "read, write = os.pipe()\nos.close(read)\nos.dup2(write, 1)\ncli.main(['models', '--json'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_public_name_does_load_torch() -> None:
    """The twin: the check above can fail."""
    code = "import sys, mechkv; mechkv.compare; assert 'torch' in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_drift_prints_one_json_document(folder: str, capsys) -> None:
    assert run("drift", folder, "--dtype", "bfloat16", "--n-prompts", "2", "--steps", "2", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["dtype"] for row in rows} == {"bfloat16", "float32"}
    assert {"site", "layer", "estimate", "bitwise_equal", "n_undefined"} <= set(rows[0])
    drifts = [row["estimate"] for row in rows if row["dtype"] == "float32" and row["estimate"]]
    assert drifts
    assert any(value != round(value, 10) for value in drifts), "digits were cut off"


def test_drift_writes_and_goes_on(folder: str, tmp_path, capsys) -> None:
    arguments = (
        "drift",
        folder,
        "--dtype",
        "float32",
        "--n-prompts",
        "2",
        "--steps",
        "2",
        "--out",
        str(tmp_path / "o"),
    )
    assert run(*arguments) == 0
    first = capsys.readouterr().out
    assert "float32" in first
    assert list((tmp_path / "o" / "figures").glob("*.png"))
    assert run(*arguments) == 0
    assert capsys.readouterr().out == first
    assert run(*arguments[:-4], "--steps", "3", "--out", str(tmp_path / "o")) == 5
    assert "another run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "taken"),
    [
        (("drift",), "profile"),
        (("heads",), "heads"),
        (("heads",), "twins"),
        (("patch",), "factorial"),
        (("patch",), "sweep"),
        (("tokens",), "divergence"),
        (("precision", "--parts", "sites"), "sites"),
    ],
)
def test_a_folder_that_is_taken_is_named_before_anything_runs(command, taken, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / taken).mkdir()
    (tmp_path / taken / "mine.txt").write_text("do not lose me")
    loaded: list[str] = []
    monkeypatch.setattr("mechkv.models.load_model", lambda source, **_: loaded.append(source))
    name, *options = command
    assert run(name, "some-model", *options, "--out", str(tmp_path)) == 5
    assert f"{taken} is taken" in capsys.readouterr().err
    assert not loaded
    assert (tmp_path / taken / "mine.txt").read_text() == "do not lose me"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("drift", "no/such-model-here"), 2, "cannot load"),
        (("drift", "FOLDER", "--n-prompts", "0"), 2, "mechkv:"),
        (("drift", "FOLDER", "--steps", "0"), 2, "at least 1"),
        (("drift", "FOLDER", "--prompts", "missing.jsonl"), 2, "missing.jsonl"),
        (("drift", "FOLDER", "--dtype", "int8"), 2, "int8"),
        (("drift", "FOLDER", "--step", "3"), 2, "--step"),
        (("models", "pull"), 2, "nothing to fetch"),
        (("models", "pull", "gpt-5"), 2, "gpt-5"),
        (("nonsense",), 2, "nonsense"),
    ],
)
def test_bad_input_exits_with_two(folder: str, arguments: tuple[str, ...], code: int, words: str, capsys) -> None:
    assert run(*(folder if word == "FOLDER" else word for word in arguments)) == code
    captured = capsys.readouterr()
    assert words in captured.err + captured.out


def test_overflow_exits_with_three(tmp_path, capsys) -> None:
    model = tiny_hf("llama-gqa", dtype=torch.float32, max_position_embeddings=512)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(8e4)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert run("drift", str(tmp_path), "--dtype", "float16", "--n-prompts", "1", "--steps", "2") == 3
    message = capsys.readouterr().err
    assert "layer 1" in message
    assert "bfloat16" in message


def test_models_lists_licences(capsys) -> None:
    assert run("models", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} == {"smollm2-135m", "gemma3-270m"}
    assert all(row["licence"] for row in rows)
