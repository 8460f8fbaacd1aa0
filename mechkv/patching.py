"""Which layer's residual stream, K or V has to be replaced for one path to give the other path's logits? The sweep.

At one step of the destination path, one target at a time is given the source path's values:

    residual    `resid_post`, the newest row          k, v, kv    the K, V, or K and V rows of all earlier positions

in one layer (`layer` 0, 1, ...), or in all layers at once (`layer` -1, where also parts of the KV state are patched:
rows written by the prompt or by decode steps, the lower or the upper half of the layers, and everything together).
Recovery is that of `patch_bench`: 1 where the patched logits are those of the source path, 0 where nothing happened.

**Same step and later steps are different questions.** The residual stream after the last layer *is* what the logits
are computed from, so patching it restores that step's logits by construction and says nothing about causes; nothing of
it stays in the KV state of that layer's successors, there are none. So the sweep also takes the next steps from the
patched state, unpatched (`later` 1, 2, ...; destination `cached` only, since the recomputed path carries nothing over).
Where the two paths held the same bits in all layers of what is patched, the patch had nothing to change, and a drift
that is born later is not one that it failed to repair: such later steps are counted (`n_idle`), not averaged.

A part S of the KV state is *sufficient* as far as S alone recovers, and *necessary* as far as all but S does not
(`PatchSweep.parts`).

Controls (`kind`): `identity` gives the destination its own values (bitwise no-op); `noise` of the norm of the real
change, `shuffled` rows, the `foreign` patch of another prompt, and `one_ulp`, one cached V element moved to the next
representable value; `dose` patches between 0 and 1. Every patched step is proven (`interventions.check_landed`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pandas as pd
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechkv.causal_run import CausalResult, Frames, Walks, run_prompts
from mechkv.configs import check_kinds, chosen, require
from mechkv.guards import GuardLog, check_repeat, same_bits
from mechkv.interventions import Change, Patch, check_untouched
from mechkv.patch_bench import DISTANCES, PatchBench, distances, floor, recovery
from mechkv.paths import Path as PathName
from mechkv.paths import Step
from mechkv.placebos import noise, one_ulp, shuffled
from mechkv.sites import CACHE_SITES
from mechkv.sources import ForeignSource, Pair, Source
from mechkv.stats import cluster_bootstrap

ALL_LAYERS = -1
TARGETS: dict[str, tuple[str, ...]] = {
    "residual": ("resid_post",),
    "k": ("cache_k",),
    "v": ("cache_v",),
    "kv": CACHE_SITES,
}
COMPLEMENTS = {
    "k": "v",
    "v": "k",
    "kv_prefill": "kv_decode",
    "kv_decode": "kv_prefill",
    "kv_lower": "kv_upper",
    "kv_upper": "kv_lower",
}
"""Part of the KV state -> all but it."""
PLACEBOS = ("noise", "shuffled", "foreign", "one_ulp")


@dataclass(frozen=True)
class SweepConfig:
    """What to patch.

    Attributes:
        n_steps: Decode steps walked, on the cached path's greedy tokens.
        at: Steps that are patched; by default the last that leaves room for `later`.
        later: Steps after the patched one that are followed, unpatched.
        into: The destination path; the other one is the source.
        targets: Among `residual`, `k`, `v`, `kv`.
        every: Every so many layers, counted down from the last.
        placebos: Among `noise`, `shuffled`, `foreign`, `one_ulp`; with all layers patched at once.
        layer_noise: Also the noise placebo layer by layer.
        doses: Doses strictly between 0 and 1, with all layers patched at once.
        seed: Draws the placebos.
    """

    n_steps: int = 8
    at: tuple[int, ...] | None = None
    later: int = 1
    into: Literal["cached", "recomputed"] = "cached"
    targets: tuple[str, ...] = ("residual", "k", "v", "kv")
    every: int = 1
    placebos: tuple[str, ...] = PLACEBOS
    layer_noise: bool = True
    doses: tuple[float, ...] = (0.25, 0.5, 0.75)
    seed: int = 0

    def __post_init__(self) -> None:
        check_kinds(self)
        require(self.into in ("cached", "recomputed"), "path", got=self.into, expected="cached or recomputed")
        require(set(self.targets) <= set(TARGETS), "targets", got=self.targets, expected=tuple(TARGETS))
        require(set(self.placebos) <= set(PLACEBOS), "placebos", got=self.placebos, expected=PLACEBOS)
        require(self.n_steps >= 1, "n_steps", got=self.n_steps, expected="1 or more", remedy="Step 0 cannot drift.")
        require(
            self.every >= 1, "every so many layers", got=self.every, expected="1 or more", remedy="1 takes them all."
        )
        require(self.later >= 0, "later", got=self.later, expected="0 or more", remedy="0 follows no later step.")
        require(
            self.into == "cached" or self.later == 0,
            "later steps of the recomputed path",
            got=f"later={self.later}",
            expected="later=0",
            remedy="It carries nothing from one step to the next, so a patch ends with its step.",
        )
        require(all(0 < dose < 1 for dose in self.doses), "doses", got=self.doses, expected="between 0 and 1")
        fits = all(1 <= step <= self.n_steps - self.later for step in self.sampled)
        require(fits and bool(self.sampled), "steps", got=self.sampled, expected=f"1..{self.n_steps - self.later}")

    @property
    def sampled(self) -> tuple[int, ...]:
        """The steps that are patched."""
        return (self.n_steps - self.later,) if self.at is None else self.at


@dataclass(frozen=True)
class PatchSweep(CausalResult):
    """Recovery by target and layer.

    Attributes:
        frame: One row per prompt, patched step, target, layer (-1: all), kind, dose and steps later: distances of the
            patched logits from the source path's, those of the unpatched destination, recoveries (NaN where the
            denominator is at or below its floor), bit equality with either, and what was written.
    """

    KIND: ClassVar[str] = "patch_sweep"
    CONFIG: ClassVar[type] = SweepConfig

    def summary(self, metric: str = "rel_l2", seed: int = 0) -> pd.DataFrame:
        """Mean recovery per kind, dose, target, layer and steps later, with a 95 % interval over prompts. Rows
        without a defined recovery (`n_undefined`) and later steps of an `idle` patch (`n_idle`) are counted instead."""
        keys, value = ["kind", "dose", "target", "layer", "later"], f"recovery_{metric}"
        table = self.frame.assign(idle=self.idle())
        defined = table[table[value].notna() & ~table["idle"]]
        counts = table.assign(undefined=table[value].isna() & ~table["idle"]).groupby(keys, sort=False)
        rest = counts.agg(
            equals_source=("equals_source", "mean"),
            unchanged=("unchanged", "mean"),
            n_undefined=("undefined", "sum"),
            n_idle=("idle", "sum"),
        ).reset_index()
        if not len(defined):
            return rest.assign(estimate=math.nan, low=math.nan, high=math.nan, n_clusters=0, n_rows=0, metric=metric)
        table = cluster_bootstrap(defined, value, by=keys, seed=seed)
        return rest.merge(table, on=keys, how="left").assign(metric=metric)

    def idle(self) -> pd.Series:
        """Per row of the frame, whether it is a later step at whose patched step the paths differed nowhere in what is
        patched (K and V rows, residual stream, or both), in any layer."""
        table = self.frame[["prompt", "step"]].assign(family=self.frame["target"].map(_family))
        changes = self.frame["n_changed"].where(self.frame["kind"] == "patch", 0)
        most = changes.groupby([table[name] for name in table]).transform("max")
        return (self.frame["later"] > 0) & (most == 0)

    def parts(self, metric: str = "rel_l2", seed: int = 0) -> pd.DataFrame:
        """Sufficiency (recovery of S alone) and necessity (1 - recovery of all but S) of each part S of the KV state,
        to be set beside what the whole state recovers (target `kv`)."""
        table = self.summary(metric, seed)
        table = table[(table["kind"] == "patch") & (table["layer"] == ALL_LAYERS)]
        alone = table.set_index(["later", "target"])["estimate"]
        rows = [
            {"later": later, "part": part, "sufficiency": alone[later, part], "necessity": 1 - alone[later, other]}
            for later in sorted(set(table["later"]))
            for part, other in COMPLEMENTS.items()
            if (later, part) in alone.index and (later, other) in alone.index
        ]
        return pd.DataFrame(rows, columns=["later", "part", "sufficiency", "necessity"])

    def plot(self) -> dict[str, Any]:
        """The figures of this result by name."""
        from mechkv import plots_patching

        return plots_patching.sweep_figures(self)


def _family(target: str) -> str:
    return target if target in ("residual", "everything") else "kv"


@dataclass(frozen=True)
class Trial:
    """One patched step of a sweep."""

    target: str
    layer: int
    patches: tuple[Patch, ...] = field(repr=False)
    kind: str = "patch"
    dose: float = 1.0


def patch_sweep(
    model: TransformerBridge,
    prompts: Sequence[str | Tensor],
    config: SweepConfig | None = None,
    *,
    folder: Path | str | None = None,
    walks: Walks | None = None,
    progress: bool | None = None,
) -> PatchSweep:
    """Sweep over layers and targets on every prompt; arguments as for `causal_factorial`. The `foreign` placebo takes
    the prompt before (the first takes the last) and is left out when there is one prompt only."""
    config = chosen(config, SweepConfig)
    walks = walks or Walks(model, limit=2)
    seen: list[Tensor] = []

    def measure(number: int, prompt: Tensor, log: GuardLog) -> Frames:
        foreign: list[Pair] | None = None
        if "foreign" in config.placebos and len(prompts) > 1:
            foreign = walks.walk(seen[number - 1], config.n_steps, GuardLog())
        steps = walks.walk(prompt, config.n_steps, log)
        rows: list[dict[str, Any]] = []
        with PatchBench(model, config.into, log=log) as bench:
            for index in config.sampled:
                other = None if foreign is None else foreign[index]
                rows += sweep_step(bench, steps[index : index + config.later + 1], config, other, number)
        return {"frame": pd.DataFrame(rows)}

    return run_prompts(
        PatchSweep,
        model,
        prompts,
        config,
        measure,
        n_steps=config.n_steps,
        folder=folder,
        progress=progress,
        fed=seen,
    )


def sweep_step(
    bench: PatchBench, steps: Sequence[Pair], config: SweepConfig, foreign: Pair | None = None, label: int = 0
) -> list[dict[str, Any]]:
    """All trials at the step of `steps[0]`, followed through the others.

    Args:
        bench: Bench of the destination path.
        steps: The patched step and the later ones.
        config: What to patch.
        foreign: The same step of another prompt, for the placebo.
        label: Names the prompt in the seeds of the placebos.
    """
    into: PathName = config.into
    source: PathName = "recomputed" if into == "cached" else "cached"
    pair, trials = steps[0], list(_trials(steps[0], config, foreign, label))
    digests = {path: pair.source(path).digest() for path in (source, into)}
    logits: list[list[Tensor]] = [[] for _ in steps]
    rows: list[dict[str, Any]] = []
    for trial in trials:
        step = bench.patched(pair.step(into), *trial.patches)
        if trial.kind == "identity":
            check_repeat(pair.step(into), step, bench.log)
            bench.log["identity_patch"] += 1
        rows.append(
            {
                "step": pair.index,
                "target": trial.target,
                "layer": trial.layer,
                "kind": trial.kind,
                "dose": trial.dose,
                "n_written": sum(write.n_written for write in bench.writes),
                "n_changed": sum(write.n_changed for write in bench.writes),
                "change_norm": math.hypot(*(write.change_norm for write in bench.writes)),
            }
        )
        logits[0].append(step.logits)
        for later, follow in enumerate(steps[1:], start=1):
            step = bench.plain(follow.cached.tokens, step.kv, follow.index)
            logits[later].append(step.logits)
    bench.again(pair.step(into))
    for path, digest in digests.items():
        check_untouched(digest, pair.source(path).digest(), f"the {path} path of step {pair.index}", bench.log)
    return [
        head | {"later": later} | row
        for later, follow in enumerate(steps)
        for head, row in zip(rows, _measured(logits[later], follow.step(into), follow.step(source)), strict=True)
    ]


def _measured(logits: list[Tensor], unpatched: Step, clean: Step) -> Iterator[dict[str, Any]]:
    table = distances([*logits, unpatched.logits], clean.logits)
    base = {name: float(table[name][-1]) for name in DISTANCES}
    floors = {name: floor(name, clean.logits.numel(), base[name]) for name in DISTANCES}
    for i, vector in enumerate(logits):
        row: dict[str, Any] = {name: float(table[name][i]) for name in DISTANCES}
        row |= {f"{name}_unpatched": base[name] for name in DISTANCES}
        row |= {f"recovery_{name}": recovery(row[name], base[name], floors[name]) for name in DISTANCES}
        yield row | {
            "equals_source": bool(table["bitwise_equal"][i]),
            "unchanged": same_bits(vector, unpatched.logits),
            "flip": bool(table["flip"][i]),
        }


def _trials(pair: Pair, config: SweepConfig, foreign: Pair | None, label: int) -> Iterator[Trial]:
    into: PathName = config.into
    source = pair.source("recomputed" if into == "cached" else "cached")
    n_layers = len(pair.cached.kv.keys)
    layers = range(n_layers - 1, -1, -config.every)
    everything: list[str] = [target for target in ("residual", "kv") if target in config.targets]
    for target in everything:
        yield Trial(target, ALL_LAYERS, _patches(pair.source(into), into, target), "identity")
    for layer in reversed(layers):
        for target in config.targets:
            yield Trial(target, layer, _patches(source, into, target, layers=(layer,)))
            if config.layer_noise and target in everything:
                hiss = noise(config.seed, label, target, layer)
                yield Trial(target, layer, _patches(source, into, target, layers=(layer,), change=hiss), "noise")
    for target in config.targets:
        yield Trial(target, ALL_LAYERS, _patches(source, into, target))
    yield from _parts(pair, source, config, n_layers)
    for target in everything:
        for dose in config.doses:
            yield Trial(target, ALL_LAYERS, _patches(source, into, target, dose=dose), "dose", dose)
        yield from _placebos(pair, source, config, target, foreign, label)


def _parts(pair: Pair, source: Source, config: SweepConfig, n_layers: int) -> Iterator[Trial]:
    """Parts of the KV state, and everything at once (every row and the residual stream)."""
    into: PathName = config.into
    n_prompt = pair.cached.kv.n_prompt
    if "kv" not in config.targets:
        return
    half = n_layers // 2
    yield Trial("kv_lower", ALL_LAYERS, _patches(source, into, "kv", layers=range(half)))
    yield Trial("kv_upper", ALL_LAYERS, _patches(source, into, "kv", layers=range(half, n_layers)))
    yield Trial("kv_prefill", ALL_LAYERS, (Patch(source, into, CACHE_SITES, positions="prefill", n_prompt=n_prompt),))
    if pair.index > 1:
        decode = Patch(source, into, CACHE_SITES, positions="decode", n_prompt=n_prompt)
        yield Trial("kv_decode", ALL_LAYERS, (decode,))
    rows = Patch(source, into, CACHE_SITES, positions=range(pair.cached.kv.n_tokens) if into == "cached" else "past")
    yield Trial("everything", ALL_LAYERS, (rows, *_patches(source, into, "residual")))


def _placebos(
    pair: Pair, source: Source, config: SweepConfig, target: str, foreign: Pair | None, label: int
) -> Iterator[Trial]:
    into: PathName = config.into
    for kind in config.placebos:
        if kind == "noise":
            yield Trial(
                target, ALL_LAYERS, _patches(source, into, target, change=noise(config.seed, label, target)), kind
            )
        elif kind == "shuffled" and target == "kv":
            change = shuffled(config.seed, label)
            yield Trial(target, ALL_LAYERS, _patches(source, into, target, change=change), kind)
        elif kind == "foreign" and foreign is not None:
            shift = pair.cached.kv.n_tokens - foreign.cached.kv.n_tokens
            there: tuple[PathName, PathName] = (
                ("recomputed", "cached") if into == "cached" else ("cached", "recomputed")
            )
            other = ForeignSource(foreign.source(there[0]), foreign.source(there[1]), shift)
            yield Trial(target, ALL_LAYERS, _patches(other, into, target), kind)
        elif kind == "one_ulp" and target == "kv":
            layer = len(pair.cached.kv.keys) // 2
            patch = Patch(source, into, ("cache_v",), layers=(layer,), positions="past", change=one_ulp((0, -1, 0)))
            yield Trial("v", layer, (patch,), kind)


def _patches(
    source: Source,
    into: PathName,
    target: str,
    *,
    layers: Sequence[int] | range | None = None,
    change: Change | None = None,
    dose: float = 1.0,
) -> tuple[Patch, ...]:
    where: Literal["current", "past"] = "current" if target == "residual" else "past"
    return (Patch(source, into, TARGETS[target], layers=layers, positions=where, change=change, dose=dose),)
