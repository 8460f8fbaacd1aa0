"""The same run in two processes has the same bits; a process that computes something else is found out."""

import sys

import pytest
import torch
from safetensors.torch import save_file

from mechkv import determinism as module
from mechkv.determinism import determinism
from mechkv.errors import InputError, ModelError
from tests.tiny import tiny_hf, tiny_tokenizer, tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    place = tmp_path_factory.mktemp("model")
    tiny_hf("llama-gqa", dtype=torch.float16, num_hidden_layers=1).save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return str(place)


def test_two_processes_give_the_same_bits(folder) -> None:
    found = determinism(folder, [tokens(9)], n_steps=3, threads=(1, 1))
    assert found.frame["equal"].all()
    assert (found.summary()["same_drift"] == 1).all()
    assert (found.summary()["n_steps"] == 4).all()


def test_one_changed_value_in_one_process_is_seen(monkeypatch) -> None:
    def start(place, process, threads):
        logits = {f"0-{path}": torch.arange(12.0).reshape(3, 4) for path in module.PATHS}
        logits["0-cached"][1, 2] += 0.5 * process
        save_file(logits, place / f"{process}.safetensors")

    monkeypatch.setattr(module, "_start", start)
    found = determinism("anything", [tokens(9)], n_steps=2, threads=(1, 2))
    table = found.summary().set_index("path")
    assert table.loc["cached", "equal"] == pytest.approx(2 / 3)
    assert table.loc["cached", "max_abs"] == 0.5
    assert table.loc["recomputed", "equal"] == 1
    assert table.loc["recomputed", "same_drift"] == pytest.approx(2 / 3)


def test_unusable_requests_and_failing_processes_are_errors(folder, tmp_path, monkeypatch) -> None:
    with pytest.raises(InputError, match="processes"):
        determinism(folder, [tokens(9)], threads=(1,))
    broken = tmp_path / "broken"  # stands in for Python: starting the real one costs seconds
    broken.write_text("#!/bin/sh\necho 'Traceback' >&2\necho 'ModelError: no such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(ModelError, match="process of the determinism check failed") as caught:
        determinism(folder, [tokens(9)], threads=(1, 1))
    assert "ModelError: no such file" in str(caught.value)
