"""Effects are paired differences, verdicts follow the rule that was fixed, the experiment says them cause by cause."""

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import mechkv
import mechkv.twins
from experiments import head_dimension
from mechkv import twin_drift
from mechkv.errors import InputError, StorageError
from mechkv.reduction import OWN
from mechkv.stats import rng
from mechkv.twin_drift import MODEL, TwinConfig, TwinStudy, judge, standard_twins, twin_study
from mechkv.twins import Twin, materialise_kv_heads, window_off
from tests.tiny import WINDOW, tiny_bridge, tokens


@pytest.mark.parametrize(
    ("relative", "low", "high", "sign", "verdict"),
    [
        (-0.6, -0.8, -0.4, -1, "reproduced"),
        (-0.1, -0.2, -0.05, -1, "partly"),
        (0.0, -0.1, 0.1, -1, "not reproduced"),
        (0.6, 0.4, 0.8, -1, "not reproduced"),
        (0.6, 0.4, 0.8, +1, "reproduced"),
        (0.0, 0.0, 0.0, +1, "not reproduced"),
        (-0.2, -0.5, 0.1, -1, "not testable here"),
        (-0.2, -0.5, 0.1, +1, "not reproduced"),
        (-0.2, math.nan, math.nan, -1, "not testable here"),
        (-0.2, -math.inf, 0.1, -1, "not testable here"),
    ],
)
def test_the_rule(relative, low, high, sign, verdict) -> None:
    assert judge(relative, low, high, sign) == verdict


def study(profiles: dict[str, list[float]], causes: dict[str, str], n_prompts: int = 8) -> TwinStudy:
    """A study whose drift by layer is given, times one factor a prompt and a little noise."""
    rows = []
    for name, profile in profiles.items():
        for prompt in range(n_prompts):
            generator = rng(0, name, prompt)
            size = 1 + prompt
            for step in (0, 1, 2):
                for layer, value in enumerate(profile):
                    drift = value * size * (1 + 0.01 * generator.standard_normal()) if step else 0.0
                    rows.append({"twin": name, "prompt": prompt, "step": step, "layer": layer, "rel_l2": drift})
    frame = pd.DataFrame(rows).assign(rms=0.0, max_ulp=0.0, bitwise_equal=False)
    known = {name: Twin(cause, "", None, 0.0, True, 12) for name, cause in causes.items()}
    return TwinStudy(frame, known, pd.DataFrame({"prompt": range(n_prompts)}), TwinConfig(), "float16", {}, {})


SHARP, EVEN = [0.8, 0.85, 0.9, 1.0], [0.25, 0.5, 0.75, 1.0]


def test_a_cause_that_is_there_is_found_and_one_that_is_not_is_not() -> None:
    found = study({MODEL: SHARP, "mha": EVEN, "wide": SHARP}, {"mha": "kv_heads", "wide": "head_dim"})
    rows = found.verdicts().set_index("twin")
    assert rows.loc["mha", "verdict"] == "reproduced"
    assert rows.loc["mha", "relative"] == pytest.approx((0.25 - 0.8) / 0.8, abs=0.02)
    assert rows.loc["wide", "verdict"] == "not reproduced"
    assert not rows["identical"].any()
    back = study({MODEL: EVEN, "mha": SHARP}, {"mha": "kv_heads"}).verdicts()
    assert back["verdict"].tolist() == ["not reproduced"], "the opposite of what is claimed"
    off = study({MODEL: EVEN, "off": SHARP}, {"off": "window"}).verdicts()
    assert off["verdict"].tolist() == ["reproduced"], "without the window accumulation is less uniform"


def test_measures_are_what_they_are_called() -> None:
    table = study({MODEL: SHARP, "mha": EVEN}, {"mha": "kv_heads"}).measures().groupby("twin").mean()
    assert table.loc[MODEL, "first_share"] == pytest.approx(0.8, rel=0.02)
    assert table.loc[MODEL, "largest_rise"] == pytest.approx(0.8, rel=0.03)
    assert table.loc["mha", "largest_rise"] == pytest.approx(0.25, rel=0.1)
    assert table.loc["mha", "level"] == pytest.approx(np.log10(np.arange(1, 9)).mean(), abs=0.01)


def test_a_twin_with_the_same_drift_has_no_effect() -> None:
    found = study({MODEL: [0.0, 0.5, 1.0]}, {}, n_prompts=4)
    frame = pd.concat([found.frame, found.frame.assign(twin="mha")], ignore_index=True)
    same = TwinStudy(frame, {"mha": Twin("kv_heads", "", None, 0.0, True, 12)}, *list(vars(found).values())[2:])
    row = same.verdicts().iloc[0]
    assert row["identical"]
    assert (row["relative"], row["verdict"]) == (0, "not reproduced"), "even where the first layer has no drift"
    two = TwinStudy(frame[frame["prompt"] < 2], same.twins, *list(vars(found).values())[2:])
    assert two.identical("mha")
    assert two.verdicts()["verdict"].tolist() == ["not testable here"], "two prompts give no interval"
    other = frame["twin"].eq("mha") & frame["layer"].eq(1) & frame["step"].eq(2) & frame["prompt"].eq(1)
    moved = frame.assign(rel_l2=frame["rel_l2"] * (1 + 1e-12 * other))
    moved_study = TwinStudy(moved, same.twins, *list(vars(found).values())[2:])
    assert not moved_study.identical("mha")


