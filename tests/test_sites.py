"""Sites: names and hook names give TransformerLens' own tensors; what a family lacks is an error, never empty."""

import pytest
import torch

from mechkv.errors import InputError
from mechkv.paths import decode
from mechkv.policies import Greedy
from mechkv.sites import AXES, CACHE_SITES, HOOKS, SITES, resolve, supported, to_cache_layout, to_hook_layout
from tests.helpers import FED, N_PROMPT, relative_l2, run
from tests.tiny import FAMILIES

SIZES = {"pos": N_PROMPT, "key": N_PROMPT, "d_model": 48, "n_heads": 4, "n_kv": 2, "d_head": 12}
SILENT = {"phi3": {"rot_q", "rot_k"}, "gpt-neox": {"rot_q", "rot_k"}}
ABSENT = {"gpt2": {"rot_q", "rot_k"}, "gpt-neox": {"resid_mid"}}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_site_gives_what_run_with_cache_gives_or_says_that_it_cannot(family, shared_bridge):
    model = shared_bridge(family)
    fed = FED[:6]
    with torch.no_grad():
        _, theirs = model.run_with_cache(fed[None], remove_batch_dim=False)
    for site in HOOKS:
        generator = decode(model, fed, path="recomputed", policy=Greedy(), n_steps=0, sites=[site])
        if site in ABSENT.get(family, ()):
            assert supported(model, [site]) == []
            with pytest.raises(InputError, match=f"no hook point for '{site}'"):
                next(generator)
        elif site in SILENT.get(family, ()):
            with pytest.raises(InputError, match=f"the hook for '{site}' did not fire.*cache_k"):
                next(generator)
        else:
            values = next(generator).activations[site]
            assert len(values) == 3
            for layer, value in enumerate(values):
                assert torch.equal(value, theirs[f"blocks.{layer}.{HOOKS[site]}"][0])
            assert not torch.equal(values[0], values[1])


def test_sites_have_the_axes_that_the_table_says(shared_bridge):
    names = [site for site in SITES if site in HOOKS]
    step = run(shared_bridge(), "cached", sites=names, n_steps=0)[0]
    values = {**step.activations, "cache_k": step.kv.keys, "cache_v": step.kv.values}
    assert set(values) | {"logits"} == set(SITES) == set(AXES)
    for site, layers in values.items():
        assert tuple(layers[1].shape) == tuple(SIZES[axis] for axis in AXES[site].split())


@pytest.mark.parametrize("path", ["cached", "recomputed"])
def test_hook_names_and_site_names_give_the_same_tensors(path, shared_bridge):
    names = [
        "resid_mid",
        "blocks.1.hook_resid_mid",
        "pattern",
        "blocks.2.attn.hook_pattern",
        "ln_final.hook_normalized",
    ]
    for step in run(shared_bridge(), path, sites=names, n_steps=2):
        (by_hook,) = step.activations["blocks.1.hook_resid_mid"]
        assert torch.equal(by_hook, step.activations["resid_mid"][1])
        assert not torch.equal(by_hook, step.activations["resid_mid"][2])
        (pattern,) = step.activations["blocks.2.attn.hook_pattern"]
        assert torch.equal(pattern, step.activations["pattern"][2])
        assert pattern.shape == (4, len(step.positions), len(step.tokens))
        assert step.activations["ln_final.hook_normalized"][0].shape == (len(step.positions), 48)


@pytest.mark.parametrize("path", ["cached", "recomputed"])
def test_the_last_row_is_the_last_of_the_new_rows(path, shared_bridge):
    names = ["resid_pre", "q", "pattern", "blocks.1.hook_mlp_out"]
    new, last = (run(shared_bridge(), path, sites=names, n_steps=2, rows=rows) for rows in ("new", "last"))
    for step, short in zip(new, last, strict=True):
        assert list(short.positions) == [len(step.tokens) - 1]
        for name in names:
            axis = -2 if name == "pattern" else 0
            for full, row in zip(step.activations[name], short.activations[name], strict=True):
                assert torch.equal(row, full.narrow(axis, full.shape[axis] - 1, 1))
    assert new[0].activations["q"][0].shape[0] > 1


