"""How different are the next-token distributions that two logit vectors stand for?

Equations: p = softmax(z_a) is the cached path's distribution, q = softmax(z_b) the recomputed path's. With D = ln p -
ln q, m = (p + q) / 2 and t = tanh(D / 2) = (p - q) / (p + q),
    KL(p || q) = sum m (t D + D - 2 t)      JS = 1/2 sum m (t D - 2 ln cosh(D / 2))      TV = sum m |t|
The KL sum is sum p (ln p - ln q) + (q - p), whose extra part adds up to 0. Written so, every term of all three is
non-negative: no sum cancels, and round-off cannot turn a divergence negative. D is (z_a - z_b) - (lse_a - lse_b) with
lse_a - lse_b = log1p(sum q expm1(z_a - z_b)) for small drift, so that D keeps its relative accuracy however small the
drift is.

Conventions: float64; nats; KL is of the cached distribution from the recomputed one; the vocabulary is the last axis.
Among equal logits the lowest token id comes first. Non-finite logits: an error in the single metrics, None or NaN
beside a count in `compare_logits` and `compare_logit_rows`.

Controls: equal logits give exactly 0; JS / KL tends to 1/4 for small drift; the flip certificate (margin > 2 max|z_a -
z_b| implies the same top token) is checked on every row, and its contradiction is an error.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechkv.errors import GuardError, InputError, NonFiniteError

UNIT_ROUNDOFF: dict[torch.dtype, float] = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}
NEAR_TIE_DISTANCES = (0.25, 0.5, 1.0, 2.0)
# |D| below which D - 2 tanh(D / 2) comes from its series: truncated there at 3e-16 of the leading term D^2 / 2.
_SERIES_BELOW = 2.0**-5
# Largest |z_a - z_b| for which the difference of the two log-sum-exps is taken through expm1 (beyond it nothing
# cancels).
_SMALL_SHIFT = 1.0
# Beyond this |D| one of p, q is zero in float64 and the Jensen-Shannon term has reached its limit.
_SATURATED = 1000.0
# Round-off of the two sides of the flip certificate; matters for float64 logits only, the others subtract exactly.
_CERTIFICATE_SLACK = 1.0 + 2.0**-50


@dataclass(frozen=True)
class LogitDifference:
    """Two logit vectors of one position. `None`: undefined (non-finite logits, or a vocabulary smaller than k).

    `kl` is of the cached distribution from the recomputed one. `margin_*` is first minus second logit; `tie` says that
    a path has several equal top logits (the lowest token id then counts as the top). `near_ties_D` counts the *other*
    tokens within D of the recomputed path's top. `certified`: a margin exceeds 2 max_abs_dz, so no flip is possible.
    """

    kl: float | None
    js: float | None
    tv: float | None
    max_abs_dz: float | None
    top_a: int | None
    top_b: int | None
    flip: bool | None
    tie_a: bool | None
    tie_b: bool | None
    margin_a: float | None
    margin_b: float | None
    certified: bool | None
    top5_overlap: float | None
    top10_overlap: float | None
    near_ties_0_25: int | None
    near_ties_0_5: int | None
    near_ties_1: int | None
    near_ties_2: int | None
    nonfinite: int

    def to_dict(self) -> dict[str, float | int | bool]:
        """The fields as one row of a frame; undefined values become NaN."""
        return {name: math.nan if value is None else value for name, value in asdict(self).items()}


def kl(z_a: Float[Tensor, "..."], z_b: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """KL(softmax(z_a) || softmax(z_b)) in nats over the last axis: the cached distribution from the recomputed one."""
    return _divergences(*_finite_logits(z_a, z_b))["kl"]


def js(z_a: Float[Tensor, "..."], z_b: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Jensen-Shannon divergence in nats (at most ln 2); tends to KL / 4 as the drift gets small."""
    return _divergences(*_finite_logits(z_a, z_b))["js"]


