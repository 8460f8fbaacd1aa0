"""The paper's claims, and what a run here says about each.

Claims are those of arXiv 2604.15409v1. A `Finding` is one measurement set against one claim: the number with its
interval, the controls, the model and dtype it was measured on, and a verdict. A result on a small model says nothing
about a large one, and a claim that was not measured is listed as such.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mechkv.errors import InputError

VERDICTS: tuple[str, ...] = ("reproduced", "partly", "not reproduced", "not testable here", "not measured")


@dataclass(frozen=True)
class Claim:
    """One claim of the paper: its number, and what a fair test needs."""

    id: str
    says: str
    number: str
    fair_test: str


CLAIMS: dict[str, Claim] = {
    claim.id: claim
    for claim in (
        Claim(
            "C1",
            "Cached and cache-free decoding produce different tokens under greedy, top-k and top-p decoding alike.",
            "100 % of prompts, 9 of 9 conditions",
            "Three rates apart (prompts, aligned positions, teacher-forced flips); common random numbers.",
        ),
        Claim(
            "C2",
            "Decoding with the cache is the more accurate of the two.",
            "8 of 9 conditions",
            "Exact McNemar a condition, sign test over conditions, detectable effect; distance from a float64 oracle.",
        ),
        Claim(
            "C3",
            "In float32 the divergence all but vanishes.",
            "KL lower by 8 orders of magnitude, 0.0 % flips",
            "The same tokens on a ladder of dtypes, KL in float64; unit roundoffs alone predict 7.8 orders.",
        ),
        Claim(
            "C4",
            "Grouped-query models diverge sharply at the first layer; a larger head dimension and a sliding window "
            "give uniform accumulation.",
            "three models compared",
            "Twins of one model that compute the same function, one cause changed at a time.",
        ),
        Claim(
            "C5",
            "Patching the residual stream does not recover the cache-free trajectory, so the KV cache is the causal "
            "variable.",
            "no recovery",
            "Residual stream and KV cache both patched, both directions, with placebos; inherited state x computation.",
        ),
        Claim(
            "C6",
            "The divergence is deterministic.",
            "same input, same divergence",
            "Each path run twice, bitwise, in one process and in two.",
        ),
    )
}


@dataclass(frozen=True)
class Finding:
    """One measurement set against one claim.

    Attributes:
        claim: Its id.
        verdict: One of `VERDICTS`.
        ours: The number in words, with its unit.
        value: The number itself, where there is one; `low`, `high` its 95 % interval over prompts.
        controls: What the controls gave.
        model: What it was measured on (model, dtype, prompts, steps).
        note: What limits it.
        source: Experiment that measured it.
    """

    claim: str
    verdict: str
    ours: str
    controls: str
    model: str
    source: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if self.claim not in CLAIMS or self.verdict not in VERDICTS:
            raise InputError(
                "unknown claim or verdict",
                got=f"{self.claim!r}, {self.verdict!r}",
                expected=f"one of {', '.join(CLAIMS)} and one of {', '.join(VERDICTS)}",
                remedy="See mechkv.claims.",
            )


@dataclass(frozen=True)
class ClaimsTable:
    """All claims, in order, each with its findings; one without any is listed as not measured."""

    findings: Sequence[Finding] = field(default_factory=tuple)

    def rows(self) -> list[dict[str, Any]]:
        """One plain row per finding, for JSON, HTML and LaTeX."""
        rows = []
        for claim in CLAIMS.values():
            head = {"claim": claim.id, "says": claim.says, "paper": claim.number}
            found = [asdict(finding) for finding in self.findings if finding.claim == claim.id]
            blank: dict[str, Any] = {
                "verdict": "not measured",
                "ours": "",
                "controls": "",
                "model": "",
                "source": "",
                "note": "",
            }
            blank |= {"value": None, "low": None, "high": None}
            rows += [finding | head for finding in found] or [blank | head]
        return rows