@pytest.mark.parametrize("path", ["cached", "recomputed"])
def test_new_rows_are_the_last_of_all_rows(path, shared_bridge):
    names = ["resid_post", "pattern", "k"]
    new = run(shared_bridge(), path, sites=names, n_steps=3)
    everything = run(shared_bridge(), path, sites=names, n_steps=3, rows="all")
    for few, many in zip(new, everything, strict=True):
        n = len(few.positions)
        assert few.positions == many.positions[-n:]
        assert len(many.positions) == (len(few.tokens) if path == "recomputed" or few.index == 0 else 1)
        for site, axis in (("resid_post", 0), ("pattern", 1), ("k", 0)):
            whole = many.activations[site][1]
            assert whole.shape[axis] == len(many.positions)
            assert torch.equal(few.activations[site][1], whole.narrow(axis, whole.shape[axis] - n, n))


def test_a_pattern_is_a_distribution_over_the_tokens_so_far(shared_bridge):
    model = shared_bridge()
    for step in run(model, "cached", sites=["pattern"]):
        rows = step.activations["pattern"][1].double()
        assert torch.allclose(rows.sum(-1), torch.ones_like(rows[..., 0]), atol=1e-6)
        assert float(rows.max()) * rows.shape[-1] > 2  # not uniform: a mixed-up row could not hide


def test_k_before_and_after_rotation_and_in_the_cache(shared_bridge):
    step = run(shared_bridge(), "cached", sites=["k", "rot_k", "v"], n_steps=0)[0]
    for layer in range(3):
        assert torch.equal(to_cache_layout(step.activations["rot_k"][layer]), step.kv.keys[layer])
        assert torch.equal(step.activations["v"][layer], to_hook_layout(step.kv.values[layer]))
        raw = to_cache_layout(step.activations["k"][layer])
        assert relative_l2(raw[:, 0], step.kv.keys[layer][:, 0]) < 1e-6  # position 0 is not turned
        assert relative_l2(raw[:, 5], step.kv.keys[layer][:, 5]) > 1e-2


def test_layouts_are_each_others_inverse():
    rows = torch.arange(5 * 2 * 3).reshape(5, 2, 3)
    state = to_cache_layout(rows)
    assert state.shape == (2, 5, 3)
    assert state[1, 4, 2] == rows[4, 1, 2]
    assert torch.equal(to_hook_layout(state), rows)


def test_unknown_names_are_refused_with_the_list(shared_bridge):
    with pytest.raises(InputError, match=r"got 'resid'; expected one of resid_pre, .*cache_k, cache_v, logits"):
        resolve(shared_bridge(), ["resid"])
    with pytest.raises(InputError, match=r"no hook point for 'blocks.9.hook_resid_pre'"):
        resolve(shared_bridge(), ["blocks.9.hook_resid_pre"])
    with pytest.raises(InputError, match=r"no hook point for 'resid_pre'.*blocks.3.hook_resid_pre"):
        resolve(shared_bridge(), ["resid_pre"], layers=[3])


def test_a_hook_that_sees_one_row_only_is_refused(shared_bridge):
    for rows in ("new", "all"):
        with pytest.raises(InputError, match=r"'unembed.hook_in' does not hold one row.*\[1, 1, 48\] where 13 tokens"):
            run(shared_bridge(), "cached", sites=["unembed.hook_in"], rows=rows)


def test_resolve_keeps_order_and_leaves_out_what_has_no_hook(shared_bridge):
    taps = resolve(shared_bridge(), ["z", *CACHE_SITES, "logits", "z", "blocks.1.hook_mlp_out"], layers=[2, 0])
    assert [(tap.key, tap.layer) for tap in taps] == [("z", 2), ("z", 0), ("blocks.1.hook_mlp_out", 1)]
