"""The cache state as a value: ragged over windowed layers, aligned by absolute position, edited in one place."""

import pytest
import torch

from mechkv.cache import KVState, StateCache, blank_layers
from mechkv.errors import GuardError
from mechkv.paths import PathRunner
from tests.helpers import FED, N_PROMPT, Change, relative_l2, run
from tests.tiny import WINDOW

WINDOWED = {"mistral-window": (0, 1, 2), "gemma2": (0, 2), "gemma3": (0, 2)}
SAME_ROW, OTHER_ROW = 1e-5, 0.3  # measured 0 .. 8e-7, and 0.7 .. 1.7


@pytest.mark.parametrize("family", WINDOWED)
def test_states_are_ragged_and_their_rows_line_up_past_the_window(family, shared_bridge):
    model = shared_bridge(family)
    pairs = zip(run(model, "cached"), run(model, "recomputed"), strict=True)
    for cached, recomputed in pairs:
        total = N_PROMPT + cached.index
        for layer in range(3):
            windowed = layer in WINDOWED[family]
            first = total - (WINDOW - 1) if windowed else 0
            for state in (cached.kv, recomputed.kv):
                assert state.first_position(layer) == first
                assert state.positions(layer) == range(first, total)
                n_decoded = state.provenance(layer).count("decode")
                assert n_decoded == (min(cached.index, WINDOW - 1) if windowed else cached.index)
            ours, theirs = cached.kv.keys[layer], recomputed.kv.keys[layer]
            assert relative_l2(ours, theirs) < SAME_ROW
            assert relative_l2(ours[:, 1:], theirs[:, :-1]) > OTHER_ROW
            assert relative_l2(cached.kv.values[layer][:, 1:], recomputed.kv.values[layer][:, :-1]) > OTHER_ROW


def test_a_state_is_never_written_to(shared_bridge):
    steps = run(shared_bridge("gemma2"), "cached", n_steps=1)
    kept = [value.clone() for value in (*steps[0].kv.keys, *steps[0].kv.values)]
    double = Change("cache_k", lambda value, at: value * 2)
    with PathRunner(shared_bridge("gemma2"), "cached", interventions=[double]) as runner:
        runner.step(FED[: N_PROMPT + 1], steps[0].kv, 1)
    assert all(torch.equal(a, b) for a, b in zip((*steps[0].kv.keys, *steps[0].kv.values), kept, strict=True))


def test_a_step_can_be_done_again_from_its_state(shared_bridge):
    for family in ("llama-gqa", "gemma3"):
        steps = run(shared_bridge(family), "cached")
        with PathRunner(shared_bridge(family), "cached") as runner:
            again = runner.step(steps[5].tokens, steps[5].kv_before, 5)
            other = runner.step(steps[5].tokens, steps[5].kv_before, 5)
        assert torch.equal(again.logits, steps[5].logits)
        assert torch.equal(other.logits, again.logits)


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window", "gemma3"])
def test_an_edit_is_told_absolute_positions_and_its_rows_are_kept(family, shared_bridge):
    model, asked = shared_bridge(family), []

    def mark(value, at):
        asked.append((at.step, at.layer, at.site, at.positions))
        if at.site == "cache_v" and 10 in at.positions:
            value = value.clone()
            value[:, at.positions.index(10)] = 5.0
            return value
        return None

    steps = run(model, "cached", n_steps=3, interventions=[Change(("cache_k", "cache_v"), mark)])
    for step in steps:
        for layer in range(3):
            row = step.kv.positions(layer).index(10)
            assert bool((step.kv.values[layer][:, row] == 5.0).all())
            assert not bool((step.kv.values[layer][:, row + 1] == 5.0).any())
            seen = {entry[3] for entry in asked if entry[:2] == (step.index, layer)}
            before = 0 if step.index == 0 else step.kv_before.first_position(layer)
            assert seen == {range(before, N_PROMPT + step.index)}


def test_a_float32_cache_under_a_half_precision_model_names_both_dtypes(shared_bridge):
    state = run(shared_bridge("llama-gqa", torch.float32), "cached", n_steps=0)[0].kv
    with (
        PathRunner(shared_bridge("llama-gqa", torch.bfloat16), "cached") as runner,
        pytest.raises(GuardError, match=r"cache rows in torch.float32, new rows in torch.bfloat16"),
    ):
        runner.step(FED[: N_PROMPT + 1], state, 1)


def test_a_cache_that_was_never_written_has_no_state(shared_bridge):
    cache = StateCache(blank_layers(shared_bridge().original_model.config), KVState.empty())
    with pytest.raises(GuardError, match=r"did not write to its KV cache.*layers \[0, 1, 2\].*5.24"):
        cache.state(3)


def test_an_empty_state_holds_nothing():
    empty = KVState.empty(n_prompt=4)
    assert (empty.keys, empty.values, empty.n_tokens, empty.n_prompt) == ((), (), 0, 4)
