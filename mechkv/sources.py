"""Where do the values of a patch come from? The other path, another run, a tensor, or another prompt's difference.

A source answers, for a value that is being patched, with the rows it holds of the same site and layer and their
absolute positions. `Pair` is one step of both paths on the same tokens and the usual source; `pairs` walks them.

Conventions. A layer with a sliding window holds only the rows that the next token can see; `Held.sees_from` says from
which position on a row of the destination matters, so that rows beyond the window's reach need no source while any
other missing row is an error. The recomputed path's rows are those of its full pass over all tokens of the step, every
one of them, read where attention reads them.

Controls: sources keep references to what steps computed and never write; `digest` gives the SHA-256 of a step, so that
an analysis can prove that its sources are as they were.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechkv.cache import KVState
from mechkv.errors import InputError
from mechkv.guards import GuardLog
from mechkv.paths import At, Path, Step, lockstep
from mechkv.policies import TokenPolicy
from mechkv.sites import CACHE_SITES

if TYPE_CHECKING:
    from mechkv.recording import RunRecord


@dataclass(frozen=True)
class Held:
    """Rows of one site and layer at absolute positions; before `sees_from` they are out of the newest token's reach."""

    value: Shaped[Tensor, "..."]
    positions: range
    sees_from: int = 0


@runtime_checkable
class Source(Protocol):
    """Gives the rows to write."""

    def held(self, own: Tensor, at: At) -> Held | None:
        """What it holds for the site and layer of `at`, in the layout of `own`; None: nothing."""
        ...


class KVReader:
    """An intervention that changes nothing and remembers K and V as attention read them in the last pass."""

    sites = CACHE_SITES

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int], Held] = {}

    def __call__(self, value: Tensor, at: At) -> None:
        """Keep a reference."""
        assert at.layer is not None
        self.rows[at.site, at.layer] = Held(value.detach(), at.positions)


@dataclass(frozen=True)
class StepSource:
    """The values of one step.

    Attributes:
        step: Where activations come from.
        rows: K and V rows as attention read them, by site and layer.
    """

    step: Step
    rows: Mapping[tuple[str, int], Held]

    def held(self, own: Tensor, at: At) -> Held | None:
        """Rows of that site and layer."""
        if at.site in CACHE_SITES:
            assert at.layer is not None
            return self.rows.get((at.site, at.layer))
        values = self.step.activations.get(at.site)
        if values is None:
            return None
        return Held(values[0 if "." in at.site else at.layer or 0], self.step.positions)

    def digest(self) -> str:
        """SHA-256 of everything it holds."""
        return digest(self.step, self.rows)


@dataclass(frozen=True)
class RecordSource:
    """A recorded run (`mechkv.record`): at step t its row of step t; K/V need `keep_states=True`."""

    record: "RunRecord"

    def held(self, own: Tensor, at: At) -> Held | None:
        """Rows of that step."""
        record = self.record
        if not 0 <= at.step < record.n_steps:
            return None
        newest = int(record.positions[at.step])
        if at.site not in CACHE_SITES:
            values = record.activations.get(at.site)
            if values is None:
                return None
            row = values[0 if "." in at.site else at.layer or 0][at.step]
            return Held(row.to(own.device)[None], range(newest, newest + 1))
        if record.states is None:
            raise InputError(
                "the run kept no KV states", got="states=None", expected="one a step", remedy="keep_states=True."
            )
        assert at.layer is not None
        state = record.states[at.step]
        rows = (state.keys if at.site == "cache_k" else state.values)[at.layer].to(own.device)
        return Held(rows, state.positions(at.layer))


@dataclass(frozen=True)
class TensorSource:
    """Given tensors: (site, layer) -> rows with the absolute position of the first."""

    tensors: Mapping[tuple[str, int], tuple[Tensor, int]]

    def held(self, own: Tensor, at: At) -> Held | None:
        """The tensor of that site and layer."""
        found = self.tensors.get((at.site, -1 if at.layer is None else at.layer))
        if found is None:
            return None
        axis = 1 if at.site in CACHE_SITES else 0
        return Held(found[0], range(found[1], found[1] + found[0].shape[axis]))


