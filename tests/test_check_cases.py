"""Cases from people who met the problem: each is built, and the answer must be the right one. See docs/check.md."""

import math
from functools import partial

import pytest
import torch
from transformers import DynamicCache

import mechkv
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
    for seed in range(3, 9):  # which of them flips depends on the processor's kernels
        report = c.check(
            c.builder("llama", attention="sdpa", seed=seed),
            partial(c.cached, chunk=5),
            partial(c.cached, chunk=1),
            n=96,
            seed=seed,
            dtypes=("float32", "bfloat16"),
        )
        assert report.verdict == "numerical"
        flips = report.rungs.set_index("dtype")["flips"]
        assert flips["float32"] == 0
        if flips["bfloat16"]:
            break
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
    infinite = partial(c.pads_by_mask, hidden=-math.inf)
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
