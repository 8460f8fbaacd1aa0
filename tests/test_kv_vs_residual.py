"""The experiment, the command and the figures on a tiny model; verdicts from planted numbers."""

import json
import math

import pytest
import torch

from experiments import kv_vs_residual, outcome
from experiments.kv_vs_residual import _verdict, inherited_finding, recovery_finding
from mechkv.cli import main
from mechkv.patching import ALL_LAYERS
from tests.tiny import tiny_bridge, tiny_hf, tiny_tokenizer

TEXTS = [" ".join(f"w{(7 * i + 3 * j) % 97}" for j in range(9 + i)) for i in range(4)]
CONFIG = kv_vs_residual.Config(
    model="tiny", dtype="float32", n_steps=3, layers_every=2, patch_at=2, factorial_every=2, free_steps=2
)


class Pool:
    def get(self, source, dtype):
        return tiny_bridge("llama-gqa", dtype=getattr(torch, dtype))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return kv_vs_residual.measure(CONFIG, Pool(), TEXTS, tmp_path_factory.mktemp("kv"))


def test_report_of_a_tiny_run(results):
    found = kv_vs_residual.report(results, CONFIG)
    assert [finding.claim for finding in found.findings] == ["C5", "C5"]
    (section,) = found.sections
    assert set(section.figures) == set(kv_vs_residual._CAPTIONS)
    for figure, caption in section.figures.values():
        assert all(axes.has_data() for axes in figure.axes)
        assert "float32" in caption
    shares = results.factorial.summary().set_index(["quantity", "measure"])
    finding = found.findings[0]
    assert finding.value == shares.loc[("logits", "inherited_share"), "estimate"]
    assert finding.low <= finding.value <= finding.high
    assert results.free.frame["prompt"].nunique() == 4


@pytest.mark.parametrize(
    ("numbers", "verdict"),
    [
        ((0.9, 0.8, 1.0), "reproduced"),
        ((0.3, 0.2, 0.4), "not reproduced"),
        ((0.6, 0.4, 0.8), "partly"),
        ((0.9, math.nan, math.nan), "not testable here"),
        ((0.6, 0.4, math.inf), "partly"),
        ((math.nan, math.nan, math.nan), "not testable here"),
    ],
)
def test_verdicts(numbers, verdict):
    assert _verdict(*numbers) == verdict


@pytest.mark.parametrize(
    ("residual", "kv", "verdict"),
    [(0.0, 1.0, "reproduced"), (0.0, 0.2, "partly"), (0.9, 1.0, "not reproduced")],
)
def test_the_papers_observation_needs_both_halves(results, residual, kv, verdict):
    frame = results.sweep.frame.copy()
    whole = (frame["layer"] == ALL_LAYERS) & (frame["kind"] == "patch") & (frame["later"] == 1)
    spread = 0.01 * frame["prompt"]
    for target, value in (("residual", residual), ("kv", kv)):
        here = whole & (frame["target"] == target)
        frame.loc[here, "recovery_rel_l2"] = value + spread[here]
    planted = type(results.sweep)(**{**vars(results.sweep), "frame": frame})
    assert recovery_finding(planted, "here").verdict == verdict


def test_an_infinite_bound_is_kept_and_an_undefined_one_is_not():
    assert [outcome.number(x) for x in (0.4, math.inf, math.nan)] == [0.4, math.inf, None]


def test_a_run_without_drift_is_not_testable(results):
    effects = results.factorial.effects.assign(
        inherited_share=math.nan, new_share=math.nan, kl_inherited_share=math.nan, kl_new_share=math.nan
    )
    frame = results.factorial.frame.assign(equals_recomputed=True)
    still = type(results.factorial)(**{**vars(results.factorial), "effects": effects, "frame": frame})
    assert inherited_finding(still, results.onset, "here").verdict == "not testable here"
    assert inherited_finding(still, results.onset, "here").value is None


def test_origin_counts_prompts_whose_reference_moved_first(results):
    assert kv_vs_residual._origin(results.onset).startswith("In 0 of 4 prompts")
    frame = results.onset.frame.copy()
    frame.loc[(frame["layer"] == 0) & (frame["prompt"] < 3), "born"] = False
    frame.loc[(frame["layer"] == 0) & (frame["prompt"] < 2) & (frame["step"] == 1), "n_moved"] = 1
    planted = type(results.onset)(**{**vars(results.onset), "frame": frame})
    assert kv_vs_residual._origin(planted).startswith("In 2 of 4 prompts")


def test_command(tmp_path, capsys):
    folder = tmp_path / "model"
    tiny_hf("llama-gqa").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    problems = tmp_path / "problems.jsonl"
    lines = [json.dumps({"question": text, "answer": "so\n#### 3"}) for text in TEXTS[:2]]
    problems.write_text("\n".join(lines) + "\n")
    arguments = ["--prompts", str(problems), "--n-prompts", "2", "--steps", "2", "--every-layer", "3"]
    arguments += ["--dtype", "float32", "--out", str(tmp_path / "out"), "--json"]
    with pytest.raises(SystemExit) as stop:
        main(["patch", str(folder), *arguments])
    assert stop.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert {row["quantity"] for row in printed["factorial"]} == {"logits", "residual"}
    assert any(row["target"] == "everything" and row["equals_source"] == 1 for row in printed["sweep"])
    assert (tmp_path / "out" / "figures" / "recovery_all_layers.png").exists()
    with pytest.raises(SystemExit) as stop:
        main(["patch", str(folder), *arguments[:4], "--steps", "0", "--dtype", "float32"])
    assert stop.value.code == 2
