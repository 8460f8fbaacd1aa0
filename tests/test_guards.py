"""Guards: each goes red when its fault is planted, and says what was got, expected and what to do."""

import dataclasses
import itertools

import pytest
import torch

import mechkv
from mechkv import guards
from mechkv.cache import StateCache
from mechkv.errors import GuardError, InputError, NonFiniteError
from mechkv.guards import GuardLog
from mechkv.hooks import Hooks
from mechkv.models import admit
from mechkv.paths import PathRunner
from tests.helpers import FED, Change, run
from tests.tiny import tiny_bridge, tiny_hf


def test_a_clean_run_passes_and_counts_its_guards(shared_bridge):
    log = GuardLog()
    run(shared_bridge(), "cached", n_steps=3, log=log)
    assert log == GuardLog(
        parameters_dtype=1,
        eval_mode=1,
        attention_implementation=1,
        no_autocast=4,
        cache_grew=4,
        attention_width=12,
        old_rows_unchanged=3,
    )


def test_training_mode_is_refused():
    model = tiny_bridge()
    model.original_model.model.layers[1].train()
    for use in (lambda: admit(model), lambda: run(model, "cached", n_steps=0)):
        with pytest.raises(GuardError, match=r"training mode.*model.eval"):
            use()
    model.original_model.eval()
    assert run(model, "cached", n_steps=0)


def test_a_parameter_in_another_dtype_is_named():
    model = tiny_bridge(dtype=torch.float16)
    model.original_model.model.layers[2].mlp.up_proj.to(torch.float32)
    for use in (lambda: admit(model), lambda: run(model, "cached", n_steps=0)):
        with pytest.raises(GuardError, match=r"1 parameters.*model.layers.2.mlp.up_proj.weight: torch.float32"):
            use()


def test_a_model_in_another_dtype_than_asked_for_is_refused(shared_bridge):
    with pytest.raises(GuardError, match=r"got .*torch.float32; expected torch.float16"):
        admit(shared_bridge(), dtype=torch.float16)


def test_another_attention_implementation_is_refused():
    model = tiny_bridge()
    model.original_model.config._attn_implementation = "sdpa"
    with pytest.raises(GuardError, match="got 'sdpa'; expected 'eager'"):
        run(model, "cached", n_steps=0)


def test_attention_that_fires_no_pattern_is_refused(shared_bridge, monkeypatch):
    shared_bridge()  # admitted before the fault
    monkeypatch.setattr(Hooks, "_ruler", lambda *args: lambda *args: None)
    with pytest.raises(GuardError, match="attention of layer 0 did not see the cache: got no attention pattern"):
        run(shared_bridge(), "cached", n_steps=0)


def test_attention_over_fewer_keys_than_the_cache_holds_is_refused(shared_bridge, monkeypatch):
    def narrow(self, tap):
        def measure(module, given, value):
            self.now.widths[tap.layer] = value.shape[-1] - (tap.layer == 1 and self.now.index == 1)

        return measure

    shared_bridge()  # admitted before the fault
    monkeypatch.setattr(Hooks, "_ruler", narrow)
    assert run(shared_bridge(), "cached", n_steps=0)
    with pytest.raises(GuardError, match=r"attention of layer 1 did not see.*got a pattern over 13 keys; expected 14"):
        run(shared_bridge(), "cached", n_steps=1)


def test_autocast_is_refused(shared_bridge):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(GuardError, match=r"autocast to torch.bfloat16"):
        run(shared_bridge(), "cached", n_steps=0)


def plant(monkeypatch, fault):
    """Every update of the cache goes through `fault(original, cache, keys, values, layer)`."""
    original = StateCache.update

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return fault(
            lambda k, v: original(self, k, v, layer_idx, *args, **kwargs), self, key_states, value_states, layer_idx
        )

    monkeypatch.setattr(StateCache, "update", update)


def test_a_cache_that_drops_a_row_is_refused(shared_bridge, monkeypatch):
    def drop(update, cache, keys, values, layer):
        held = cache.layers[layer]
        if layer == 1 and held.is_initialized:
            held.keys, held.values = held.keys[..., 1:, :], held.values[..., 1:, :]
        return update(keys, values)

    models = [shared_bridge(family) for family in ("llama-gqa", "mistral-window")]
    plant(monkeypatch, drop)
    with pytest.raises(GuardError, match=r"cache of layer 1 did not grow.*got 13 rows.*expected 13 held \+ 1 new"):
        run(models[0], "cached", n_steps=1)


def test_a_cache_that_rewrites_an_old_row_is_refused(shared_bridge, monkeypatch):
    def rewrite(update, cache, keys, values, layer):
        held = cache.layers[layer]
        if layer == 2 and held.is_initialized:
            held.values = held.values.clone()
            held.values[0, 1, 4, 5] += 1e-6
        return update(keys, values)

    models = [shared_bridge(family) for family in ("llama-gqa", "mistral-window")]
    plant(monkeypatch, rewrite)
    for model in models:
        with pytest.raises(GuardError, match="V rows of layer 2 changed while a new token was processed"):
            run(model, "cached", n_steps=1)


