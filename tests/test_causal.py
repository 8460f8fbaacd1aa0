"""Sweep, trajectories, onset and reprojection: what must hold by construction, and planted causes."""

import math
from dataclasses import replace

import pandas as pd
import pytest
import torch

from mechkv import trajectory
from mechkv.cache import KVState
from mechkv.causal_run import Walks
from mechkv.errors import GuardError, InputError
from mechkv.factorial import FactorialConfig, causal_factorial
from mechkv.guards import GuardLog
from mechkv.onset import DriftOnset, OnsetConfig, _rows, drift_onset
from mechkv.patch_bench import PatchBench
from mechkv.patching import ALL_LAYERS, PatchSweep, SweepConfig, patch_sweep, sweep_step
from mechkv.paths import PathRunner, decode
from mechkv.policies import Greedy
from mechkv.reprojection import SITE, Reprojection, ReprojectionConfig, _compared, _one_pass, reprojection_check
from mechkv.sources import Held, Pair, pairs
from mechkv.trajectory import FreeRunning, TeacherForced, TrajectoryConfig, free_running, teacher_forced
from tests.test_patches import corrupted
from tests.tiny import tiny_bridge, tokens

PROMPTS = [tokens(n, seed=n) for n in (11, 9, 14, 7)]
LAST = 2  # layer


@pytest.fixture(scope="module")
def single():
    return tiny_bridge("llama-gqa", dtype=torch.float32)


@pytest.fixture(scope="module")
def walks(single):
    return Walks(single)


@pytest.fixture(scope="module")
def sweep(single, walks):
    return patch_sweep(single, PROMPTS[:2], SweepConfig(n_steps=4, doses=(0.5,)), walks=walks)


# ---------------------------------------------------------------------------------------------------------- sweep


def rows(result, **where):
    frame = result.frame
    for name, value in where.items():
        frame = frame[frame[name] == value]
    assert len(frame), where
    return frame


def test_identity_trials_change_nothing(sweep):
    assert rows(sweep, kind="identity")["unchanged"].all()
    assert (rows(sweep, kind="identity")["recovery_rel_l2"] == 0).all()
    assert not rows(sweep, kind="patch", target="kv", layer=ALL_LAYERS)["unchanged"].any()


def test_same_step_and_next_step_are_different_questions(sweep):
    last = {"kind": "patch", "target": "residual", "layer": LAST}
    assert (rows(sweep, **last, later=0)["recovery_kl"] == 1).all()
    assert rows(sweep, **last, later=0)["equals_source"].all()
    assert rows(sweep, **last, later=1)["unchanged"].all()  # nothing of it is in the KV state
    assert (rows(sweep, **last, later=1)["recovery_kl"] == 0).all()
    assert not rows(sweep, kind="patch", target="residual", layer=0, later=1)["unchanged"].all()


def test_everything_is_the_other_path_at_its_step(sweep):
    assert rows(sweep, target="everything", later=0)["equals_source"].all()
    assert not rows(sweep, kind="noise", target="kv", layer=ALL_LAYERS, later=0)["equals_source"].any()


def test_all_old_rows_are_the_cell_of_the_factorial(sweep, single, walks):
    factorial = causal_factorial(single, PROMPTS[:2], FactorialConfig(n_steps=3, every=2), walks=walks).frame
    cell = factorial[(factorial["state"] == "recomputed") & (factorial["computation"] == "one-token")]
    cell = cell[(cell["step"] == 3) & (cell["quantity"] == "logits")]
    patched = rows(sweep, kind="patch", target="kv", layer=ALL_LAYERS, later=0)
    assert patched["kl"].tolist() == cell["kl"].tolist()


def test_a_patch_that_had_nothing_to_change_is_left_out_of_later_steps_alone(sweep):
    frame, kv = sweep.frame, sweep.frame["target"].str.match("k|v")
    still = (frame["prompt"] == 1) & kv
    planted = replace(sweep, frame=frame.assign(n_changed=frame["n_changed"].where(~still, 0)))
    table = planted.summary().set_index(["kind", "target", "layer", "later"])
    before = sweep.summary().set_index(["kind", "target", "layer", "later"])
    whole = ("patch", "kv", ALL_LAYERS)
    assert table.loc[(*whole, 1), ["n_idle", "n_rows"]].tolist() == [1, 1]
    kept = rows(sweep, kind="patch", target="kv", layer=ALL_LAYERS, later=1, prompt=0)["recovery_rel_l2"]
    assert table.loc[(*whole, 1), "estimate"] == kept.item() != before.loc[(*whole, 1), "estimate"]
    assert table.loc[(*whole, 0), "n_idle"] == 0  # at its own step "no effect" is an answer
    assert table.loc[(*whole, 0), "estimate"] == before.loc[(*whole, 0), "estimate"]
    assert table.loc[("patch", "residual", ALL_LAYERS, 1), "n_idle"] == 0  # it had something to change
    # rows of the prompt never differ, but others did: that they recover nothing is an answer too
    assert before.loc[("patch", "kv_prefill", ALL_LAYERS, 1), ["n_idle", "n_rows"]].tolist() == [0, 2]
    assert before["n_idle"].sum() == 0


