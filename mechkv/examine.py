"""The evidence of one pair of paths: the ladder, what perturbed weights do, third references, and the first bad layer.

Order. The ladder runs on every case. Then, in the most precise rung that runs: the sensitivity of the logits to
perturbed weights (`conditioning`), for the bound. The rule (`verdict`) decides. Cases that it calls semantic, and the
first case in any event, are then asked for more: third references (does an earlier row move when only the last token
changes, or when it is left out; does a call change after other calls; what does one token at a time give) and the
layer profile by forward hooks. Where logits are not finite, the same hooks name the first module that is not.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from mechkv import localise
from mechkv.conditioning import N_PROBES, modules_in, perturbed, weights_in
from mechkv.errors import MechkvError, NonFiniteError
from mechkv.ladder import PATHS, UNRUNNABLE, Builder, Caller, Case, Rung, climb, size, takes_n_prompt
from mechkv.localise import Limits, Trace
from mechkv.signature import References, Signature, describe, profile_shape
from mechkv.verdict import ROUNDOFF, SAFETY, Decision, decide

Modules = Callable[[Any], nn.Module]
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class CaseReport:
    """One case with everything known about it.

    Attributes:
        case: The paths and tokens.
        rungs: As climbed.
        sensitivity: G(p) for every compared position; None where no weights were within reach.
        decision: The verdict.
        references: Third references; None when they were not asked.
        place: Where in the model; None without a torch module.
        signature: The kind of a semantic difference.
        profile_shape: The shape over the layers, in words.
        spoiled: Path -> the first module with NaN or infinity in the rung that has it, and the largest value before.
    """

    case: Case
    rungs: list[Rung]
    sensitivity: tuple[float, ...] | None
    decision: Decision
    references: References | None = None
    place: localise.Place | None = None
    signature: Signature | None = None
    profile_shape: str = ""
    spoiled: dict[str, localise.Spoiled] = field(default_factory=dict)

    @property
    def first_position(self) -> int | None:
        """Absolute position of the first logits that are beyond the bound, or not finite."""
        if self.decision.verdict == "nonfinite":
            rung = next(r for r in self.rungs if r.evidence.dtype == self.decision.rung)
            finite = [logits.isfinite().all(-1) for logits in rung.logits.values()]
            rows = [int((~good).nonzero()[0]) for good in finite if not bool(good.all())]
            return self.case.positions[min(rows)] if rows else None
        return self.case.positions[self.decision.bad[0]] if self.decision.bad else None

    @property
    def first_layer(self) -> int | None:
        """The first layer that is beyond its bound, or not finite."""
        if self.decision.verdict == "nonfinite":
            return min((s.layer for s in self.spoiled.values() if s.layer is not None), default=None)
        return self.place.layer if self.place is not None and self.signature is not None else None


class Examiner:
    """Builds objects and calls paths; one per check."""

    def __init__(self, build: Callable[[torch.dtype], Any], modules: Modules | None) -> None:
        self._windows: tuple[bool, ...] = ()
        self._used: tuple[torch.dtype, Any] | None = None
        self.build, self.call, self._modules = Builder(build), Caller(), modules

    def run(self, cases: Sequence[Case], dtypes: Sequence[torch.dtype]) -> list[CaseReport]:
        """All cases."""
        climbed, finest = climb(self.build, cases, dtypes, self.call)
        self._used = None if finest is None else (dtypes[0], finest)
        climbed = [self._again(case, rungs) for case, rungs in zip(cases, climbed, strict=True)]
        sensitivities = self._sensitivities(cases, climbed)
        reports = []
        for index, (case, rungs) in enumerate(zip(cases, climbed, strict=True)):
            decision = decide([rung.evidence for rung in rungs], sensitivities[index])
            report = CaseReport(case, rungs, sensitivities[index], decision)
            if (index == 0 or decision.verdict == "semantic") and _top(rungs) is not None:
                report = self._explain(report)
            if decision.verdict == "nonfinite":
                report = replace(report, spoiled=self._spoiled(report))
            reports.append(report)
        return reports

    def _again(self, case: Case, rungs: list[Rung]) -> list[Rung]:
        """For a path that does not repeat: what a first call on two fresh objects gives (chance, or state)."""
        done = []
        for rung in rungs:
            moving = [path for path, amount in rung.evidence.repeat.items() if amount > 0]
            again = {}
            for path in moving:
                dtype = _dtype(rung)
                first, second = (self.call(self.build(dtype), case, path) for _ in range(2))
                again[path] = size(first, second)
            done.append(replace(rung, evidence=replace(rung.evidence, again=again)) if moving else rung)
        return done

    def _sensitivities(self, cases: Sequence[Case], climbed: Sequence[list[Rung]]) -> list[tuple[float, ...] | None]:
        """G(p) of every case, from N_PROBES perturbations in the most precise rung; an object is compared with itself,
        so the one that was climbed with will do."""
        tops = [_top(rungs) for rungs in climbed]
        found: list[tuple[float, ...] | None] = [None] * len(cases)
        for dtype in dict.fromkeys(_dtype(top) for top in tops if top is not None):
            mine = [i for i, top in enumerate(tops) if top is not None and _dtype(top) == dtype]
            if self._used is None or self._used[0] != dtype:
                self._used = (dtype, self.build(dtype))
            thing, unit = self._used[1], _probe_unit(dtype)
            weights = weights_in(thing)
            if not weights:
                continue
            plain = {i: self.call(thing, cases[i], "sensitivity") for i in mine}
            moved: dict[int, list[np.ndarray]] = {i: [] for i in mine}
            for probe in range(N_PROBES):
                with perturbed(weights, unit, seed=probe):
                    for i in mine:
                        logits = self.call(thing, cases[i], "sensitivity")
                        moved[i].append((logits - plain[i]).abs().amax(-1).numpy() / unit)
            for i in mine:
                values = np.max(moved[i], axis=0)
                # A bound as wide as the logits themselves would clear anything: the ladder has to say more.
                useful = SAFETY * unit * values.max() < float(plain[i].std(dim=-1).median())
                if np.isfinite(values).all() and values.max() > 0 and useful:
                    found[i] = tuple(float(x) for x in values)
        return found

    def _explain(self, report: CaseReport) -> CaseReport:
        """The place and, for a semantic difference, third references."""
        case, top = report.case, _top(report.rungs)
        assert top is not None
        dtype = _dtype(top)
        semantic = report.decision.verdict == "semantic"
        used, self._used = self._used, None
        again = not semantic and used is not None and used[0] == dtype
        thing = used[1] if again and used is not None else self.build(dtype)
        references = self._references(report, thing, dtype) if semantic else References()
        place = self._locate(report, thing, dtype, references)
        layer = place.layer if place else None
        profile = place.profile if place else pd.DataFrame(columns=["layer", "max_abs", "rel_linf", "bound"])
        shape = profile_shape(profile, layer if semantic else None, self._windows, place.own if place else None)
        signature = None
        if semantic:
            signature = describe(
                layer=layer,
                site=place.site if place else None,
                equal_before=place.equal_before if place else (),
                tables=place.tables if place else (),
                watched=len(profile) > 0,
                bad=report.decision.bad,
                positions=case.positions,
                n_prompt=case.n_prompt,
                chunks=case.chunks,
                references=references,
            )
        return replace(report, references=references, place=place, signature=signature, profile_shape=shape)

    def _spoiled(self, report: CaseReport) -> dict[str, localise.Spoiled]:
        """Where each path stops being finite, on a fresh object of the rung that shows it."""
        rung = next(r for r in report.rungs if r.evidence.dtype == report.decision.rung)
        found: dict[str, localise.Spoiled] = {}
        try:
            thing = self.build(_dtype(rung))
        except NonFiniteError:  # said in the rung's error
            return found
        for path in rung.evidence.nonfinite if self._models(thing) else ():
            seen = localise.first_nonfinite(self._trace(thing, report.case, path, None))
            if seen is not None and seen.layer is not None and seen.layer >= 0:
                module = localise.first_nonfinite(self._trace(thing, report.case, path, seen.layer))
                if module is not None:
                    seen = replace(module, largest_before=max(seen.largest_before, module.largest_before))
            if seen is not None:
                found[path] = seen
        return found

    def _references(self, report: CaseReport, thing: Any, dtype: torch.dtype) -> References:
        """Ask both paths about changed, missing and repeated tokens; a path that cannot say is left out."""
        case = report.case
        limit = _limit(report, dtype)
        tokens, before = case.tokens, self._buffers(thing)
        inner = sum(p < len(tokens) - 1 for p in case.positions)
        later: dict[str, float] = {}
        shorter: dict[str, float] = {}
        state: dict[str, float] = {}
        short = tokens[:-1]
        first_calls: dict[str, Tensor | None] = {}
        if inner and len(short) > case.n_prompt:
            first_calls = {path: self._try(thing, case, path, short) for path in PATHS}
        logits = {path: self.call(thing, case, path) for path in PATHS}
        for path, first in first_calls.items():
            if first is not None:
                again = self._try(thing, case, path, short)
                shorter[path] = size(first[:inner], logits[path][:inner])
                if again is not None:
                    state[path] = size(first, again)
        if inner:
            changed = _other_end(tokens)
            for path in PATHS:
                moved = self._try(thing, case, path, changed)
                if moved is not None:
                    later[path] = size(moved[:inner], logits[path][:inner])
        steps = self._stepwise(thing, case, logits)
        after = self._buffers(thing)
        changed_state = tuple(name for name, value in before.items() if not torch.equal(value, after.get(name, value)))
        return References(later, shorter, state, steps, limit, changed_state)

    def _buffers(self, thing: Any) -> dict[str, Tensor]:
        """Copies of every buffer within reach: running a model should change none."""
        return {name: value.clone() for model in self._models(thing) for name, value in model.named_buffers()}

    def _hidden_leaks(
        self, case: Case, thing: Any, traces: dict[str, Trace], limits: Limits, references: References
    ) -> None:
        """A full pass a step hides later tokens from its logits, not from its earlier hidden rows: look there too."""
        for path, before in traces.items():
            after = self._trace(thing, case, path, None, _other_end(case.tokens))
            excess = localise.leaks(before, after, limits)
            references.later_token[path] = max(references.later_token.get(path, 0.0), excess * references.limit)

    def _stepwise(self, thing: Any, case: Case, logits: dict[str, Tensor]) -> dict[str, float]:
        """Both paths against one token at a time on an empty cache, where a path can be asked for that."""
        if case.stepwise is not None:
            steps = self._try(thing, case, "stepwise")
        elif takes_n_prompt(case.cached):
            steps = self._try(thing, case, "cached", case.tokens, 1)
            steps = None if steps is None else steps[list(case.positions)]
        else:
            return {}
        return {} if steps is None else {path: size(steps, logits[path]) for path in PATHS}

    def _try(
        self, thing: Any, case: Case, path: str, tokens: Tensor | None = None, n_prompt: int | None = None
    ) -> Tensor | None:
        try:
            return self.call(thing, case, path, tokens, n_prompt)
        except MechkvError as error:
            _LOG.info("reference not available: %s", error)
        except (*UNRUNNABLE, LookupError) as error:
            _LOG.info("reference not available: %s", error)
        return None

    def _locate(
        self, report: CaseReport, thing: Any, dtype: torch.dtype, references: References
    ) -> localise.Place | None:
        """The first bad layer and module at the first bad position (or the profile where the difference is largest)."""
        models = self._models(thing)
        if not models:
            return None
        self._windows = _windows(models[0])
        case, decision = report.case, report.decision
        top = _top(report.rungs)
        assert top is not None
        index = decision.bad[0] if decision.bad else int(np.argmax(top.evidence.difference))
        position = case.positions[index]
        ours, theirs, limits = self._traces(case, thing, dtype, decision.roundoff)
        if not ours.calls or not theirs.calls:
            return None
        profile = localise.layer_profile(ours, theirs, position, limits)
        if decision.verdict == "semantic":
            self._hidden_leaks(case, thing, {"cached": ours, "recomputed": theirs}, limits, references)
        layer = localise.first_layer(profile) if decision.verdict == "semantic" else None
        tables = localise.differing_tables(ours, theirs, position, limits) if layer is not None else ()
        site: str | None = None
        own: tuple[int, ...] | None = None
        equal: tuple[str, ...] = ()
        if layer is not None and localise.can_swap_inputs(ours, theirs):
            with localise.same_inputs(models, theirs):
                swapped = self._trace(thing, case, "cached", None)
            own = localise.wrong_layers(swapped, theirs, position, limits)
        if layer is not None and layer >= 0:
            ours, theirs, limits = self._traces(case, thing, dtype, decision.roundoff, inside=layer)
            site, equal = localise.first_site(ours, theirs, position, limits, skip=tables)
            equal = tuple(name for name in equal if f".{layer}." in name)
        return localise.Place(layer, site, equal, tables, profile, own)

    def _traces(
        self, case: Case, thing: Any, dtype: torch.dtype, roundoff: float | None, inside: int | None = None
    ) -> tuple[Trace, Trace, Limits]:
        ours = self._trace(thing, case, "cached", inside)
        theirs = self._trace(thing, case, "recomputed", inside)
        unit, probes, plain = _probe_unit(dtype), [], theirs
        if case.sensitivity_of is not None:
            plain = self._trace(thing, case, "sensitivity", inside)
        weights = weights_in(thing)
        for probe in range(N_PROBES):
            with perturbed(weights, unit, seed=probe):
                probes.append(self._trace(thing, case, "sensitivity", inside))
        return ours, theirs, Limits(plain, probes, SAFETY * (roundoff or ROUNDOFF["float32"]) / unit)

    def _trace(self, thing: Any, case: Case, path: str, inside: int | None, tokens: Tensor | None = None) -> Trace:
        """What the model that this path runs on computed; with two models within reach, each path may have its own."""
        with ExitStack() as stack:
            traces = [
                stack.enter_context(localise.watch(model, len(case.tokens), inside)) for model in self._models(thing)
            ]
            self._try(thing, case, path, tokens)
        return max(traces, key=lambda trace: sum(len(calls) for calls in trace.calls.values()))

    def _models(self, thing: Any) -> list[nn.Module]:
        """The torch models with blocks, largest first; one that is part of another is left out."""
        found = [self._modules(thing)] if self._modules is not None else modules_in(thing)
        found = [model for model in found if localise.find_blocks(model)[1]]
        inner = {id(part) for model in found for part in model.modules() if part is not model}
        outer = [model for model in found if id(model) not in inner]
        return sorted(outer, key=lambda m: -sum(p.numel() for p in m.parameters()))


def _top(rungs: Sequence[Rung]) -> Rung | None:
    """The most precise rung that both paths ran and left finite."""
    usable = [rung for rung in rungs if rung.evidence.status == "ok"]
    return min(usable, key=lambda rung: rung.evidence.unit_roundoff) if usable else None


def _dtype(rung: Rung) -> torch.dtype:
    return getattr(torch, rung.evidence.dtype)


def _probe_unit(dtype: torch.dtype) -> float:
    """Size of the perturbation: float32's roundoff, or that of a coarser dtype; in float64 it stands far above u."""
    return max(ROUNDOFF["float32"], ROUNDOFF[str(dtype).removeprefix("torch.")])


def _limit(report: CaseReport, dtype: torch.dtype) -> float:
    """What rounding may do to the logits of this case, float32 islands included."""
    if report.sensitivity is None:
        return 0.0
    return SAFETY * _probe_unit(dtype) * max(report.sensitivity)


def _other_end(tokens: Tensor) -> Tensor:
    """The same tokens but for the last one, which becomes another of them."""
    changed = tokens.clone()
    others = tokens[tokens != tokens[-1]]
    changed[-1] = others[0] if len(others) else tokens[-1] - 1 if int(tokens[-1]) else 1
    return changed


def _windows(model: nn.Module) -> tuple[bool, ...]:
    """Which layers have a sliding window, by the model's own configuration."""
    config = getattr(model, "config", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return ()
    return tuple("sliding" in str(kind) for kind in kinds)
