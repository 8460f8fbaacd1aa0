"""Is the drift inherited with the KV state, or made afresh by the one-token computation? The 2 x 2 factorial.

At one step two things differ between the paths: the K and V rows of the earlier tokens (state), and whether the newest
row is computed alone or as the last of a full pass (computation). All four combinations are run:

                            computation: one token                      computation: full pass
    state: cached           the cached path                             full pass reading the cached path's old rows
    state: recomputed       one token reading the recomputed old rows   the recomputed path

The state of a step is the K and V rows of all positions before its newest token, as that path's attention reads them at
this very step, in every layer. With z_sc the logits (or the last residual) of a cell, and c, r, 1, F for the levels,

    drift      D = z_c1 - z_rF = I + N
    inherited  I = 1/2 [(z_c1 - z_r1) + (z_cF - z_rF)]          main effect of the state
    new        N = 1/2 [(z_c1 - z_cF) + (z_r1 - z_rF)]          main effect of the computation
    interaction  X = (z_c1 - z_r1) - (z_cF - z_rF)

evaluated in float64. The inherited share is <I, D> / <D, D>, that made afresh <N, D> / <D, D>; they add up to 1
and either can be negative or above 1. For KL(. || z_rF), a scalar v of each cell with v_rF = 0, the shares are the two
main effects of v (its Shapley values) over v_c1. Shares are NaN, and counted, where D is at or below its floor.

Controls: the off-diagonal cells are patches with proof; giving a path its own rows (identity) leaves its bits alone,
checked on the first sampled step; the diagonal cells are done again after the patches, bitwise the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechkv import guards
from mechkv.causal_run import CausalResult, Frames, Walks, run_prompts, walk
from mechkv.comparison import compare, compare_logits, kl, metric_floor
from mechkv.configs import check_kinds, chosen, require
from mechkv.guards import GuardLog, same_bits
from mechkv.interventions import Patch, check_untouched
from mechkv.patch_bench import PatchBench
from mechkv.paths import Path as PathName
from mechkv.paths import Step
from mechkv.sites import CACHE_SITES
from mechkv.sources import Pair
from mechkv.stats import cluster_bootstrap

CELLS: tuple[tuple[str, str], ...] = (
    ("cached", "one-token"),
    ("recomputed", "one-token"),
    ("cached", "full"),
    ("recomputed", "full"),
)
"""(state, computation); the first is the cached path, the last the recomputed path."""


@dataclass(frozen=True)
class FactorialConfig:
    """Which steps to take apart.

    Attributes:
        n_steps: Decode steps after the prompt, on the cached path's greedy tokens.
        every: Every so many of them, counted down from the last.
    """

    n_steps: int = 12
    every: int = 1

    def __post_init__(self) -> None:
        check_kinds(self)
        require(self.n_steps >= 1 and self.every >= 1, "steps", got=self, expected="n_steps, every >= 1")

    @property
    def sampled(self) -> list[int]:
        """The steps that are taken apart."""
        return list(range(self.n_steps, 0, -self.every))[::-1]


@dataclass(frozen=True)
class CausalFactorial(CausalResult):
    """Inherited KV state x computation.

    Attributes:
        frame: One row per prompt, step, quantity (`logits`, `residual`: after the last block) and cell (state,
            computation): its distance from the recomputed path (`kl`, `flip` for logits only), and whether it has the
            bits of the recomputed and of the cached path.
        effects: One row per prompt, step and quantity: norms of D, I, N, X relative to the recomputed value, shares of
            D, and for logits the shares of KL.
    """

    effects: pd.DataFrame

    KIND: ClassVar[str] = "causal_factorial"
    TABLES: ClassVar[tuple[str, ...]] = ("frame", "effects")
    CONFIG: ClassVar[type] = FactorialConfig

    def summary(self, seed: int = 0) -> pd.DataFrame:
        """Mean share per quantity and measure, with a 95 % interval over prompts, the steps that it rests on and those
        without any drift (`n_undefined`)."""
        long = self.effects.melt(["prompt", "step", "quantity"], list(SHARES), "measure", "share")
        long = long[(long["quantity"] == "logits") | ~long["measure"].str.startswith("kl")]
        defined = long[long["share"].notna()]
        keys = ["quantity", "measure"]
        counts = long.groupby(keys)["share"].agg(n_undefined=lambda v: int(v.isna().sum())).reset_index()
        if not len(defined):
            return counts.assign(estimate=math.nan, low=math.nan, high=math.nan, n_clusters=0, n_rows=0)
        return cluster_bootstrap(defined, "share", by=keys, seed=seed).merge(counts, on=keys)

    def bitwise(self) -> pd.DataFrame:
        """Per quantity and cell, the share of steps with the bits of the recomputed and of the cached path, among the
        steps where these two differ."""
        diagonal = self.frame[(self.frame["state"] == "cached") & (self.frame["computation"] == "one-token")]
        drifting = diagonal[~diagonal["equals_recomputed"]][["prompt", "step", "quantity"]]
        part = self.frame.merge(drifting, on=["prompt", "step", "quantity"])
        columns = {name: (name, "mean") for name in ("equals_recomputed", "equals_cached")}
        return (
            part.groupby(["quantity", "state", "computation"], sort=False)
            .agg(**columns, n=("step", "size"))
            .reset_index()
        )

    def plot(self) -> dict[str, Any]:
        """The figures of this result by name."""
        from mechkv import plots_patching

        return plots_patching.factorial_figures(self)


SHARES = ("inherited_share", "new_share", "kl_inherited_share", "kl_new_share")


def causal_factorial(
    model: TransformerBridge,
    prompts: Sequence[str | Tensor],
    config: FactorialConfig | None = None,
    *,
    folder: Path | str | None = None,
    walks: Walks | None = None,
    progress: bool | None = None,
) -> CausalFactorial:
    """Run the four cells on every prompt.

    Args:
        model: A bridge.
        prompts: Texts or `[pos]` token tensors.
        config: Which steps.
        folder: Keep finished prompts there and go on from what is there.
        walks: Share one walk of the paths with other experiments.
        progress: Show a progress bar; by default when standard error is a terminal.
    """
    config = chosen(config, FactorialConfig)

    def measure(number: int, prompt: Tensor, log: GuardLog) -> Frames:
        cells: list[dict[str, Any]] = []
        effects: list[dict[str, Any]] = []
        with PatchBench(model, "cached", log=log) as one, PatchBench(model, "recomputed", log=log) as full:
            for pair in walk(walks, model, prompt, config.n_steps, log):
                if pair.index in config.sampled:
                    steps = four_cells(one, full, pair, identity=pair.index == config.sampled[0])
                    for quantity, values in (("logits", _logits(steps)), ("residual", _residuals(steps))):
                        head = {"step": pair.index, "quantity": quantity}
                        cells += [head | row for row in _cell_rows(quantity, values)]
                        effects.append(head | _effects(quantity, values))
        return {"frame": pd.DataFrame(cells), "effects": pd.DataFrame(effects)}

    return run_prompts(
        CausalFactorial, model, prompts, config, measure, n_steps=config.n_steps, folder=folder, progress=progress
    )


def four_cells(one: PatchBench, full: PatchBench, pair: Pair, *, identity: bool = False) -> dict[tuple[str, str], Step]:
    """All four cells of one step; the diagonal ones are the paths themselves.

    Args:
        one: Bench of the cached path.
        full: Bench of the recomputed path.
        pair: The step of both paths.
        identity: Also give each path its own rows: nothing may change.
    """
    paths: tuple[PathName, ...] = ("cached", "recomputed")
    before = {path: pair.source(path).digest() for path in paths}
    cells = {
        ("cached", "one-token"): pair.cached,
        ("recomputed", "one-token"): one.patched(pair.cached, inherited_state(pair, "recomputed", "cached")),
        ("cached", "full"): full.patched(pair.recomputed, inherited_state(pair, "cached", "recomputed")),
        ("recomputed", "full"): pair.recomputed,
    }
    if identity:
        for bench, base in ((one, pair.cached), (full, pair.recomputed)):
            guards.check_repeat(base, bench.patched(base, inherited_state(pair, bench.path, bench.path)), bench.log)
            bench.log["identity_patch"] += 1
            bench.again(base)
    for path, digest in before.items():
        check_untouched(digest, pair.source(path).digest(), f"the {path} path of step {pair.index}", one.log)
    return cells


def inherited_state(pair: Pair, source: PathName, into: PathName) -> Patch:
    """The patch that gives `into` all old K and V rows of `source`."""
    return Patch(pair.source(source), into, CACHE_SITES, positions="past")


def _logits(steps: dict[tuple[str, str], Step]) -> list[Tensor]:
    return [steps[cell].logits for cell in CELLS]


def _residuals(steps: dict[tuple[str, str], Step]) -> list[Tensor]:
    return [steps[cell].activations["resid_post"][-1][-1] for cell in CELLS]


def _cell_rows(quantity: str, values: list[Tensor]) -> list[dict[str, Any]]:
    rows = []
    for (state, computation), value in zip(CELLS, values, strict=True):
        difference = compare(value, values[-1])
        row = {
            "state": state,
            "computation": computation,
            "rel_l2": math.nan if difference.rel_l2 is None else difference.rel_l2,
            "max_abs": math.nan if difference.max_abs is None else difference.max_abs,
            "equals_recomputed": same_bits(value, values[-1]),
            "equals_cached": same_bits(value, values[0]),
            "kl": math.nan,
            "flip": math.nan,
        }
        if quantity == "logits":
            found = compare_logits(value, values[-1])
            row |= {"kl": math.nan if found.kl is None else found.kl, "flip": float(bool(found.flip))}
        rows.append(row)
    return rows


def _effects(quantity: str, values: list[Tensor]) -> dict[str, Any]:
    """Main effects, interaction and shares of one step."""
    c1, r1, cf, rf = (value.double() for value in values)
    drift, inherited, new = c1 - rf, ((c1 - r1) + (cf - rf)) / 2, ((c1 - cf) + (r1 - rf)) / 2
    size = float(torch.linalg.vector_norm(rf))
    parts = {"drift": drift, "inherited": inherited, "new": new, "interaction": (c1 - r1) - (cf - rf)}
    row: dict[str, Any] = {name: float(torch.linalg.vector_norm(v)) / size for name, v in parts.items()}
    shares = dict.fromkeys(SHARES, math.nan)
    if row["drift"] > metric_floor("rel_l2", drift.numel(), row["drift"]):
        square = torch.dot(drift, drift)
        shares["inherited_share"] = float(torch.dot(inherited, drift) / square)
        shares["new_share"] = float(torch.dot(new, drift) / square)
    if quantity == "logits":
        shares |= _kl_shares(values)
    return row | shares


def _kl_shares(values: list[Float[Tensor, "d_vocab"]]) -> dict[str, float]:
    c1, r1, cf = (float(kl(value, values[-1])) for value in values[:3])
    if not c1 > metric_floor("kl", values[0].numel(), c1):
        return {}
    inherited = ((c1 - r1) + cf) / 2
    return {"kl_inherited_share": inherited / c1, "kl_new_share": 1 - inherited / c1}