def test_necessity_is_what_the_complement_leaves(sweep):
    parts = sweep.parts().set_index(["later", "part"])
    assert parts.loc[(0, "k"), "necessity"] == pytest.approx(1 - parts.loc[(0, "v"), "sufficiency"])
    assert set(parts.loc[0].index) == {"k", "v", "kv_prefill", "kv_decode", "kv_lower", "kv_upper"}


def pair_of(bad, good):
    """A pair whose destination is `bad` and whose source is `good`, both of the cached path."""
    return Pair(bad, good, Pair(good, good, {}).rows("cached"))


def test_a_planted_corruption_is_found_at_its_layer_and_stays_repaired(single):
    log = GuardLog()
    good = [pair.cached for pair in pairs(single, PROMPTS[0], policy=Greedy(), n_steps=5)][3:]
    with PatchBench(single, "cached", log=log) as bench:
        state, bad = corrupted(good[0].kv_before, "cache_k", 1, 1, 6), []
        for step in good:
            bad.append(bench.plain(step.tokens, state, step.index))
            state = bad[-1].kv
        config = SweepConfig(n_steps=5, at=(3,), later=2, layer_noise=False)
        frame = pd.DataFrame(sweep_step(bench, [pair_of(b, g) for b, g in zip(bad, good, strict=True)], config))
    by_layer = frame[(frame["kind"] == "patch") & (frame["layer"] != ALL_LAYERS)]
    restored = by_layer[by_layer["equals_source"] & (by_layer["later"] == 0)]
    # the newest row carries what the corrupted K did to it, so its residual repairs the step from that layer on ...
    repaired = {("k", 1), ("kv", 1), ("residual", 1), ("residual", LAST)}
    assert set(zip(restored["target"], restored["layer"], strict=True)) == repaired
    # ... and only the K that was corrupted repairs what follows
    later = by_layer[by_layer["equals_source"] & (by_layer["later"] > 0)]
    assert set(zip(later["target"], later["layer"], later["later"], strict=True)) == {
        (target, 1, n) for target in ("k", "kv") for n in (1, 2)
    }


def test_no_recovery_where_there_is_nothing_to_recover(single):
    good = [pair.cached for pair in pairs(single, PROMPTS[0], policy=Greedy(), n_steps=2)][1:]
    with PatchBench(single, "cached", log=GuardLog()) as bench:
        config = SweepConfig(n_steps=2, at=(1,), later=1)
        frame = pd.DataFrame(sweep_step(bench, [pair_of(step, step) for step in good], config))
    assert frame[["recovery_kl", "recovery_rel_l2"]].isna().all(axis=None)
    assert (frame["kl_unpatched"] == 0).all()


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3"])
def test_the_other_direction(family):
    model = tiny_bridge(family, dtype=torch.float32)
    found = patch_sweep(model, PROMPTS[:2], SweepConfig(n_steps=3, into="recomputed", later=0, layer_noise=False))
    assert rows(found, kind="identity")["unchanged"].all()
    assert rows(found, target="everything")["equals_source"].all()
    assert rows(found, kind="patch", target="residual", layer=LAST)["equals_source"].all()
    assert not rows(found, kind="patch", target="k", layer=0)["equals_source"].any()


def test_the_cost_is_that_of_the_patched_steps_alone(single):
    passes = []
    for at in (1, 5):
        found = pairs(single, PROMPTS[3], policy=Greedy(), n_steps=at)
        *_, pair = found
        log = GuardLog()
        with PatchBench(single, "cached", log=log) as bench:
            trials = sweep_step(bench, [pair], SweepConfig(n_steps=at, later=0, targets=("residual", "k", "v")))
        assert log["no_autocast"] == len(trials) + 1  # every trial once, and the unpatched step again
        passes.append(log["no_autocast"])
    assert passes[0] == passes[1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"into": "recomputed", "later": 1},
        {"at": (8,)},
        {"targets": ("q",)},
        {"doses": (1.0,)},
        {"every": 0},
        {"placebos": ("salt",)},
    ],
)
def test_sweeps_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InputError):
        SweepConfig(**wrong)