@dataclass(frozen=True)
class ForeignSource:
    """Placebo: the patch of another prompt. Own value plus that prompt's difference between its paths, rows aligned at
    the newest token, rounded once; rows that the other prompt does not have stay as they are."""

    theirs: Source
    their_own: Source
    shift: int
    """Our newest position minus theirs."""

    def held(self, own: Tensor, at: At) -> Held | None:
        """Own rows, moved by the other prompt's difference."""
        there = At(
            at.path,
            at.step,
            at.site,
            at.layer,
            range(at.positions.start - self.shift, at.positions.stop - self.shift),
            at.n_before - self.shift,
        )
        a, b = self.theirs.held(own, there), self.their_own.held(own, there)
        if a is None or b is None:
            return None
        axis = 1 if at.site in CACHE_SITES else 0
        start = max(a.positions.start, b.positions.start, there.positions.start)
        stop = min(a.positions.stop, b.positions.stop, there.positions.stop)
        parts = [h.value.narrow(axis, start - h.positions.start, stop - start).double() for h in (a, b)]
        moved = own.clone()
        rows = moved.narrow(axis, start - there.positions.start, stop - start)
        rows.copy_((rows.double() + parts[0] - parts[1]).to(own.dtype))
        return Held(moved, at.positions)


@dataclass(frozen=True)
class Pair:
    """One step of both paths on the same tokens, with K and V as each path's attention read them."""

    cached: Step
    recomputed: Step
    recomputed_rows: Mapping[tuple[str, int], Held] = field(repr=False)

    @property
    def index(self) -> int:
        """Number of the step."""
        return self.cached.index

    def step(self, path: Path) -> Step:
        """That path's step."""
        return self.cached if path == "cached" else self.recomputed

    def source(self, path: Path) -> StepSource:
        """That path as the source of a patch."""
        return StepSource(self.step(path), self.rows(path))

    def rows(self, path: Path) -> Mapping[tuple[str, int], Held]:
        """K and V as that path's attention read them."""
        return self.recomputed_rows if path == "recomputed" else _cached_rows(self.cached)


def pairs(
    model: TransformerBridge,
    prompt: Int[Tensor, "pos"],
    *,
    policy: TokenPolicy,
    n_steps: int,
    sites: Sequence[str] = ("resid_post",),
    log: GuardLog | None = None,
) -> Iterator[Pair]:
    """Both paths in lockstep (`paths.lockstep`), with the K and V rows that patches need."""
    reader = KVReader()
    walk = lockstep(model, prompt, policy=policy, n_steps=n_steps, sites=sites, log=log, readers=(reader,))
    for cached, recomputed in walk:
        yield Pair(cached, recomputed, dict(reader.rows))


def _cached_rows(step: Step) -> dict[tuple[str, int], Held]:
    """What attention of a cached step read: the rows held before, and the new ones."""
    n_new, found = step.n_new, {}
    for site, before, after in (
        ("cache_k", step.kv_before.keys, step.kv.keys),
        ("cache_v", step.kv_before.values, step.kv.values),
    ):
        for layer, rows in enumerate(after):
            new = rows[:, rows.shape[1] - min(n_new, rows.shape[1]) :]
            rows = torch.cat([before[layer], new], dim=1) if before else new
            start = len(step.tokens) - rows.shape[1]
            found[site, layer] = Held(rows, range(start, len(step.tokens)), start)
    return found


def inherited(rows: Mapping[tuple[str, int], Held], like: KVState) -> KVState:
    """A KV state made of `rows`, at the positions that `like` holds."""

    def part(site: str, layer: int) -> Tensor:
        held, want = rows[site, layer], like.positions(layer)
        return held.value[:, want.start - held.positions.start : want.stop - held.positions.start]

    layers = range(len(like.keys))
    return KVState(
        tuple(part("cache_k", layer) for layer in layers),
        tuple(part("cache_v", layer) for layer in layers),
        like.n_tokens,
        like.n_prompt,
    )


def digest(step: Step, rows: Mapping[tuple[str, int], Held] | None = None) -> str:
    """SHA-256 over the bits of a step's logits, activations, KV states and, if given, K/V rows."""
    tensors = [step.logits, *(value for values in step.activations.values() for value in values)]
    for state in (step.kv_before, step.kv):
        tensors += [*state.keys, *state.values]
    tensors += [held.value for held in (rows or {}).values()]
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return found.hexdigest()
