"""Hooks of a pass: they keep what TransformerLens' own hooks see, read one value once, and can end a pass early."""

import pytest
import torch

from mechkv.cache import KVState
from mechkv.errors import GuardError, NonFiniteError
from mechkv.hooks import Hooks
from mechkv.paths import PathRunner
from mechkv.sites import AXES, HOOKS, resolve, supported
from tests.helpers import FED, Change, n_hooks, run

FAMILIES = ("llama-gqa", "mistral-window", "gemma2", "gpt2", "gpt-neox", "phi3")
RESIDUAL = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")


def fired(model, sites):
    """Sites of the family whose hooks fire (some families declare rotation and never show it)."""
    seen, taps = set(), resolve(model, supported(model, sites))
    handles = [
        (tap, tap.hook_point.add_hook(lambda value, *, hook, tap=tap: seen.add((tap.key, tap.layer)) or None))
        for tap in taps
    ]
    with torch.no_grad():
        model(FED[None, :4])
    for tap, handle in handles:
        handle.hook.remove()
        tap.hook_point.fwd_hooks.remove(handle)
    return [site for site in supported(model, sites) if (site, 0) in seen]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_kept_is_what_hooks_of_transformer_lens_see(family, shared_bridge):
    model, theirs = shared_bridge(family), {}
    sites = fired(model, [site for site in HOOKS if site != "pattern"])
    handles = [
        (tap, tap.hook_point.add_hook(lambda value, *, hook, tap=tap: theirs.update({(tap.key, tap.layer): value[0]})))
        for tap in resolve(model, sites)
    ]
    with PathRunner(model, "recomputed", sites=sites, rows="all") as runner:
        ours = runner.step(FED[:7], KVState.empty(6), 1, n_new=1).activations
    for tap, handle in handles:
        handle.hook.remove()
        tap.hook_point.fwd_hooks.remove(handle)
    assert set(sites) >= {"resid_pre", "attn_out", "q", "k", "v"}
    for site in sites:
        for layer, value in enumerate(ours[site]):
            assert torch.equal(value, theirs[site, layer]), (site, layer)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_newest_row_is_the_last_of_all_rows(family, shared_bridge):
    model = shared_bridge(family)
    sites = fired(model, list(HOOKS))
    steps = {}
    for rows in ("new", "all"):
        with PathRunner(model, "recomputed", sites=sites, rows=rows) as runner:
            steps[rows] = runner.step(FED[:7], KVState.empty(6), 1, n_new=1).activations
    for site in sites:
        axis = AXES[site].split().index("pos")
        for newest, every in zip(steps["new"][site], steps["all"][site], strict=True):
            assert newest.shape[axis] == 1
            assert torch.equal(newest, every.narrow(axis, every.shape[axis] - 1, 1)), site


def test_transformer_lens_takes_no_notes_of_what_is_read(shared_bridge):
    """Its conversion remembers each value it is shown by address, for ever: a run would grow with its steps."""
    model = shared_bridge()
    point = model.hook_dict["blocks.1.hook_attn_out"]
    notes = point.hook_conversion._conversion_state
    notes.clear()
    steps = run(model, "cached", sites=("attn_out",), n_steps=3)
    assert not notes
    seen = []
    handle = point.add_hook(lambda value, *, hook: seen.append(value[0].clone()))
    assert torch.equal(run(model, "cached", n_steps=3)[-1].logits, steps[-1].logits)
    assert notes
    assert all(torch.equal(step.activations["attn_out"][1], value) for step, value in zip(steps, seen, strict=True))
    handle.hook.remove()
    point.fwd_hooks.remove(handle)


@pytest.mark.parametrize("path", ["cached", "recomputed"])
def test_one_value_at_two_sites_is_read_once_unless_it_was_written_to(path, shared_bridge):
    model = shared_bridge()
    step = run(model, path, sites=RESIDUAL, n_steps=1)[1].activations
    for layer in (0, 1):
        assert step["resid_pre"][layer + 1] is step["resid_post"][layer]
        assert step["resid_mid"][layer] is not step["attn_out"][layer]
    point = model.hook_dict["blocks.1.hook_resid_pre"]
    handle = point.add_hook(lambda value, *, hook: value.mul_(2.0))
    step = run(model, path, sites=RESIDUAL, n_steps=1)[1].activations
    handle.hook.remove()
    point.fwd_hooks.remove(handle)
    assert torch.equal(step["resid_pre"][1], step["resid_post"][0] * 2.0)
    assert step["resid_pre"][2] is step["resid_post"][1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("path", ["cached", "recomputed"])
def test_a_pass_that_ends_with_the_blocks_has_their_values_and_no_head(family, path, shared_bridge):
    model, heads = shared_bridge(family), []
    sites = supported(model, RESIDUAL)
    before = n_hooks(model)
    first, whole = run(model, path, sites=sites, n_steps=1)
    counter = model.original_model.get_output_embeddings().register_forward_hook(lambda *args: heads.append(1))
    with PathRunner(model, path, sites=sites) as runner:
        ended = runner.blocks(whole.tokens, first.kv, 1)
        assert not heads
        again = runner.step(whole.tokens, first.kv, 1)
    counter.remove()
    assert len(heads) == 1
    assert torch.equal(again.logits, whole.logits)
    assert n_hooks(model) == before
    for site in sites:
        for value, expected in zip(ended[site], whole.activations[site], strict=True):
            assert torch.equal(value, expected)


def test_a_pass_that_ends_early_runs_the_guards(shared_bridge, monkeypatch):
    model = shared_bridge()
    first, whole = run(model, "cached", n_steps=1)
    monkeypatch.setattr(Hooks, "_ruler", lambda *args: lambda *args: None)
    with (
        PathRunner(model, "cached", sites=("resid_post",)) as runner,
        pytest.raises(GuardError, match="did not see the cache"),
    ):
        runner.blocks(whole.tokens, first.kv, 1)


def test_a_pass_that_ends_early_is_not_finite_aloud(shared_bridge):
    model = shared_bridge()
    first, whole = run(model, "cached", n_steps=1)
    end = model.cfg.n_layers - 1
    burst = Change("mlp_out", lambda value, at: value * torch.inf if at.layer == end else None)
    with (
        PathRunner(model, "cached", sites=("resid_post",), interventions=[burst]) as runner,
        pytest.raises(NonFiniteError, match=f"mlp_out of layer {end}"),
    ):
        runner.blocks(whole.tokens, first.kv, 1)