# ----------------------------------------------------------------------------------------------------- trajectories


@pytest.fixture(scope="module")
def forced(single, walks):
    return teacher_forced(single, PROMPTS[:2], TrajectoryConfig(n_steps=5, at=2), walks=walks)


def test_residual_at_every_step_gives_the_logits_and_repairs_nothing(forced):
    frame = forced.frame.set_index(["condition", "view"])
    for condition in ("residual-every", "both-every"):
        assert frame.loc[(condition, "patched"), "equals_recomputed"].all()
        after = frame.loc[(condition, "probe")]
        assert not after[after["step"] > 2]["equals_recomputed"].any()
    assert not frame.loc[("none", "patched"), "equals_recomputed"].any()
    once = frame.loc[("residual-once", "patched")]
    assert once[once["step"] == 2]["equals_recomputed"].all()
    assert not once[once["step"] > 2]["equals_recomputed"].any()


def test_kv_at_every_step_is_the_cell_of_the_factorial(forced, single, walks):
    cells = causal_factorial(single, PROMPTS[:2], FactorialConfig(n_steps=5), walks=walks).frame
    cells = cells[(cells["quantity"] == "logits") & (cells["step"] >= 2)].sort_values(["prompt", "step"])
    ours = forced.frame[forced.frame["view"] == "patched"].sort_values(["prompt", "step"])
    for condition, state in (("kv-every", "recomputed"), ("none", "cached")):
        cell = cells[(cells["state"] == state) & (cells["computation"] == "one-token")]
        assert ours[ours["condition"] == condition]["kl"].tolist() == cell["kl"].tolist()


def test_free_runs_that_stay_together_have_nothing_to_recover(single):
    found = free_running(single, PROMPTS[:2], TrajectoryConfig(n_steps=4, at=1))
    assert found.frame["condition"].tolist() == ["none"] * 2
    assert (found.frame["at"] == -1).all()
    assert not len(found.summary())


def corrupting(model, prompt, **options):
    """The decode loop of a cached path that is wrong at every step."""
    run = decode(model, prompt, **options)
    step = next(run)
    with PathRunner(model, "cached", sites=options["sites"]) as runner:
        while True:
            if step.index:
                old = step.kv_before
                state = KVState(tuple(k + 0.5 for k in old.keys), old.values, old.n_tokens, old.n_prompt)
                step = runner.step(step.tokens, state, step.index)
            given = yield step
            try:
                step = run.send(step if given is None else given)
            except StopIteration:
                return


def test_patches_at_every_step_keep_a_wrong_path_on_the_trajectory(single, monkeypatch):
    monkeypatch.setattr(trajectory, "decode", corrupting)
    found = free_running(single, PROMPTS[:2], TrajectoryConfig(n_steps=6, at=1))
    summary = found.summary().set_index("condition")
    assert summary.loc["none", "n_diverging"] == 2
    for condition in ("residual-every", "both-every", "kv-every"):
        assert summary.loc[condition, "follows_to_end"] == 2
    assert summary.loc["none", "follows_to_end"] == 0
    # one patch repairs its own step; nothing says that the path leaves again, but not all four runs may stay
    assert summary.loc[["residual-once", "kv-once"], "follows_to_end"].sum() < 4
    one = found.frame.set_index(["prompt", "condition"])
    for prompt in (0, 1):
        assert one.loc[(prompt, "none"), "divergence"] == one.loc[(prompt, "none"), "at"]
        assert one.loc[(prompt, "residual-once"), "divergence"] != one.loc[(prompt, "none"), "at"]


def test_rejoining_is_about_the_end():
    clean = [1, 2, 3, 4, 5, 6, 7]
    assert trajectory._compared([1, 9, 3, 4, 5, 6, 7], clean)["rejoins"]
    assert not trajectory._compared([1, 9, 3, 4, 5, 6, 8], clean)["rejoins"]
    assert not trajectory._compared(clean, clean)["rejoins"]
    assert trajectory._compared([1, 9, 3, 4, 5, 6, 7], clean)["divergence"] == 1


# ------------------------------------------------------------------------------------------------------------ onset


