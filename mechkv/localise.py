"""Where in a torch model do two paths first differ? Plain forward hooks; the model may be anybody's.

Question: at the first position where the logits are wrong, which block is the first whose output differs by more than
rounding explains, and inside it which module?

Conventions. The blocks are the longest `ModuleList` (or `Sequential`) whose members are of one class. The embedding is
what enters block 0; it counts as layer -1. A run is a sequence of calls of every module, each with some rows; a call
over all tokens gives row p from the call that ended at p if there is one (a full pass a step), else from itself, and
otherwise the calls are rows of one sequence, in order. Rows are aligned at the end, so left padding shifts nothing.
In a batch, the row of the batch is the one whose embeddings are nearest to the other path's.

Which layers are wrong by themselves: one path runs again with the input of every block replaced by the other path's
(`same_inputs`), so that a block's output differs by what the block itself did, not by what came before it.

Controls: the response of every layer to perturbed weights (`conditioning`) is its bound; the hooks are removed whatever
happens, and a path with hooks gives the same bits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

EMBEDDING = -1
"""The layer number of what enters block 0."""


@dataclass
class Trace:
    """Rows of every watched module in one run: name -> one `[batch, row, feature]` tensor per call; `inside`: the block
    whose modules were watched."""

    n_tokens: int
    inside: int | None = None
    calls: dict[str, list[Tensor]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    dtypes: dict[str, str] = field(default_factory=dict)

    def rows(self, name: str) -> Tensor | None:
        """`[batch, position, feature]`: absolute positions where all were processed, aligned at the end."""
        calls = self.calls.get(name, [])
        if len({call.shape[2] for call in calls}) != 1:
            return None  # never called, or the second axis is not that of rows
        longest = max(calls, key=lambda call: call.shape[1])
        pad = longest.shape[1] - self.n_tokens
        if pad >= 0:
            ends = {call.shape[1] - pad: call for call in calls if call.shape[0] == longest.shape[0]}
            rows = [ends.get(p + 1, longest)[:, p + pad] for p in range(self.n_tokens)]
            return torch.stack(rows, dim=1)
        joined = torch.cat([call for call in calls if call.shape[0] == calls[0].shape[0]], dim=1)
        return joined[:, -self.n_tokens :]

    def longest(self, name: str) -> Tensor:
        """The call with most rows."""
        return max(self.calls[name], key=lambda call: call.shape[1])


def find_blocks(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """Name and members of the list of blocks; an empty list when there is none."""
    best: tuple[int, int, str, list[nn.Module]] = (0, 0, "", [])
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) == 0:
            continue
        members = list(module)
        if len({type(member) for member in members}) == 1 and not isinstance(members[0], (nn.Linear, nn.Embedding)):
            size = sum(p.numel() for p in module.parameters())
            best = max(best, (size, len(members), name, members), key=lambda entry: entry[:2])
    return best[2], best[3]


@contextmanager
def watch(model: nn.Module, n_tokens: int, inside: int | None = None) -> Iterator[Trace]:
    """Record block outputs, what enters block 0 and what comes before it; with `inside`, every module of that block."""
    trace = Trace(n_tokens, inside)
    prefix, blocks = find_blocks(model)
    handles: list[Any] = []

    def keep(name: str, value: Any) -> None:
        rows = _as_rows(value)
        if rows is None:
            return
        if name not in trace.calls:
            trace.order.append(name)
            trace.calls[name] = []
            trace.dtypes[name] = str(rows.dtype).removeprefix("torch.")
        trace.calls[name].append(rows.detach().clone())

    def after(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs, output: keep(name, output)

    def before(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs: keep(name, [*args, *kwargs.values()])

    try:
        for layer, block in enumerate(blocks):
            if layer == 0:
                handles.append(block.register_forward_pre_hook(before("embedding"), with_kwargs=True))
            handles.append(block.register_forward_hook(after(f"block {layer}"), with_kwargs=True))
        for name, module in model.named_modules():
            in_block = bool(prefix) and name.startswith(f"{prefix}.")
            wanted = inside is not None and in_block and name.startswith(f"{prefix}.{inside}.")
            table = (
                inside is None
                and not in_block
                and any(word in name.rsplit(".", 1)[-1].lower() for word in ("rot", "rope"))
            )
            if wanted or table:
                handles.append(module.register_forward_hook(after(name), with_kwargs=True))
        yield trace
    finally:
        for handle in handles:
            handle.remove()
        _split_tables(trace)


def _split_tables(trace: Trace) -> None:
    """A table that is made several times a pass (for layers with a window and for those without) is several tables."""
    n_passes = len(trace.calls.get("block 0", []))
    for name in [n for n in trace.order if n != "embedding" and not n.startswith("block ")]:
        times = len(trace.calls[name]) // n_passes if n_passes else 1
        if times < 2 or len(trace.calls[name]) % n_passes:
            continue
        calls = trace.calls.pop(name)
        trace.order.remove(name)
        for index in range(times):
            trace.calls[f"{name} ({index + 1})"] = calls[index::times]
            trace.order.append(f"{name} ({index + 1})")


@dataclass(frozen=True)
class Place:
    """Where two traces first differ.

    Attributes:
        layer: The first block beyond its bound, -1 for the embedding; None when none is.
        site: The first module inside it, by name.
        equal_before: Modules of that block that ran before and are within their bounds.
        tables: Names of position tables (rotary cosines and sines) that differ at that row.
        profile: One row per layer (-1: embedding): max abs and relative difference at the row, and the bound.
        own: Layers that differ at that row when they are given the other path's input; None where it was not tried.
    """

    layer: int | None
    site: str | None
    equal_before: tuple[str, ...]
    tables: tuple[str, ...]
    profile: pd.DataFrame
    own: tuple[int, ...] | None = None


def layer_profile(ours: Trace, theirs: Trace, position: int, limits: "Limits") -> pd.DataFrame:
    """Difference of what enters block 0 and of every block's output at one position, beside its bound."""
    rows = []
    pick = _batch_rows(ours, theirs)
    for name in theirs.calls:
        if name != "embedding" and not name.startswith("block "):
            continue
        layer = EMBEDDING if name == "embedding" else int(name.split()[1])
        size, scale = _difference(ours, theirs, name, position, pick)
        rows.append({"layer": layer, "max_abs": size, "rel_linf": size / scale if scale else 0.0})
        rows[-1]["bound"] = limits(name, position)
    columns = ["layer", "max_abs", "rel_linf", "bound"]
    return pd.DataFrame(rows, columns=columns).sort_values("layer", ignore_index=True)


