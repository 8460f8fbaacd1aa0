"""The 2 x 2 of inherited state and computation: algebra, planted causes, and plain Hugging Face loops."""

from dataclasses import replace

import pytest
import torch

import mechkv
from mechkv.causal_run import Walks
from mechkv.errors import InputError
from mechkv.factorial import CELLS, CausalFactorial, FactorialConfig, _effects, causal_factorial, four_cells
from mechkv.guards import GuardLog, same_bits
from mechkv.patch_bench import PatchBench
from mechkv.policies import Forced, Greedy
from mechkv.sources import pairs
from tests import plain_cells
from tests.test_patches import corrupted
from tests.tiny import tiny_bridge, tokens

PROMPTS = [tokens(n, seed=n) for n in (11, 9, 14, 7)]


@pytest.fixture(scope="module")
def single():
    return tiny_bridge("llama-gqa", dtype=torch.float32)


@pytest.fixture(scope="module")
def result(single):
    return causal_factorial(single, PROMPTS, FactorialConfig(n_steps=4, every=2))


def cells_agree(model, runs, plain):
    n = 0
    for number, (fed, n_prompt, steps) in enumerate(runs):
        log = GuardLog()
        with PatchBench(model, "cached", log=log) as one, PatchBench(model, "recomputed", log=log) as full:
            policy = Forced(fed.tolist())
            for pair in pairs(model, fed[:n_prompt], policy=policy, n_steps=max(steps), log=log):
                if pair.index in steps:
                    found = four_cells(one, full, pair, identity=True)
                    for state, computation in CELLS:
                        theirs = plain[f"{number} {pair.index} {state} {computation}"]
                        assert same_bits(found[state, computation].logits, theirs), (number, pair.index, state)
                        n += 1
    return n


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_tiny_cells_are_those_of_plain_loops(dtype):
    wanted = getattr(torch, dtype)
    plain_model = plain_cells.tiny_hf("llama-gqa", dtype=wanted)  # never wrapped
    plain = {
        f"{number} {step} {name}": logits
        for number, (fed, n_prompt, steps) in enumerate(plain_cells.TINY)
        for step in steps
        for name, logits in plain_cells.four_cells(plain_model, fed, n_prompt, step).items()
    }
    assert cells_agree(tiny_bridge("llama-gqa", dtype=wanted), plain_cells.TINY, plain) == 16
    if dtype == "float32":  # the cells are four different things
        assert len({plain[f"0 4 {state} {computation}"].numpy().tobytes() for state, computation in CELLS}) == 4


@pytest.mark.real
def test_smollm2_float16_cells_are_those_of_plain_loops(tmp_path):
    from mechkv import packaged

    folder = packaged.folder("smollm2-135m", quiet=True)
    plain = plain_cells.in_another_process(tmp_path / "cells.safetensors", str(folder), "float16")
    model = mechkv.load_model("smollm2-135m", dtype="float16")
    run = (plain["0 fed"], int(plain["0 n_prompt"]), plain_cells.REAL_STEPS)
    assert cells_agree(model, [run], plain) == 4 * len(plain_cells.REAL_STEPS)
    drifting = [s for s in run[2] if not same_bits(plain[f"0 {s} cached one-token"], plain[f"0 {s} recomputed full"])]
    assert drifting, "no drift at these lengths on this machine: choose other steps"


def test_main_effects_add_up_to_the_drift(result):
    decoded = result.effects
    assert len(decoded) == 4 * 2 * 2
    assert (decoded["inherited_share"] + decoded["new_share"]).to_numpy() == pytest.approx(1, abs=1e-9)
    kl = decoded[decoded["quantity"] == "logits"]
    assert (kl["kl_inherited_share"] + kl["kl_new_share"]).to_numpy() == pytest.approx(1, abs=1e-9)
    assert (decoded["inherited"] + decoded["new"] >= decoded["drift"] * (1 - 1e-9)).all()