def test_onset_finds_a_planted_row(single):
    steps = list(pairs(single, PROMPTS[0], policy=Greedy(), n_steps=2))
    before, pair = (pair_of(p.cached, p.cached) for p in steps[1:])
    row, table = _rows(pair, before, "cache_v", 1, 11)
    assert (row["born"], row["n_differ"], row["n_moved"]) == (False, 0, 0)
    held = dict(pair.recomputed_rows)
    value = held["cache_v", 1].value.clone()
    value[1, 4, 3] += 1e-3
    held["cache_v", 1] = Held(value, held["cache_v", 1].positions)
    row, table = _rows(replace(pair, recomputed_rows=held), before, "cache_v", 1, 11)
    assert (row["born"], row["n_differ"], row["n_moved"]) == (False, 1, 1)
    assert table.loc[table["rel_l2"] > 0, "position"].tolist() == [4]
    assert table.loc[4, "provenance"] == "prefill"
    value[0, 12, 0] += 1e-3  # the newest row
    row, table = _rows(replace(pair, recomputed_rows=held), before, "cache_v", 1, 11)
    assert row["born"]
    assert (row["n_differ"], row["n_moved"]) == (1, 1)
    assert table.loc[12, ["provenance", "written_at"]].tolist() == ["decode", 2]


def test_onset_of_a_float32_run(single, walks):
    found = drift_onset(single, PROMPTS, OnsetConfig(n_steps=3), walks=walks)
    assert (found.onset()["step"] == 1).all()
    assert (found.map.loc[found.map["provenance"] == "decode", "rel_l2"] > 0).mean() > 0.9
    assert len(found.map) == 2 * 3 * (sum(len(p) for p in PROMPTS) + 4 * 3)
    assert set(found.map["written_at"]) == {0, 1, 2, 3}


def test_onset_without_drift():
    found = drift_onset(tiny_bridge("llama-gqa", dtype=torch.float64), PROMPTS[:1], OnsetConfig(n_steps=1))
    if not found.frame["born"].any():
        assert found.onset()["step"].isna().all()


# ----------------------------------------------------------------------------------------------------- reprojection


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama-gqa", torch.float32), ("gemma3", torch.float32), ("gpt2", torch.float32), ("qwen3", torch.float64)],
    ids=str,
)
def test_same_shape_is_bitwise_and_other_shapes_are_close(family, dtype):
    found = reprojection_check(
        tiny_bridge(family, dtype=dtype), PROMPTS[1:2], ReprojectionConfig(n_steps=3, n_sampled=4)
    )
    table = found.summary().set_index(["writer", "projection", "site"]).sort_index()
    for cell in (("prefill", "prompt"), ("decode", "one-row"), ("full", "many-row")):
        assert (table.loc[cell, "bitwise_equal"] == 1).all()
    assert found.frame["rel_l2"].max() < {torch.float32: 1e-5, torch.float64: 1e-13}[dtype]
    if dtype == torch.float32:
        assert (table.loc[("decode", "many-row"), "bitwise_equal"] < 1).all()
    assert found.guards["same_shape_projection"] > 0


def test_a_residual_that_is_not_the_recorded_one_is_caught(single):
    (step, *_) = (pair.cached for pair in pairs(single, PROMPTS[0], policy=Greedy(), n_steps=0, sites=(SITE,)))
    held = {
        (site, layer, p): rows[:, p : p + 1]
        for site, kept in (("cache_k", step.kv.keys), ("cache_v", step.kv.values))
        for layer, rows in enumerate(kept)
        for p in range(11)
    }
    log = GuardLog()
    right = _one_pass(single, PROMPTS[0], 11, step.activations[SITE], log)
    assert _compared("prefill", "prompt", held, right, 11, log)["bitwise_equal"].all()
    wrong = [rows.clone() for rows in step.activations[SITE]]
    wrong[1][5] *= 1.01
    with pytest.raises(GuardError, match=r"cache_k, layer 1, position 5"):
        _compared("prefill", "prompt", held, _one_pass(single, PROMPTS[0], 11, wrong, log), 11, log)


# ------------------------------------------------------------------------------------------------------- whole thing


def test_results_are_saved_and_read_back(sweep, forced, single, tmp_path):
    free = free_running(single, PROMPTS[:1], TrajectoryConfig(n_steps=1, at=1))
    onset = drift_onset(single, PROMPTS[:1], OnsetConfig(n_steps=1))
    projected = reprojection_check(single, PROMPTS[1:2], ReprojectionConfig(n_steps=1, n_sampled=1))
    kinds = {PatchSweep: sweep, TeacherForced: forced, FreeRunning: free, DriftOnset: onset, Reprojection: projected}
    for number, (kind, result) in enumerate(kinds.items()):
        loaded = kind.load(result.save(tmp_path / str(number)))
        assert loaded.frame.equals(result.frame)
        assert loaded.config == result.config
    assert not math.isnan(sweep.summary()["estimate"].iloc[0])
