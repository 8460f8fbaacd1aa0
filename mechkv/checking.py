"""Cached and uncached outputs differ: is that rounding or a bug? A verdict with its evidence, for anyone's model.

`check_paths` compares any two functions that return logits; `check` drives both paths of a model itself, on several
prompts, lengths and prefill sizes and in chunks. The rule and its bound are in `verdict`, what each is based on in
`conditioning`, `localise` and `signature`; docs/check.md tells it on one page.

Verdicts: `identical` (same bits), `numerical` (rounding), `semantic` (the two compute different functions),
`nonfinite`, `irreproducible` (a path differs from itself), `inconclusive` (what was run cannot tell).

Controls: every path is run twice; weights are made anew for every precision; the bound is measured on the model itself;
third references say which side is wrong, or that the pair alone cannot tell.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from mechkv import provenance, result_folder, storage
from mechkv.check_model import model_build, model_cases
from mechkv.check_tables import first_flips, flip_words, position_frame, rung_rows, rung_table
from mechkv.errors import CacheError, InputError, MechkvError, NonFiniteError
from mechkv.examine import CaseReport, Examiner, Modules
from mechkv.ladder import Case, PathFunction
from mechkv.models import dtype_name, to_dtype
from mechkv.plain_json import records, to_json
from mechkv.signature import Signature
from mechkv.verdict import EXIT_CODES, ROUNDOFF, VERDICTS

__all__ = ["DTYPES", "CheckReport", "check", "check_paths"]

DTYPES = ("float64", "float32", "float16", "bfloat16")
"""The whole ladder."""
KIND = "check_report"
LOSSY_SHARE = 2.0**-4
"""Relative error of a 4-bit store; used for a note only, never for the verdict."""
_SEVERITY = ("identical", "numerical", "inconclusive", "irreproducible", "nonfinite", "semantic")


@dataclass(frozen=True)
class CheckReport:
    """A verdict and what it rests on.

    Attributes:
        verdict: One of `identical`, `numerical`, `semantic`, `nonfinite`, `irreproducible`, `inconclusive`.
        reason: One sentence.
        rungs: One row per case and dtype: status, `max_abs` difference, `bound` (what rounding explains), `floor` (a
            path against itself), unit roundoff, flipped positions, first position beyond the bound.
        frame: One row per case, dtype and position: difference, bound, flip, both margins.
        profile: One row per layer (-1: what enters block 0) at the first bad position: difference and bound.
        first_position: Absolute position of the first logits beyond the bound, or not finite.
        first_step: Its decode step (0: the prompt).
        first_layer: The first layer beyond its bound, or not finite; -1 is the embedding.
        kind: What kind of difference, as coarse as the evidence (`signature.Kind`).
        convicted: `cached`, `recomputed`, or None.
        evidence: Everything else, as plain values.
        provenance: Versions, machine, kernels.
    """

    verdict: str
    reason: str
    rungs: pd.DataFrame
    frame: pd.DataFrame
    profile: pd.DataFrame
    first_position: int | None
    first_step: int | None
    first_layer: int | None
    kind: str | None
    convicted: str | None
    evidence: dict[str, Any]
    provenance: dict[str, Any]

    @property
    def exit_code(self) -> int:
        """0 identical or numerical, 1 semantic, 3 nonfinite, 4 irreproducible or inconclusive."""
        return EXIT_CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; NaN and infinity become None."""
        names = ("verdict", "reason", "first_position", "first_step", "first_layer", "kind", "convicted", "evidence")
        found = {name: getattr(self, name) for name in names} | {"exit_code": self.exit_code}
        for name in ("rungs", "profile"):
            found[name] = records(getattr(self, name))
        return json.loads(to_json(found | {"provenance": self.provenance}, nan_as_null=True))

    def save(self, folder: Path | str) -> Path:
        """Write tables (parquet) and the rest (JSON) to a folder, sealed last."""
        with result_folder.sealed_folder(folder, KIND, {"verdict": self.verdict}) as place:
            for name in ("rungs", "frame", "profile"):
                storage.write_frame(place / f"{name}.parquet", getattr(self, name))
            rest = {name: value for name, value in asdict(self).items() if name not in TABLES}
            storage.write_json(place / "check.json", rest, nan_as_null=True)
        return Path(folder)

    @classmethod
    def load(cls, folder: Path | str) -> "CheckReport":
        """Read what `save` wrote."""
        place = result_folder.open_folder(Path(folder), KIND).path
        tables = {name: storage.read_frame(place / f"{name}.parquet") for name in TABLES}
        return cls(**storage.read_json(place / "check.json"), **tables)

    def __str__(self) -> str:
        """A dozen lines for a terminal."""
        lines = [f"{self.verdict}: {self.reason}"]
        if self.kind:
            lines += [f"  kind       {self.kind}: {self.evidence['text']}"]
            lines += [f"  when       {self.evidence['when']}", f"  layers     {self.evidence['profile_shape']}"]
            lines += [f"  first      position {self.first_position}, step {self.first_step}, layer {self.first_layer}"]
            lines += [f"  which side {self.convicted or 'undecided'}: {self.evidence['because']}"]
        for flip in self.evidence.get("flips", [])[:1]:
            lines.append(f"  first flip {flip_words(flip)}")
        lines += [f"  note       {note}" for note in self.evidence.get("notes", [])]
        lines += ["", rung_table(self.rungs)] if len(self.rungs) else []
        return "\n".join(lines)


