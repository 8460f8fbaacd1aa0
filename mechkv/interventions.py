"""What happens to one path when some of its values are replaced by the other path's? The patching engine.

A `Patch` takes rows from a source (`mechkv.sources`) and writes them into the path that runs (the destination):

    destination := own + a (change(own, other) - own),   a = dose, change(own, other) = other unless a placebo is named

at the sites, layers, KV heads, positions and steps that it names, and nowhere else. Dose 0 gives the destination's own
bits, dose 1 those of the source; between them the blend is evaluated in float64 and rounded once.

Conventions. Positions are absolute. "new K" is `cache_k` at `positions="current"`, "cached K" is `cache_k` at
`positions="past"`, likewise V: `cache_k` and `cache_v` are what attention is about to read, after rotation, on either
path. An edit of the cache state stays in the state, so later steps of the cached path inherit it.

Controls. `Board` runs patches and notes every write; `check_landed` proves bit by bit, for every patched step, that the
rest of the model saw what was written, that nothing else was written (old K/V rows, and everything upstream of the
first write, are those of the unpatched step), and counts it in the guard log. Placebos are in `mechkv.placebos`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Shaped
from torch import Tensor

from mechkv.errors import GuardError, InputError
from mechkv.guards import GuardLog, same_bits
from mechkv.paths import At, Step
from mechkv.sites import AXES, CACHE_SITES
from mechkv.sources import Source

Change = Callable[[Shaped[Tensor, "..."], Shaped[Tensor, "..."], At, int], Tensor]
"""(own rows, the source's rows, where, position axis) -> the rows to write."""

_NAMED = ("all", "current", "past", "prefill", "decode")


@dataclass(frozen=True)
class Patch:
    """Rows of a source, written into the path that runs. An `Intervention` by itself; `Board` adds the proof.

    Attributes:
        source: Where values come from.
        into: The path that is patched; asked on another path it raises.
        sites: Sites with a position axis: residual sites, `attn_out`, `mlp_out`, `q`, `k`, `v`, `z`, `cache_k`,
            `cache_v`.
        layers: Layers; None: all.
        kv_heads: KV heads, for sites that have them; None: all.
        positions: `all` rows; `current`: those of the newest tokens; `past`: older ones; `prefill`, `decode`: past rows
            by provenance (needs `n_prompt`); or absolute positions.
        steps: Steps at which it acts, for instance `{5}` or `range(5, 99)`; None: every step.
        dose: Share of the way from the destination's own value to the new one, 0 to 1.
        change: A placebo instead of the source's own rows.
        n_prompt: Prompt length, for `prefill` and `decode`.
    """

    source: Source
    into: str
    sites: tuple[str, ...]
    layers: Collection[int] | None = None
    kv_heads: tuple[int, ...] | None = None
    positions: str | range | tuple[int, ...] = "all"
    steps: Collection[int] | None = None
    dose: float = 1.0
    change: Change | None = None
    n_prompt: int | None = None

    def __post_init__(self) -> None:
        if self.into not in ("cached", "recomputed"):
            raise InputError("unknown path", got=self.into, expected="'cached' or 'recomputed'", remedy="Name one.")
        if not self.sites or any("pos" not in AXES.get(site, "pos") for site in self.sites):
            raise InputError(
                "these sites cannot be patched", got=self.sites, expected="sites with rows", remedy="See sites.AXES."
            )
        if not 0.0 <= self.dose <= 1.0:
            raise InputError("dose", got=self.dose, expected="0 to 1", remedy="1 writes the source's own bits.")
        if isinstance(self.positions, str) and self.positions not in _NAMED:
            raise InputError("positions", got=self.positions, expected=f"{_NAMED} or positions", remedy="Name some.")
        if self.positions in ("prefill", "decode") and self.n_prompt is None:
            raise InputError("no prompt length", got="n_prompt=None", expected="an integer", remedy="Give n_prompt.")
        if self.kv_heads is not None and any("n_kv" not in AXES.get(site, "") for site in self.sites):
            raise InputError(
                "KV heads of a site without them", got=self.sites, expected="cache_k, cache_v, k or v", remedy="Drop."
            )

    def __call__(self, value: Tensor, at: At) -> Tensor | None:
        """The patched value, or None where the patch does not act."""
        if not self.acts(at):
            return None
        if at.path != self.into:
            raise InputError("a patch on the wrong path", got=at.path, expected=self.into, remedy="Name `into` right.")
        index, theirs = self._rows(value, at)
        if not index.numel():
            return None
        axis = position_axis(at.site)
        own = self._heads(value, at.site).index_select(axis, index)
        new = theirs if self.change is None else self.change(own, theirs, at, axis)
        new = own if self.dose == 0.0 else new if self.dose == 1.0 else _blend(own, new, self.dose)
        target = self._heads(value, at.site).index_copy(axis, index, new)
        if self.kv_heads is None:
            return target
        return value.index_copy(_head_axis(at.site), self._head_index(value), target)

    def acts(self, at: At) -> bool:
        """Whether this site, layer and step are meant."""
        return (
            at.site in self.sites
            and (self.layers is None or at.layer in self.layers)
            and (self.steps is None or at.step in self.steps)
        )

    def wanted(self, at: At) -> list[int]:
        """Absolute positions that are meant, among those the value has."""
        where, have = self.positions, at.positions
        if where == "all":
            return list(have)
        if where == "current":
            return [p for p in have if p >= at.n_before]
        if where == "past":
            return [p for p in have if p < at.n_before]
        if isinstance(where, str):
            assert self.n_prompt is not None
            old = where == "prefill"
            return [p for p in have if p < at.n_before and (p < self.n_prompt) == old]
        return [p for p in have if p in where]

    def written(self, value: Tensor, at: At) -> Tensor:
        """A mask of the value's elements that the patch may write."""
        mask = torch.zeros_like(value, dtype=torch.bool)
        index, _ = self._rows(value, at)
        part = torch.zeros_like(self._heads(mask, at.site)).index_fill(position_axis(at.site), index, True)
        return part if self.kv_heads is None else mask.index_copy(_head_axis(at.site), self._head_index(value), part)

    def _rows(self, value: Tensor, at: At) -> tuple[Tensor, Tensor]:
        """Row numbers in `value`, and the source's rows for them."""
        wanted = self.wanted(at)
        held = self.source.held(value, at)
        if held is None:
            raise InputError(
                f"the source has nothing for {at.site}, layer {at.layer}, step {at.step}",
                got=type(self.source).__name__,
                expected="values of that site and step",
                remedy="Record the site on the source path, or restrict the patch.",
            )
        if held.value.dtype != value.dtype or held.value.device != value.device:
            raise InputError(
                f"the source of a patch at {at.site} is another kind of tensor",
                got=f"{held.value.dtype} on {held.value.device}",
                expected=f"{value.dtype} on {value.device}",
                remedy="Nothing is cast for you.",
            )
        lacking = [p for p in wanted if p not in held.positions]
        visible = [p for p in lacking if p >= held.sees_from]
        if visible:
            raise InputError(
                f"the source lacks rows of {at.site}, layer {at.layer}",
                got=f"positions {held.positions.start}..{held.positions.stop - 1}",
                expected=f"position {visible[0]} among them",
                remedy="Restrict `positions`, or take a source that holds these rows.",
            )
        rows = [p for p in wanted if p in held.positions]
        index = torch.tensor([p - at.positions.start for p in rows], dtype=torch.long, device=value.device)
        theirs = torch.tensor([p - held.positions.start for p in rows], dtype=torch.long, device=value.device)
        return index, self._heads(held.value, at.site).index_select(position_axis(at.site), theirs)

    def _heads(self, value: Tensor, site: str) -> Tensor:
        if self.kv_heads is None:
            return value
        n_kv = value.shape[_head_axis(site)]
        if any(not 0 <= head < n_kv for head in self.kv_heads):
            raise InputError("KV heads", got=self.kv_heads, expected=f"0..{n_kv - 1}", remedy="Count KV heads.")
        return value.index_select(_head_axis(site), self._head_index(value))

    def _head_index(self, value: Tensor) -> Tensor:
        return torch.tensor(self.kv_heads, dtype=torch.long, device=value.device)


def position_axis(site: str) -> int:
    """The position axis of a site's value, without batch axis (a full hook name: 0)."""
    return AXES.get(site, "pos").split().index("pos")


def _head_axis(site: str) -> int:
    return AXES[site].split().index("n_kv")


def _blend(own: Tensor, other: Tensor, dose: float) -> Tensor:
    mixed = ((1.0 - dose) * own.double() + dose * other.double()).to(own.dtype)
    return torch.where(own == other, other, mixed)


# ---------------------------------------------------------------------------------------------------------- proof


@dataclass(frozen=True)
class Write:
    """One write of a patched pass: where, how many elements were written and how many changed, and the new value.

    `change_norm` is the L2 norm of the change.
    """

    at: At
    value: Tensor
    n_written: int
    n_changed: int
    change_norm: float


@dataclass
class Board:
    """Patches that can be exchanged between passes, so that a sweep attaches its hooks once; notes every write.

    Attributes:
        sites: Sites at which it will be asked.
        active: Patches in force, applied in order.
        writes: Writes since the last `arm`.
    """

    sites: tuple[str, ...]
    active: tuple[Patch, ...] = ()
    writes: list[Write] = field(default_factory=list)

    def arm(self, *patches: Patch) -> None:
        """Put these patches in force and forget the writes so far."""
        unknown = {site for patch in patches for site in patch.sites} - set(self.sites)
        if unknown:
            raise InputError("sites of a patch", got=sorted(unknown), expected=f"some of {self.sites}", remedy="Add.")
        self.active, self.writes = patches, []

    def __call__(self, value: Tensor, at: At) -> Tensor | None:
        """What the patches in force make of the value."""
        current, allowed = value, None
        for patch in self.active:
            new = patch(current, at)
            if new is not None:
                mask = patch.written(current, at)
                allowed = mask if allowed is None else allowed | mask
                current = new
        if allowed is None:
            return None
        changed = bits_differ(value, current)
        if bool((changed & ~allowed).any()):
            raise GuardError(
                f"a patch wrote more than it named at {at.site}, layer {at.layer}",
                got=f"{int((changed & ~allowed).sum())} elements outside the patch changed",
                expected="none",
                remedy="This is a fault of the patching engine or of a custom change: do not use the numbers.",
            )
        norm = float(torch.linalg.vector_norm((current.double() - value.double())[changed]))
        self.writes.append(Write(at, current, int(allowed.sum()), int(changed.sum()), norm))
        return current


def bits_differ(a: Shaped[Tensor, "..."], b: Shaped[Tensor, "..."]) -> Tensor:
    """Element by element, whether the bits differ."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.view(integers) != b.view(integers)


def check_landed(step: Step, writes: Sequence[Write], unpatched: Step, log: GuardLog) -> None:
    """The proof of one patched step; sites that were patched through hooks must be recorded in `step`.

    Args:
        step: The patched step.
        writes: What `Board` noted during it.
        unpatched: The same step of the same state without patches.
        log: Counts `patch_landed` (writes) and `nothing_else_written` (steps).
    """
    if not writes:
        raise GuardError("no patch acted", got="no write", expected="at least one", remedy="Check steps and layers.")
    last = {(write.at.site, write.at.layer): write for write in writes}
    for (site, layer), write in last.items():
        seen = _seen(step, site, layer, write.value)
        if not same_bits(seen[0], seen[1]):
            raise GuardError(
                f"a patch did not land at {site}, layer {layer}, step {step.index}",
                got="other values than were written",
                expected="the written bits",
                remedy="Another intervention or hook writes to the same place after the patch.",
            )
    log["patch_landed"] += len(writes)
    _check_rest(step, last, unpatched)
    log["nothing_else_written"] += 1


def _seen(step: Step, site: str, layer: int | None, value: Tensor) -> tuple[Tensor, Tensor]:
    """(what the step shows, what was written) at one place."""
    if site in CACHE_SITES:
        assert layer is not None
        shown = (step.kv.keys if site == "cache_k" else step.kv.values)[layer]
        return shown, value[:, value.shape[1] - shown.shape[1] :]
    if site not in step.activations:
        raise InputError(
            "a patched site is not recorded", got=site, expected="it among the sites of the run", remedy="Record it."
        )
    shown, axis = step.activations[site][0 if "." in site else layer or 0], position_axis(site)
    n = shown.shape[axis]
    return shown, value.narrow(axis, value.shape[axis] - n, n)


def _check_rest(step: Step, writes: dict[tuple[str, int | None], Write], unpatched: Step) -> None:
    layers = [layer for _, layer in writes if layer is not None]
    first = min(layers) if layers else 0
    for layer in range(len(step.kv.keys)):
        for site, after, plain, before in (
            ("cache_k", step.kv.keys, unpatched.kv.keys, step.kv_before.keys),
            ("cache_v", step.kv.values, unpatched.kv.values, step.kv_before.values),
        ):
            if (site, layer) in writes:
                continue
            old = after[layer].shape[1] - (len(step.tokens) - step.kv_before.n_tokens) if before else 0
            same = layer >= first or same_bits(after[layer], plain[layer])
            kept = old <= 0 or same_bits(after[layer][:, :old], before[layer][:, before[layer].shape[1] - old :])
            if not (same and kept):
                raise _leak(f"{site}, layer {layer}", step)
    for site, values in step.activations.items():
        if "." not in site and not all(
            same_bits(values[layer], unpatched.activations[site][layer]) for layer in range(first)
        ):
            raise _leak(f"{site} below layer {first}", step)


def _leak(where: str, step: Step) -> GuardError:
    return GuardError(
        f"something else than the patch was written at step {step.index}",
        got=f"a difference from the unpatched step in {where}",
        expected="the bits of the unpatched step",
        remedy="Another hook is active, or the model keeps state between calls.",
    )


def check_untouched(before: str, after: str, what: str, log: GuardLog) -> None:
    """Source, destination or weights have the same digest after the patches as before."""
    if before != after:
        raise GuardError(f"{what} changed", got=after[:12], expected=before[:12], remedy="A patch wrote in place.")
    log["untouched"] += 1


__all__ = [
    "Board",
    "Change",
    "Patch",
    "Write",
    "bits_differ",
    "check_landed",
    "check_untouched",
    "position_axis",
]
