"""Orders of summation do what they are called, exponents of known laws are recovered, shared errors are shared."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from mechkv.broadcast import BroadcastConfig, _perturbed, broadcast
from mechkv.cache import KVState
from mechkv.comparison import UNIT_ROUNDOFF
from mechkv.errors import InputError, StorageError
from mechkv.plots_heads import sweep_figure
from mechkv.reduction import ORDERS, OWN, SumOrder, ordered_matmul, ordered_sum, summation_line
from mechkv.stats import rng
from mechkv.synthetic import LayerShape, Sweep, _Layer, layer_sweep, model_sweep, sum_sweep
from tests.tiny import tiny_bridge, tokens

FLOAT64_FLOOR = 1e-14  # relative L2, measured 0 to 4e-16


def test_orders_round_where_they_should() -> None:
    half = torch.tensor([2048.0, 1, 1, 1, 1, 1, 1, 1], dtype=torch.float16)  # float16 has no odd numbers above 2048
    assert ordered_sum(half, "sequential") == 2048, "each 1 is lost"
    assert ordered_sum(half, "pairwise") == 2054, "2048 + 1 is lost, (1 + 1) and 4 are not"
    assert ordered_sum(half, "split:2") == 2052, "the second half is 4"
    assert ordered_sum(half, "blocked:2") == 2054
    assert ordered_sum(half.float(), "sequential") == 2055, "in float32 nothing is"


def test_whole_numbers_add_up_in_every_order() -> None:
    terms = torch.randint(-9, 10, (5, 77), generator=torch.Generator().manual_seed(0)).to(torch.float16)
    for order in (*ORDERS, "split:100", "blocked:100"):
        assert torch.equal(ordered_sum(terms, order), terms.sum(-1)), order


@pytest.mark.parametrize("order", ORDERS)
def test_errors_stay_within_their_bounds(order) -> None:
    n, u = 300, UNIT_ROUNDOFF[torch.float16]
    terms = torch.randn(200, n, generator=torch.Generator().manual_seed(1)).to(torch.float16)
    error = (ordered_sum(terms, order).double() - terms.double().sum(-1)).abs() / terms.double().abs().sum(-1)
    law = "pairwise" if order == "pairwise" else "worst case"
    assert error.max() <= summation_line(law, n, torch.float16) * (1 + n * u)
    assert error.max() > u / 100, "half precision does round"


def test_matmul_in_float64_is_the_matmul() -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(*s, generator=generator).double() for s in ((3, 4, 5), (3, 5, 6)))
    for order in ORDERS:
        torch.testing.assert_close(ordered_matmul(a, b, order, torch.float64), a @ b, rtol=1e-14, atol=1e-14)


def test_unknown_orders() -> None:
    for text in ("random", "split", "split:1", "pairwise:2", "blocked:x"):
        with pytest.raises(InputError, match="order of summation"):
            SumOrder.parse(text)
    assert str(SumOrder.parse("split:4")) == "split:4"


def simulated(exponent: float, spread: float = 0.05) -> Sweep:
    """Drift = 3e-4 x^exponent, times a random factor of every seed and of every point."""
    rows = []
    for seed in range(8):
        generator = rng(seed, "simulated", str(exponent))
        factor = np.exp(spread * generator.standard_normal())
        for x in (16, 32, 64, 128, 256):
            drift = 3e-4 * x**exponent * factor * np.exp(spread * generator.standard_normal())
            rows.append({"sweep": "s", "axis": "n", "x": x, "seed": seed, "stage": "sum", "how": "a | b"})
            rows[-1] |= {"dtype": "float16", "accumulator": "float16", "drift": drift}
    return Sweep(pd.DataFrame(rows), {})


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_exponents_of_a_known_law_are_recovered(exponent) -> None:
    row = simulated(exponent).exponents().iloc[0]
    assert row["low"] < exponent < row["high"]
    assert row["high"] - row["low"] < 0.15, "so that another law is excluded"
    assert row["prefactor"] == pytest.approx(3e-4, rel=0.2)


def test_lines_without_drift_are_counted_not_fitted() -> None:
    sweep = simulated(0.5)
    row = Sweep(sweep.frame.assign(drift=0.0), {}).exponents().iloc[0]
    assert (row["n"], row["n_zero"]) == (0, 40)
    assert math.isnan(row["exponent"])


def test_a_line_that_rarely_drifts_is_not_fitted() -> None:
    frame = simulated(0.5).frame
    rare = frame.assign(drift=frame["drift"].where(frame["seed"] < 3, 0.0))
    row = Sweep(rare, {}).exponents().iloc[0]
    assert (row["n"], row["n_zero"]) == (15, 25)
    assert math.isnan(row["exponent"]), "the points that happen to drift are no sample of the line"
    often = frame.assign(drift=frame["drift"].where(frame["seed"] < 6, 0.0))
    assert Sweep(often, {}).exponents().iloc[0]["exponent"] == pytest.approx(0.5, abs=0.1)


def test_sums_follow_theory() -> None:
    pairs = [("sequential", "pairwise"), ("pairwise", "blocked:16"), ("pairwise", "pairwise")]
    sweep = sum_sweep((32, 64, 128, 256, 512), pairs, ("float32",), n_sums=300)
    table = sweep.exponents().set_index("how")
    one, none = table.loc["sequential | pairwise"], table.loc["pairwise | blocked:16"]
    assert 0.4 < one["exponent"] < 0.55, "a random walk, sqrt(n)"
    assert none["exponent"] < 0.25 < one["low"]
    assert table.loc["pairwise | pairwise", "n_zero"] == 20, "the same order gives the same bits"


def test_accumulators_differ_by_their_roundoff() -> None:
    names = ("float16", "bfloat16", "float32")
    sweep = sum_sweep((64, 128), [("sequential", "pairwise")], names, seeds=(0, 1))
    drift = sweep.frame.groupby("accumulator")["drift"].mean()
    for name in names[1:]:
        expected = UNIT_ROUNDOFF[getattr(torch, name)] / UNIT_ROUNDOFF[torch.float16]
        assert drift[name] / drift["float16"] == pytest.approx(expected, rel=0.1), name
    layer = [
        layer_sweep("d_head", (16,), SMALL, accumulators=(name,), orders=[("sequential", "split:4")], seeds=(0, 1))
        for name in ("float16", "float32")
    ]
    half, single = (part.frame.set_index("stage")["drift"].groupby("stage").mean() for part in layer)
    assert (single < half / 10).all(), "float16 data, summed in float32, is nearly free of the order"


def simulated_figure(axis: str, n_terms: tuple[float, ...]):
    rows = [
        {"sweep": "layer", "axis": axis, "x": x, "seed": 0, "stage": stage, "n_terms": n, "how": how}
        | {"dtype": "float16", "accumulator": sums, "drift": 0.0 if sums == OWN else 1e-3 * x}
        for x, terms in zip((16, 64), n_terms, strict=True)
        for stage, n in (("z", terms), ("layer", math.nan))
        for how, sums in (("a | b", "bfloat16"), ("one row | all rows", OWN))
    ]
    return sweep_figure(Sweep(pd.DataFrame(rows), {}), "layer", axis)


def test_lines_of_theory_are_those_of_the_terms() -> None:
    for n_terms in ((16, 64), (32, 32)):
        alone, inherited = simulated_figure("window", n_terms).axes
        lines = [line for line in alone.lines if line.get_gid() == "theory"]
        u = UNIT_ROUNDOFF[torch.bfloat16]
        assert [list(line.get_ydata()) for line in lines] == [
            [pytest.approx((n - 1) * u) for n in n_terms],
            [pytest.approx(math.sqrt(n) * u) for n in n_terms],
        ]
        assert not any(line.get_gid() == "theory" for line in inherited.lines), "many sums, no line"
        assert any(line.get_gid() == "zeros" for line in alone.lines)


def test_the_window_is_the_number_of_terms_of_an_output() -> None:
    base, values = LayerShape(d_model=16, n_heads=4, n_kv=2, d_head=16, context=128), (8, 32, 128)
    for axis, expected in (("window", values), ("context", values)):
        sweep = layer_sweep(axis, values, base, orders=[("sequential", "split:4")], accumulators=("float16",))
        table = sweep.exponents().set_index("stage")
        alone = sweep.frame[sweep.frame["stage"] == "z"]
        assert tuple(alone["n_terms"].unique()) == expected
        assert 0.3 < table.loc["z", "exponent"] < 0.6, "a random walk over keys"
        assert table.loc["z", "low"] > 0.1
        for stage in ("k", "scores"):
            assert abs(table.loc[stage, "exponent"]) < 0.15, "neither has more terms with more keys"


SMALL = LayerShape(d_model=32, n_heads=2, n_kv=1, context=24)


def test_layer_drift_grows_with_the_terms_it_has() -> None:
    table = layer_sweep(
        "d_head", (16, 64, 256), SMALL, orders=[("sequential", "pairwise")], accumulators=("float16",)
    ).exponents()
    exponents = table.set_index("stage")["exponent"]
    assert abs(exponents["k"]) < 0.05, "a projection has d_model terms, whatever d_head"
    assert 0.3 < exponents["scores"] < 0.6, "a random walk over d_head"
    assert abs(exponents["z"]) < 0.15, "a head's output has as many terms as keys"
    same = layer_sweep("d_head", (16, 64), SMALL, orders=[("split:4", "split:4")], accumulators=("float16",))
    assert (same.frame["drift"] == 0).all()


def test_the_emulated_layer_is_attention() -> None:
    shape = LayerShape(d_model=16, n_heads=4, n_kv=2, d_head=8, context=10, window=6)
    layer = _Layer(shape, 0, torch.float64)
    q, k, v = ((layer.x @ layer.weights[name]).unflatten(1, (-1, 8)).transpose(0, 1) for name in "qkv")
    mask = torch.arange(10) < 4
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[:, -1:], k.repeat_interleave(2, 0), v.repeat_interleave(2, 0), attn_mask=~mask[None]
    )
    assert shape.n_keys == 6
    for order, path in (("sequential", "one"), ("split:4", "all"), ("", "one"), ("", "all")):
        torch.testing.assert_close(layer.run(order, "float64", path)["z"][:, -1:], expected, rtol=1e-12, atol=1e-12)


def test_real_kernels_have_a_floor_and_stand_beside_emulated_ones() -> None:
    base = LayerShape(d_model=16, n_heads=4, n_kv=2, d_head=8, context=20, window=6)
    real = layer_sweep("window", (6, 20), base, kernels="torch", dtype="float64", seeds=(0, 1))
    assert (real.frame["drift"] < FLOAT64_FLOOR).all(), "both paths compute one function, masks and all"
    emulated = layer_sweep("window", (6, 20), base, dtype="float16", accumulators=("float16",), seeds=(0, 1))
    both = real + emulated
    assert set(both.frame["sweep"]) == {"layer"}
    assert set(real.frame["accumulator"]) == {OWN}
    assert (emulated.frame["drift"] > FLOAT64_FLOOR).any()
    assert list(both.plot()) == ["sweep_layer_window"]


def test_model_sweep_and_saving(tmp_path) -> None:
    sizes = {"n_steps": 3, "n_layers": 2}
    sweep = model_sweep("window", (8, 64), LayerShape(context=24), dtypes=("float32",), seeds=(0, 1), **sizes)
    assert len(sweep.frame) == 8
    assert (sweep.frame["drift"] < 1e-5).all()
    assert sorted(set(sweep.frame["n_terms"])) == [8, 24], "a window of 64 leaves a text of 24 as it is"
    assert sweep.frame["drift"].max() > 0
    sweep.save(tmp_path / "s")
    pd.testing.assert_frame_equal(Sweep.load(tmp_path / "s").frame, sweep.frame)
    assert list(sweep.plot()) == ["sweep_model_window"]
    (tmp_path / "s" / "settings.json").unlink()
    with pytest.raises(StorageError):
        Sweep.load(tmp_path / "s")
    with pytest.raises(InputError, match="cannot be"):
        LayerShape(n_heads=4, n_kv=3)


def test_shared_and_independent_errors() -> None:
    rows = torch.ones(6, 50, 8)
    state = KVState((rows,), (rows,), 50, 50)
    shared, independent = (_perturbed(state, 2, arm, BroadcastConfig(), (0, 0)) for arm in ("shared", "independent"))
    for arm in (shared, independent):
        size = (arm.keys[0] - 1).square().mean().sqrt() / UNIT_ROUNDOFF[torch.float16]
        assert size == pytest.approx(1, rel=0.05)
    assert torch.equal(shared.keys[0][0], shared.keys[0][2])
    assert not torch.equal(shared.keys[0][2], shared.keys[0][3]), "three copies of each of two heads"
    assert not torch.equal(independent.keys[0][0], independent.keys[0][1])
    assert not torch.equal(shared.keys[0], shared.values[0])


def test_a_coherent_group_is_found() -> None:
    """Where the heads of a group have one query and one output map, a shared error counts sqrt(r) times as much."""
    texts = [tokens(14, seed=i) for i in range(4)]
    plain = tiny_bridge("llama-gqa", num_hidden_layers=1)
    ratio = broadcast(plain, texts, BroadcastConfig(n_draws=3)).ratios().iloc[-1]
    assert 0.7 < ratio["estimate"] < 1.25
    from mechkv.rebuilding import plain_state, rebuild

    state = plain_state(plain)
    for name in ("q_proj", "o_proj"):
        key = f"model.layers.0.self_attn.{name}.weight"
        dim = 0 if name == "q_proj" else 1
        heads = state[key].movedim(dim, 0).unflatten(0, (2, 2, 12))
        state[key] = heads[:, :1].expand(-1, 2, -1, -1).flatten(0, 2).movedim(0, dim).contiguous()
    coherent = rebuild(plain, dtype=torch.float32, config=plain.original_model.config, state=state)
    ratio = broadcast(coherent, texts, BroadcastConfig(n_draws=3)).ratios().iloc[-1]
    assert ratio["estimate"] == pytest.approx(math.sqrt(2), rel=0.15)
    with pytest.raises(InputError, match="no groups"):
        broadcast(tiny_bridge("llama-mha"), texts)
