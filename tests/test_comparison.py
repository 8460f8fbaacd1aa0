import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from mechkv import comparison
from mechkv.comparison import (
    UNIT_ROUNDOFF,
    compare,
    compare_rows,
    metric_floor,
    metric_range,
    ulp_distance,
)
from mechkv.distributions import compare_logit_rows
from mechkv.errors import InputError

DTYPES = list(UNIT_ROUNDOFF)
REFERENCE_ERROR = 1e-55  # of the reference's own 60 digits
NUMBERS = ("max_abs", "rel_l2", "rel_linf", "cosine_distance", "signed_mean", "rms")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pair(shape, dtype, noise, seed=0):
    g = generator(seed)
    b = torch.randn(shape, generator=g, dtype=torch.float64)
    a = b + noise * torch.randn(shape, generator=g, dtype=torch.float64)
    return a.to(dtype), b.to(dtype)


def exact_metrics(a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    """The textbook definitions in rational arithmetic; roots through mpmath."""
    import mpmath

    mpmath.mp.dps = 60
    x, y = ([Fraction(v) for v in t.double().flatten().tolist()] for t in (a, b))
    d = [u - v for u, v in zip(x, y, strict=True)]

    def root(values):
        total = sum(v * v for v in values)
        return mpmath.sqrt(mpmath.mpf(total.numerator) / total.denominator)

    def real(value):
        return mpmath.mpf(value.numerator) / value.denominator

    inner = real(sum(u * v for u, v in zip(x, y, strict=True)))
    return {
        "max_abs": float(max(map(abs, d))),
        "rel_l2": float(root(d) / root(y)),
        "rel_linf": float(max(map(abs, d)) / max(map(abs, y))),
        "cosine_distance": float(1 - inner / (root(x) * root(y))),
        "signed_mean": float(sum(d) / len(d)),
        "rms": float(root(d) / mpmath.sqrt(len(d))),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("noise", [1e-12, 1e-6, 1e-2, 3.0])
def test_metrics_meet_their_definitions_within_the_stated_floor(dtype, noise):
    a, b = pair((7, 11), dtype, noise)
    got, want = compare(a, b), exact_metrics(a, b)
    values = want | {"signed_mean": want["rms"], "cosine_distance": want["rel_l2"]}
    for name in NUMBERS:
        assert abs(getattr(got, name) - want[name]) <= metric_floor(name, got.n, values[name]) + REFERENCE_ERROR, name


def test_the_textbook_form_of_the_cosine_distance_would_miss_its_floor():
    a, b = pair((7, 11), torch.float64, 1e-9)
    textbook = float(1 - (a * b).sum() / (a.norm() * b.norm()))
    want, rel_l2 = exact_metrics(a, b)["cosine_distance"], exact_metrics(a, b)["rel_l2"]
    assert 0 < want < 1e-17
    assert abs(textbook - want) > metric_floor("cosine_distance", a.numel(), rel_l2)


def test_a_hand_worked_pair():
    got = compare(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0]))
    assert (got.n, got.max_abs, got.rel_l2, got.rel_linf) == (2, 1.0, 0.2, 0.25)
    assert (got.signed_mean, got.equal_fraction, got.bitwise_equal) == (0.5, 0.5, False)
    assert got.rms == pytest.approx(math.sqrt(0.5), rel=1e-15)
    assert got.cosine_distance == pytest.approx(1 - 29 / (5 * math.sqrt(34)), rel=1e-13)
    assert (got.max_ulp, got.ulp_q50) == (2**21, 0)  # 4 and 5 are a quarter of a binade of 2^23 values apart


