"""Interventions: nothing changed is bitwise nothing, a planted change shows where it was planted, not before."""

import pytest
import torch

from mechkv.errors import InputError
from mechkv.paths import decode
from mechkv.policies import Forced
from mechkv.sites import CACHE_SITES, HOOKS, supported
from tests.helpers import FED, N_PROMPT, Change, logits, run
from tests.tiny import FAMILIES, tiny_bridge

PATHS = ("cached", "recomputed")
IN_ORDER = ("resid_pre", "q", "z", "attn_out", "resid_mid", "mlp_out", "resid_post")
SILENT = {"phi3": ("rot_q", "rot_k"), "gpt-neox": ("rot_q", "rot_k")}


def same_steps(ours, theirs) -> bool:
    """All logits, K and V of two runs are bitwise equal."""
    pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x.kv.keys, y.kv.keys, strict=True)]
    pairs += [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x.kv.values, y.kv.values, strict=True)]
    return torch.equal(logits(ours), logits(theirs)) and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_giving_every_value_back_changes_no_bit(family, path, shared_bridge):
    model = shared_bridge(family)
    plain = run(model, path, n_steps=2)
    sites = [site for site in supported(model, [*HOOKS, *CACHE_SITES]) if site not in SILENT.get(family, ())]
    for site in (sites[0], *CACHE_SITES):
        change = Change(site, lambda value, at: value.clone())
        assert same_steps(run(model, path, n_steps=2, interventions=[change]), plain)
        assert change.asked == 9  # three layers, three steps
    all_at_once = [Change(site, lambda value, at: value.clone()) for site in sites]
    assert same_steps(run(model, path, n_steps=2, interventions=all_at_once), plain)
    assert {change.asked for change in all_at_once} == {9}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("site", [*HOOKS, *CACHE_SITES])
def test_every_site_is_read_by_what_comes_after_it(site, path, shared_bridge):
    model = shared_bridge()
    plain = run(model, path, n_steps=1)
    scaled = run(model, path, n_steps=1, interventions=[Change(site, lambda value, at: value * 1.5)])
    assert not torch.equal(logits(scaled)[0], logits(plain)[0])
    assert same_steps(run(model, path, n_steps=1), plain)


@pytest.mark.parametrize("path", PATHS)
def test_a_change_of_one_layers_residual_shows_there_and_not_before(path, shared_bridge):
    model = shared_bridge()
    plain = run(model, path, sites=IN_ORDER, n_steps=3)
    nudge = Change("resid_mid", lambda value, at: value + 0.1 if (at.layer, at.step) == (1, 2) else None)
    changed = run(model, path, sites=IN_ORDER, n_steps=3, interventions=[nudge])
    for step in (0, 1):
        assert torch.equal(changed[step].logits, plain[step].logits)
    moved = _moved(changed[2], plain[2])
    start = IN_ORDER.index("resid_mid")
    order = [(layer, site) for layer in range(3) for site in IN_ORDER]
    assert moved == set(order[len(IN_ORDER) + start :])
    assert not torch.equal(changed[2].logits, plain[2].logits)
    later = _moved(changed[3], plain[3])
    # the cached path inherits the change through K and V of layer 2, the recomputed one starts afresh
    expected = {entry for entry in order if entry[0] == 2 and entry[1] not in ("resid_pre", "q")}
    assert later == (expected if path == "cached" else set())


def _moved(ours, theirs) -> set[tuple[int, str]]:
    return {
        (layer, site)
        for site in ours.activations
        for layer in range(3)
        if not torch.equal(ours.activations[site][layer], theirs.activations[site][layer])
    }


@pytest.mark.parametrize("family", ["llama-gqa", "llama-mha", "gemma3"])
def test_a_planted_k_value_is_found_at_its_layer_head_and_step(family, shared_bridge):
    model, planted = shared_bridge(family), {"layer": 1, "step": 3, "head": 1, "position": 11}

    def plant(value, at):
        if (at.layer, at.step) != (planted["layer"], planted["step"]):
            return None
        value = value.clone()
        value[planted["head"], at.positions.index(planted["position"])] += 3.0
        return value

    plain = run(model, "cached", sites=IN_ORDER)
    changed = run(model, "cached", sites=IN_ORDER, interventions=[Change("cache_k", plant)])
    for step in range(3):
        assert _moved(changed[step], plain[step]) == set()
        assert torch.equal(changed[step].logits, plain[step].logits)
    moved = _moved(changed[3], plain[3])
    order = [(layer, site) for layer in range(3) for site in IN_ORDER]
    assert moved == set(order[order.index((1, "z")) :])
    z, before = changed[3].activations["z"][1][0], plain[3].activations["z"][1][0]
    heads = [head for head in range(4) if not torch.equal(z[head], before[head])]
    shared = 4 // changed[3].kv.keys[1].shape[0]
    assert heads == list(range(planted["head"] * shared, (planted["head"] + 1) * shared))
    ours, theirs = changed[3].kv.keys, plain[3].kv.keys
    assert torch.equal(ours[0], theirs[0])
    where = (ours[1] != theirs[1]).any(-1).nonzero().tolist()
    assert where == [[planted["head"], changed[3].kv.positions(1).index(planted["position"])]]
    assert torch.equal(changed[3].kv.values[1], plain[3].kv.values[1])
    assert torch.equal(logits(run(model, "cached")), logits(plain))