def test_a_cache_whose_rows_attention_does_not_get_is_refused(shared_bridge, monkeypatch):
    def ignore(update, cache, keys, values, layer):
        together = update(keys, values)
        return (keys, values) if layer == 1 else together

    model = shared_bridge()
    plant(monkeypatch, ignore)
    with pytest.raises((GuardError, RuntimeError), match=r"attention of layer 1 did not see|size of tensor"):
        run(model, "cached", n_steps=1)


def test_a_cache_that_is_never_passed_on_is_refused(shared_bridge, monkeypatch):
    """As with transformers 5.24, whose decoder has another keyword for the cache."""
    model = tiny_bridge()
    decoder = model.original_model.model
    original = decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda *args, past_key_values=None, **kwargs: original(*args, **kwargs))
    with pytest.raises(GuardError, match=r"did not write to its KV cache.*transformers>=5.9,<5.24"):
        run(model, "cached", n_steps=1)
    hf = tiny_hf()
    whole = type(hf.model).forward
    monkeypatch.setattr(
        type(hf.model),
        "forward",
        lambda self, *args, past_key_values=None, **kwargs: whole(self, *args, **{**kwargs, "use_cache": False}),
    )
    with pytest.raises(GuardError, match="did not write to its KV cache"):
        mechkv.from_hf(hf)


def test_nondeterminism_is_found_by_doing_a_step_twice():
    model, calls = tiny_bridge(), []
    steps = run(model, "cached", sites=["mlp_out"], n_steps=1)
    log = GuardLog()
    with PathRunner(model, "cached", sites=["mlp_out"]) as runner:
        guards.check_repeat(steps[1], runner.step(steps[1].tokens, steps[1].kv_before, 1), log)
    assert log["repeatable"] == 1

    def wobble(tensor, hook):
        calls.append(1)
        return tensor + 1e-6 * (len(calls) % 2)

    model.hook_dict["blocks.1.hook_mlp_out"].add_hook(wobble)
    with PathRunner(model, "cached", sites=["mlp_out"]) as runner:
        first = runner.step(steps[1].tokens, steps[1].kv_before, 1)
        second = runner.step(steps[1].tokens, steps[1].kv_before, 1)
    with pytest.raises(GuardError, match=r"done twice does not give the same bits.*difference at step 1"):
        guards.check_repeat(first, second, log)
    assert log["repeatable"] == 1


@pytest.mark.parametrize("where", ["logits", "resid_mid, layer 1", "cache_k, layer 2", "cache_v, layer 0"])
def test_any_difference_on_the_prompt_is_found_and_named(where, shared_bridge):
    step = run(shared_bridge(), "cached", sites=["resid_mid"], n_steps=0)[0]
    guards.check_null(step, run(shared_bridge(), "recomputed", sites=["resid_mid"], n_steps=0)[0], GuardLog())
    site, _, layer = where.partition(", layer ")
    if site == "logits":
        other = dataclasses.replace(step, logits=nudged(step.logits))
    elif site == "resid_mid":
        values = list(step.activations[site])
        values[int(layer)] = nudged(values[int(layer)])
        other = dataclasses.replace(step, activations={site: tuple(values)})
    else:
        name = "keys" if site == "cache_k" else "values"
        values = list(getattr(step.kv, name))
        values[int(layer)] = nudged(values[int(layer)])
        other = dataclasses.replace(step, kv=dataclasses.replace(step.kv, **{name: tuple(values)}))
    with pytest.raises(GuardError, match=f"difference at step 0 in {where}"):
        guards.check_null(step, other, GuardLog())


def nudged(value: torch.Tensor) -> torch.Tensor:
    """The last value moved by one place of its dtype."""
    value = value.clone()
    flat = value.view(-1)
    flat[-1] = torch.nextafter(flat[-1], flat[-1] + 1)
    return value


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_same_bits_means_bits(dtype):
    zero, nan = torch.tensor([0.0, 1.0], dtype=dtype), torch.tensor([float("nan"), 1.0], dtype=dtype)
    assert guards.same_bits(zero, zero.clone())
    assert not guards.same_bits(zero, -zero)
    assert not guards.same_bits(zero, torch.tensor([-0.0, 1.0], dtype=dtype))
    assert guards.same_bits(nan, nan.clone())
    assert not guards.same_bits(zero, nan)
    assert not guards.same_bits(zero, zero[:1])
    assert not guards.same_bits(zero, zero.to(torch.float64 if dtype != torch.float64 else torch.float32))


