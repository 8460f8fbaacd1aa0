"""The ladder: predicted orders of magnitude, both ways of sharing weights, and what zero and missing values do."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from mechkv.errors import InputError
from mechkv.precision import LadderConfig, PrecisionLadder, precision_ladder
from tests.tiny import tiny_bridge, tiny_hf, tiny_tokenizer, tokens

UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


def fabricated(flip: bool = False, n_prompts: int = 6) -> PrecisionLadder:
    """A ladder in which logit errors are exactly proportional to the unit roundoff."""
    rng, rows = np.random.default_rng(0), []
    for prompt in range(n_prompts):
        size = rng.lognormal(size=10)
        for dtype, unit in UNIT.items():
            for step in range(10):
                dz = unit * size[step]
                row = {"dtype": dtype, "prompt": prompt, "step": step + 1, "kl": 3 * dz**2, "max_abs_dz": dz}
                rows.append(row | {"flip": float(flip and dtype != "float32" and step == 0)})
    config = LadderConfig(dtypes=tuple(UNIT))
    return PrecisionLadder(pd.DataFrame(rows), pd.DataFrame(), config, {}, {})


def test_errors_proportional_to_the_unit_roundoff_give_the_predicted_orders() -> None:
    ratios = fabricated().ratios()
    defined = ratios[ratios["statistic"] != "flipped only"]
    np.testing.assert_allclose(defined["observed"], defined["predicted"], atol=1e-9)
    kl = ratios[(ratios["metric"] == "kl") & (ratios["statistic"] == "mean")].set_index(["coarse", "fine"])
    assert kl.loc[("float16", "float32"), "predicted"] == pytest.approx(7.83, abs=0.01)
    assert kl.loc[("bfloat16", "float16"), "predicted"] == pytest.approx(6 * math.log10(2))
    # its twin: an error that is not proportional to the roundoff is not hidden
    bent = fabricated()
    bent.frame.loc[bent.frame["dtype"] == "float32", "kl"] *= 100
    row = bent.ratios().query("metric == 'kl' and statistic == 'mean' and coarse == 'float16'").iloc[0]
    assert row["observed"] == pytest.approx(row["predicted"] - 2)


def test_prompts_without_drift_are_counted_and_medians_of_zero_have_no_ratio() -> None:
    ladder = fabricated()
    ladder.frame.loc[(ladder.frame["dtype"] == "float32") & (ladder.frame["prompt"] < 2), ["kl", "max_abs_dz"]] = 0.0
    row = ladder.ratios().query("metric == 'kl' and statistic == 'mean' and coarse == 'float16'").iloc[0]
    assert row["n_zero"] == 2
    assert row["observed"] == pytest.approx(row["predicted"])
    ladder.frame.loc[ladder.frame["dtype"] == "float32", ["kl", "max_abs_dz"]] = 0.0
    rows = ladder.ratios().query("coarse == 'float16'")
    assert rows["observed"].isna().all()


def test_flipped_only_means_are_over_flipped_steps() -> None:
    ladder = fabricated(flip=True)
    table = ladder.summary().set_index("dtype")
    first = ladder.frame[(ladder.frame["dtype"] == "float16") & (ladder.frame["step"] == 1)]
    assert table.loc["float16", "kl_flipped"] == pytest.approx(first["kl"].mean())
    assert table.loc["float16", "flips"] == 6
    assert table.loc["float16", "flip_rate"] == pytest.approx(0.1)
    assert math.isnan(table.loc["float32", "kl_flipped"])
    assert 0 < table.loc["float32", "flip_high"] < 0.1


@pytest.fixture(scope="module")
def source():
    """Weights whose low bits no 16-bit dtype holds, and some too small for float16's normal range."""
    hf = tiny_hf("llama-gqa", num_hidden_layers=1)
    for parameter in hf.parameters():
        parameter.data[..., 0] *= 1e-5
    import mechkv

    return mechkv.from_hf(hf, tiny_tokenizer())


def test_common_weights_are_one_function_on_every_rung(source, tmp_path) -> None:
    prompts, seen = [tokens(9, s) for s in range(2)], {}
    for weights in ("own", "common"):
        config = LadderConfig(dtypes=("bfloat16", "float16", "float32"), n_steps=3, weights=weights)
        ladder = precision_ladder(source, prompts, config, folder=tmp_path / weights)
        seen[weights] = ladder.provenance["models"]
        assert set(ladder.frame["dtype"]) == set(config.dtypes)
        assert (ladder.frame.loc[ladder.frame["step"] == 0, "kl"] == 0).all()
        fed = ladder.frame.pivot_table(index=["prompt", "step"], columns="dtype", values="token")
        assert (fed.nunique(axis=1) == 1).all()
        again = precision_ladder(source, prompts, config, folder=tmp_path / weights)
        assert again.frame.equals(ladder.frame)
        loaded = PrecisionLadder.load(ladder.save(tmp_path / f"{weights}-saved"))
        assert loaded.config == config
    hashes = {name: {m["weights"] for m in models.values()} for name, models in seen.items()}
    assert hashes["own"] != hashes["common"]


def test_common_weights_hold_exactly_in_every_rung(source) -> None:
    from mechkv.precision import _common

    common = _common(source, ("bfloat16", "float16", "float32"))
    plain = dict(source.original_model.named_parameters())
    changed = 0
    for name, value in common.original_model.named_parameters():
        for dtype in (torch.bfloat16, torch.float16):
            assert torch.equal(value.to(dtype).float(), value)
        changed += int(not torch.equal(value, plain[name]))
    assert changed  # the weights of the source are not exact in 16 bits
    huge = tiny_hf("llama-gqa", num_hidden_layers=1)
    huge.model.layers[0].mlp.up_proj.weight.data[0, 0] = 1e6
    import mechkv

    with pytest.raises(InputError, match="leave the range"):
        _common(mechkv.from_hf(huge, tiny_tokenizer()), ("bfloat16", "float16", "float32"))


@pytest.mark.parametrize("wrong", [{"dtypes": ("float32", "float16")}, {"dtypes": ("float32",)}, {"n_steps": 0}])
def test_impossible_ladders_are_refused(wrong) -> None:
    with pytest.raises(InputError):
        LadderConfig(**wrong)


def test_a_bridge_of_the_narrow_dtype_is_its_own_rung() -> None:
    half = tiny_bridge(dtype=torch.float16)
    config = LadderConfig(dtypes=("float16", "float32"), n_steps=3)
    ladder = precision_ladder(half, [tokens(9)], config)
    assert ladder.provenance["models"]["float32"]["weights"].startswith("float16")