def test_diagonal_cells_are_the_paths(result):
    frame = result.frame.set_index(["state", "computation"])
    assert frame.loc[("cached", "one-token"), "equals_cached"].all()
    assert frame.loc[("recomputed", "full"), "equals_recomputed"].all()
    assert (frame.loc[("recomputed", "full"), "rel_l2"] == 0).all()
    assert (frame.loc[("cached", "one-token"), "rel_l2"] > 0).all()
    assert not frame.loc[("recomputed", "one-token"), "equals_recomputed"].all()


def test_synthetic_causes_are_told_apart():
    generator = torch.Generator().manual_seed(0)
    base, a, b = (torch.randn(101, generator=generator, dtype=torch.float64) for _ in range(3))
    by_state = _effects("residual", [base + a, base, base + a, base])
    assert (by_state["inherited_share"], by_state["new_share"]) == (1.0, 0.0)
    by_computation = _effects("residual", [base + b, base + b, base, base])
    assert (by_computation["inherited_share"], by_computation["new_share"]) == (0.0, 1.0)
    both = _effects("residual", [base + a + b, base + b, base + a, base])
    assert both["interaction"] == pytest.approx(0, abs=1e-15)
    expected = float(torch.dot(a, a + b) / torch.dot(a + b, a + b))
    assert both["inherited_share"] == pytest.approx(expected, rel=1e-12)
    coupled = _effects("residual", [base + a, base, base, base])  # needs state and computation together
    assert coupled["inherited_share"] == pytest.approx(0.5)
    assert coupled["interaction"] > 0.1


def test_a_corrupted_state_is_inherited_drift(single):
    log = GuardLog()
    with PatchBench(single, "cached", log=log) as one, PatchBench(single, "recomputed", log=log) as full:
        *_, pair = pairs(single, PROMPTS[0], policy=Greedy(), n_steps=3, log=log)
        shares = []
        for state in (pair.cached.kv_before, corrupted(pair.cached.kv_before, "cache_k", 1, 1, 6)):
            bad = replace(pair, cached=one.plain(pair.cached.tokens, state, pair.index))
            steps = four_cells(one, full, bad)
            shares.append(_effects("logits", [steps[cell].logits for cell in CELLS])["inherited_share"])
    assert shares[1] > 0.999
    assert shares[0] < 0.9


def test_no_drift_no_share():
    found = causal_factorial(tiny_bridge("llama-gqa", dtype=torch.float64), PROMPTS[:2], FactorialConfig(n_steps=2))
    still = found.effects["drift"] == 0
    assert still.any()
    assert found.effects.loc[still, ["inherited_share", "new_share", "kl_inherited_share"]].isna().all(axis=None)
    counted = found.summary().set_index(["quantity", "measure"])["n_undefined"]
    assert counted["residual", "inherited_share"] == still[found.effects["quantity"] == "residual"].sum()


def test_guards_count_the_proofs(result):
    n_cells = 4 * 2
    assert (
        result.guards["nothing_else_written"] == 2 * n_cells + 2 * 4
    )  # two patched cells a step, two identities a prompt
    assert result.guards["identity_patch"] == 2 * 4
    assert result.guards["null_control"] == 4
    assert result.guards["untouched"] == 2 * n_cells + 1


def test_saved_and_resumed_results_are_the_same(single, result, tmp_path):
    loaded = CausalFactorial.load(result.save(tmp_path / "saved"))
    assert loaded.frame.equals(result.frame)
    assert loaded.effects.equals(result.effects)
    assert loaded.config == result.config
    walks = Walks(single)
    few, expected = PROMPTS[:2], result.effects[result.effects["prompt"] < 2]
    for _ in range(2):
        again = causal_factorial(single, few, result.config, folder=tmp_path / "run", walks=walks)
        assert again.effects.equals(expected)
    with pytest.raises(mechkv.StorageError, match="another run"):
        causal_factorial(single, PROMPTS[:1], result.config, folder=tmp_path / "run")


def test_refusals(single):
    with pytest.raises(InputError, match="steps"):
        FactorialConfig(n_steps=0)
    with pytest.raises(InputError, match="another model"):
        causal_factorial(single, PROMPTS[:1], walks=Walks(tiny_bridge("gpt2")))