_LAYOUTS = {
    "row after row": lambda rows: rows.clone(),
    "within a longer buffer": lambda rows: torch.cat([rows, rows.flip(1)], 1)[:, : rows.shape[1]],
    "position first": lambda rows: rows.transpose(0, 1).contiguous().transpose(0, 1),
    "every other number": lambda rows: torch.stack([rows, rows], -1).flatten(-2)[..., ::2],
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kept", [5, 3, 1])
@pytest.mark.parametrize("layout", _LAYOUTS)
def test_one_changed_bit_of_one_old_row_is_found(layout, kept, dtype):
    """A layer that held 5 rows of 3 heads gets one more; a window lets the first of them go."""
    torch.manual_seed(0)
    before = torch.randn(3, 5, 7, dtype=torch.float64).to(dtype)
    before[0, -1, 0], before[1, -1, 0] = 0.0, float("nan")
    after = torch.cat([before[:, 5 - kept :], torch.randn(3, 1, 7, dtype=torch.float64).to(dtype)], 1)
    lay = _LAYOUTS[layout]
    assert guards.same_rows(lay(before), lay(after), kept)
    assert guards.same_rows(before, lay(after), kept)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for head, row, place in itertools.product(range(3), range(kept), (0, 6)):
        for bit in (0, 8 * dtype.itemsize - 1):  # the last bit, and the sign: that of zero and of NaN are among them
            for rows, at in ((after, row), (before, 5 - kept + row)):
                flipped = rows.clone()
                flipped.view(integers)[head, at, place] ^= 1 << bit if bit == 0 else torch.iinfo(integers).min
                pair = (before, flipped) if rows is after else (flipped, after)
                assert not guards.same_rows(lay(pair[0]), lay(pair[1]), kept), (head, row, place, bit)
    others = [before.clone(), after.clone()]
    others[0][:, : 5 - kept] += 1
    others[1][:, kept:] += 1
    assert guards.same_rows(lay(others[0]), lay(others[1]), kept), "rows let go and new rows are not old rows"


def test_old_rows_of_another_kind_are_not_the_same():
    rows = torch.zeros(2, 4, 8)
    assert guards.same_rows(rows, rows, 4)
    assert not guards.same_rows(rows, rows.to(torch.int32), 4), "the same bytes"
    assert not guards.same_rows(rows, torch.zeros(3, 4, 8), 4)
    assert not guards.same_rows(rows, torch.zeros(2, 4, 16), 4)
    assert not guards.same_rows(rows, torch.zeros(2, 3, 8), 4), "rows that are not there are not read"


def test_infinite_weights_are_found_at_their_layer_and_site():
    for name, site, dtype in (
        ("mlp.down_proj", "mlp_out", torch.float32),
        ("self_attn.o_proj", "attn_out", torch.float16),
    ):
        model = tiny_bridge(dtype=dtype)
        module = model.original_model.get_submodule(f"model.layers.1.{name}")
        weight = next(iter(module.parameters()))
        with torch.no_grad():
            weight[3, 2] = float("inf")
        for path in ("cached", "recomputed"):
            with pytest.raises(NonFiniteError, match=rf"{path} path.*step 0.*first at {site} of layer 1.*the weights"):
                run(model, path, n_steps=1)


def test_an_overflow_of_float16_names_the_layer_and_suggests_bfloat16():
    for dtype in (torch.float16, torch.bfloat16):
        model = tiny_bridge(dtype=dtype)
        with torch.no_grad():
            for name in ("gate_proj", "up_proj", "down_proj"):
                next(iter(model.original_model.get_submodule(f"model.layers.2.mlp.{name}").parameters())).mul_(100)
        if dtype == torch.float16:
            with pytest.raises(NonFiniteError, match=r"mlp_out of layer 2.*ends at 6.55e\+04.*dtype='bfloat16'"):
                run(model, "cached", n_steps=1)
        else:
            assert run(model, "cached", n_steps=1)


def test_scores_masked_everywhere_are_not_a_matter_of_range(shared_bridge):
    model = tiny_bridge(dtype=torch.float16)

    def mask_all(tensor, hook):
        tensor = tensor.clone()
        tensor[..., -1, :] = float("-inf")
        return tensor.softmax(-1)

    model.hook_dict["blocks.1.attn.hook_pattern"].add_hook(mask_all)
    with pytest.raises(NonFiniteError, match=r"first at attn_out of layer 1.*not a matter of range"):
        run(model, "cached", n_steps=1)


def test_a_step_that_stops_being_finite_later_says_which(shared_bridge):
    blow = Change("mlp_out", lambda value, at: value / 0 if (at.layer, at.step) == (1, 2) else None)
    with pytest.raises(NonFiniteError, match=r"not finite at step 2.*mlp_out of layer 1"):
        run(shared_bridge(), "cached", n_steps=4, interventions=[blow])


def test_edited_caches_are_still_counted(shared_bridge):
    log = GuardLog()
    change = Change("cache_k", lambda value, at: value * 2)
    run(shared_bridge(), "cached", n_steps=2, interventions=[change], log=log)
    assert (log["cache_grew"], log["attention_width"], log["old_rows_unchanged"]) == (3, 9, 0)


def test_errors_say_got_expected_and_remedy(shared_bridge):
    with pytest.raises(InputError) as caught:
        run(shared_bridge(), "cached", fed=FED[:0], n_prompt=0, n_steps=0)
    error = caught.value
    assert isinstance(error, ValueError)
    assert str(error) == f"{error.what}: got {error.got}; expected {error.expected}. {error.remedy}"
    assert "prompt of at least one token" in error.remedy