def test_on_the_recomputed_path_a_planted_k_value_does_not_outlive_its_step(shared_bridge):
    model = shared_bridge()
    plain = run(model, "recomputed", n_steps=4)
    plant = Change("cache_k", lambda value, at: value + 1.0 * (value[..., :1] > 0) if at.step == 2 else None)
    changed = run(model, "recomputed", n_steps=4, interventions=[plant])
    equal = [torch.equal(a.logits, b.logits) for a, b in zip(changed, plain, strict=True)]
    assert equal == [True, True, False, True, True]


def test_interventions_see_each_others_values_in_order_and_reads_see_the_last(shared_bridge):
    model = shared_bridge()
    add, double = Change("resid_pre", lambda v, at: v + 1), Change("resid_pre", lambda v, at: v * 2)
    plain = run(model, "cached", sites=["resid_pre"], n_steps=0)[0].activations["resid_pre"][0]
    both = run(model, "cached", sites=["resid_pre"], n_steps=0, interventions=[add, double])[0]
    assert torch.equal(both.activations["resid_pre"][0], (plain + 1) * 2)
    assert not torch.equal(both.activations["resid_pre"][0], plain * 2 + 1)


def test_an_intervention_is_told_where_it_is(shared_bridge):
    seen = {path: [] for path in PATHS}
    for path in PATHS:
        note = Change("blocks.1.hook_mlp_out", lambda value, at: seen[at.path].append(at))
        run(shared_bridge(), path, n_steps=1, interventions=[note])
    for path in PATHS:
        first, second = seen[path]
        assert (first.site, first.layer, first.step, first.n_before) == ("blocks.1.hook_mlp_out", 1, 0, 0)
        assert first.positions == range(N_PROMPT)
        assert (second.step, second.n_before) == (1, N_PROMPT)
        assert second.positions == range(N_PROMPT if path == "cached" else 0, N_PROMPT + 1)


@pytest.mark.parametrize("site", ["resid_mid", "z", "pattern", "cache_k", "cache_v"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda value, at: value[:1], "another kind of tensor"),
        (lambda value, at: value[None], "another kind of tensor"),
        (lambda value, at: value.double(), "float64 on cpu.*nothing is cast"),
        (lambda value, at: value.to("meta"), "on meta"),
        (lambda value, at: value.mul_(2), "in place"),
        (lambda value, at: value[0].zero_() and None, "in place"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_another_shape_dtype_device_or_a_write_in_place_is_refused(site, change, says, shared_bridge):
    def careless(value, at):
        try:
            return change(value, at)
        except RuntimeError:  # the truth value of a tensor, after the write
            return None

    with pytest.raises(InputError, match=says):
        run(shared_bridge(), "cached", n_steps=0, interventions=[Change(site, careless)])
    assert run(shared_bridge(), "cached", n_steps=0)


def test_logits_cannot_be_patched_and_unknown_sites_are_refused(shared_bridge):
    for site, says in (("logits", "logits cannot be patched"), ("cache", "unknown site")):
        generator = decode(
            shared_bridge(),
            FED[:5],
            path="cached",
            policy=Forced([]),
            n_steps=0,
            interventions=[Change(site, lambda value, at: None)],
        )
        with pytest.raises(InputError, match=says):
            next(generator)


def test_weights_and_stored_values_are_the_same_bits_after_a_patch():
    model = tiny_bridge()
    weights = {name: value.clone() for name, value in model.original_model.state_dict().items()}
    source = run(model, "recomputed", sites=["resid_post"], n_steps=3)
    kept = [step.activations["resid_post"][1].clone() for step in source]
    give = Change(
        "resid_post", lambda value, at: source[at.step].activations["resid_post"][1] if at.layer == 1 else None
    )
    patched = run(model, "cached", sites=["resid_post"], n_steps=3, interventions=[give])
    for step, value in zip(patched, kept, strict=True):
        assert torch.equal(step.activations["resid_post"][1], value)
        assert torch.equal(source[step.index].activations["resid_post"][1], value)
    assert all(torch.equal(value, weights[name]) for name, value in model.original_model.state_dict().items())
