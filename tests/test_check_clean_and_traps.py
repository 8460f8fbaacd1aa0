"""What must stay clean, and the traps of a verdict rule: never `semantic` for rounding, never `numerical` for a bug."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, MixtralConfig

import mechkv
from mechkv import check_paths
from tests import check_cases as c
from tests.tiny import tiny_hf, tokens

CLEAN = ("identical", "numerical")


# --- must stay clean ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["opt", "llama"])
def test_left_padding_that_the_model_allows_for(kind):
    """OPT takes its positions from the mask; rotary attention sees only how far apart tokens are."""
    report = c.check(c.builder(kind), c.padded, c.full)
    assert report.verdict in CLEAN


def test_nan_in_float64_alone_is_an_artefact_and_not_a_bug():
    """A mask value made for float64 overflows in the float32 softmax of eager attention, in rows of padding."""
    report = c.check(c.builder("llama"), c.pads_by_mask, c.full)
    assert report.rungs.set_index("dtype").loc["float64", "status"] == "nonfinite"
    assert report.verdict in CLEAN
    assert any("artefact" in note and "float64" in note for note in report.evidence["notes"])


def test_a_model_that_overflows_while_it_is_built_is_a_verdict_and_not_an_error():
    hot = tiny_hf("llama-gqa")
    hot.model.layers[1].mlp.down_proj.weight.data *= 2e5
    report = mechkv.check(hot, dtypes=("float32", "float16"), n_steps=3, prompts=[tokens(8)])
    assert (report.verdict, report.exit_code) == ("nonfinite", 3)
    assert "overflow" in report.reason
    assert any("layer 1" in note for note in report.evidence["notes"])
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["verdict"] == "nonfinite"


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


@pytest.mark.parametrize(
    ("attention", "verdicts"),
    [
        ("sdpa", {"numerical"}),
        # An island in float64: inconclusive where the 16-bit rungs happen to be equal and nothing scales it.
        ("eager", {"inconclusive", "numerical"}),
    ],
)
def test_functions_without_weights_within_reach_are_judged_by_the_ladder(attention, verdicts):
    def build(dtype):
        store[dtype] = c.model("llama", dtype, attention=attention)
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
    assert clean.verdict in verdicts
    sixteen = clean.rungs.set_index("dtype").loc[["float16", "bfloat16"], "max_abs"]
    assert (clean.verdict == "inconclusive") <= bool((sixteen == 0).any())
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
