"""Which path is nearer the truth?

The truth is the same function, the 16-bit weights as they are, in float64 arithmetic (the oracle: a `recast`). At
each step, on the same tokens, D(path) = KL(oracle || path) in nats, and the relative L2 distance of the logits. The
nearer path is the one with the smaller D; a difference of the two D within the oracle's own floor, or equal logits on
both paths, is a tie. "Decoding with the cache is more accurate" means here: the cached path is the nearer one at more
than half of the steps that are not ties, and D(recomputed) - D(cached) is positive on average.

Conventions: teacher-forced on the cached path's greedy tokens of the 16-bit model. The oracle walks its cached path;
its floor is D between its own two paths on every `floor_every`-th step (float64 has float32 islands: softmax, rotary
tables, norms; so the floor is 1e-7 or so in the logits, not 1e-16).
Controls: step 0, where both paths are one computation, must be a tie everywhere; a sample of steps is done twice.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechkv import provenance
from mechkv.cache import KVState
from mechkv.comparison import compare_rows
from mechkv.configs import check_kinds, chosen
from mechkv.distributions import kl
from mechkv.errors import InputError
from mechkv.forced_study import (
    ForcedStudy,
    check_repeats,
    continuations,
    prompt_table,
    run_conditions,
    run_settings,
    token_lists,
)
from mechkv.guards import GuardLog
from mechkv.models import admit, info
from mechkv.paths import PathRunner, decode, lockstep
from mechkv.policies import Forced
from mechkv.rebuilding import recast
from mechkv.runs import RunFolder
from mechkv.stats import PairedTest, cluster_bootstrap, proportion_interval, rng, sign_test

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DISTANCES = ("kl", "rel_l2")


@dataclass(frozen=True)
class OracleConfig:
    """How long, and how often the oracle's floor is measured."""

    n_steps: int = 24
    floor_every: int = 8

    def __post_init__(self) -> None:
        check_kinds(self)
        if self.n_steps < 1 or not 1 <= self.floor_every <= self.n_steps:
            raise InputError(
                "oracle",
                got=f"n_steps={self.n_steps}, floor_every={self.floor_every}",
                expected="1 <= floor_every <= n_steps",
                remedy="A distance without its floor means nothing.",
            )


@dataclass(frozen=True)
class OracleStudy(ForcedStudy):
    """Distances of both paths from the oracle; `frame` has, per prompt and step, `cached_kl`, `recomputed_kl`,
    `cached_rel_l2`, `recomputed_rel_l2`, the oracle's `floor_*` where it was measured, and `equal` logits."""

    KIND: ClassVar[str] = "oracle"
    CONFIG: ClassVar[type] = OracleConfig

    def floor(self, distance: str = "kl") -> float:
        """The largest distance between the oracle's own two paths."""
        return float(self.frame[f"floor_{distance}"].max())

    def nearer(self, distance: str = "kl") -> pd.Series:
        """Per row: `cached`, `recomputed` or `tie`."""
        gap = self.frame[f"recomputed_{distance}"] - self.frame[f"cached_{distance}"]
        tie = self.frame["equal"] | (gap.abs() <= self.floor(distance))
        return pd.Series(np.where(tie, "tie", np.where(gap > 0, "cached", "recomputed")), index=self.frame.index)

    def summary(self, distance: str = "kl", seed: int = 0) -> dict[str, Any]:
        """Decided steps, share at which the cached path is nearer (95 % over prompts), mean of D(recomputed) -
        D(cached) with its interval and the mean D of both, and the sign test over prompts."""
        table = self.decoded.assign(nearer=self.nearer(distance)[self.frame["step"] > 0])
        decided = table[table["nearer"] != "tie"].assign(won=lambda rows: (rows["nearer"] == "cached").astype(float))
        gap = table.assign(gap=table[f"recomputed_{distance}"] - table[f"cached_{distance}"])
        mean = cluster_bootstrap(gap, "gap", seed=seed).iloc[0]
        test = self.sign_test(distance)
        found: dict[str, Any] = {
            "distance": distance,
            "n_steps": len(table),
            "n_decided": len(decided),
            "share_cached": math.nan,
            "share_low": 0.0,
            "share_high": 1.0,
            "cached": float(table[f"cached_{distance}"].mean()),
            "recomputed": float(table[f"recomputed_{distance}"].mean()),
            "gap": float(mean["estimate"]),
            "gap_low": float(mean["low"]),
            "gap_high": float(mean["high"]),
            "floor": self.floor(distance),
            "prompts_cached": test.wins,
            "prompts_recomputed": test.losses,
            "p_value": test.p_value,
        }
        if len(decided):
            share = cluster_bootstrap(decided, "won", support=(0.0, 1.0), seed=seed).iloc[0]
            low, high = float(share["low"]), float(share["high"])
            if share["estimate"] in (0.0, 1.0):
                n = decided["prompt"].nunique()  # resampling knows no spread: prompts are counted instead
                low, high = proportion_interval(n if share["estimate"] else 0, n)[1:]
            found |= {"share_cached": float(share["estimate"]), "share_low": low, "share_high": high}
        return found

    def sign_test(self, distance: str = "kl") -> PairedTest:
        """Sign test over prompts: on how many is the mean distance of the cached path the smaller one, by more than the
        oracle's own floor?"""
        mean = self.decoded.groupby("prompt")[[f"cached_{distance}", f"recomputed_{distance}"]].mean()
        gap = mean[f"recomputed_{distance}"] - mean[f"cached_{distance}"]
        return sign_test(int((gap > self.floor(distance)).sum()), int((gap < -self.floor(distance)).sum()))

    def plot(self) -> "dict[str, Figure]":
        """The figures by name (see `plots_precision`)."""
        from mechkv import plots_precision

        return {"nearer_path": plots_precision.nearer_path(self)}


