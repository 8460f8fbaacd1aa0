"""Where two paths first differ, on models with a known mistake: layers wrong by themselves, and where NaN begins."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from experiments import injected_bugs
from mechkv import check_paths, localise
from tests import check_cases as c
from tests.tiny import tiny_hf, tokens


def _windows(ours: int, theirs: int):
    """Gemma-3 (window, full, window) with another window on either path, from the same weights."""

    def build(dtype):
        return {n: tiny_hf("gemma3", dtype=dtype, sliding_window=n) for n in {ours, theirs}}

    cached = lambda m, t, n_prompt: c.cached(m[ours], t, n_prompt)  # noqa: E731
    full = lambda m, t, n_prompt: c.full(m[theirs], t, n_prompt)  # noqa: E731
    return check_paths(build, cached, full, tokens(12), n_prompt=4, dtypes=("float32",))


def test_another_window_is_wrong_in_window_layers_only():
    report = _windows(8, 7)
    assert (report.verdict, report.first_position, report.first_layer) == ("semantic", 7, 0)
    assert report.evidence["layers_wrong_by_themselves"] == [0, 2]
    assert report.evidence["profile_shape"] == "only window layers (0, 2)"
    profile = report.profile.set_index("layer")
    assert profile.loc[1, "max_abs"] > profile.loc[1, "bound"]  # the full layer inherits the difference


def test_the_same_window_is_clean():
    report = _windows(8, 8)
    assert report.verdict in ("identical", "numerical")
    assert report.evidence["layers_wrong_by_themselves"] is None


def _bugged(kind: str, family: str, layer: int):
    pair = injected_bugs.bug(kind, family, 4, layer)
    build = partial(injected_bugs.random_model, family, seed=0)
    return check_paths(build, pair.cached, pair.recomputed, tokens(10), n_prompt=4, dtypes=("float32",))


@pytest.mark.parametrize("family", ["gemma3", "llama", "gpt2"])
@pytest.mark.parametrize("layer", [0, 1])
def test_one_corrupted_layer_is_wrong_alone(family, layer):
    report = _bugged("value heads swapped", family, layer)
    assert report.first_layer == layer
    assert report.evidence["layers_wrong_by_themselves"] == [layer]
    assert report.evidence["profile_shape"].startswith(f"jump at layer {layer}")


def test_a_wrong_rotary_position_is_wrong_in_every_layer():
    report = _bugged("position off by one", "llama", 1)
    assert report.evidence["layers_wrong_by_themselves"] == [0, 1, 2]
    assert report.evidence["profile_shape"].startswith("block 0, flat")


def test_a_wrong_learned_position_is_wrong_in_no_layer():
    report = _bugged("position off by one", "gpt2", 1)
    assert (report.first_layer, report.evidence["layers_wrong_by_themselves"]) == (-1, [])
    assert report.evidence["profile_shape"] == "embedding"


def test_the_other_paths_inputs_are_what_blocks_get():
    """Fed with rows of its own, a path keeps its bits; with others, it does not; afterwards all is as before."""
    net, fed = c.model("llama", torch.float32), c.tokens(10)
    with torch.no_grad():
        plain = c.cached(net, fed, 6)
        with localise.watch(net, 10) as own:
            c.cached(net, fed, 6)
        with localise.same_inputs([net], own):
            assert torch.equal(c.cached(net, fed, 6), plain)
        with localise.watch(net, 10) as other:
            c.cached(net, fed.flip(0), 6)
        with localise.same_inputs([net], other):
            assert not torch.equal(c.cached(net, fed, 6), plain)
        assert torch.equal(c.cached(net, fed, 6), plain)


def test_a_path_that_repeats_tokens_cannot_be_fed():
    net, fed = c.model("llama", torch.float32), c.tokens(8)
    traces = {}
    for name, path in {"cached": c.cached, "every": c.every_step}.items():
        with torch.no_grad(), localise.watch(net, 8) as traces[name]:
            path(net, fed, 6)
    assert localise.can_swap_inputs(traces["cached"], traces["every"])
    assert not localise.can_swap_inputs(traces["every"], traces["cached"])


def test_infinite_mask_is_followed_to_the_first_attention():
    infinite = partial(c.pads_by_mask, hidden=-math.inf)
    report = c.check(c.builder("llama"), infinite, c.full, dtypes=("float32", "float16"))
    assert (report.verdict, report.first_layer, report.first_position) == ("nonfinite", 0, 5)
    assert list(report.evidence["nonfinite"]) == ["cached"]
    assert ".0.self_attn" in report.evidence["nonfinite"]["cached"]["site"]
    assert any("self_attn" in note for note in report.evidence["notes"])


def test_overflow_is_followed_to_its_module():
    def hot(dtype):
        net = c.model("llama", dtype)
        net.model.layers[1].mlp.down_proj.weight.data *= 2e5
        return net

    report = c.check(hot, c.cached, c.full, dtypes=("float32", "float16"))
    assert (report.verdict, report.first_layer) == ("nonfinite", 1)
    assert set(report.evidence["nonfinite"]) == {"cached", "recomputed"}
    for spoiled in report.evidence["nonfinite"].values():
        assert spoiled["site"].endswith("layers.1.mlp.down_proj")
        assert 0 < spoiled["largest_before"] < 65504


def test_a_finite_run_has_no_origin_of_nan():
    with torch.no_grad(), localise.watch(net := c.model("gpt2", torch.float32), 6) as trace:
        c.full(net, c.tokens(6), 3)
    assert localise.first_nonfinite(trace) is None


def test_nan_in_the_embedding_is_layer_minus_one():
    net = c.model("llama", torch.float32)
    assert isinstance(net.model.embed_tokens, nn.Embedding)
    net.model.embed_tokens.weight.data[:] = math.nan
    with torch.no_grad(), localise.watch(net, 6) as trace:
        c.full(net, c.tokens(6), 3)
    assert localise.first_nonfinite(trace).layer == localise.EMBEDDING