def first_layer(profile: pd.DataFrame) -> int | None:
    """The first layer whose difference is beyond its bound."""
    over = profile[profile["max_abs"] > profile["bound"]]
    return int(over["layer"].iloc[0]) if len(over) else None


def differing_tables(ours: Trace, theirs: Trace, position: int, limits: "Limits") -> tuple[str, ...]:
    """Position tables outside the blocks whose row differs."""
    pick = _batch_rows(ours, theirs)
    names = [n for n in theirs.calls if n != "embedding" and not n.startswith("block ") and n in ours.calls]
    return tuple(n for n in names if _difference(ours, theirs, n, position, pick)[0] > limits(n, position))


def first_site(
    ours: Trace, theirs: Trace, position: int, limits: "Limits", skip: Sequence[str] = ()
) -> tuple[str | None, tuple[str, ...]]:
    """The first module, in order of completion, whose row differs, and those before it that do not."""
    pick = _batch_rows(ours, theirs)
    equal: list[str] = []
    for name in theirs.order:
        if name == "embedding" or name.startswith("block ") or name in skip or name not in ours.calls:
            continue
        size, _ = _difference(ours, theirs, name, position, pick)
        if size > limits(name, position):
            return name, tuple(equal)
        equal.append(name)
    return None, tuple(equal)


