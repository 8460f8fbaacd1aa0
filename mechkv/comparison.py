"""How different are two tensors?

Question: `a` was computed on the cached path, `b` on the recomputed path (or by the oracle); by how much do they
differ? Every metric is evaluated in float64 from the two tensors as they are; nothing is cast to a common dtype first.

Equations, with d = a - b and norms taken over all elements of a tensor (or of a row):
    rel_l2 = |d| / |b|,   rel_linf = max|d| / max|b|,   signed_mean = mean d,   rms = |d| / sqrt(n)
    cosine_distance = 1 - <a, b> / (|a| |b|) = (|d|^2 - (|a| - |b|)^2) / (2 |a| |b|)
    with |a| - |b| = <d, a + b> / (|a| + |b|)
The second form of the cosine distance is the one evaluated: the first loses everything below 1e-16, and drift lives
there. (Where one norm is more than twice the other the second form cancels, and the first is taken.)

Conventions: equality is of bits, so -0.0 and 0.0 count as different although they are 0 ULP apart. A value that is
undefined (a zero norm below the fraction; any non-finite element) is None in a `Difference` and NaN in rows and frames,
and `nonfinite` says why: no average is ever taken over NaN. Equal fraction and bitwise equality are about bits and
always defined.

Controls: a tensor against itself gives exactly 0 in every metric; `metric_floor` bounds the round-off of the evaluation
itself. The metrics of two logit vectors are in `mechkv.distributions` and importable from here as well.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from mechkv.distributions import (
    NEAR_TIE_DISTANCES,
    UNIT_ROUNDOFF,
    LogitDifference,
    check_pair,
    compare_logit_rows,
    compare_logits,
    exact_tie,
    flip_certified,
    js,
    kl,
    margin,
    near_ties,
    require_certificate,
    top1_flip,
    top_k_overlap,
    total_variation,
)
from mechkv.errors import InputError

__all__ = [
    "NEAR_TIE_DISTANCES",
    "ULP_QUANTILES",
    "UNIT_ROUNDOFF",
    "Difference",
    "LogitDifference",
    "compare",
    "compare_logit_rows",
    "compare_logits",
    "compare_rows",
    "exact_tie",
    "flip_certified",
    "js",
    "kl",
    "margin",
    "metric_floor",
    "metric_range",
    "near_ties",
    "require_certificate",
    "top1_flip",
    "top_k_overlap",
    "total_variation",
    "ulp_distance",
]

ULP_QUANTILES = {"ulp_q50": 0.5, "ulp_q90": 0.9, "ulp_q99": 0.99}
_INTEGER_VIEW = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
_INT64_MAX = torch.iinfo(torch.int64).max
_FLOAT_METRICS = ("max_abs", "rel_l2", "rel_linf", "cosine_distance", "signed_mean", "rms")
_ELEMENTS_AT_ONCE = 2**17
_FRACTIONS = ("rel_l2", "rel_linf", "cosine_distance")
_COUNTS = ("nonfinite", "nonfinite_a", "nonfinite_b")


@dataclass(frozen=True)
class Difference:
    """Cached minus recomputed, one tensor. `None`: undefined. Counts and bit equality are always defined."""

    n: int
    max_abs: float | None
    rel_l2: float | None
    rel_linf: float | None
    cosine_distance: float | None
    signed_mean: float | None
    rms: float | None
    max_ulp: int | None
    ulp_q50: int | None
    ulp_q90: int | None
    ulp_q99: int | None
    equal_fraction: float
    bitwise_equal: bool
    nonfinite: int
    nonfinite_a: int
    nonfinite_b: int

    def to_dict(self) -> dict[str, float | int | bool]:
        """The fields as one row of a frame; undefined values become NaN."""
        return {name: math.nan if value is None else value for name, value in asdict(self).items()}


def compare(a: Shaped[Tensor, "..."], b: Shaped[Tensor, "..."]) -> Difference:
    """Every two-tensor metric of cached `a` against recomputed `b`, over all elements. Same shape, dtype and device."""
    check_pair(a, b)
    flat_a, flat_b = a.detach().reshape(1, -1), b.detach().reshape(1, -1)
    row: dict[str, Any] = {name: values.item() for name, values in _compare_core(flat_a, flat_b).items()}
    defined = row["nonfinite"] == 0
    numbers: dict[str, Any] = {name: row[name] if math.isfinite(row[name]) else None for name in _FLOAT_METRICS}
    max_ulp: int | None = None
    quantiles: dict[str, Any] = dict.fromkeys(ULP_QUANTILES)
    if defined:
        ulps = ulp_distance(flat_a, flat_b).reshape(-1)
        ranks = {name: math.ceil(q * ulps.numel()) for name, q in ULP_QUANTILES.items()}
        quantiles = {name: int(ulps.kthvalue(rank).values) for name, rank in ranks.items()}
        max_ulp = int(row["max_ulp"])
    return Difference(
        n=flat_a.shape[1],
        max_ulp=max_ulp,
        equal_fraction=row["equal_fraction"],
        bitwise_equal=bool(row["bitwise_equal"]),
        nonfinite=row["nonfinite"],
        nonfinite_a=row["nonfinite_a"],
        nonfinite_b=row["nonfinite_b"],
        **numbers,
        **quantiles,
    )


def compare_rows(
    a: Shaped[Tensor, "..."], b: Shaped[Tensor, "..."], dim: int | Sequence[int] = 0
) -> dict[str, np.ndarray]:
    """The metrics of `compare` for every index of axis `dim` (or of several axes, in the order given), in one pass.

    Each array has the shape of those axes. The definitions are those of `compare`; undefined values are NaN. The
    quantiles of the ULP distance are left out (they need a sort). Integers beyond 2^53 in `max_ulp` are rounded to
    float64.
    """
    check_pair(a, b)
    dims = [dim] if isinstance(dim, int) else list(dim)
    if not all(-a.ndim <= axis < a.ndim for axis in dims) or len({axis % a.ndim for axis in dims}) != len(dims):
        raise InputError(
            "row axes", got=dims, expected=f"distinct axes of a {a.ndim}-dimensional tensor", remedy="Pass other axes."
        )
    front = list(range(len(dims)))
    moved_a, moved_b = (value.detach() if dims == front else value.detach().movedim(dims, front) for value in (a, b))
    shape = moved_a.shape[: len(dims)]
    rows = math.prod(shape)
    table = _compare_core(moved_a.reshape(rows, -1), moved_b.reshape(rows, -1))
    arrays = {name: values.reshape(shape) for name, values in table.items()}
    arrays["max_ulp"] = np.where(arrays["nonfinite"] > 0, np.nan, arrays["max_ulp"].astype(np.float64))
    return arrays


def ulp_distance(a: Shaped[Tensor, "..."], b: Shaped[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Steps between neighbouring representable values from `a` to `b`, element by element, in their own dtype.

    Bit patterns are mapped to integers that grow with the value, both zeros to 0: -0.0 and 0.0 are 0 apart, and the
    smallest subnormals of either sign are 2 apart. Infinity follows the largest finite value. -1 where either is NaN.
    A float64 distance beyond int64 saturates at 2^63 - 1.
    """
    check_pair(a, b)
    distance = _ulp_distance(_bits(a.detach()), _bits(b.detach()), a.dtype).to(torch.int64)
    return torch.where(a.isnan() | b.isnan(), -1, distance)