def test_few_prompts_and_no_drift_are_not_testable() -> None:
    few = study({MODEL: SHARP, "mha": EVEN}, {"mha": "kv_heads"}, n_prompts=3).verdicts()
    assert few["verdict"].tolist() == ["not testable here"]
    none = study({MODEL: [0, 0, 0], "mha": [0, 0, 0]}, {"mha": "kv_heads"})
    assert none.verdicts()["verdict"].tolist() == ["not testable here"]
    assert none.identical("mha")
    assert none.effects()["n_undefined"].tolist() == [8, 8, 8]


def test_a_study_of_a_tiny_model(tmp_path) -> None:
    model = tiny_bridge("mistral-window", num_hidden_layers=2)
    prompts = [tokens(5, seed=i) for i in range(2)]
    twins = {"no window": window_off(model)}
    with pytest.raises(InputError, match="too long for 'no window'"):
        twin_study(model, twins, prompts, TwinConfig(n_steps=4))
    found = twin_study(model, twins, prompts, TwinConfig(n_steps=3), folder=tmp_path / "run")
    assert (found.frame.query("step == 0")["rel_l2"] == 0).all()
    assert found.identical("no window"), "the same rows, the same kernels"
    assert found.guards["no window"]["repeatable"] == 4, "two prompts, both paths"
    resumed = twin_study(model, twins, prompts, TwinConfig(n_steps=3), folder=tmp_path / "run")
    pd.testing.assert_frame_equal(resumed.frame, found.frame)
    found.save(tmp_path / "s")
    again = TwinStudy.load(tmp_path / "s")
    pd.testing.assert_frame_equal(again.frame, found.frame)
    assert again.twins == found.twins
    (tmp_path / "s" / "frame.parquet").unlink()
    with pytest.raises(StorageError):
        TwinStudy.load(tmp_path / "s")
    other = materialise_kv_heads(tiny_bridge("llama-gqa", dtype=torch.bfloat16, num_hidden_layers=1))
    with pytest.raises(InputError, match="cannot be compared"):
        twin_study(model, {"mha": other}, prompts)
    with pytest.raises(InputError, match="not a twin"):
        twin_study(model, {"mha": tiny_bridge("llama-mha", num_hidden_layers=1)}, prompts)


def test_the_experiment(tmp_path, monkeypatch) -> None:
    class Pool:
        def get(self, source, dtype):
            return tiny_bridge("llama-gqa", dtype=getattr(torch, dtype), num_hidden_layers=2)

    texts = [f"w{i} w{i + 7} w3 w{2 * i} w9 w{i + 30}" for i in range(2)]
    monkeypatch.setattr(head_dimension, "problem_texts", lambda n, file: texts[:n])
    monkeypatch.setattr(head_dimension.Sweep, "plot", lambda self: {})  # drawn in test_synthetic
    small: dict[str, Any] = {
        "lengths": (16, 32),
        "d_heads": (8, 16),
        "contexts": (16, 32),
        "windows": (8, 16),
        "accumulators": ("float16", "float32"),
        "seeds": (0,),
        "n_prompts": 2,
    }
    config = head_dimension.Config(dtype="float32", n_steps=2, **small)
    outcome = head_dimension.run(config, Pool(), tmp_path)  # type: ignore[arg-type]
    assert [finding.claim for finding in outcome.findings] == ["C4"] * 3
    grouped, wide, window = outcome.findings
    assert "grouped queries" in grouped.ours
    assert "independent ones: response x" in grouped.controls
    assert "heads merely reordered" in wide.controls
    assert window.verdict == "not testable here"
    assert {name for section in outcome.sections for name in section.tables} >= {"verdicts", "sharing", "exponents"}
    powers = next(section for section in outcome.sections if "exponents" in section.tables).tables["exponents"][0]
    layers = powers[powers["sweep"] == "layer"]
    assert set(layers["axis"]) == {"d_head", "context", "window", "n_kv"}
    assert set(zip(layers["dtype"], layers["accumulator"], strict=True)) == {
        (dtype, sums) for dtype in config.accumulators for sums in (dtype, "float32", OWN)
    }
    assert set(powers[powers["axis"] == "n"]["accumulator"]) == set(config.accumulators)
    first = head_dimension._sweeps(config, tmp_path / "sweeps").frame
    monkeypatch.setattr(head_dimension, "sum_sweep", None)
    monkeypatch.setattr(head_dimension, "layer_sweep", None)
    pd.testing.assert_frame_equal(head_dimension._sweeps(config, tmp_path / "sweeps").frame, first)  # nothing is redone


def test_the_twins_that_a_model_has(monkeypatch) -> None:
    made: list = []
    for name in ("materialise_kv_heads", "pad_head_dim", "window_off", "permute_heads"):
        monkeypatch.setattr(twin_drift, name, lambda model, *size, name=name: made.append((name, *size)) or model)
    model = tiny_bridge("gemma2", num_hidden_layers=1)
    assert list(standard_twins(model, WINDOW, 16)) == ["mha", "padded", "no window", "reordered"]
    assert made == [("materialise_kv_heads",), ("pad_head_dim", 16), ("window_off",), ("permute_heads",)]
    assert "no window" not in standard_twins(model, WINDOW + 1), "the texts do not fit into it"
    made.clear()
    assert list(standard_twins(tiny_bridge("llama-mha", num_hidden_layers=1), 50)) == ["padded", "reordered"]
    assert made == [("pad_head_dim", 24), ("permute_heads",)]


@pytest.mark.real
def test_smollm2_without_groups_is_the_same_function_bit_for_bit() -> None:
    model = mechkv.load_model("smollm2-135m", dtype="float32")
    twin = materialise_kv_heads(model)
    assert mechkv.twins.twin_info(twin).bitwise
