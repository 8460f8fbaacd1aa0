"""Cases from people who met the problem: each is built, and the answer must be the right one. See docs/check.md."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, MixtralConfig

import mechkv
from mechkv import check_paths
from mechkv.cache import KVState
from mechkv.paths import PathRunner
from tests import check_cases as c
from tests.tiny import tiny_bridge, tiny_hf, tokens

CLEAN = ("identical", "numerical")


def test_prefill_and_steps_against_one_pass_is_rounding():
    report = c.check(c.builder("llama", attention="sdpa"), c.cached, c.full, n=48, dtypes=mechkv.checking.DTYPES)
    assert report.verdict == "numerical"
    rungs = report.rungs.set_index("dtype")
    assert rungs.loc["float64", "max_abs"] < 1e-13 < 1e-7 < rungs.loc["float32", "max_abs"] < 1e-5
    profile = report.profile.set_index("layer")
    assert report.evidence["profile_shape"] == "smooth growth"
    assert profile.loc[-1, "max_abs"] == 0
    assert 0 < profile.loc[0, "max_abs"] < profile.loc[3, "max_abs"]
    assert report.convicted is None
    assert report.exit_code == 0


def test_assisted_decoding_flips_tokens_and_is_rounding():
    """Verification in chunks against one token a step: bfloat16 flips an argmax, float32 none."""
    report = c.check(
        c.builder("llama", attention="sdpa", seed=3),
        partial(c.cached, chunk=5),
        partial(c.cached, chunk=1),
        n=96,
        seed=3,
        dtypes=("float32", "bfloat16"),
    )
    assert report.verdict == "numerical"
    flips = report.rungs.set_index("dtype")["flips"]
    assert flips["float32"] == 0
    assert flips["bfloat16"] >= 1
    first = report.evidence["flips"][0]
    assert first["dtype"] == "bfloat16"
    assert first["margin_dtype"] == "float32"
    rows = report.frame[(report.frame["dtype"] == "bfloat16") & (report.frame["flip"] == 1)]
    assert first["position"] == rows["position"].min()
    margins = report.frame[report.frame["dtype"] == "float32"].set_index("position")["margin_b"]
    assert first["margin"] == margins[first["position"]]
    assert first["margin"] <= 2 * first["bound"]  # a flip needs a margin that rounding reaches


@pytest.mark.parametrize("ours", [c.batch_of_8, c.full_batch_of_8])
def test_a_row_in_a_batch_is_not_semantic(ours):
    theirs = c.cached if ours is c.batch_of_8 else c.full
    report = c.check(c.builder("llama", attention="sdpa"), ours, theirs, n=14)
    assert report.verdict in CLEAN


def test_float32_island_inside_float64_is_named():
    report = c.check(c.builder("neox"), c.cached, c.full, n=28, n_prompt=5)
    top = report.rungs.set_index("dtype").loc["float64", "max_abs"]
    assert 1e-9 < top < 1e-5  # nowhere near float64
    assert report.verdict == "numerical"
    assert any("float32 island" in note for note in report.evidence["notes"])


def test_sdpa_has_no_island():
    report = c.check(c.builder("neox", attention="sdpa"), c.cached, c.full, n=28, n_prompt=5)
    assert report.verdict == "numerical"
    assert not any("island" in note for note in report.evidence["notes"])


def test_left_pads_without_position_ids_move_learned_positions():
    report = c.check(c.builder("gpt2"), c.padded, c.full)
    assert report.verdict == "semantic"
    assert report.first_layer == -1
    assert report.kind == "positions"
    assert report.evidence["profile_shape"] == "embedding"
    assert report.rungs["max_abs"].min() > 0.5
    assert report.exit_code == 1


def _positions(start, stop):
    """Right positions of a left-padded row."""
    return {"position_ids": (torch.arange(start, stop)[None] - c.PADS).clamp(min=0)}


def _omitted(start, stop):
    return _positions(start, stop) | (c.pad_mask(start, stop) if start == 0 else {})


def _only_the_new(start, stop):
    mask = c.pad_mask(start, stop)["attention_mask"]
    return _positions(start, stop) | {"attention_mask": mask[:, start:] if start else mask}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("options", [_omitted, _only_the_new])
def test_mask_omitted_on_decode_steps(kind, options):
    """Against the same padded row with its mask: q, k, v of the new token agree in layer 0, attention does not."""
    right = partial(c.cached, pads=c.PADS, options=lambda a, b: _positions(a, b) | c.pad_mask(a, b))
    wrong = partial(c.cached, pads=c.PADS, options=options)
    report = c.check(c.builder(kind), wrong, right, dtypes=("float32", "bfloat16"))
    if options is _only_the_new and report.verdict in CLEAN:
        pytest.skip("this transformers takes a mask of the new token for one of all")
    assert report.verdict == "semantic"
    assert (report.kind, report.first_layer) == ("attention", 0)
    assert "mask" in report.evidence["text"]
    before = {name.rsplit(".", 1)[-1] for name in report.evidence["equal_before"]}
    assert before & {"c_attn", "v_proj"}
    assert report.evidence["tables"] == []
    assert report.evidence["when"].startswith("only on decode steps")


_NTK = {
    "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "max_position_embeddings": 16,
}


def test_dynamic_rope_starts_where_the_length_passes_the_trained_one():
    report = c.check(c.builder("llama", **_NTK), c.cached, c.every_step, n=20, dtypes=("float64", "float32"))
    assert report.verdict == "semantic"
    assert report.first_position == 16
    assert "onset at position 16" in report.evidence["when"]
    assert report.kind == "state"
    assert any("state from call to call" in note for note in report.evidence["notes"])


def test_dynamic_rope_up_to_the_trained_length_is_clean():
    report = c.check(c.builder("llama", **_NTK), c.cached, c.every_step, n=16, dtypes=("float64", "float32"))
    assert report.verdict in CLEAN


def test_another_window_is_found_at_its_first_position():
    def pair(dtype):
        return {"8": c.model("mistral", dtype), "7": c.model("mistral", dtype, sliding_window=7)}

    report = c.check(
        pair, lambda m, t, n_prompt: c.cached(m["8"], t, n_prompt), lambda m, t, n_prompt: c.full(m["7"], t, n_prompt)
    )
    assert report.verdict == "semantic"
    assert report.first_position == 7
    assert (report.kind, report.first_layer) == ("attention", 0)
    assert "window" in report.evidence["text"]
    assert report.convicted is None


def _all_visible(net, fed, n_prompt):
    mask = torch.zeros(1, 1, len(fed), len(fed), dtype=net.dtype)
    return c.full(net, fed, n_prompt, attention_mask=mask)


def _all_visible_every_step(net, fed, n_prompt):
    return torch.stack([_all_visible(net, fed[:stop], stop)[-1] for stop in range(n_prompt, len(fed) + 1)])


@pytest.mark.parametrize("uncached", [_all_visible, _all_visible_every_step])
def test_uncached_run_without_causal_mask_is_convicted(uncached):
    report = c.check(c.builder("llama"), c.cached, uncached, dtypes=("float32", "float16"))
    assert report.verdict == "semantic"
    assert (report.kind, report.convicted) == ("causality", "recomputed")


def test_new_token_that_does_not_see_itself():
    def blind(net, fed, n_prompt):
        def options(start, stop):
            if start == 0:
                return {}
            mask = torch.zeros(1, 1, 1, stop, dtype=net.dtype)
            mask[..., -1] = torch.finfo(net.dtype).min
            return {"attention_mask": mask}

        return c.cached(net, fed, n_prompt, options=options)

    report = c.check(c.builder("llama"), blind, c.full)
    assert report.verdict == "semantic"
    assert (report.kind, report.first_layer, report.first_position) == ("attention", 0, 6)
    assert "mask" in report.evidence["text"]


def test_cache_in_another_dtype_is_a_clear_error():
    def float32_buffers(net, fed, n_prompt):
        cache = DynamicCache(config=net.config)
        net(fed[None, :n_prompt], past_key_values=cache, use_cache=True)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.float(), layer.values.float()
        return c.cached(net, fed, n_prompt, cache=cache)

    with pytest.raises(mechkv.InputError, match=r"float(16|32) and float(16|32)") as caught:
        c.check(c.builder("llama"), float32_buffers, c.full, dtypes=("float16",))
    assert "dtype of the model" in str(caught.value)

    bridge = tiny_bridge(dtype=torch.float16)
    fed = tokens(6)
    with PathRunner(bridge, "cached") as runner:
        state = runner.step(fed[:4], KVState.empty(4), 0).kv
        wide = KVState(tuple(k.float() for k in state.keys), tuple(v.float() for v in state.values), 4, 4)
        with pytest.raises(mechkv.GuardError, match=r"float32.*float16"):
            runner.step(fed[:5], wide, 1)


def test_infinite_mask_in_padded_rows_is_masking_not_overflow():
    def infinite(net, fed, n_prompt):
        row = torch.cat([fed.new_zeros(c.PADS), fed])
        mask = torch.full((len(row), len(row)), -math.inf).triu(1).to(net.dtype)
        mask[:, : c.PADS] = -math.inf
        return net(row[None], attention_mask=mask[None, None], use_cache=False).logits[0, c.PADS + n_prompt - 1 :]

    report = c.check(c.builder("llama"), infinite, c.full, dtypes=("float32", "float16"))
    assert report.verdict == "nonfinite"
    assert "masking" in report.reason
    assert "not overflow" in report.reason
    assert report.exit_code == 3


def test_overflow_is_not_masking():
    def hot(dtype):
        net = c.model("llama", dtype)
        net.model.layers[1].mlp.down_proj.weight.data *= 3e5
        return net

    report = c.check(hot, c.cached, c.full, dtypes=("float32", "bfloat16", "float16"))
    assert report.verdict == "nonfinite"
    assert "float16" in report.reason
    assert "overflow" in report.reason
    assert "masking" not in report.reason


def test_the_live_one_is_refused_and_named(monkeypatch):
    """A bridge that drops its cache, as with transformers 5.24: logits are off by units in every dtype."""
    from transformer_lens.model_bridge import TransformerBridge

    right = TransformerBridge.forward

    def dropping(self, *args, past_key_values=None, **kwargs):
        return right(self, *args, **kwargs)

    monkeypatch.setattr(TransformerBridge, "forward", dropping)
    report = mechkv.check(tiny_hf("gpt2"), dtypes=("float32",))
    assert (report.verdict, report.kind, report.exit_code) == ("semantic", "cache not updated", 1)
    assert "transformers>=5.9,<5.24" in report.reason


def test_a_cache_that_stays_empty_is_semantic():
    def empty(net, fed, n_prompt):
        rows, start = [], 0
        for stop in range(n_prompt, len(fed) + 1):
            places = torch.arange(start, stop)[None]
            rows.append(net(fed[None, start:stop], position_ids=places, use_cache=False).logits[0, -1])
            start = stop
        return torch.stack(rows)

    report = c.check(c.builder("llama"), empty, c.full, dtypes=("float64", "bfloat16"))
    assert (report.verdict, report.kind, report.first_layer) == ("semantic", "attention", 0)


# --- must stay clean ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["opt", "llama"])
def test_left_padding_that_the_model_allows_for(kind):
    """OPT takes its positions from the mask; rotary attention sees only how far apart tokens are."""
    report = c.check(c.builder(kind), c.padded, c.full)
    assert report.verdict in CLEAN


_SCALINGS = [
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0},
]


@pytest.mark.parametrize("rope", _SCALINGS, ids=lambda rope: rope["rope_type"])
def test_static_rope_scaling(rope):
    report = c.check(c.builder("llama", rope_parameters=rope), c.cached, c.full, n=18, dtypes=("float64", "float32"))
    assert report.verdict in CLEAN


@pytest.mark.parametrize("build", [c.builder("llama"), c.builder("mistral"), lambda d: tiny_hf("gemma3", dtype=d)])
def test_static_cache(build):
    report = c.check(build, c.static, c.full, dtypes=("float64", "float32"))
    assert report.verdict in CLEAN


@pytest.mark.parametrize("family", ["gemma3", "gemma2", "mistral-window"])
def test_past_the_window(family):
    report = c.check(lambda d: tiny_hf(family, dtype=d), c.cached, c.full, n=18, dtypes=("float32", "float16"))
    assert report.verdict in CLEAN


# --- traps -------------------------------------------------------------------------------------------------------


def _rounded_store(bits):
    class Rounded(DynamicCache):
        def update(self, keys, values, layer_idx, *args, **kwargs):
            return super().update(*(_quantised(x, bits) for x in (keys, values)), layer_idx, *args, **kwargs)

    return lambda net, fed, n_prompt: c.cached(net, fed, n_prompt, cache=Rounded(config=net.config))


def _quantised(x, bits):
    if bits is None:
        return x.to(torch.bfloat16).to(x.dtype)
    scale = x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (x / scale).round() * scale


@pytest.mark.parametrize("bits", [None, 8])
def test_lossy_store_is_not_called_rounding(bits):
    """It is of the size of rounding in bfloat16 and does not shrink from float32 to float64."""
    report = c.check(c.builder("llama"), _rounded_store(bits), c.full)
    assert report.verdict == "semantic"
    assert "does not shrink" in report.reason
    assert report.kind == "attention"
    assert any("lossy" in note for note in report.evidence["notes"])
    rungs = report.rungs.set_index("dtype")
    assert rungs.loc["bfloat16", "max_abs"] < rungs.loc["bfloat16", "bound"]
    assert rungs.loc["float64", "max_abs"] == pytest.approx(rungs.loc["float32", "max_abs"], rel=0.2)


def test_missing_top_rung():
    """Mixture of experts, whose grouped product has no float64 path; experts may flip in bfloat16."""

    def build(dtype):
        if dtype == torch.float64:
            raise NotImplementedError("no float64 kernel")
        torch.manual_seed(0)
        config = MixtralConfig(**{**c._COMMON, "num_key_value_heads": 2, "num_local_experts": 4})
        net = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for parameter in net.parameters():
            parameter.data = (parameter.data * 6 if parameter.ndim > 1 else parameter.data).to(dtype)
        return net.eval()

    report = c.check(build, c.cached, c.full)
    assert report.verdict in CLEAN
    assert report.rungs.set_index("dtype").loc["float64", "status"] == "missing"
    assert any("float64 could not be run" in note for note in report.evidence["notes"])


def test_functions_without_weights_within_reach_are_judged_by_the_ladder():
    class Hidden:
        __slots__ = ()

    def build(dtype):
        net = c.model("llama", dtype)
        store[dtype] = net
        return dtype

    store: dict = {}
    wrong = lambda dtype, fed, n_prompt: c.cached(  # noqa: E731
        store[dtype], fed, n_prompt, options=lambda a, b: {"position_ids": torch.arange(a, b)[None] + bool(a)}
    )
    right = lambda dtype, fed, n_prompt: c.full(store[dtype], fed, n_prompt)  # noqa: E731
    report = c.check(build, wrong, right, dtypes=mechkv.checking.DTYPES)
    assert report.verdict == "semantic"
    clean = c.check(
        build, lambda d, fed, n_prompt: c.cached(store[d], fed, n_prompt), right, dtypes=mechkv.checking.DTYPES, seed=1
    )
    assert clean.verdict in (*CLEAN, "inconclusive")
    assert clean.rungs["bound"].isna().all()


def test_a_path_that_differs_from_itself():
    def noisy(net, fed, n_prompt):
        logits = c.full(net, fed, n_prompt)
        return logits * (1 + 1e-3 * torch.randn(()))

    report = c.check(c.builder("llama"), noisy, c.full, dtypes=("float32", "float16"))
    assert (report.verdict, report.exit_code) == ("irreproducible", 4)
    assert "cached" in report.reason


def test_a_cache_kept_from_the_call_before_is_state():
    def leaky(net, fed, n_prompt):
        if not hasattr(net, "kept"):
            net.kept = DynamicCache(config=net.config)
        rows, start = [], 0
        for stop in range(n_prompt, len(fed) + 1):
            places = torch.arange(start, stop)[None]
            rows.append(net(fed[None, start:stop], past_key_values=net.kept, position_ids=places).logits[0, -1])
            start = stop
        return torch.stack(rows)

    report = c.check(c.builder("llama"), leaky, c.full, dtypes=("float32",))
    assert report.verdict == "semantic"
    assert "state" in report.reason
    assert report.convicted == "cached"


def test_build_that_returns_its_last_model_is_refused():
    net = c.model("llama", torch.float32)
    with pytest.raises(mechkv.InputError, match="weights of its last call"):
        c.check(lambda dtype: net.to(dtype), c.cached, c.full)


def test_build_that_ignores_its_dtype_is_refused():
    with pytest.raises(mechkv.InputError, match="ignores its dtype"):
        c.check(lambda dtype: c.model("llama", torch.float32), c.cached, c.full)


def test_numpy_code_without_torch():
    """A path need not know torch: an averaging language model in numpy, with a running sum as its cache."""

    class Average:
        def __init__(self, dtype):
            rng = np.random.default_rng(0)
            kind = str(dtype).removeprefix("torch.")
            self.embed, self.out = (rng.normal(size=shape).astype(kind) for shape in ((101, 16), (16, 101)))

    def recomputed(m, fed):
        states = [m.embed[fed[: p + 1].numpy()].mean(0) for p in range(3, len(fed))]
        return np.tanh(np.stack(states)) @ m.out

    def running(m, fed, off=0):
        total, rows = m.embed[fed[:4].numpy()].sum(0), []
        for n in range(4, len(fed) + 1):
            rows.append(np.tanh(total / m.embed.dtype.type(n + off)) @ m.out)
            total = total + m.embed[int(fed[n])] if n < len(fed) else total
        return np.stack(rows)

    dtypes = ("float64", "float32", "float16")
    assert check_paths(Average, running, recomputed, tokens(20), n_prompt=4, dtypes=dtypes).verdict == "numerical"
    wrong = check_paths(Average, partial(running, off=1), recomputed, tokens(20), n_prompt=4, dtypes=dtypes)
    assert wrong.verdict == "semantic"
    assert wrong.first_position == 3


def test_weights_drawn_anew_at_every_build_hide_nothing():
    """The probes compare an object with itself, so a build that is not deterministic cannot widen the bound."""

    def build(dtype):
        torch.seed()
        return c.model("gpt2", dtype, seed=int(torch.randint(0, 2**31, ())))

    report = c.check(build, c.padded, c.full)
    assert (report.verdict, report.kind) == ("semantic", "positions")
    assert c.check(build, c.cached, c.full).verdict in CLEAN
