"""Rounding or a bug? The rule, as a function of what was measured; no model is needed to test it.

Question: a pair of paths differs by D_r(p) at position p in the precision r; is that what rounding does?

Equations, with u_r the unit roundoff of rung r and G(p) the measured sensitivity of the logits at p (`conditioning`):
    bound_r(p) = SAFETY u_r G(p),    SAFETY = 2 paths x 4
The computed value of an inner product of length n is the exact one of weights that are perturbed by sqrt(n) u, but for
a factor lambda that the errors exceed with probability 2 exp(-lambda^2 / 2), 7e-4 at lambda = 4 (Higham and Mary 2019).
G is the response to just these perturbations, so nothing in the bound is fitted to a model.

The rule, applied to the *highest usable rung* T (finite and present on both paths; float32 at least):
    D_T <= bound_T at every position                                 numerical
    T is float64 and D_T <= the bound with float32's u               numerical: a float32 island inside the float64 run
    else                                                             semantic: the difference does not go with precision
Lower rungs never decide: there rounding is large enough to hide a bug (a lossy store in bfloat16) or to look like one
(a flipped argmax or expert). They are reported, and a jump that they alone show over most steps is `inconclusive`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from mechkv.distributions import UNIT_ROUNDOFF

Verdict = Literal["identical", "numerical", "semantic", "nonfinite", "irreproducible", "inconclusive"]
VERDICTS: tuple[Verdict, ...] = ("identical", "numerical", "semantic", "nonfinite", "irreproducible", "inconclusive")
EXIT_CODES: dict[str, int] = {
    "identical": 0,
    "numerical": 0,
    "semantic": 1,
    "nonfinite": 3,
    "irreproducible": 4,
    "inconclusive": 4,
}

N_PATHS, LAMBDA = 2, 4
SAFETY = N_PATHS * LAMBDA
"""Both paths round; LAMBDA is that of Higham and Mary (2019), theorem 2.4."""

ROUNDOFF: dict[str, float] = {str(dtype).removeprefix("torch."): u for dtype, u in UNIT_ROUNDOFF.items()}
PRECISE = ("float64", "float32")
"""Rungs that may decide."""


@dataclass(frozen=True)
class RungEvidence:
    """One precision.

    Attributes:
        dtype: Its name.
        status: `ok`, `nonfinite` (on some path, at some position) or `missing` (it could not be run).
        difference: Max abs logit difference, position by position (empty when missing).
        nonfinite: Paths that gave NaN or infinity.
        repeat: Path -> max abs difference of a second call on the same object; the floor, 0 when it repeats.
        again: Path -> max abs difference of a first call on another fresh object (empty: not tried).
        error: Why it is missing.
    """

    dtype: str
    status: Literal["ok", "nonfinite", "missing"]
    difference: tuple[float, ...] = ()
    nonfinite: tuple[str, ...] = ()
    repeat: dict[str, float] = field(default_factory=dict)
    again: dict[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def unit_roundoff(self) -> float:
        """u of this rung."""
        return ROUNDOFF[self.dtype]

    @property
    def largest(self) -> float:
        """The largest difference."""
        return max(self.difference, default=0.0)


@dataclass(frozen=True)
class Decision:
    """What the rule says.

    Attributes:
        verdict: One of `VERDICTS`.
        reason: One sentence.
        rung: The rung that decided, if one did.
        bad: Indices (into the compared positions) whose difference is beyond the bound at that rung.
        roundoff: The unit roundoff that the deciding bound was made with.
        notes: What a reader must know besides.
    """

    verdict: Verdict
    reason: str
    rung: str | None = None
    bad: tuple[int, ...] = ()
    roundoff: float | None = None
    notes: tuple[str, ...] = ()


def bounds(sensitivity: Sequence[float] | None, unit_roundoff: float) -> np.ndarray | None:
    """bound_r(p) for every position; None where the sensitivity is unknown."""
    return None if sensitivity is None else SAFETY * unit_roundoff * np.asarray(sensitivity, dtype=np.float64)


def decide(rungs: Sequence[RungEvidence], sensitivity: Sequence[float] | None) -> Decision:
    """The verdict.

    Args:
        rungs: Every precision that was asked for, in any order.
        sensitivity: G(p) in logits per unit of relative rounding, or None where no weights were within reach; the
            ladder itself then has to say how the difference goes with precision.
    """
    usable = sorted((r for r in rungs if r.status == "ok"), key=lambda r: r.unit_roundoff)
    broken = sorted((r for r in rungs if r.status == "nonfinite"), key=lambda r: r.unit_roundoff)
    notes = [f"{r.dtype} could not be run: {r.error}" for r in rungs if r.status == "missing"]
    if not usable:
        return _all_nonfinite(broken, notes)
    top = usable[0]
    above = [r for r in broken if r.unit_roundoff < top.unit_roundoff]
    artefact = top.dtype == "float32" and [r.dtype for r in above] == ["float64"]
    if artefact:
        notes.append(
            f"float64, the highest precision alone, is not finite on the {' and the '.join(above[0].nonfinite)} path: "
            "an artefact of running it in float64 (a mask value or a kernel made for float32), so float32 decides"
        )
    found = _judge(usable, sensitivity, notes)
    unexplained = [r for r in broken if not (artefact and r.dtype == "float64")]
    if not unexplained or found.verdict == "semantic":
        extra = tuple(f"{r.dtype} is not finite on the {' and the '.join(r.nonfinite)} path" for r in unexplained)
        return Decision(found.verdict, found.reason, found.rung, found.bad, found.roundoff, (*found.notes, *extra))
    names = ", ".join(r.dtype for r in unexplained)
    overflow = [r.dtype for r in unexplained] == ["float16"]
    cause = "overflow: float16 ends at 65504 and the wider ranges are finite" if overflow else "not a matter of range"
    agreement = f"; where it is finite the paths are {found.verdict}"
    reason = f"NaN or infinity in {names} only ({cause}){agreement}"
    return Decision("nonfinite", reason, unexplained[0].dtype, (), None, found.notes)


def _all_nonfinite(broken: Sequence[RungEvidence], notes: Sequence[str]) -> Decision:
    if not broken:
        return Decision("inconclusive", "no precision could be run", notes=tuple(notes))
    paths = sorted({path for r in broken for path in r.nonfinite})
    where = f"on the {paths[0]} path alone" if len(paths) == 1 else "on both paths"
    only_half = all(r.dtype == "float16" for r in broken)
    if only_half:
        reason = f"NaN or infinity in float16 {where}: overflow, unless bfloat16 or float32 show it as well (add one)"
    else:
        names = ", ".join(r.dtype for r in broken)
        reason = f"NaN or infinity {where} in {names}, whatever the precision: masking (or weights), not overflow"
    return Decision("nonfinite", reason, broken[0].dtype, (), None, tuple(notes))


def _judge(usable: Sequence[RungEvidence], sensitivity: Sequence[float] | None, notes: Sequence[str]) -> Decision:
    """The verdict from the finite rungs, the most precise first."""
    top, kept = usable[0], list(notes)
    bound, how = _bound(usable, sensitivity)
    repeat = _unrepeatable(usable, bound)
    if repeat is not None:
        verdict, reason = repeat
        bad = _beyond(top.difference, bound)
        if verdict == "semantic" or not _stands_out(top, bad):
            return Decision(verdict, reason, top.dtype, bad, top.unit_roundoff, tuple(kept))
        kept.append(reason)
    if all(r.largest == 0 for r in usable):
        names = ", ".join(r.dtype for r in usable)
        return Decision("identical", f"every logit has the same bits in {names}", top.dtype, notes=tuple(kept))
    if top.dtype not in PRECISE:
        return _only_half(top, bound, kept)
    if bound is None:
        reason = f"they differ by {top.largest:.2g} in {top.dtype} and nothing says what rounding would do"
        remedy = "let build return the weights, or add a 16-bit dtype"
        return Decision("inconclusive", f"{reason}; {remedy}", top.dtype, notes=tuple(kept))
    bad = _beyond(top.difference, bound)
    if not bad:
        return _numerical(usable, top, bound / top.unit_roundoff, top.unit_roundoff, how, kept)
    island = None
    if top.dtype == "float64":
        island = _island_bound(usable, sensitivity)
        if island is not None and not _beyond(top.difference, island):
            kept.append(
                f"a float32 island sits inside the float64 run: it stops at {top.largest:.1g}, above float64's bound "
                f"{float(bound.max()):.1g} and within float32's {float(island.max()):.1g}"
            )
            return _numerical(usable, top, island / ROUNDOFF["float32"], ROUNDOFF["float32"], how, kept)
        if island is None:
            text = (
                f"they differ by {top.largest:.2g} in float64, and no 16-bit rung that differs says what rounding does"
            )
            remedy = "let build return the weights, or add float16 or bfloat16"
            return Decision("inconclusive", f"{text}; {remedy}", top.dtype, bad, notes=tuple(kept))
        bad = _beyond(top.difference, island)
    used = island if island is not None else bound
    roundoff = ROUNDOFF["float32"] if island is not None else top.unit_roundoff
    worst = bad[int(np.argmax([top.difference[i] for i in bad]))]
    reason = (
        f"in {top.dtype} they differ by {top.difference[worst]:.2g}, where rounding moves these logits by at most "
        f"{float(used[worst]):.1g}{_flat(usable)}"
    )
    return Decision("semantic", reason, top.dtype, bad, roundoff, tuple(kept))


def _numerical(
    usable: Sequence[RungEvidence],
    top: RungEvidence,
    per_unit: np.ndarray,
    roundoff: float,
    how: str,
    notes: list[str],
) -> Decision:
    """Within the bound `per_unit * roundoff` at the top; look whether a lower rung jumps."""
    peak = float(per_unit.max()) * roundoff
    reason = f"in {top.dtype} they differ by {top.largest:.2g}, within the {peak:.2g} that rounding explains ({how})"
    for rung in usable[1:]:
        over = _beyond(rung.difference, per_unit * max(rung.unit_roundoff, roundoff))
        if not over:
            continue
        if len(over) > max(2, len(rung.difference) // 2):
            text = (
                f"{rung.dtype} alone differs by {rung.largest:.2g} at {len(over)} of {len(rung.difference)} positions, "
                f"beyond rounding, and {top.dtype} does not: a kernel or mask value of that dtype, or discrete choices"
            )
            return Decision("inconclusive", text, rung.dtype, over, rung.unit_roundoff, tuple(notes))
        notes.append(
            f"{rung.dtype} jumps by {rung.largest:.2g} at {len(over)} positions and {top.dtype} does not: rounding "
            "that flips a discrete choice (an argmax, an expert)"
        )
    return Decision("numerical", reason, top.dtype, (), roundoff, tuple(notes))


def _only_half(top: RungEvidence, bound: np.ndarray | None, notes: Sequence[str]) -> Decision:
    bad = _beyond(top.difference, bound) if bound is not None else ()
    size = f"they differ by {top.largest:.2g} in {top.dtype}"
    if len(bad) > max(2, len(top.difference) // 2):
        return Decision("semantic", f"{size}, beyond rounding at most positions", top.dtype, bad, top.unit_roundoff)
    reason = f"{size}; a 16-bit rung alone cannot tell a small bug from rounding: add float32"
    return Decision("inconclusive", reason, top.dtype, bad, top.unit_roundoff, tuple(notes))


def _bound(usable: Sequence[RungEvidence], sensitivity: Sequence[float] | None) -> tuple[np.ndarray | None, str]:
    top = usable[0]
    if sensitivity is not None:
        return bounds(sensitivity, top.unit_roundoff), "measured by perturbing the weights"
    return _ladder_bound(usable[1:], top.unit_roundoff, len(top.difference)), "from how the ladder scales"


def _island_bound(usable: Sequence[RungEvidence], sensitivity: Sequence[float] | None) -> np.ndarray | None:
    if sensitivity is not None:
        return bounds(sensitivity, ROUNDOFF["float32"])
    coarse = [r for r in usable if r.dtype not in PRECISE]
    return _ladder_bound(coarse, ROUNDOFF["float32"], len(usable[0].difference))


def _ladder_bound(lower: Sequence[RungEvidence], unit_roundoff: float, n: int) -> np.ndarray | None:
    """Without weights: G from the lower rungs, the largest difference in units of their roundoff."""
    sizes = [r.largest / r.unit_roundoff for r in lower if r.largest > 0 and math.isfinite(r.largest)]
    return np.full(n, SAFETY * unit_roundoff * max(sizes)) if sizes else None


def _beyond(difference: Sequence[float], bound: np.ndarray | None) -> tuple[int, ...]:
    if bound is None:
        return ()
    return tuple(int(i) for i in np.flatnonzero(np.asarray(difference) > bound))


def _flat(usable: Sequence[RungEvidence]) -> str:
    """How the difference goes with precision, in words."""
    if len(usable) < 2:
        return ""
    parts = ", ".join(f"{r.largest:.2g} in {r.dtype}" for r in usable[1:])
    return f"; it does not shrink with precision ({parts})"


def _unrepeatable(usable: Sequence[RungEvidence], bound: np.ndarray | None) -> tuple[Verdict, str] | None:
    """A path that does not repeat itself: chance, or state that it carries from call to call."""
    top = usable[0]
    for rung in usable:
        for path, size in rung.repeat.items():
            if size == 0:
                continue
            if rung.again.get(path) == 0:  # two fresh objects agree, so it is state and not chance
                limit = float(bound.max()) if bound is not None else 0.0
                if rung is top and size > limit:
                    text = f"the {path} path carries state from call to call: a second call differs by {size:.2g}"
                    return "semantic", text
                continue
            text = f"the {path} path, called twice in {rung.dtype}, differs from itself by {size:.2g}"
            return "irreproducible", text
    return None


def _stands_out(top: RungEvidence, bad: Sequence[int]) -> bool:
    """Whether the paths differ by far more than a path does from itself, and beyond rounding."""
    own = max((size for size in (*top.repeat.values(), *top.again.values()) if math.isfinite(size)), default=0.0)
    return bool(bad) and top.largest > SAFETY * own