def total_variation(z_a: Float[Tensor, "..."], z_b: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Half the L1 distance of the two distributions: how often two optimally coupled samples differ."""
    return _divergences(*_finite_logits(z_a, z_b))["tv"]


def top1_flip(z_a: Float[Tensor, "..."], z_b: Float[Tensor, "..."]) -> Bool[Tensor, "..."]:
    """Whether the top tokens differ; among equal top logits the lowest token id is the top."""
    x, y = _finite_logits(z_a, z_b)
    return _top_token(x) != _top_token(y)


def exact_tie(z: Float[Tensor, "... d_vocab"]) -> Bool[Tensor, "..."]:
    """Whether several tokens share the top logit."""
    return margin(z) == 0


def top_k_overlap(z_a: Float[Tensor, "..."], z_b: Float[Tensor, "..."], k: int) -> Float[Tensor, "..."]:
    """Size of the intersection of the two top-k sets over k; ties at the k-th place go to the lowest token ids."""
    x, y = _finite_logits(z_a, z_b)
    if not 1 <= k <= x.shape[-1]:
        raise InputError("k", got=k, expected=f"1 to d_vocab = {x.shape[-1]}", remedy="Choose another k.")
    in_x, in_y = (_top_k_mask(z, z.topk(k, dim=-1).values[..., -1:], k) for z in (x, y))
    return (in_x & in_y).sum(-1).to(torch.float64) / k


def margin(z: Float[Tensor, "... d_vocab"]) -> Float[Tensor, "..."]:
    """First minus second logit."""
    first, second = _finite_logits(z, z)[0].topk(2, dim=-1).values.unbind(-1)
    return first - second


def near_ties(z: Float[Tensor, "... d_vocab"], distance: float) -> Int[Tensor, "..."]:
    """Number of tokens other than the top one whose logit is within `distance` of it (an exact tie counts)."""
    x = _finite_logits(z, z)[0]
    return (x.amax(-1, keepdim=True) - x <= distance).sum(-1) - 1


def flip_certified(margin: Float[Tensor, "..."], max_abs_dz: Float[Tensor, "..."]) -> Bool[Tensor, "..."]:
    """Whether a margin of *either* path exceeds 2 max |z_a - z_b|: the top token then cannot change."""
    return margin > 2.0 * max_abs_dz * _CERTIFICATE_SLACK


def require_certificate(certified: Bool[Tensor, "..."], flip: Bool[Tensor, "..."]) -> None:
    """Raise `GuardError` if a certified position flipped: the two logit rows then do not belong together."""
    contradicted = int((certified & flip).sum())
    if contradicted:
        raise GuardError(
            "flip certificate",
            got=f"{contradicted} flips at positions whose margin exceeds twice the largest logit difference",
            expected="none, by arithmetic",
            remedy="Margins, differences and top tokens come from different rows: check how they were aligned.",
        )


def compare_logits(z_a: Float[Tensor, "..."], z_b: Float[Tensor, "..."]) -> LogitDifference:
    """Every distribution metric of one pair of logit vectors [d_vocab]: cached `z_a`, recomputed `z_b`."""
    if z_a.ndim != 1:
        raise InputError(
            "logits", got=f"{z_a.ndim} axes", expected="one vector [d_vocab]", remedy="Use compare_logit_rows for more."
        )
    rows = compare_logit_rows(z_a[None], z_b[None])
    whole = {"top_a", "top_b", "nonfinite"} | {name for name in rows if name.startswith("near_ties")}
    casts: dict[str, type] = dict.fromkeys(whole, int) | dict.fromkeys(("flip", "tie_a", "tie_b", "certified"), bool)
    values: dict[str, Any] = {name: None if np.isnan(row[0]) else row[0] for name, row in rows.items()}
    for name, value in values.items():
        values[name] = None if value is None else casts.get(name, float)(value)
    return LogitDifference(**values)


def compare_logit_rows(z_a: Float[Tensor, "..."], z_b: Float[Tensor, "..."]) -> dict[str, np.ndarray]:
    """`compare_logits` for each row of [step, d_vocab]: float64 arrays [step] named as the fields of `LogitDifference`.

    Truth values are 0.0 and 1.0. A row with a non-finite logit is NaN in everything but `nonfinite`. Raises
    `GuardError` if the flip certificate is contradicted.
    """
    x, y = _checked_logits(z_a, z_b)
    if x.ndim != 2:
        raise InputError("logits", got=f"{x.ndim} axes", expected="[step, d_vocab]", remedy="Reshape to rows.")
    nonfinite = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    if not bool(torch.stack([end for z in (x, y) for end in (z.amax(-1), z.amin(-1))]).isfinite().all()):
        nonfinite = (~(x.isfinite() & y.isfinite())).sum(-1)
    bad = nonfinite > 0
    if bool(bad.any()):
        x, y = (torch.where(bad[:, None], 0.0, z) for z in (x, y))
    table = _divergences(x, y) | _rank_metrics(x, y)
    table["certified"] = flip_certified(torch.maximum(table["margin_a"], table["margin_b"]), table["max_abs_dz"])
    require_certificate(table["certified"], table["flip"])
    stacked = torch.where(bad, math.nan, torch.stack([values.to(torch.float64) for values in table.values()])).cpu()
    return dict(zip(table, stacked.numpy(), strict=True)) | {"nonfinite": nonfinite.cpu().numpy()}


def _rank_metrics(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Top tokens, margins, overlaps and near ties of float64 rows, from one partial sort of each side."""
    d_vocab = x.shape[-1]
    head_x, head_y = (z.topk(min(11, d_vocab), dim=-1) for z in (x, y))
    margin_a, margin_b = (head.values[..., 0] - head.values[..., 1] for head in (head_x, head_y))
    top_a, top_b = head_x.indices[..., 0], head_y.indices[..., 0]
    tie_a, tie_b = margin_a == 0, margin_b == 0
    if bool((tie_a | tie_b).any()):
        top_a, top_b = _top_token(x), _top_token(y)
    table = {"top_a": top_a, "top_b": top_b, "flip": top_a != top_b, "tie_a": tie_a, "tie_b": tie_b}
    table |= {"margin_a": margin_a, "margin_b": margin_b}
    for k in (5, 10):
        overlap = torch.full_like(margin_a, math.nan)
        if k < d_vocab and not any(bool((h.values[..., k - 1] == h.values[..., k]).any()) for h in (head_x, head_y)):
            same = head_x.indices[..., :k, None] == head_y.indices[..., None, :k]
            overlap = same.sum((-2, -1)).to(torch.float64) / k
        elif k <= d_vocab:  # a tie at the k-th place: which tokens belong to the set?
            in_x, in_y = (_top_k_mask(z, head.values[..., k - 1 : k], k) for z, head in ((x, head_x), (y, head_y)))
            overlap = (in_x & in_y).sum(-1).to(torch.float64) / k
        table[f"top{k}_overlap"] = overlap
    below = head_y.values[..., :1] - y
    for distance in NEAR_TIE_DISTANCES:
        table[f"near_ties_{distance:g}".replace(".", "_")] = (below <= distance).sum(-1) - 1
    return table


def _divergences(z_a: Tensor, z_b: Tensor) -> dict[str, Tensor]:
    """KL, JS and TV of float64 logits [..., d_vocab] by the non-negative forms of the module docstring.

    Written in place where a value is not needed again: a vocabulary of float64 is large, and new memory costs more
    than arithmetic.
    """
    dz = z_a - z_b
    max_abs_dz = torch.maximum(dz.amax(-1), -dz.amin(-1)).abs()
    (p, lse_a), (q, lse_b) = _softmax(z_a), _softmax(z_b)
    m = p.add_(q).div_(2.0)
    work = torch.clamp(dz, -_SMALL_SHIFT, _SMALL_SHIFT).expm1_()
    small_shift = torch.log1p(q.mul_(work).sum(-1)).unsqueeze(-1)
    shift = torch.where(max_abs_dz.unsqueeze(-1) <= _SMALL_SHIFT, small_shift, lse_a - lse_b)
    log_ratio = dz.sub_(shift)
    t = torch.div(log_ratio, 2.0, out=work).tanh_()
    terms = torch.mul(t, log_ratio, out=q).add_(_odd_part(log_ratio, t)).clamp_min_(0.0)
    kl = terms.mul_(m).sum(-1)
    tv = torch.abs(t, out=terms).mul_(m).sum(-1)
    bounded = log_ratio.clamp_(-_SATURATED, _SATURATED)
    entropy = t.mul_(bounded).sub_(bounded.div_(4.0).sinh_().square_().mul_(2.0).log1p_(), alpha=2.0)
    return {"kl": kl, "js": entropy.clamp_min_(0.0).mul_(m).sum(-1) / 2.0, "tv": tv, "max_abs_dz": max_abs_dz}


def _softmax(z: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities, and the logarithm of the sum of exponentials [..., 1]; each exponential is taken once."""
    largest = z.amax(-1, keepdim=True)
    p = (z - largest).exp_()
    total = p.sum(-1, keepdim=True)
    return p.div_(total), largest + total.log()


def _odd_part(log_ratio: Tensor, t: Tensor) -> Tensor:
    """D - 2 tanh(D / 2), from its series where that cancels."""
    square = log_ratio.square()
    series = square * -(17.0 / 20160.0)
    series.add_(1.0 / 120.0).mul_(square).neg_().add_(1.0 / 12.0).mul_(square).mul_(log_ratio)
    if bool(torch.maximum(log_ratio.amax(), -log_ratio.amin()) < _SERIES_BELOW):
        return series
    return torch.where(log_ratio.abs() < _SERIES_BELOW, series, log_ratio - 2.0 * t)


def _top_token(z: Tensor) -> Tensor:
    """Lowest token id among the largest logits (`argmax` leaves the choice open)."""
    ids = torch.arange(z.shape[-1], device=z.device)
    return torch.where(z == z.amax(-1, keepdim=True), ids, z.shape[-1]).amin(-1)


def _top_k_mask(z: Tensor, threshold: Tensor, k: int) -> Tensor:
    """Exactly k tokens: all above the k-th largest logit `threshold`, then those equal to it by ascending token id."""
    above, level = z > threshold, z == threshold
    room = k - above.sum(-1, keepdim=True)
    return above | (level & (level.cumsum(-1) <= room))


def check_pair(a: Tensor, b: Tensor) -> None:
    """Refuse a pair that could only be compared after broadcasting, casting or moving."""
    for value in (a, b):
        if not isinstance(value, Tensor):
            raise InputError("not tensors", got=type(value).__name__, expected="two tensors", remedy="torch.tensor(x).")
    for name, got, expected in (
        ("shapes", tuple(a.shape), tuple(b.shape)),
        ("dtypes", a.dtype, b.dtype),
        ("devices", a.device, b.device),
    ):
        if got != expected:
            raise InputError(
                f"{name} of the two tensors",
                got=f"{got} and {expected}",
                expected="the same",
                remedy="Nothing is cast.",
            )
    if a.dtype not in UNIT_ROUNDOFF:
        names = ", ".join(str(dtype) for dtype in UNIT_ROUNDOFF)
        raise InputError("dtype", got=a.dtype, expected=f"one of {names}", remedy="Compare floating-point values.")
    if a.numel() == 0:
        raise InputError(
            "tensors", got=f"no elements, shape {tuple(a.shape)}", expected="some", remedy="Check the slice."
        )
    if a.is_meta:
        raise InputError("device", got="meta", expected="a device that holds values", remedy="Use the CPU.")


def _checked_logits(z_a: Tensor, z_b: Tensor) -> tuple[Tensor, Tensor]:
    check_pair(z_a, z_b)
    if z_a.ndim == 0 or z_a.shape[-1] < 2:
        raise InputError(
            "logits",
            got=tuple(z_a.shape),
            expected="[..., d_vocab], d_vocab >= 2",
            remedy="Keep the vocabulary axis last.",
        )
    return z_a.detach().to(torch.float64), z_b.detach().to(torch.float64)


def _finite_logits(z_a: Tensor, z_b: Tensor) -> tuple[Tensor, Tensor]:
    x, y = _checked_logits(z_a, z_b)
    bad = int((~(x.isfinite() & y.isfinite())).sum())
    if bad:
        raise NonFiniteError(
            "logits", got=f"{bad} non-finite values", expected="none", remedy="Find the first layer that has them."
        )
    return x, y
