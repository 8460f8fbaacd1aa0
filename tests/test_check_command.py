"""`mechkv check` from outside: exit codes, one JSON document, somebody else's code, the worked example."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jaxtyping
import pytest
import torch

import mechkv
from mechkv import check_model, cli
from tests.tiny import tiny_bridge, tiny_hf, tiny_tokenizer, tokens

EXAMPLE = Path(__file__).parents[1] / "examples" / "small_gpt"


def call(capsys, *arguments) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["check", *arguments])
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


@pytest.fixture
def in_example(monkeypatch):
    monkeypatch.chdir(EXAMPLE)
    yield
    for name in ("paths", "model"):
        sys.modules.pop(name, None)


def test_example_with_the_planted_bug(capsys, in_example):
    code, out, _ = call(capsys, "--paths", "paths:planted", "--dtype", "float32", "float16", "--json")
    found = json.loads(out)
    assert (code, found["verdict"], found["kind"]) == (1, "semantic", "positions")
    assert (found["first_position"], found["first_step"], found["first_layer"]) == (8, 1, -1)


def test_example_without_it(capsys, in_example):
    code, out, _ = call(capsys, "--paths", "paths:right", "--dtype", "float64", "float32")
    assert code == 0
    assert out.startswith("numerical") or out.startswith("identical")


def test_usage_errors(capsys, in_example):
    assert call(capsys)[0] == 2
    assert call(capsys, "some-model", "--paths", "paths:right")[0] == 2
    code, _, err = call(capsys, "--paths", "paths:nothing")
    assert code == 2
    assert "module:object" in err
    code, _, err = call(capsys, "--paths", "json:dumps")
    assert code == 2
    for where in ("", ":paths", "./paths.py"):
        code, _, err = call(capsys, "--paths", where)
        assert code == 2
        assert "cannot find the paths" in err


def _holder(**changes):
    """A module with two paths that agree, and changes."""

    def logits(model, tokens):
        return (model[tokens, None] * torch.arange(1.0, 6).to(model)).cumsum(0)[2:]

    made = {"cached": logits, "recomputed": logits, "tokens": torch.arange(9), "n_prompt": 3}
    return SimpleNamespace(build=lambda dtype: torch.linspace(0, 1, 9, dtype=dtype), **made | changes)


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({}, 0, ""),  # the twin
        ({"tokens": [1, 2, 3, 4]}, 2, "tokens: got list"),
        ({"n_prompt": "3"}, 2, "'3' of 9 tokens"),
        ({"recomputed": None}, 2, "recomputed: got NoneType"),
        ({"cached": lambda model, tokens: 1 / 0}, 70, "ZeroDivisionError"),
    ],
)
def test_paths_that_crash_are_not_called_semantic(capsys, monkeypatch, changes, code, words):
    monkeypatch.setitem(sys.modules, "holder", _holder(**changes))
    jaxtyping.config.update("jaxtyping_disable", True)  # as outside pytest
    try:
        found, _, err = call(capsys, "--paths", "holder", "--dtype", "float64")
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    assert found == code
    assert words in err


def test_where_a_report_cannot_go_is_found_before_anything_runs(capsys, monkeypatch, tmp_path):
    def never(model, tokens):
        raise AssertionError("run")

    monkeypatch.setitem(sys.modules, "holder", _holder(cached=never))
    (tmp_path / "thesis.txt").write_text("years of work")
    for out in (tmp_path, tmp_path / "thesis.txt", tmp_path / "thesis.txt" / "below"):
        assert call(capsys, "--paths", "holder", "--out", str(out))[0] == 5
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]
    monkeypatch.setitem(sys.modules, "holder", _holder())
    for _ in range(2):  # a report may be written over an earlier one
        assert call(capsys, "--paths", "holder", "--dtype", "float64", "--out", str(tmp_path / "new"))[0] == 0


@pytest.fixture
def folder(tmp_path):
    tiny_hf("qwen3").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_model_folder(capsys, folder, tmp_path):
    out = tmp_path / "report"
    arguments = (str(folder), "--dtype", "float32", "float64", "--steps", "4", "--json", "--device", "cpu")
    code, text, _ = call(capsys, *arguments, "--out", str(out))
    found = json.loads(text)
    assert code == 0
    assert found["verdict"] in ("numerical", "identical")
    assert {row["dtype"] for row in found["rungs"]} == {"float32", "float64"}
    assert any("chunks" in name for name in found["evidence"]["cases"])
    again = mechkv.CheckReport.load(out)
    assert again.verdict == found["verdict"]
    assert again.to_dict()["rungs"] == found["rungs"]


def _spoiled(folder: Path, factor: float) -> Path:
    model = tiny_hf("llama-gqa", max_position_embeddings=512)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(factor)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("factor", "dtypes", "reason"),
    [
        (8e4, ["float16"], "in float16 on both paths: overflow"),
        (float("nan"), ["float16"], "in every precision as soon as the model is run"),
        (float("nan"), ["float32", "bfloat16"], "in every precision as soon as the model is run"),
    ],
)
def test_a_model_that_overflows_when_loaded_gets_its_report(capsys, tmp_path, factor, dtypes, reason):
    folder, out = _spoiled(tmp_path / "model", factor), tmp_path / "report"
    arguments = (str(folder), "--dtype", *dtypes, "--steps", "2", "--device", "cpu", "--out", str(out))
    code, text, _ = call(capsys, *arguments, "--json")
    found = json.loads(text)
    assert (code, found["verdict"], found["exit_code"]) == (3, "nonfinite", 3)
    assert reason in found["reason"]
    assert mechkv.CheckReport.load(out).verdict == "nonfinite"
    assert call(capsys, *arguments)[1].startswith("nonfinite: ")


def test_a_model_that_does_not_overflow_is_not_called_so(capsys, tmp_path):
    """The twin."""
    folder = str(_spoiled(tmp_path, 1.0))
    code, text, _ = call(capsys, folder, "--dtype", "float16", "--steps", "2", "--device", "cpu", "--json")
    assert (code, json.loads(text)["verdict"]) in ((4, "inconclusive"), (0, "identical"))


def test_batched_and_padded_variants_are_clean():
    report = mechkv.check(
        tiny_hf("llama-gqa"), dtypes=("float32",), n_steps=4, batched=True, left_padded=True, prompts=[tokens(10)]
    )
    assert report.verdict in ("numerical", "identical")
    assert len(report.evidence["cases"]) == 4


def test_a_model_in_memory_is_left_alone():
    model = tiny_hf("gpt2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = mechkv.check(model, dtypes=("float32", "float16"), n_steps=4, prompts=[tokens(12), tokens(9, 1)])
    assert report.verdict in ("numerical", "identical")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert type(model.transformer.h[0]).__name__ == "GPT2Block"  # not wrapped


def test_a_bridge_is_checked_from_its_weights():
    report = mechkv.check(tiny_bridge("mistral-window"), dtypes=("float32",), n_steps=4, prompts=[tokens(18)], chunk=0)
    assert report.verdict in ("numerical", "identical")


def test_sampled_positions_are_admitted(monkeypatch):
    """On large models some steps are compared: a bug that begins between two of them is not pinned to the later one."""
    net = tiny_hf("mistral-window", sliding_window=6)
    right = check_model._cached

    def another_window(bridge, *arguments, **options):
        config = bridge.original_model.config
        config.sliding_window = 16
        try:
            return right(bridge, *arguments, **options)
        finally:
            config.sliding_window = 6

    monkeypatch.setattr(check_model, "_cached", another_window)
    found = {}
    for limit in (check_model.SMALL, 0):
        monkeypatch.setattr(check_model, "SMALL", limit)
        report = mechkv.check(net, dtypes=("float32",), n_steps=12, prompts=[tokens(15)], chunk=0)
        assert report.verdict == "semantic"
        found[limit] = report.first_position, [n for n in report.evidence["notes"] if "were not compared" in n]
    (exact, none), (later, said) = found.values()
    assert (exact, none) == (6, [])
    assert later > exact
    assert said == [f"positions 4 to {later - 1} were not compared: it may begin there"]


def test_short_prompts_are_refused():
    with pytest.raises(mechkv.InputError, match="too short"):
        mechkv.check(tiny_hf("gpt2"), dtypes=("float32",), n_steps=8, prompts=[tokens(8)])


@pytest.mark.real
def test_the_packaged_model_in_two_dtypes(capsys, packaged_folder):
    packaged_folder("smollm2-135m")
    code, out, _ = call(capsys, "smollm2-135m", "--dtype", "float32", "float16", "--json", "--device", "cpu")
    assert code == 0
    assert json.loads(out)["verdict"] == "numerical"
