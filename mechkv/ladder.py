"""How does the difference of two paths go with precision? The rungs of a ladder, each on fresh weights.

A `Case` is a pair of paths on given tokens; a path is any function (object, tokens) -> logits, a row for each compared
position. `climb` builds a fresh object for every precision, the coarsest first, runs both paths of every case on it,
and keeps the logits; the first case in every precision, and every case in the finest precision, run twice. A precision
that a model has no code for is a missing rung, not an error, as long as another rung runs.

Controls: the second call of a path is its floor (0 when it repeats); random number generators are set differently
before every call, so chance shows; an object returned twice, or with weights of another dtype, is refused.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechkv.conditioning import floating_dtypes, weights_in
from mechkv.distributions import compare_logit_rows
from mechkv.errors import InputError, MechkvError, NonFiniteError
from mechkv.verdict import RungEvidence

Build = Callable[[torch.dtype], Any]
PathFunction = Callable[..., Any]
PATHS = ("cached", "recomputed")
UNRUNNABLE = (RuntimeError, NotImplementedError, TypeError, ValueError)
"""What torch and its users raise where a precision has no kernel. Errors of mechkv are not among them."""


@dataclass(frozen=True)
class Case:
    """Two paths on the same tokens.

    Attributes:
        name: For the report.
        cached, recomputed: `(object, tokens) -> logits [position, d_vocab]`; called with `n_prompt=` if they take it.
        tokens: `[pos]`.
        n_prompt: Tokens of the prompt.
        positions: Absolute positions of the rows of logits.
        sensitivity_of: The path whose response to perturbed weights is measured; `recomputed` unless given.
        stepwise: A third path, one token at a time on an empty cache.
        chunks: Tokens a call on the cached path after the prompt.
    """

    name: str
    cached: PathFunction
    recomputed: PathFunction
    tokens: Int[Tensor, "pos"]
    n_prompt: int
    positions: tuple[int, ...]
    sensitivity_of: PathFunction | None = None
    stepwise: PathFunction | None = None
    chunks: int = 1

    def function(self, path: str) -> PathFunction:
        """`cached`, `recomputed`, `stepwise` or `sensitivity`."""
        if path == "sensitivity":
            return self.sensitivity_of or self.recomputed
        found = getattr(self, path)
        assert found is not None
        return found


@dataclass(frozen=True)
class Rung:
    """One precision of one case: the evidence, and the logits of both paths in float64."""

    evidence: RungEvidence
    logits: dict[str, Float[Tensor, "position d_vocab"]]
    table: dict[str, np.ndarray]
    """`compare_logit_rows` of cached against recomputed; empty when a path is missing."""


class Caller:
    """Calls paths: seeds differ from call to call, logits are checked and come out in float64 on the CPU."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(
        self, thing: Any, case: Case, path: str, tokens: Tensor | None = None, n_prompt: int | None = None
    ) -> Float[Tensor, "position d_vocab"]:
        """The logits of one path; `tokens` replaces those of the case (of the same length or shorter)."""
        tokens = case.tokens if tokens is None else tokens
        n_prompt = case.n_prompt if n_prompt is None else n_prompt
        function = case.function(path)
        options = {"n_prompt": n_prompt} if takes_n_prompt(function) else {}
        self._calls += 1
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(self._calls)
            found = function(thing, tokens.clone(), **options)
        first = n_prompt - 1 if options else case.n_prompt - 1
        wanted = case.positions if first == case.n_prompt - 1 else range(first, len(tokens))
        return _as_logits(found, sum(p < len(tokens) for p in wanted), path)


def takes_n_prompt(function: PathFunction) -> bool:
    """Whether a path can be told where the prompt ends."""
    try:
        return "n_prompt" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