@contextmanager
def same_inputs(models: Sequence[nn.Module], theirs: Trace) -> Iterator[None]:
    """Give every block of `models` the other path's input at the same positions, in a path that processes every token
    once, in order."""
    handles: list[Any] = []

    def give(rows: Tensor) -> Callable[..., Any]:
        done = 0

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal done
            given = [*args, *kwargs.values()]
            at = next(i for i, x in enumerate(given) if isinstance(x, Tensor) and x.is_floating_point())
            start, done = done, done + given[at].shape[-2]
            given[at] = rows[:, start:done].to(given[at]).reshape(given[at].shape)
            return tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))

        return hook

    try:
        for model in models:
            for layer, block in enumerate(find_blocks(model)[1]):
                rows = theirs.rows("embedding" if layer == 0 else f"block {layer - 1}")
                if rows is not None:
                    handles.append(block.register_forward_pre_hook(give(rows), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def can_swap_inputs(ours: Trace, theirs: Trace) -> bool:
    """Whether `same_inputs` means something: batch size 1, and our path processes every token exactly once."""
    calls, rows = ours.calls.get("block 0", []), theirs.rows("embedding")
    once = all(call.shape[0] == 1 for call in calls) and sum(call.shape[1] for call in calls) == ours.n_tokens
    return once and rows is not None and rows.shape[:2] == (1, theirs.n_tokens)


def wrong_layers(swapped: Trace, theirs: Trace, position: int, limits: "Limits") -> tuple[int, ...]:
    """Layers whose output at a position is beyond its bound, in a run with the other path's inputs."""
    profile = layer_profile(swapped, theirs, position, limits)
    over = profile[(profile["max_abs"] > profile["bound"]) & (profile["layer"] >= 0)]
    return tuple(int(layer) for layer in over["layer"])


def leaks(before: Trace, after: Trace, limits: "Limits") -> float:
    """By how many times its bound an earlier row of the longest pass moves when only the last token changed."""
    largest = 0.0
    for name in before.calls:
        if not name.startswith("block ") or name not in after.calls:
            continue
        a, b = before.longest(name), after.longest(name)
        if a.shape != b.shape or a.shape[1] < 2:
            continue
        moved, bound = _largest(a[:, :-1] - b[:, :-1]), limits(name, before.n_tokens - 2)
        largest = max(largest, moved / bound if bound else float(moved > 0))
    return largest


@dataclass(frozen=True)
class Spoiled:
    """Where a run stops being finite.

    Attributes:
        layer: The first block with NaN or infinity in its output, -1 for the embedding; None outside the blocks.
        site: The module, by name.
        largest_before: The largest magnitude among the outputs before it.
    """

    layer: int | None
    site: str
    largest_before: float


def first_nonfinite(trace: Trace) -> Spoiled | None:
    """The first module, in order of completion, with NaN or infinity; in a trace of the inside of a block, of those."""
    inner = [name for name in trace.order if name != "embedding" and not name.startswith("block ")]
    largest = 0.0
    for name in inner if trace.inside is not None else trace.order:
        calls = trace.calls[name]
        if not all(bool(call.isfinite().all()) for call in calls):
            layer = EMBEDDING if name == "embedding" else int(name.split()[1]) if name not in inner else trace.inside
            return Spoiled(layer, name, largest)
        largest = max(largest, *(_largest(call) for call in calls))
    return None


class Limits:
    """Bound of a module's row at a position: a multiple of its response to perturbed weights."""

    def __init__(self, plain: Trace | None, probes: Sequence[Trace], factor: float) -> None:
        self._plain, self._probes, self._factor = plain, probes, factor

    def __call__(self, name: str, position: int) -> float:
        """The bound; without probes, zero (any difference counts)."""
        if self._plain is None:
            return 0.0
        found = [_difference(probe, self._plain, name, position, (0, 0)) for probe in self._probes]
        return self._factor * max((size for size, _ in found), default=0.0)


def _difference(ours: Trace, theirs: Trace, name: str, position: int, pick: tuple[int, int]) -> tuple[float, float]:
    a, b = ours.rows(name), theirs.rows(name)
    if a is None or b is None or a.shape[-1] != b.shape[-1]:
        return 0.0, 0.0
    at = position - theirs.n_tokens  # from the end: a path may have fewer rows
    if -at > min(a.shape[1], b.shape[1]):
        return 0.0, 0.0
    x = a[pick[0] if a.shape[0] > pick[0] else 0, at].double()
    y = b[pick[1] if b.shape[0] > pick[1] else 0, at].double()
    return _largest(x - y), _largest(y)


def _batch_rows(ours: Trace, theirs: Trace) -> tuple[int, int]:
    """Which row of the larger batch is the other path's sequence: the one whose embeddings are nearest."""
    a, b = ours.rows("embedding"), theirs.rows("embedding")
    if a is None or b is None or a.shape[0] == b.shape[0] or a.shape[-1] != b.shape[-1]:
        return 0, 0
    n = min(a.shape[1], b.shape[1])
    gaps = (a[:, None, -n:].double() - b[None, :, -n:].double()).abs().sum((-1, -2))
    flat = int(gaps.argmin())
    return flat // b.shape[0], flat % b.shape[0]


def _largest(values: Tensor) -> float:
    """Largest magnitude; infinity where a value is not finite."""
    if values.numel() == 0:
        return 0.0
    largest = float(values.double().abs().max())
    return largest if largest == largest else float("inf")


def _as_rows(value: Any) -> Tensor | None:
    """The first floating tensor (or, for tables, all of one shape) as `[batch, row, feature]`."""
    items = [value] if isinstance(value, Tensor) else list(value) if isinstance(value, (tuple, list)) else []
    tensors = [item for item in items if isinstance(item, Tensor) and item.is_floating_point() and item.ndim >= 2]
    if not tensors:
        return None
    same = [t for t in tensors if t.shape == tensors[0].shape] if len(tensors) == 2 else tensors[:1]
    return torch.cat([t.reshape(*t.shape[:2], -1) if t.ndim > 2 else t[None] for t in same], dim=-1)