def _compare_core(a: Tensor, b: Tensor) -> dict[str, np.ndarray]:
    """All row metrics of two [row, n] tensors. Undefined metrics are NaN; `max_ulp` then means nothing.

    The drift profile calls this at every step, often on rows that are bitwise equal: those are not taken to float64.
    Rows are taken a few at a time, so that float64 copies do not grow with the tensors, and what has one number a row
    is worked out in numpy, where an operation on a few numbers costs a fraction of torch's.
    """
    step = max(1, _ELEMENTS_AT_ONCE // max(1, a.shape[1]))
    facts = _compare_bits(a, b, step)
    rest = np.flatnonzero((facts[0] > 0) | ~np.isfinite(facts[2]))
    if len(rest) == a.shape[0]:
        return _measure_rows(a, b, facts, step)
    table = _equal_rows(facts[2])
    if len(rest):
        at = torch.from_numpy(rest).to(a.device)
        for name, values in _measure_rows(a[at], b[at], facts[:, rest], step).items():
            table[name][rest] = values
    return table


def _compare_bits(a: Tensor, b: Tensor, step: int) -> np.ndarray:
    """`[3, row]`: elements with different bits, whether any has another sign, the largest absolute value in `b`.

    Comparisons that give integers and in-place operations are several times faster than those that give truth values.
    """
    parts = []
    for i in range(0, a.shape[0], step):
        bits_a, bits_b = (value[i : i + step].view(_INTEGER_VIEW[value.dtype]) for value in (a, b))
        xor = bits_a ^ bits_b
        lowest = xor.amin(-1)
        different = xor.ne_(0).sum(-1, dtype=torch.int32)
        parts.append(torch.stack([different.double(), lowest.double(), _largest(b[i : i + step]).double()]))
    facts = torch.cat(parts, -1).cpu().numpy()
    facts[1] = facts[1] < 0
    return facts


def _largest(rows: Tensor) -> Tensor:
    """Largest absolute value of each row, NaN where it holds one; no copy of the rows is made."""
    return torch.maximum(rows.amax(-1), -rows.amin(-1)).abs()


def _equal_rows(largest: np.ndarray) -> dict[str, np.ndarray]:
    """The metrics of rows that are bitwise equal and finite: exact zeros, and no fraction of a zero norm."""
    zero, none = np.zeros(len(largest)), np.zeros(len(largest), dtype=np.int64)
    fraction = np.where(largest > 0, zero, math.nan)
    table = {name: (fraction if name in _FRACTIONS else zero).copy() for name in _FLOAT_METRICS}
    table |= {"max_ulp": none, "equal_fraction": zero + 1.0, "bitwise_equal": none == 0}
    return table | {name: none.copy() for name in _COUNTS}


def _measure_rows(a: Tensor, b: Tensor, facts: np.ndarray, step: int) -> dict[str, np.ndarray]:
    """`_compare_core` for any rows, given what `_compare_bits` found. Arithmetic in float64 is done in one room: new
    memory costs more than arithmetic."""
    (n_rows, n), (different, crossing, largest) = a.shape, facts
    room = torch.empty(4, min(step, n_rows), n, dtype=torch.float64, device=a.device)
    sums, ulps = [], []
    for i in range(0, n_rows, step):
        some_a, some_b = a[i : i + step], b[i : i + step]
        x, y, d, product = room[:, : some_a.shape[0]].unbind()
        divided_by = _to_float64(some_a, some_b, x, y)
        torch.sub(x, y, out=d)
        norms = [torch.linalg.vector_norm(v, dim=-1) for v in (x, y, d)]
        sums.append(torch.stack([*norms, _largest(d), torch.mul(d, y, out=product).sum(-1), d.sum(-1), *divided_by]))
        ulps.append(_max_ulp(some_a, some_b, bool(crossing[i : i + step].any())))
    # One transfer from the device for the floats, one for the integers.
    norm_a, norm_b, norm_d, max_d, dot, sum_d, *scales = torch.cat(sums, -1).cpu().numpy()
    scale = scales[0] if scales else 1.0
    with np.errstate(all="ignore"):  # undefined values are sorted out below
        gap = (2.0 * dot + norm_d**2) / (norm_a + norm_b)
        cosine = np.maximum(norm_d**2 - gap**2, 0.0) / (2.0 * norm_a * norm_b)
        unlike = np.flatnonzero((norm_a < norm_b / 2.0) | (norm_a > norm_b * 2.0))
        if len(unlike):
            at = torch.from_numpy(unlike).to(a.device)
            cosine[unlike] = _cosine_of_unlike(a[at], b[at]).cpu().numpy()
        columns = [max_d * scale, norm_d / norm_b, max_d / (largest / scale), cosine]
        columns += [sum_d / n * scale, norm_d / math.sqrt(n) * scale]
    finite = np.isfinite(norm_a) & np.isfinite(norm_b)
    some = finite & (norm_b > 0)
    defined = [finite, some, some, some & (norm_a > 0), finite, finite]
    table = {
        name: np.where(kept, column, math.nan)
        for name, kept, column in zip(_FLOAT_METRICS, defined, columns, strict=True)
    }
    none = [np.zeros(n_rows, dtype=np.int64) for _ in _COUNTS]
    bad = none if finite.all() else _count_nonfinite(a, b)
    table |= {"max_ulp": torch.cat(ulps).cpu().numpy(), "equal_fraction": 1.0 - different / n}
    return table | {"bitwise_equal": different == 0} | dict(zip(_COUNTS, bad, strict=True))


def _cosine_of_unlike(a: Tensor, b: Tensor) -> Tensor:
    """Cosine distance of rows of very unlike norms, where the form for small drift cancels and the first does not."""
    x, y = (value.double() / _row_scale(value.double(), value.double()) for value in (a, b))
    norms = torch.linalg.vector_norm(x, dim=-1) * torch.linalg.vector_norm(y, dim=-1)
    return (1.0 - torch.linalg.vecdot(x, y) / norms).clamp_min(0.0)


def _to_float64(a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
    """Both tensors in float64 into `x` and `y`; for float64 also a power of two that each row was divided by."""
    if a.dtype != torch.float64:
        # Two steps are faster than one from the 16-bit dtypes, and as exact.
        x.copy_(a.float())
        y.copy_(b.float())
        return []
    scale = _row_scale(a, b)
    torch.div(a, scale, out=x)
    torch.div(b, scale, out=y)
    return [scale.squeeze(-1)]


def _row_scale(x: Tensor, y: Tensor) -> Tensor:
    """A power of two for each row that keeps squares inside float64 (the narrower dtypes cannot leave it)."""
    largest = torch.maximum(x.abs().amax(-1, keepdim=True), y.abs().amax(-1, keepdim=True))
    exponent = torch.frexp(largest).exponent.clamp(-1021, 1023)
    usable = largest.isfinite() & (largest > 0)
    return torch.where(usable, torch.ldexp(torch.ones_like(largest), exponent), 1.0)


def _count_nonfinite(a: Tensor, b: Tensor) -> list[np.ndarray]:
    """Non-finite elements per row: in either, in `a`, in `b`."""
    bad_a, bad_b = ~a.isfinite(), ~b.isfinite()
    return [bad.sum(-1).cpu().numpy() for bad in (bad_a | bad_b, bad_a, bad_b)]


def _bits(values: Tensor) -> Tensor:
    """Bit patterns as signed integers: int32 (sign-extended for 16-bit floats), int64 for float64."""
    bits = values.view(_INTEGER_VIEW[values.dtype])
    return bits.to(torch.int32) if bits.dtype == torch.int16 else bits


def _max_ulp(a: Tensor, b: Tensor, crossing: bool) -> Tensor:
    """Largest ULP distance of each row, int64, without regard to NaN; `crossing`: whether some sign changes.

    Where signs agree it is the difference of the bit patterns, which cannot overflow; the few other elements go the
    general way.
    """
    bits_a, bits_b = (value.view(_INTEGER_VIEW[value.dtype]) for value in (a, b))
    distance = (bits_a - bits_b).abs_()
    if not crossing:
        return distance.amax(-1).to(torch.int64)
    row, column = ((bits_a ^ bits_b) < 0).nonzero(as_tuple=True)
    distance[row, column] = 0
    far = _ulp_distance(_bits(a[row, column]), _bits(b[row, column]), a.dtype).to(torch.int64)
    return distance.amax(-1).to(torch.int64).scatter_reduce(0, row, far, "amax")


def _ulp_distance(bits_a: Tensor, bits_b: Tensor, dtype: torch.dtype) -> Tensor:
    """ULP distance without regard to NaN: int32 for 16-bit floats, int64 otherwise."""
    key_a, key_b = _ordered(bits_a, dtype), _ordered(bits_b, dtype)
    difference = key_a - key_b
    if dtype != torch.float64:
        return difference.abs()
    wrapped = (((key_a ^ key_b) & (key_a ^ difference)) < 0) | (difference == torch.iinfo(torch.int64).min)
    return torch.where(wrapped, _INT64_MAX, difference.abs())


def _ordered(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Integers that grow with the value: the bits of the magnitude, negated where the sign bit is set."""
    sign = bits >> (torch.iinfo(bits.dtype).bits - 1)
    magnitude = bits & torch.iinfo(_INTEGER_VIEW[dtype]).max
    signed = (magnitude ^ sign) - sign
    return signed.to(torch.int64) if dtype == torch.float32 else signed


def metric_floor(metric: str, n: Any, value: Any = 0.0) -> Any:
    """Bound on the absolute round-off of `metric` when it is evaluated here, in float64, over `n` elements.

    With u = 2^-53 (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1; any order of summation):
        max_abs, max_abs_dz, rel_linf                  4 u value
        rel_l2, rms                                    (n + 4) u value
        signed_mean                                    (n + 4) u value      value: the RMS of the same tensors
        cosine_distance                                4 (n + 4) u value^2  value: the relative L2 of the same tensors
        kl, js, tv                                     8 (n + 64) u value   logits up to about 60 above one another
    `n` and `value` are numbers, or columns of one length. At value 0 it is 0: identical tensors give exactly 0.
    Round-off of the *model*, a path against itself, is measured.
    """
    u = UNIT_ROUNDOFF[torch.float64]
    bounds = {"max_abs": 4 * u * value, "max_abs_dz": 4 * u * value, "rel_linf": 4 * u * value}
    bounds |= dict.fromkeys(("rel_l2", "rms", "signed_mean"), (n + 4) * u * value)
    bounds |= {"cosine_distance": 4 * (n + 4) * u * value**2}
    bounds |= dict.fromkeys(("kl", "js", "tv"), 8 * (n + 64) * u * value)
    if metric not in bounds:
        raise InputError("metric", got=metric, expected=f"one of {sorted(bounds)}", remedy="Pick a numeric metric.")
    return bounds[metric]


def metric_range(metric: str) -> tuple[float, float]:
    """The range that `metric`, and so a mean of it, has but for round-off; (-inf, inf) for a name not known here."""
    shares = ("equal_fraction", "bitwise_equal", "flip", "tie_a", "tie_b", "certified", "tv")
    if metric in shares or (metric.startswith("top") and metric.endswith("_overlap")):
        return 0.0, 1.0
    bounded = {"js": math.log(2.0), "cosine_distance": 2.0}
    sizes = ("max_abs", "rel_l2", "rel_linf", "rms", "max_ulp", "kl", "max_abs_dz", "nonfinite")
    if metric in (*bounded, *sizes) or metric.startswith(("near_ties", "margin")):
        return 0.0, bounded.get(metric, math.inf)
    return -math.inf, math.inf