class Builder:
    """`build`, with a check that every object is fresh and in the precision asked for."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._last: tuple[int, Any] | None = None

    def __call__(self, dtype: torch.dtype) -> Any:
        """A fresh object.

        Raises:
            InputError: The object of the call before came back, or no matrix of it has the dtype.
        """
        thing = self._build(dtype)
        weights = weights_in(thing)
        first = (id(weights[0]), weights[0]) if weights else None
        if first is not None and self._last is not None and first[1] is self._last[1]:
            raise InputError(
                "build returned the weights of its last call",
                got="the same tensors for another rung",
                expected="fresh weights at every call",
                remedy="Make the model inside build: a model that is cast down and up again has lost its weights.",
            )
        self._last = first
        found = floating_dtypes(weights)
        name = str(dtype).removeprefix("torch.")
        if found and name not in found:
            raise InputError(
                "build ignores its dtype",
                got=f"matrices in {', '.join(sorted(found))}",
                expected=name,
                remedy="Cast the model in build: model.to(dtype).",
            )
        return thing


def climb(
    build: Builder, cases: Sequence[Case], dtypes: Sequence[torch.dtype], call: Caller
) -> tuple[list[list[Rung]], Any]:
    """All rungs of every case, and the object of the finest one (None if it could not be built) for further questions.

    Args:
        build: Makes the objects.
        cases: What to run on each.
        dtypes: The finest first.
        call: Calls the paths.

    Raises:
        InputError: No rung could be run, or a path mixes dtypes where the other does not.
    """
    rungs: list[list[Rung]] = [[] for _ in cases]
    errors: list[Exception] = []
    thing: Any = None
    for dtype in reversed(dtypes):
        name = str(dtype).removeprefix("torch.")
        thing = None  # the object before goes before the next one comes
        try:
            thing = build(dtype)
        except NonFiniteError as error:
            for rung in rungs:
                rung.append(Rung(RungEvidence(name, "nonfinite", nonfinite=PATHS, error=f"build: {error}"), {}, {}))
            continue
        except MechkvError:
            raise
        except UNRUNNABLE as error:
            errors.append(error)
            for rung in rungs:
                rung.append(_missing(name, f"build: {_short(error)}"))
            continue
        for index, case in enumerate(cases):
            again = index == 0 or dtype == dtypes[0]
            rungs[index].append(_rung(name, thing, case, call, errors, again))
    if all(rung.evidence.status == "missing" for case in rungs for rung in case):
        raise InputError(
            "the paths could not be run in any precision",
            got=rungs[0][0].evidence.error,
            expected="logits from both paths in at least one dtype",
            remedy="Call them yourself first: cached(build(torch.float32), tokens).",
        ) from (errors[-1] if errors else None)
    return [rung[::-1] for rung in rungs], thing


def _rung(name: str, thing: Any, case: Case, call: Caller, errors: list[Exception], again: bool) -> Rung:
    logits: dict[str, Tensor] = {}
    failed: dict[str, Exception] = {}
    broken: dict[str, str] = {}
    for path in PATHS:
        try:
            logits[path] = call(thing, case, path)
        except NonFiniteError as error:
            broken[path] = str(error)
        except MechkvError:
            raise
        except UNRUNNABLE as error:
            failed[path] = error
    errors += failed.values()
    if failed:
        _refuse_mixed(name, failed)
        return _missing(name, "; ".join(f"{path}: {_short(error)}" for path, error in failed.items()))
    if broken:
        for path, found in logits.items():
            if not bool(found.isfinite().all()):
                broken[path] = "NaN or infinity in the logits"
        evidence = RungEvidence(name, "nonfinite", nonfinite=tuple(broken), error="; ".join(broken.values()))
        return Rung(evidence, logits, {})
    _same_shape(logits)
    nonfinite = tuple(path for path in PATHS if not bool(logits[path].isfinite().all()))
    table = compare_logit_rows(logits["cached"], logits["recomputed"])
    difference = tuple(float(x) for x in table["max_abs_dz"])
    if nonfinite:
        evidence = RungEvidence(name, "nonfinite", difference, nonfinite, error="NaN or infinity in the logits")
        return Rung(evidence, logits, table)
    repeat = {path: size(call(thing, case, path), logits[path]) for path in PATHS} if again else {}
    return Rung(RungEvidence(name, "ok", difference, (), repeat), logits, table)


def size(a: Tensor, b: Tensor) -> float:
    """Largest difference; infinity where one is not finite and the other is."""
    d = (a - b)[~((a == b) | (a.isnan() & b.isnan()))].abs()
    return 0.0 if d.numel() == 0 else float("inf") if bool(d.isnan().any()) else float(d.max())


def _missing(name: str, error: str) -> Rung:
    return Rung(RungEvidence(name, "missing", error=error), {}, {})


def _short(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160] if text else ''}"


_NAMES = {"c10::Half": "float16", "Half": "float16", "c10::BFloat16": "bfloat16", "BFloat16": "bfloat16"}
_NAMES |= {"float": "float32", "Float": "float32", "double": "float64", "Double": "float64"}
_NAMES |= {name: name for name in ("float16", "bfloat16", "float32", "float64")}


def _refuse_mixed(name: str, failed: dict[str, Exception]) -> None:
    """A path that fails alone because two dtypes meet: most often cache buffers in another dtype than the model."""
    if len(failed) != 1:
        return
    ((path, error),) = failed.items()
    text = str(error)
    words = re.findall(r"c10::\w+|\b(?:Half|BFloat16|Float|Double|float|double|b?float(?:16|32|64))\b", text)
    met = list(dict.fromkeys(_NAMES[word] for word in words if word in _NAMES))
    if len(met) < 2:
        return
    raise InputError(
        f"the {path} path mixes dtypes when the model is in {name}",
        got=f"{met[0]} and {met[1]} in one operation ({text.strip().splitlines()[0][:160]})",
        expected=f"cache buffers and activations in {name} alike",
        remedy="Allocate the cache in the dtype of the model, or cast what is read from it.",
    ) from error


def _as_logits(found: Any, n_rows: int, path: str) -> Float[Tensor, "position d_vocab"]:
    value = found if isinstance(found, Tensor) else torch.as_tensor(np.asarray(found))
    if value.ndim != 2 or len(value) != n_rows or value.shape[1] < 2 or not value.is_floating_point():
        raise InputError(
            f"the {path} path returned something else than logits",
            got=f"shape {list(value.shape)}, {value.dtype}",
            expected=f"floating logits [{n_rows}, d_vocab]: a row for every position from n_prompt - 1 on",
            remedy="Drop the batch axis and the rows of earlier prompt positions: logits[0, n_prompt - 1:].",
        )
    return value.detach().double().cpu()


def _same_shape(logits: dict[str, Tensor]) -> None:
    shapes = [list(value.shape) for value in logits.values()]
    if shapes[0] != shapes[1]:
        raise InputError(
            "the paths return logits of different shapes",
            got=f"cached {shapes[0]}, recomputed {shapes[1]}",
            expected="the same positions and vocabulary",
            remedy="Return the same rows from both.",
        )
