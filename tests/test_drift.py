"""The drift profile: predictions on tiny models, planted perturbations, controls, and resuming."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import FAMILIES, tiny_bridge, tokens

from mechkv import drift
from mechkv.comparison import metric_floor
from mechkv.drift import DriftConfig, DriftProfile, drift_profile
from mechkv.drift_measure import _GiveResidual, _put_step, _Table, profile_prompt
from mechkv.errors import GuardError, InputError, StorageError
from mechkv.paths import PathRunner, lockstep
from mechkv.policies import Greedy
from mechkv.sites import supported

FLOOR = {torch.float64: 1e-6, torch.float32: 2e-5}
"""Relative L2 of any site and layer. Measured over the families: up to 6e-6 in float32; in float64 up to 4e-15 on one
processor and 3e-7 on another, where the float32 islands of eager attention (softmax, rotation) round apart."""
CONFIG = DriftConfig(n_steps=6, split_every=2)
PROMPTS = [tokens(9, seed) for seed in range(4)]


@pytest.fixture(scope="module")
def model():
    return tiny_bridge("llama-gqa", dtype=torch.float64)


@pytest.fixture(scope="module")
def profile(model) -> DriftProfile:
    return drift_profile(model, PROMPTS, CONFIG)


class PerturbK:
    """A hook that adds to K of one layer, one head, on one one-token step: a planted bug of the cached path."""

    def __init__(self, step: int, size: float) -> None:
        self.step, self.size, self.seen = step, size, 0

    def __call__(self, value: torch.Tensor, hook: object) -> torch.Tensor | None:
        if value.shape[1] != 1:
            return None
        self.seen += 1
        if self.seen != self.step:
            return None
        changed = value.clone()
        changed[:, :, 1] += self.size
        return changed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_drift_of_every_family_sits_at_the_floor(family: str, dtype: torch.dtype) -> None:
    found = profile_prompt(tiny_bridge(family, dtype=dtype), tokens(11), DriftConfig(n_steps=5))
    assert found.frame["rel_l2"].max() < FLOOR[dtype]
    assert (found.frame[found.frame["step"] == 0]["bitwise_equal"]).all()
    assert found.guards["null_control"] == 1
    assert found.guards["repeatable"] == 2


def test_planted_k_is_found_at_its_layer_and_step(model) -> None:
    size = 0.5
    config = DriftConfig(n_steps=5, split_every=0)
    layer, step = 1, 3
    point = model.hook_dict[f"blocks.{layer}.attn.hook_k"]
    handle = point.add_hook(PerturbK(step, size))
    try:
        found = _Table(1000)
        sites = supported(model, config.sites)
        for ours, theirs in lockstep(model, tokens(9), policy=Greedy(), n_steps=5, sites=sites):
            _put_step(found, ours, theirs, sites)
    finally:
        handle.hook.remove()
        point.fwd_hooks.remove(handle)
    table = found.frame()
    large = table[table["rel_l2"] > FLOOR[torch.float64]]
    assert large["step"].min() == step
    first = large[large["step"] == step]
    assert first["layer"].min() == layer
    at_layer = set(first[first["layer"] == layer]["site"])
    assert at_layer == {"cache_k", "attn_out", "resid_mid", "mlp_out", "resid_post"}
    new_rows = first[(first["site"] == "cache_k") & (first["layer"] == layer)]
    assert set(new_rows["provenance"]) == {"new"}
    later = large[(large["step"] == step + 1) & (large["site"] == "cache_k") & (large["layer"] == layer)]
    assert "decode" in set(later["provenance"])


def test_nothing_is_found_where_nothing_is_planted(profile: DriftProfile) -> None:
    assert profile.frame["rel_l2"].max() < FLOOR[torch.float64]


def test_a_flaky_path_is_refused(model) -> None:
    """Noise that differs from call to call is no drift: the repeat guard must stop the profile."""
    point = model.hook_dict["blocks.0.hook_mlp_out"]
    noise = torch.Generator().manual_seed(0)

    def flaky(value: torch.Tensor, hook: object) -> torch.Tensor:
        return value + 1e-9 * torch.randn(value.shape, generator=noise, dtype=value.dtype)

    handle = point.add_hook(flaky)
    try:
        with pytest.raises(GuardError, match="step"):
            profile_prompt(model, tokens(9), CONFIG)
    finally:
        handle.hook.remove()
        point.fwd_hooks.remove(handle)


def test_split_adds_up(model) -> None:
    """injected + propagated = drift as vectors, so the sizes obey the triangle inequality, and with a planted error in
    layer 1 the error is injected there and propagated above."""
    planted = model.hook_dict["blocks.1.hook_mlp_out"]

    def push(value: torch.Tensor, hook: object) -> torch.Tensor | None:
        return value + 0.01 if value.shape[1] == 1 else None

    handle = planted.add_hook(push)
    try:
        split = profile_prompt(model, tokens(9), DriftConfig(n_steps=3, split_every=1)).split
    finally:
        handle.hook.remove()
        planted.fwd_hooks.remove(handle)
    wide = split.set_index(["step", "layer"])
    assert (wide["drift"] <= wide["injected"] + wide["propagated"] + 1e-14).all()
    first = wide.xs(1, level="step")
    assert first.loc[0].max() < FLOOR[torch.float64]
    assert first.loc[1, "injected"] > 1e-4
    assert first.loc[1, "propagated"] < FLOOR[torch.float64]
    assert first.loc[2, "propagated"] > 1e-4


def test_split_is_what_the_definition_says(model) -> None:
    """f_c(x_r) computed by hand: one block called with the recomputed residual and the cached K/V."""
    rows = profile_prompt(model, tokens(9), DriftConfig(n_steps=1, split_every=1)).split
    ours, theirs = list(lockstep(model, tokens(9), policy=Greedy(), n_steps=1, sites=("resid_pre", "resid_post")))[1]
    for layer in range(3):
        one = _GiveResidual(
            [theirs.activations["resid_pre"][i] if i == layer else ours.activations["resid_pre"][i] for i in range(3)]
        )
        with PathRunner(model, "cached", sites=("resid_post",), interventions=[one]) as runner:
            mixed = runner.step(ours.tokens, ours.kv_before, 1).activations["resid_post"][layer][-1]
        end = theirs.activations["resid_post"][layer][-1]
        injected = float((mixed - end).norm() / end.norm())
        assert rows["injected"][layer] == pytest.approx(injected, rel=1e-9, abs=1e-18)


def test_summary_is_the_mean_over_steps_and_prompts(profile: DriftProfile) -> None:
    summary = profile.summary()
    row = summary[(summary["site"] == "resid_post") & (summary["layer"] == 2)].iloc[0]
    part = profile.frame
    part = part[(part["site"] == "resid_post") & (part["layer"] == 2) & (part["step"] > 0)]
    assert row["estimate"] == pytest.approx(part["rel_l2"].mean(), rel=1e-12)
    assert row["low"] <= row["estimate"] <= row["high"]
    assert row["n_clusters"] == len(PROMPTS)


def test_control_is_fed_the_same_tokens_and_carries_the_same_values() -> None:
    half = tiny_bridge("llama-gqa", dtype=torch.bfloat16)
    found = drift_profile(half, PROMPTS[:2], DriftConfig(n_steps=4))
    fed = found.steps.pivot_table(index=["prompt", "step"], columns="dtype", values="token")
    assert (fed["bfloat16"] == fed["float32"]).all()
    assert found.provenance["models"]["float32"]["weights"] == "bfloat16 values in float32"
    size = found.frame[found.frame["step"] > 0].groupby("dtype")["rel_l2"].max()
    assert size["float32"] < FLOOR[torch.float32]


def test_onset_is_the_first_difference_in_order_of_computation() -> None:
    frame = pd.DataFrame(
        [
            {"step": 1, "layer": 0, "site": "resid_post", "bitwise_equal": True},
            {"step": 2, "layer": 3, "site": "resid_post", "bitwise_equal": False},
            {"step": 2, "layer": 3, "site": "cache_k", "bitwise_equal": False},
            {"step": 2, "layer": 4, "site": "resid_pre", "bitwise_equal": False},
            {"step": 3, "layer": 0, "site": "resid_post", "bitwise_equal": False},
        ]
    ).assign(dtype="float16", prompt=0)
    blank = pd.DataFrame()
    found = DriftProfile(frame, blank, blank, blank, CONFIG, "float16", {}, {}).onset().iloc[0]
    assert (found["step"], found["layer"], found["site"], found["kv_step"]) == (2, 3, "cache_k", 2)


def test_amplification_of_a_known_profile() -> None:
    rows = [(0, 1e-3), (1, 2e-3), (2, 0.0), (3, 5e-3)]
    frame = pd.DataFrame([{"layer": layer, "rel_l2": size} for layer, size in rows])
    frame = frame.assign(dtype="float16", prompt=0, step=1, site="resid_post")
    blank = pd.DataFrame()
    found = DriftProfile(frame, blank, blank, blank, CONFIG, "float16", {}, {}).amplification()
    assert found["amplification"].tolist() == pytest.approx([2.0])
    assert found["layer"].tolist() == [0]


def test_save_and_load_round_trip(profile: DriftProfile, tmp_path) -> None:
    loaded = DriftProfile.load(profile.save(tmp_path / "profile"))
    for name in ("frame", "steps", "split"):
        pd.testing.assert_frame_equal(getattr(loaded, name), getattr(profile, name))
    assert loaded.config == profile.config
    assert loaded.guards == profile.guards
    with pytest.raises(StorageError):
        DriftProfile.load(tmp_path)


def test_a_killed_run_goes_on_to_the_same_tables(model, profile: DriftProfile, tmp_path, monkeypatch) -> None:
    done, real = [], drift.profile_prompt

    def dies(*args, **kwargs):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(drift, "profile_prompt", dies)
    with pytest.raises(KeyboardInterrupt):
        drift_profile(model, PROMPTS, CONFIG, folder=tmp_path / "run")
    monkeypatch.setattr(drift, "profile_prompt", lambda *a, **k: done.append(1) or real(*a, **k))
    resumed = drift_profile(model, PROMPTS, CONFIG, folder=tmp_path / "run")
    assert len(done) == len(PROMPTS), "finished prompts must not be done again"
    for name in ("frame", "steps", "split"):
        pd.testing.assert_frame_equal(getattr(resumed, name), getattr(profile, name))
    with pytest.raises(StorageError, match="another run"):
        drift_profile(model, PROMPTS[:2], CONFIG, folder=tmp_path / "run")


def test_undefined_values_are_counted_not_averaged(profile: DriftProfile) -> None:
    frame = profile.frame.copy()
    frame.loc[(frame["site"] == "resid_post") & (frame["layer"] == 1) & (frame["step"] == 1), "rel_l2"] = math.nan
    blank = pd.DataFrame()
    row = DriftProfile(frame, blank, blank, blank, CONFIG, "float64", {}, {}).summary()
    row = row[(row["site"] == "resid_post") & (row["layer"] == 1)].iloc[0]
    assert row["n_undefined"] == len(PROMPTS)
    assert np.isfinite(row["estimate"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"n_steps": 0}, "at least 1"),
        ({"n_repeats": 0}, "n_repeats"),
        ({"n_repeats": 30}, "n_repeats"),
        ({"split_every": -1}, "split_every"),
        ({"sites": ("q",)}, "resid_pre"),
        ({"sites": ()}, "resid_pre"),
    ],
)
def test_impossible_configurations_are_refused(arguments: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        DriftConfig(**arguments)


def test_bad_prompts_are_refused_before_anything_runs(model) -> None:
    for prompts, words in (([], "prompt"), ([""], "prompt 0"), ([torch.tensor([500])], "prompt 0")):
        with pytest.raises(InputError, match=words):
            drift_profile(model, prompts, CONFIG)
    with pytest.raises(InputError, match=r"128|longer|context"):
        drift_profile(model, [tokens(125)], CONFIG)
    with pytest.raises(InputError, match="continuations"):
        drift_profile(model, PROMPTS, CONFIG, continuations=[[1]])
    with pytest.raises(TypeError, match="n_step"):
        DriftConfig(n_step=3)  # type: ignore[call-arg]


def test_the_floor_stands_beside_the_number(profile: DriftProfile) -> None:
    """Elements compared are those of the site, and the floor is the round-off of evaluating this many of them."""
    frame = profile.frame[profile.frame["dtype"] == "float64"]
    assert set(frame[frame["provenance"] == "activation"]["n"]) == {48, 101}
    held = frame[frame["site"] == "cache_k"]
    assert (held["n"] == held["n_rows"] * held["n"].min()).all()
    table = profile.summary()
    assert (table["floor"] < 1e-12).all()
    assert ((table["floor"] == 0) == (table["estimate"].fillna(0) == 0)).all()
    row = table[(table["site"] == "resid_post") & (table["layer"] == 2)].iloc[0]
    assert row["floor"] == pytest.approx(metric_floor("rel_l2", 48, row["estimate"]))
    assert (profile.summary("max_ulp")["floor"] == 0).all()