def test_signed_mean_has_the_sign_of_cached_minus_recomputed():
    a, b = pair((5, 3), torch.float32, 1e-3)
    assert compare(b + 0.5, b).signed_mean > 0.49
    assert compare(b, b + 0.5).signed_mean < -0.49
    assert compare(a, b).signed_mean == -compare(b, a).signed_mean


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_against_itself_is_exactly_zero_and_one_bit_is_seen(dtype):
    a, _ = pair((7, 11), dtype, 0.0)
    same = compare(a, a.clone())
    assert [getattr(same, name) for name in NUMBERS] == [0.0] * len(NUMBERS)
    assert (same.bitwise_equal, same.equal_fraction, same.max_ulp, same.ulp_q99) == (True, 1.0, 0, 0)
    nudged = a.clone()
    nudged[3, 5] = torch.nextafter(a[3, 5].float(), torch.tensor(9.0)).to(dtype) if dtype == torch.float32 else a[3, 5]
    if dtype != torch.float32:
        bits = nudged.view(torch.int64 if dtype == torch.float64 else torch.int16)
        bits[3, 5] += 1
    other = compare(nudged, a)
    assert (other.bitwise_equal, other.max_ulp, other.ulp_q90) == (False, 1, 0)
    assert other.equal_fraction == pytest.approx(76 / 77)
    assert min(other.max_abs, other.rel_l2, other.rms) > 0