def oracle_study(
    model: TransformerBridge,
    prompts: Sequence[str | Tensor],
    config: OracleConfig | None = None,
    *,
    folder: Path | str | None = None,
    progress: bool | None = None,
) -> OracleStudy:
    """Both paths of `model` against the same weights in float64.

    Raises:
        InputError: A float64 model, or prompts that cannot be used.
        ModelError: The family has no float64 path.
    """
    config = chosen(config, OracleConfig)
    admit(model)
    if info(model).dtype == "float64":
        raise InputError("no oracle", got="a float64 model", expected="a lower dtype", remedy="It is its own oracle.")
    tokens = token_lists(model, prompts, config.n_steps)
    run = RunFolder(folder, run_settings("oracle", model, tokens, asdict(config)))
    fed = continuations(run, model, tokens, config.n_steps)

    def condition() -> AbstractContextManager[TransformerBridge]:
        return nullcontext(recast(model, "float64"))

    def measure(
        truth: TransformerBridge, prompt: Tensor, continuation: Sequence[int], label: int
    ) -> tuple[list[dict[str, Any]], GuardLog]:
        return oracle_rows(model, truth, prompt, continuation, label, floor_every=config.floor_every)

    name = info(model).dtype
    frame, guards, models = run_conditions(
        run, {name: condition}, tokens, fed, column="dtype", measure=measure, progress=progress
    )
    where = provenance.collect(model) | {"oracle": models[name]}
    return OracleStudy(frame, prompt_table(tokens, fed), config, guards, where)


def oracle_rows(
    model: TransformerBridge,
    truth: TransformerBridge,
    prompt: Int[Tensor, "pos"],
    continuation: Sequence[int],
    label: int,
    *,
    floor_every: int,
) -> tuple[list[dict[str, Any]], GuardLog]:
    """A row per step: how far either path is from the oracle."""
    log, rows = GuardLog(), []
    repeated = int(rng(0, "repeat", label).integers(len(continuation) + 1))
    policy = Forced([*prompt.tolist(), *continuation])
    n_steps = len(continuation)
    walk = lockstep(model, prompt, policy=policy, n_steps=n_steps, log=log)
    oracle = decode(truth, prompt, path="cached", policy=policy, n_steps=n_steps, log=log)
    for (cached, recomputed), exact in zip(walk, oracle, strict=True):
        if cached.index == repeated:
            check_repeats(model, (cached, recomputed), log)
        row: dict[str, Any] = {"step": cached.index, "position": len(cached.tokens) - 1}
        row["equal"] = torch.equal(cached.logits, recomputed.logits)
        row |= distances(exact.logits, cached.logits, "cached")
        row |= distances(exact.logits, recomputed.logits, "recomputed")
        row |= {f"floor_{name}": math.nan for name in DISTANCES}
        if cached.index % floor_every == 0 and cached.index:
            with PathRunner(truth, "recomputed", log=log) as runner:
                again = runner.step(exact.tokens, KVState.empty(len(prompt)), exact.index, exact.n_new)
            row |= distances(again.logits, exact.logits, "floor")
        rows.append(row | {"between_kl": float(kl(cached.logits, recomputed.logits))})
    return rows, log


def distances(exact: Float[Tensor, "d_vocab"], logits: Float[Tensor, "d_vocab"], name: str) -> dict[str, float]:
    """KL(oracle || path) and the relative L2 distance of the logits; float64 is exact for every narrower dtype."""
    z = logits.double()
    rel_l2 = compare_rows(z[None], exact.double()[None])["rel_l2"][0]
    return {f"{name}_kl": float(kl(exact.double(), z)), f"{name}_rel_l2": float(rel_l2)}
