"""The decode loop: both paths are a plain Hugging Face loop, their drift is at the floor, and hooks come and go."""

import itertools
import weakref
from dataclasses import replace

import pytest
import torch
from transformer_lens.hook_points import HookPoint

import mechkv
from mechkv.cache import KVState, StateCache, blank_layers
from mechkv.errors import GuardError, InputError
from mechkv.guards import GuardLog
from mechkv.paths import PathRunner, decode, lockstep
from mechkv.policies import Forced, Greedy
from tests.helpers import FED, FLOORS, PLANTED, Change, logits, n_hooks, relative_l2, run
from tests.plain import N_PROMPT, N_STEPS
from tests.reference import ByHand
from tests.tiny import FAMILIES, VOCABULARY, tiny_bridge, tiny_hf, tokens

DTYPES = {"float64": torch.float64, "float32": torch.float32}
BY_HAND = 2e-6  # measured 1.1e-7 .. 6.3e-7: float32 islands (norms, softmax, rotary tables) in Hugging Face's float64
SPLIT = ("phi3", "gpt2", "gpt-neox")
"""TransformerLens splits the joint q/k/v projection of these and computes attention itself: bridged and plain model
agree to rounding, not in bits (measured: float64 1e-15 for GPT-2, 8e-8 and 2e-7 for the others; float32 0 .. 9e-7)."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_both_paths_are_the_plain_loop_and_drift_is_at_the_floor(family, dtype, shared_bridge, plain_logits):
    model = shared_bridge(family, DTYPES[dtype])
    sites = ("resid_pre", "resid_post", "attn_out", "mlp_out")
    pairs = list(lockstep(model, FED[:N_PROMPT], policy=Forced(FED.tolist()), n_steps=N_STEPS, sites=sites))
    assert len(pairs) == N_STEPS + 1
    for index, path in enumerate(("cached", "recomputed")):
        ours, plain = logits([pair[index] for pair in pairs]), plain_logits[f"{family} {dtype} {path}"]
        if family in SPLIT:
            assert relative_l2(ours, plain) < FLOORS[DTYPES[dtype]]
        else:
            assert torch.equal(ours, plain)
        assert relative_l2(ours.roll(1, 0), plain) > PLANTED
    first, *later = [_drift(*pair, sites) for pair in pairs]
    assert first == 0.0
    assert max(later) < FLOORS[DTYPES[dtype]]
    _, recomputed = pairs[-1]
    cached = pairs[-2][0].kv
    assert relative_l2(_faulty(model, cached, shift=3), recomputed.logits) > PLANTED
    assert relative_l2(_faulty(model, cached, drop=1), recomputed.logits) > PLANTED
    assert relative_l2(_faulty(model, cached), recomputed.logits) < FLOORS[DTYPES[dtype]]


def _drift(cached, recomputed, sites) -> float:
    pairs = [(cached.logits, recomputed.logits)]
    for site in sites:
        pairs += zip(cached.activations[site], recomputed.activations[site], strict=True)
    pairs += zip(cached.kv.keys + cached.kv.values, recomputed.kv.keys + recomputed.kv.values, strict=True)
    return max(relative_l2(ours, theirs) for ours, theirs in pairs)


def _faulty(model, state, *, shift: int = 0, drop: int = 0) -> torch.Tensor:
    """Logits of the last token on a cached state, at a position `shift` too far or without the last `drop` rows."""
    cache = StateCache(blank_layers(model.original_model.config), state)
    for layer in cache.layers:
        stop = layer.keys.shape[-2] - drop
        layer.keys, layer.values = layer.keys[..., :stop, :], layer.values[..., :stop, :]
    position = torch.tensor([[len(FED) - 1 + shift]])
    with torch.no_grad():
        return model(FED[None, -1:], past_key_values=cache, position_ids=position, logits_to_keep=1)[0, -1]


@pytest.mark.parametrize("family", ["llama-mha", "llama-gqa"])
def test_logits_and_cache_rows_are_those_written_by_hand(family):
    hf = tiny_hf(family, dtype=torch.float64)
    hand = ByHand.of(hf)
    for path in ("cached", "recomputed"):
        for step in run(mechkv.from_hf(hf) if path == "cached" else tiny_bridge(family, dtype=torch.float64), path):
            ours = hand.logits(step.tokens, 0 if step.index == 0 else len(step.tokens) - 1)[-1]
            assert relative_l2(step.logits, ours) < BY_HAND
            for layer in range(3):
                assert relative_l2(step.kv.keys[layer], hand.keys[layer]) < BY_HAND
                assert relative_l2(step.kv.values[layer], hand.values[layer]) < BY_HAND
                assert relative_l2(step.kv.keys[layer].roll(1, 0), hand.keys[layer]) > PLANTED  # heads swapped
                assert relative_l2(step.kv.keys[layer].roll(1, 1), hand.keys[layer]) > PLANTED  # off by one
    whole = ByHand.of(tiny_hf(family, dtype=torch.float64)).logits(FED)[-1]
    assert relative_l2(whole, ours) < 1e-13  # by hand the two paths agree, too


@pytest.mark.parametrize("path", ["cached", "recomputed"])
def test_steps_say_what_they_hold(path, shared_bridge):
    for step in run(shared_bridge(), path, sites=("resid_pre",)):
        n = N_PROMPT + step.index
        assert (step.path, len(step.tokens), step.kv.n_tokens) == (path, n, n)
        assert step.positions == (range(N_PROMPT) if step.index == 0 else range(n - 1, n))
        assert torch.equal(step.tokens, FED[:n])
        assert step.kv_before.n_tokens == (n - 1 if path == "cached" and step.index else 0)
        assert step.activations["resid_pre"][2].shape == (len(step.positions), 48)
        assert step.kv.provenance(1) == ["prefill"] * N_PROMPT + ["decode"] * step.index


def test_chunks_of_tokens_give_the_same_last_logits(shared_bridge):
    model = shared_bridge("llama-gqa", torch.float64)
    chunked = list(decode(model, FED[:5], path="cached", policy=Forced(FED.tolist(), chunk=4), n_steps=4))
    assert [len(step.tokens) for step in chunked] == [5, 9, 13, 17, 21]
    assert relative_l2(chunked[-1].logits, run(model, "recomputed", n_prompt=20)[-1].logits) < 1e-6


def test_hooks_attach_once_a_run_and_not_once_a_step(shared_bridge, monkeypatch):
    model, calls = shared_bridge(), []
    original = HookPoint.register_forward_hook
    monkeypatch.setattr(
        HookPoint, "register_forward_hook", lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    )
    run(model, "cached", sites=("resid_pre",), n_steps=1)
    once = len(calls)
    run(model, "cached", sites=("resid_pre",), n_steps=7)
    assert once == 6  # three layers of resid_pre and three patterns
    assert len(calls) == 2 * once


def test_hooks_go_when_a_run_ends_fails_or_is_dropped(shared_bridge):
    model = shared_bridge()
    before = n_hooks(model)
    options = {"policy": Forced(FED.tolist()), "n_steps": 4, "sites": ("resid_pre", "z")}
    list(decode(model, FED[:5], path="cached", **options))
    assert n_hooks(model) == before
    half = decode(model, FED[:5], path="cached", **options)
    next(half)
    assert n_hooks(model) > before
    half.close()
    assert n_hooks(model) == before

    def fail(value, at):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(decode(model, FED[:5], path="cached", interventions=[Change("mlp_out", fail)], **options))
    assert n_hooks(model) == before
    half = lockstep(model, FED[:5], **options)
    next(half)
    half.close()
    assert n_hooks(model) == before


@pytest.mark.parametrize("first", [0, 1])
def test_two_generators_take_turns_without_seeing_each_other(first, shared_bridge):
    model = shared_bridge()
    before = n_hooks(model)
    other = tokens(12, seed=7)
    alone = [run(model, "cached", n_prompt=6, fed=fed, sites=("resid_mid",)) for fed in (FED[:12], other)]
    pair = [
        decode(model, fed[:6], path="cached", policy=Forced(fed.tolist()), n_steps=6, sites=("resid_mid",))
        for fed in (FED[:12], other)
    ]
    for index in range(4):
        for which, generator in enumerate(pair):
            step, expected = next(generator), alone[which][index]
            assert torch.equal(step.logits, expected.logits)
            for ours, theirs in zip(step.activations["resid_mid"], expected.activations["resid_mid"], strict=True):
                assert torch.equal(ours, theirs)
    pair[first].close()
    rest = next(pair[1 - first])
    assert torch.equal(rest.activations["resid_mid"][1], alone[1 - first][4].activations["resid_mid"][1])
    pair[1 - first].close()
    assert n_hooks(model) == before


def test_an_intervention_stays_in_its_own_runner(shared_bridge):
    model = shared_bridge()
    plain = run(model, "cached", n_steps=2)
    options = {"path": "cached", "policy": Forced(FED.tolist()), "n_steps": 2}
    double = Change("resid_mid", lambda value, at: value * 2)
    changed = decode(model, FED[:N_PROMPT], interventions=[double], **options)
    untouched = decode(model, FED[:N_PROMPT], sites=("resid_mid",), **options)
    for index in range(3):
        assert not torch.equal(next(changed).logits, plain[index].logits)
        assert torch.equal(next(untouched).logits, plain[index].logits)


def test_hooks_of_the_user_survive_and_work_as_before(shared_bridge):
    model, seen = shared_bridge(), []
    handle = model.hook_dict["blocks.1.hook_resid_pre"].add_hook(lambda tensor, hook: seen.append(tensor.shape[1]))
    before = n_hooks(model)
    run(model, "cached", sites=("resid_pre",), n_steps=2)
    assert seen == [N_PROMPT, 1, 1]
    assert n_hooks(model) == before
    with torch.no_grad():
        model(FED[None, :4])
    assert seen[-1] == 4
    handle.hook.remove()
    model.hook_dict["blocks.1.hook_resid_pre"].fwd_hooks.remove(handle)


def test_a_run_leaves_the_model_and_the_surroundings_as_they_were():
    model = tiny_bridge()
    weights = {name: value.clone() for name, value in model.original_model.state_dict().items()}
    random_state = torch.get_rng_state()
    attributes = set(vars(model.original_model)), set(vars(model))
    run(model, "cached", sites=("pattern",), interventions=[Change("cache_k", lambda value, at: value * 2)])
    assert all(torch.equal(value, weights[name]) for name, value in model.original_model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.is_grad_enabled()
    assert (set(vars(model.original_model)), set(vars(model))) == attributes


def test_values_are_detached_clones_even_under_grad_and_inference_mode(shared_bridge):
    model = shared_bridge()
    plain = run(model, "cached", sites=("resid_post",), n_steps=1)
    same = Change(("resid_mid", "cache_v"), lambda value, at: value.clone())
    with torch.inference_mode():
        inside = run(model, "cached", sites=("resid_post",), n_steps=1, interventions=[same])
    assert torch.equal(logits(plain), logits(inside))
    for step in (*plain, *inside):
        assert not step.logits.requires_grad
        assert not step.kv.keys[0].requires_grad
        assert not step.activations["resid_post"][0].requires_grad
    kept = plain[0].activations["resid_post"][2].clone()
    plain[0].activations["resid_post"][2].zero_()
    again = run(model, "cached", sites=("resid_post",), n_steps=0)
    assert torch.equal(again[0].activations["resid_post"][2], kept)


@pytest.mark.usefixtures("_shapes_unchecked")
@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (torch.tensor([], dtype=torch.int64), "0 new tokens of 0"),
        (torch.tensor([], dtype=torch.float32), "torch.float32"),
        (FED[None, :5], r"\[1, 5\].*without a batch axis"),
        (FED[:5].float(), "torch.float32"),
        ([1, 2], "got list"),
        (torch.tensor([3, VOCABULARY]), f"ids 3..{VOCABULARY}; expected 0..{VOCABULARY - 1}"),
        (torch.tensor([-1, 3]), "ids -1..3"),
        (FED[:5].to("meta"), "got the meta device"),
        (tokens(129), "129 tokens; expected at most 128"),
    ],
)
def test_tokens_that_cannot_be_processed_are_refused(prompt, says, shared_bridge):
    with pytest.raises(InputError, match=says):
        next(decode(shared_bridge(), prompt, path="cached", policy=Greedy(), n_steps=0))


@pytest.fixture
def _shapes_unchecked():
    """As outside pytest, where nobody checks annotations."""
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def test_a_run_that_outgrows_the_context_stops_with_an_error(shared_bridge):
    generator = decode(shared_bridge(), tokens(128), path="cached", policy=Greedy(), n_steps=1)
    next(generator)
    with pytest.raises(InputError, match="129 tokens; expected at most 128"):
        next(generator)


@pytest.mark.usefixtures("_shapes_unchecked")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"path": "clean"}, "unknown path"),
        ({"rows": "some"}, "unknown rows"),
        ({"n_steps": -1}, "too few steps"),
        ({"sites": ("resid",)}, "unknown site"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, says, shared_bridge):
    options = {"path": "cached", "policy": Greedy(), "n_steps": 1, **options}
    with pytest.raises(InputError, match=says):
        next(decode(shared_bridge(), FED[:5], **options))
    with pytest.raises(TypeError, match="unexpected keyword"):
        decode(shared_bridge(), FED[:5], path="cached", policy=Greedy(), n_steps=1, layer=3)


def test_a_state_of_other_tokens_is_refused(shared_bridge):
    state = run(shared_bridge(), "cached", n_steps=0)[0].kv
    with PathRunner(shared_bridge(), "cached") as runner, pytest.raises(InputError, match="a state of 13 tokens"):
        runner.step(FED[:17], state, 1, n_new=1)


def test_lockstep_walks_both_paths_over_the_cached_paths_greedy_tokens(shared_bridge):
    model, log = shared_bridge(), GuardLog()
    pairs = list(lockstep(model, FED[:5], policy=Greedy(), n_steps=6, log=log))
    for (cached, recomputed), (later, _) in itertools.pairwise(pairs):
        assert torch.equal(cached.tokens, recomputed.tokens)
        assert int(later.tokens[-1]) == int(cached.logits.argmax())
    assert log["null_control"] == 1
    assert log["cache_grew"] == 14
    assert log["attention_width"] == 14 * 3
    assert log["old_rows_unchanged"] == 6


def test_lockstep_refuses_paths_that_differ_on_the_prompt():
    model, calls = tiny_bridge(), []

    def nudge(tensor, hook):
        calls.append(1)
        return tensor + 1e-6 * len(calls)

    model.hook_dict["blocks.2.hook_mlp_out"].add_hook(nudge)
    with pytest.raises(GuardError, match=r"differ on the prompt.*difference at step 0 in logits"):
        next(lockstep(model, FED[:5], policy=Greedy(), n_steps=1))


def test_a_state_of_equal_length_is_not_taken_for_the_last_one(shared_bridge):
    """The runner goes on from its last cache only when it is given that very state."""
    llama = shared_bridge("llama-gqa")
    with PathRunner(llama, "cached") as runner:
        first = runner.step(FED[:6], KVState.empty(6), 0)
        other = runner.step(FED[1:7], KVState.empty(6), 0)
        after = runner.step(torch.cat([FED[:6], FED[6:7]]), first.kv, 1)
    with PathRunner(llama, "cached") as fresh:
        expected = fresh.step(FED[:7], first.kv, 1)
    assert torch.equal(after.logits, expected.logits)
    assert not torch.equal(other.kv.keys[1], first.kv.keys[1])


def test_a_run_goes_on_from_the_step_that_is_sent_back(shared_bridge):
    llama = shared_bridge("llama-gqa")
    run = decode(llama, FED[:6], path="cached", policy=Forced(FED.tolist()), n_steps=2)
    step = next(run)
    changed = KVState(tuple(k + 1 for k in step.kv.keys), step.kv.values, 6, 6)
    sent = run.send(replace(step, kv=changed))
    with PathRunner(llama, "cached") as fresh:
        assert torch.equal(sent.logits, fresh.step(FED[:7], changed, 1).logits)
        assert not torch.equal(sent.logits, fresh.step(FED[:7], step.kv, 1).logits)
    run.close()


def test_a_step_of_another_kind_is_not_taken_back(shared_bridge):
    llama = shared_bridge("llama-gqa")
    step = next(decode(llama, FED[:6], path="cached", policy=Forced(FED.tolist()), n_steps=2))
    for changed in ({"index": 1}, {"path": "recomputed"}, {"tokens": FED[1:7]}):
        run = decode(llama, FED[:6], path="cached", policy=Forced(FED.tolist()), n_steps=2)
        next(run)
        with pytest.raises(InputError, match="the step sent back is another one"):
            run.send(replace(step, **changed))


@pytest.mark.parametrize("first_step", [-1, 3])
def test_a_first_step_outside_the_run_is_refused(first_step, shared_bridge):
    run = decode(shared_bridge(), FED[:6], path="cached", policy=Forced(FED.tolist()), n_steps=2, first_step=first_step)
    with pytest.raises(InputError, match=f"first_step: got {first_step}; expected 0 to n_steps=2"):
        next(run)


@pytest.mark.parametrize(("path", "kept"), [("cached", True), ("recomputed", False)])
def test_only_the_cached_path_keeps_the_state_of_the_step_before(path, kept, shared_bridge):
    run = decode(shared_bridge("llama-gqa"), FED[:6], path=path, policy=Forced(FED.tolist()), n_steps=2)
    step = next(run)
    rows = weakref.ref(step.kv.keys[1])
    del step
    step = next(run)
    assert (rows() is not None) is kept
    assert step.index == 1