TABLES = ("rungs", "frame", "profile")


def check_paths(
    build: Callable[[torch.dtype], Any],
    cached: PathFunction,
    recomputed: PathFunction,
    tokens: Int[Tensor, "pos"],
    *,
    n_prompt: int,
    dtypes: Sequence[str | torch.dtype] = DTYPES,
    modules: Modules | None = None,
    stepwise: PathFunction | None = None,
    name: str = "paths",
) -> CheckReport:
    """Compare any two functions that should compute the same logits.

    Args:
        build: `build(dtype)` makes a fresh object (a model, a tuple, a dict of weights, anything) in that precision.
        cached: `cached(object, tokens)` -> logits `[position, d_vocab]` for the positions from `n_prompt - 1` on.
        recomputed: The same by another way. A path that takes a keyword `n_prompt` is told where the prompt ends, and
            can then be asked for one token at a time on an empty cache.
        tokens: `[pos]`, prompt and continuation.
        n_prompt: Tokens of the prompt.
        dtypes: Rungs of the ladder. Without float32 or float64 only gross bugs can be told from rounding.
        modules: `modules(object)` -> the torch model in it, for localisation; by default the largest one within reach.
        stepwise: A third path: one token at a time on an empty cache.
        name: For the report.

    Raises:
        InputError: Something that cannot be compared, or paths that run in no precision.
    """
    for role, function in (("build", build), ("cached", cached), ("recomputed", recomputed)):
        if not callable(function):
            raise InputError(role, got=type(function).__name__, expected="a function", remedy="See check_paths.")
    if not isinstance(tokens, Tensor) or tokens.ndim != 1 or tokens.is_floating_point():
        got = list(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise InputError("tokens", got=got, expected="a tensor of [pos] integers", remedy="Pass one sequence.")
    if tokens.is_meta:
        raise InputError("tokens", got="the meta device", expected="a device that computes", remedy="Use the CPU.")
    if type(n_prompt) is not int or not 1 <= n_prompt < len(tokens):
        raise InputError(
            "n_prompt leaves nothing to decode",
            got=f"{n_prompt!r} of {len(tokens)} tokens",
            expected=f"1 to {len(tokens) - 1}",
            remedy="Pass the prompt and some tokens after it.",
        )
    positions = tuple(range(n_prompt - 1, len(tokens)))
    case = Case(name, cached, recomputed, tokens, n_prompt, positions, stepwise=stepwise)
    return _report(Examiner(build, modules).run([case], _dtypes(dtypes)))


def check(
    model_or_source: Any,
    *,
    prompts: Sequence[str | Tensor] | None = None,
    dtypes: Sequence[str | torch.dtype] = DTYPES,
    n_steps: int = 12,
    chunk: int = 4,
    batched: bool = False,
    left_padded: bool = False,
    device: str = "auto",
) -> CheckReport:
    """Drive both paths of a model and say whether they differ by rounding.

    Args:
        model_or_source: A model name, folder or file (`load_model`), a Hugging Face model in memory, or a bridge. Rungs
            other than a given model's own dtype are made from its weights.
        prompts: Texts or token tensors; by default word problems (or random tokens where there is no tokenizer), cut to
            several lengths.
        dtypes: Rungs.
        n_steps: Tokens after every prompt.
        chunk: Tokens a call for the chunked variant (0: leave it out).
        batched: Add a row alone against the same row in a batch.
        left_padded: Add a left-padded row against the row alone.
        device: Where to run a model that is loaded here.
    """
    if n_steps < 2:
        raise InputError("too few steps", got=n_steps, expected="at least 2", remedy="Decode a few tokens.")
    wanted = _dtypes(dtypes)
    try:
        try:
            build = model_build(model_or_source, device)
            bridge = build.first(list(dict.fromkeys([*wanted[::-1], *map(to_dtype, DTYPES[::-1])])))
        except NonFiniteError as error:
            return _never_finite(error)
        cases = model_cases(bridge, prompts, n_steps=n_steps, chunk=chunk, batched=batched, left_padded=left_padded)
        examined = Examiner(build, lambda bridge: bridge.original_model).run(cases, wanted)
    except CacheError as error:
        return _cache_dead(error)
    return _report(examined)


def _dtypes(dtypes: Sequence[str | torch.dtype]) -> list[torch.dtype]:
    found = list(dict.fromkeys(to_dtype(dtype) for dtype in dtypes))
    if not found:
        raise InputError("no dtypes", got="none", expected=f"some of {', '.join(DTYPES)}", remedy="Name some.")
    return sorted(found, key=lambda dtype: ROUNDOFF[dtype_name(dtype)])


def _cache_dead(error: CacheError) -> CheckReport:
    reason = f"cache not updated or not read: {error.what} ({error.got}). {error.remedy}"
    because = {"when": "only on decode steps, from the first on", "because": "the guard of the cached path"}
    return _refused("semantic", reason, error, because, kind="cache not updated", convicted="cached")


def _never_finite(error: NonFiniteError) -> CheckReport:
    reason = f"NaN or infinity in every precision as soon as the model is run: {error.what} ({error.got})"
    because = {"when": "from the first tokens on", "because": "no precision could be run"}
    return _refused("nonfinite", reason, error, because)


def _refused(
    verdict: str,
    reason: str,
    error: MechkvError,
    because: dict[str, str],
    *,
    kind: str | None = None,
    convicted: str | None = None,
) -> CheckReport:
    """What a guard found before any rung was climbed."""
    evidence: dict[str, Any] = {"text": str(error), "profile_shape": "not looked at", "notes": [], "flips": []}
    return CheckReport(
        verdict=verdict,
        reason=reason,
        rungs=pd.DataFrame(),
        frame=pd.DataFrame(),
        profile=pd.DataFrame(),
        first_position=None,
        first_step=None,
        first_layer=None,
        kind=kind,
        convicted=convicted,
        evidence=evidence | because,
        provenance=provenance.collect(),
    )


def _report(examined: Sequence[CaseReport]) -> CheckReport:
    """The worst case speaks for all."""
    worst = max(examined, key=lambda r: _SEVERITY.index(r.decision.verdict))
    assert worst.decision.verdict in VERDICTS
    first, signature, place = worst.first_position, worst.signature, worst.place
    if place is None and worst.decision.verdict in ("identical", "numerical"):
        place = examined[0].place
    profile = place.profile if place is not None else pd.DataFrame(columns=["layer", "max_abs", "rel_linf", "bound"])
    frame = pd.concat([position_frame(report) for report in examined], ignore_index=True)
    return CheckReport(
        verdict=worst.decision.verdict,
        reason=worst.decision.reason + (f" [{worst.case.name}]" if len(examined) > 1 else ""),
        rungs=pd.DataFrame([row for report in examined for row in rung_rows(report)]),
        frame=frame,
        profile=profile,
        first_position=first,
        first_step=None if first is None else max(0, first - worst.case.n_prompt + 1),
        first_layer=worst.first_layer,
        kind=signature.kind if signature else None,
        convicted=signature.convicted if signature else None,
        evidence=_evidence(examined, worst, signature),
        provenance=provenance.collect(),
    )


def _evidence(examined: Sequence[CaseReport], worst: CaseReport, signature: Signature | None) -> dict[str, Any]:
    place = worst.place or examined[0].place
    references = worst.references or examined[0].references
    found: dict[str, Any] = {
        "rung": worst.decision.rung,
        "notes": list(dict.fromkeys(note for report in examined for note in report.decision.notes)),
        "flips": [flip for report in examined for flip in first_flips(report)],
        "profile_shape": worst.profile_shape or examined[0].profile_shape,
        "site": place.site if place else None,
        "equal_before": list(place.equal_before) if place else [],
        "tables": list(place.tables) if place else [],
        "layers_wrong_by_themselves": None if place is None or place.own is None else list(place.own),
        "nonfinite": {path: asdict(spoiled) for path, spoiled in worst.spoiled.items()},
        "references": asdict(references) if references else None,
        "cases": {report.case.name: report.decision.verdict for report in examined},
    }
    text = {"text": signature.text, "when": signature.when, "because": signature.because} if signature else {}
    found["notes"] += [
        f"on the {path} path the first module that is not finite is {s.site} (layer {s.layer}); what came before it "
        f"stays within {s.largest_before:.2g}"
        for path, s in worst.spoiled.items()
    ]
    found["notes"] += _sampled_note(worst) if worst.decision.bad else []
    if worst.decision.verdict == "nonfinite" and not worst.spoiled:
        broken = [rung.evidence for rung in worst.rungs if rung.evidence.status == "nonfinite"]
        found["notes"] += [f"{evidence.dtype}: {evidence.error}" for evidence in broken]
    if references and references.changed_buffers:
        names = ", ".join(references.changed_buffers)
        found["notes"].append(f"the model carries state from call to call: {names} changes while it runs")
    elif references and references.beyond("state"):
        found["notes"].append(
            f"the {' and the '.join(references.beyond('state'))} path carries state from call to call"
        )
    if signature is not None and place is not None and place.layer is not None and signature.kind == "attention":
        found["notes"] += _store_note(place.profile, place.layer)
    bad = sorted(r.case.name for r in examined if r.decision.verdict == "semantic")
    if bad and len(bad) < len(examined):
        found["notes"].append(f"semantic only in: {', '.join(bad)}")
    return found | text


def _sampled_note(report: CaseReport) -> list[str]:
    """Where only some positions were compared, the first bad one may lie before the first that was seen."""
    positions, first = report.case.positions, report.decision.bad[0]
    if first == 0 or positions[first] - positions[first - 1] == 1:
        return []
    return [f"positions {positions[first - 1] + 1} to {positions[first] - 1} were not compared: it may begin there"]


def _store_note(profile: pd.DataFrame, layer: int) -> list[str]:
    """A mask or position error changes a layer's output by a large part of itself; a coarse store by a small one."""
    share = float(profile.set_index("layer")["rel_linf"][layer])
    if not 0 < share < LOSSY_SHARE:
        return []
    return [
        f"the first bad layer is off by {100 * share:.2g} % only, whatever the precision: a lossy or quantised store "
        "of K and V looks like this, or arithmetic in fewer bits inside the model; if that is meant, it is still not "
        "rounding of this dtype but another function"
    ]