# --------------------------------------------------------------------------------------------------------- ULP


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ulp_distance_counts_every_representable_value(dtype):
    """All 16-bit patterns but NaN, sorted by value: neighbours are 1 apart, the two zeros 0."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[~values.isnan()]
    order = values.double().argsort(stable=True)
    ranked = values[order]
    steps = ulp_distance(ranked[:-1].contiguous(), ranked[1:].contiguous())
    zeros = (ranked[:-1] == 0) & (ranked[1:] == 0)
    assert zeros.sum() == 1
    assert torch.equal(steps, torch.where(zeros, 0, 1))
    assert ulp_distance(ranked[:1], ranked[-1:]).item() == len(ranked) - 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_ulp_distance_crosses_zero_and_keeps_nan_apart(dtype):
    tiny = torch.tensor([1], dtype={2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]).view(dtype)
    one, eps = torch.ones(1, dtype=dtype), 2 * UNIT_ROUNDOFF[dtype]
    nan = torch.full((1,), math.nan, dtype=dtype)
    assert ulp_distance(-tiny, tiny).item() == 2
    assert ulp_distance(one, one + 3 * eps).item() == 3
    assert ulp_distance(one - eps, one).item() == 2  # spacing halves below a power of two
    assert ulp_distance(nan, one).item() == ulp_distance(one, nan).item() == ulp_distance(nan, nan).item() == -1
    assert ulp_distance(torch.full((1,), torch.finfo(dtype).max, dtype=dtype), one * math.inf).item() == 1


def test_float64_ulp_distance_saturates():
    big = torch.tensor([torch.finfo(torch.float64).max], dtype=torch.float64)
    assert ulp_distance(big, -big).item() == ulp_distance(-big, big).item() == 2**63 - 1
    assert 0 < ulp_distance(big, -0.0 * big).item() < 2**63 - 1


def test_the_float64_distance_of_two_and_minus_two_saturates_as_well():
    """Exactly 2^63 steps: the one difference that overflows without changing sign."""
    a, b = torch.tensor([-2.0, 1.0], dtype=torch.float64), torch.tensor([2.0, 1.0], dtype=torch.float64)
    assert ulp_distance(a, b).tolist() == [2**63 - 1, 0]
    assert compare(a, b).max_ulp == 2**63 - 1
    assert compare_rows(a[None], b[None])["max_ulp"][0] == float(2**63)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [0.4, 1e-4, 3e3])
def test_the_angle_between_rows_of_unlike_size_is_that_of_the_definition(dtype, factor):
    a, b = pair((1, 40), dtype, 0.7)
    a = a * factor
    found, truth = compare(a, b), exact_metrics(a, b)
    assert truth["cosine_distance"] > 0.01
    floor = metric_floor("cosine_distance", 40, truth["rel_l2"])
    assert abs(found.cosine_distance - truth["cosine_distance"]) <= max(floor, metric_floor("cosine_distance", 40, 1.0))


@pytest.mark.parametrize("factor", [3.0, 1e-5, 7e4])
def test_parallel_rows_of_unlike_size_have_no_negative_distance(factor):
    _, b = pair((200, 40), torch.float64, 0.0)
    distances = compare_rows(b * factor, b)["cosine_distance"]
    assert (distances >= 0).all()
    assert (distances <= metric_floor("cosine_distance", 40, 1.0)).all()


def test_no_number_is_a_negative_zero():
    a, b = torch.tensor([[0.0, 1.0], [-0.0, 0.0]]), torch.tensor([[-0.0, 1.0], [0.0, -0.0]])
    for rows in (compare_rows(a, b), compare_rows(b, a)):
        assert not any(np.signbit(np.asarray(values, dtype=float)).any() for values in rows.values())


def test_signed_zeros_differ_in_bits_though_not_in_ulp():
    got = compare(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (got.bitwise_equal, got.equal_fraction, got.max_ulp, got.max_abs) == (False, 0.5, 0, 0.0)


def test_ulp_quantiles_are_order_statistics():
    b = torch.ones(10)
    a = b + torch.arange(10) * 2.0**-23
    got = compare(a, b)
    assert (got.ulp_q50, got.ulp_q90, got.ulp_q99, got.max_ulp) == (4, 8, 9, 9)


# -------------------------------------------------------------------------------------------- undefined, non-finite


@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_values_are_counted_and_never_averaged(dtype):
    a, b = pair((7, 11), dtype, 1e-2)
    a[0, 0], a[1, 1], b[1, 1], b[2, 2] = math.nan, math.inf, math.inf, -math.inf
    got = compare(a, b)
    assert (got.nonfinite, got.nonfinite_a, got.nonfinite_b) == (3, 2, 2)
    assert all(getattr(got, name) is None for name in (*NUMBERS, "max_ulp", "ulp_q50", "ulp_q99"))
    assert got.equal_fraction >= 1 / 77
    rows = compare_rows(a, b)
    assert rows["nonfinite"].tolist() == [1, 1, 1, 0, 0, 0, 0]
    for name in (*NUMBERS, "max_ulp"):
        assert np.isnan(rows[name]).tolist() == [True] * 3 + [False] * 4


def test_zero_norm_is_undefined_and_says_so():
    got = compare(torch.ones(3), torch.zeros(3))
    assert (got.rel_l2, got.rel_linf, got.cosine_distance, got.nonfinite) == (None, None, None, 0)
    assert (got.max_abs, got.rms, got.signed_mean) == (1.0, 1.0, 1.0)
    assert math.isnan(got.to_dict()["rel_l2"])
    zero_a = compare(torch.zeros(3), torch.ones(3))
    assert (zero_a.rel_l2, zero_a.cosine_distance) == (1.0, None)
    assert compare(torch.zeros(3), torch.zeros(3)).rel_l2 is None
    assert compare(torch.ones(3), torch.ones(3)).rel_l2 == 0.0


def test_the_angle_to_a_zero_row_is_undefined_and_never_infinite():
    _, b = pair((200, 7), torch.float32, 0.0)
    a = torch.zeros_like(b)
    a[0] = b[0]
    assert np.isnan(compare_rows(a, b)["cosine_distance"]).tolist() == [False] + [True] * 199


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_float64_extremes_do_not_leave_float64(size):
    a, b = pair((4, 5), torch.float64, 1e-3)
    near, far = compare(a, b), compare(a * size, b * size)
    assert far.rel_l2 == pytest.approx(near.rel_l2, rel=1e-10)
    assert far.cosine_distance == pytest.approx(near.cosine_distance, rel=1e-10)
    assert far.rms == pytest.approx(near.rms * size, rel=1e-10)


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2), "shapes"),
        (torch.zeros(3), torch.zeros(1), "shapes"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float16), "dtypes"),
        (torch.zeros(3), torch.zeros(3, device="meta"), "devices"),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), "dtype"),
        (torch.zeros(0), torch.zeros(0), "no elements"),
    ],
)
def test_what_cannot_be_compared_is_refused(a, b, words):
    for function in (compare, compare_rows, ulp_distance):
        with pytest.raises(InputError, match=words):
            function(a, b)


@pytest.mark.parametrize("dim", [2, (0, 0), (0, -2), -3])
def test_wrong_row_axes_are_refused(dim):
    with pytest.raises(InputError, match="row axes"):
        compare_rows(torch.ones(2, 3), torch.ones(2, 3), dim)


def test_unknown_metric_has_no_floor():
    with pytest.raises(InputError, match="metric"):
        metric_floor("rel_l3", 10)


# ----------------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1, -1, (0, 1), (2, 0)])
def test_rows_have_the_metrics_of_compare(dtype, dim):
    a, b = pair((3, 5, 7), dtype, 1e-2)
    a[1] = b[1]
    rows = compare_rows(a, b, dim)
    dims = [dim] if isinstance(dim, int) else list(dim)
    moved_a, moved_b = (t.movedim(dims, list(range(len(dims)))) for t in (a, b))
    shape = moved_a.shape[: len(dims)]
    for index in np.ndindex(*shape):
        single = compare(moved_a[index], moved_b[index]).to_dict()
        for name, values in rows.items():
            assert values.shape == shape
            assert values[index] == pytest.approx(single[name], rel=1e-12, abs=1e-300), name


def test_a_planted_difference_is_found_in_its_row_alone():
    _, b = pair((5, 7, 11), torch.float16, 0.0)
    a = b.clone()
    a[3, 2, 7] += 1.0
    rows = compare_rows(a, b, (0, 1))
    assert np.argwhere(~rows["bitwise_equal"]).tolist() == [[3, 2]]
    assert (
        np.count_nonzero(rows["max_abs"]) == np.count_nonzero(rows["rel_l2"]) == np.count_nonzero(rows["max_ulp"]) == 1
    )
    assert compare_rows(a, b, 2)["max_abs"].argmax() == 7


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bitwise_equal_rows_that_are_not_finite_have_no_numbers(bad):
    rows = torch.tensor([[1.0, bad, 2.0], [1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    table = compare_rows(rows, rows.clone())
    assert table["nonfinite"].tolist() == [1, 0, 0]
    assert table["bitwise_equal"].all()
    assert np.isnan(table["rel_l2"]).tolist() == [True, False, True]
    assert np.isnan(table["max_abs"]).tolist() == [True, False, False]


def awkward_rows(dtype):
    """Rows with equal parts, changes of sign, zeros of both signs, extremes, NaN and infinity."""
    a, b = pair((9, 40), dtype, 1e-2, seed=4)
    b[1] = a[1]
    b[2] = -a[2]
    a[3], b[3] = 0.0, -0.0
    a[4, :2], b[4, :2] = torch.finfo(dtype).max, -torch.finfo(dtype).max
    a[5, 7], b[6, 7] = math.nan, math.inf
    b[7] = a[7]
    b[7, 3] = -a[7, 3]
    return a, b


@pytest.mark.parametrize("dtype", DTYPES)
def test_how_many_rows_are_taken_at_once_changes_no_bit(dtype, monkeypatch):
    a, b = awkward_rows(dtype)
    together = compare_rows(a, b)
    for elements in (1, 80, 100):
        monkeypatch.setattr(comparison, "_ELEMENTS_AT_ONCE", elements)
        apart = compare_rows(a, b)
        for name, values in together.items():
            assert np.array_equal(apart[name], values, equal_nan=True), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_ulp_distance_of_a_row_is_that_of_its_elements(dtype):
    """Where the signs agree and where they do not: two ways in the code, one in the definition."""
    a, b = awkward_rows(dtype)
    elements = ulp_distance(a, b).to(torch.float64).amax(-1).numpy()
    finite = (a.isfinite() & b.isfinite()).all(-1).numpy()
    found = compare_rows(a, b)["max_ulp"]
    assert np.array_equal(found[finite], elements[finite])
    assert np.isnan(found[~finite]).all()
    assert finite.sum() == 7
    assert (found[[2, 4, 7]] > found[0]).all()
    assert found[3] == 0


def test_every_metric_stays_in_its_range_and_far_drift_reaches_it():
    a, b = pair((50, 30), torch.float32, 5.0)
    found = compare_rows(torch.cat([a, -b]), torch.cat([b, b]))
    found |= compare_logit_rows(torch.cat([a, 40 * a]), torch.cat([b, -40 * a]))
    ends = {name: (values.astype(float).min(), values.astype(float).max()) for name, values in found.items()}
    for name, (smallest, largest) in ends.items():
        low, high = metric_range(name)
        assert low <= smallest, name
        assert largest <= high * (1 + 1e-12), name
    for name in ("js", "tv", "cosine_distance", "flip"):
        assert ends[name][1] >= 0.99 * metric_range(name)[1]
    assert metric_range("signed_mean") == metric_range("entropy_drift") == (-math.inf, math.inf)
