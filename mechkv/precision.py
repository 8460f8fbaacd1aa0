"""How does the divergence of the two paths shrink with the precision of the arithmetic?

`precision_ladder` feeds the same tokens to both paths in several dtypes (rungs) and compares, per step, the two
next-token distributions. Unit roundoffs u are 2^-8 (bfloat16), 2^-11 (float16), 2^-24 (float32), 2^-53 (float64). A
logit error is proportional to u, so between two rungs it should shrink by the ratio of their u, and KL, which is
quadratic in the logit error, by its square: float16 / float32 by 2^13 and 2^26 (7.8 orders), bfloat16 / float16 by 2^3
and 2^6.

Two ways to hold the weights. `own`: each rung rounds the source's weights to its dtype anew, so the rungs are slightly
different functions, each compared with itself. `common`: all rungs hold the weights rounded to every 16-bit dtype of
the ladder in turn, which all rungs represent exactly: one function, and arithmetic is all that differs.

Conventions: tokens are the cached path's greedy choice on the reference rung (the most precise one that is no wider
than float32). Rungs are loaded one at a time. Mean, median and flipped-only KL are given apart: few steps carry the
mean, and the median may be exactly zero.
Controls: step 0 exactly zero and a sample of steps done twice on every rung. float64 has float32 islands (softmax,
rotary tables, norms) in the models of the transformers library: its prediction is marked as a bound.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechkv import provenance
from mechkv.configs import check_kinds, chosen
from mechkv.distributions import UNIT_ROUNDOFF
from mechkv.errors import InputError, ModelError
from mechkv.forced_study import (
    Condition,
    ForcedStudy,
    continuations,
    prompt_table,
    run_conditions,
    run_settings,
    token_lists,
)
from mechkv.models import admit, info, load_model, to_dtype
from mechkv.rebuilding import recast
from mechkv.runs import RunFolder
from mechkv.stats import MIN_CLUSTERS, cluster_bootstrap, proportion_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RUNGS = ("bfloat16", "float16", "float32", "float64")
PAIRS = (("float16", "float32"), ("bfloat16", "float16"), ("bfloat16", "float32"), ("float32", "float64"))


@dataclass(frozen=True)
class LadderConfig:
    """Which rungs, how long, and which weights.

    Attributes:
        dtypes: The rungs, least precise first.
        n_steps: Decode steps after the prompt.
        weights: `own`: each rung rounds for itself; `common`: see the module.
    """

    dtypes: tuple[str, ...] = RUNGS
    n_steps: int = 24
    weights: Literal["own", "common"] = "own"

    def __post_init__(self) -> None:
        check_kinds(self)
        known = [name for name in RUNGS if name in self.dtypes]
        if list(self.dtypes) != known or len(known) < 2:
            raise InputError(
                "rungs", got=self.dtypes, expected=f"two or more of {RUNGS}, in this order", remedy="Order them."
            )
        if self.n_steps < 1 or self.weights not in ("own", "common"):
            raise InputError(
                "ladder",
                got=f"n_steps={self.n_steps}, weights={self.weights!r}",
                expected="n_steps >= 1 and weights 'own' or 'common'",
                remedy="See LadderConfig.",
            )

    @property
    def reference(self) -> str:
        """The rung whose greedy choice is fed to all."""
        return [name for name in self.dtypes if name != "float64"][-1]


@dataclass(frozen=True)
class PrecisionLadder(ForcedStudy):
    """The same tokens on a ladder of dtypes; `frame` has a row per dtype, prompt and step (see `ForcedStudy`)."""

    KIND: ClassVar[str] = "precision_ladder"
    CONFIG: ClassVar[type] = LadderConfig

    def summary(self, seed: int = 0) -> pd.DataFrame:
        """Per rung, over decode steps: mean KL with its 95 % interval over prompts, median KL, mean KL of the steps
        that flip, mean of max |dz|, flips with their interval, and the share of steps with equal logits."""
        rows = []
        for dtype, part in self.decoded.groupby("dtype", sort=False, observed=True):
            mean = cluster_bootstrap(part, "kl", support=(0.0, math.inf), seed=seed).iloc[0]
            flipped = part[part["flip"] == 1]
            k, n = len(flipped), len(part)
            flips = proportion_interval(k, n)
            if part["prompt"].nunique() >= MIN_CLUSTERS and 0 < k < n:
                row = cluster_bootstrap(part, "flip", support=(0.0, 1.0), seed=seed).iloc[0]
                flips = flips._replace(low=float(row["low"]), high=float(row["high"]))
            rows.append(
                {
                    "dtype": dtype,
                    "kl_mean": mean["estimate"],
                    "kl_low": mean["low"],
                    "kl_high": mean["high"],
                    "kl_median": part["kl"].median(),
                    "kl_flipped": flipped["kl"].mean() if k else math.nan,
                    "max_abs_dz": part["max_abs_dz"].mean(),
                    "flips": k,
                    "flip_rate": flips.estimate,
                    "flip_low": flips.low,
                    "flip_high": flips.high,
                    "equal": float((part["max_abs_dz"] == 0).mean()),
                    "n_steps": n,
                    "n_prompts": part["prompt"].nunique(),
                }
            )
        return pd.DataFrame(rows)

    def ratios(self, seed: int = 0) -> pd.DataFrame:
        """Observed beside predicted ratios between rungs, as orders of magnitude (log10).

        `mean`: log10 of the ratio of per-prompt means, averaged over prompts, with its 95 % interval; prompts without
        any drift on one of the rungs have no ratio and are counted in `n_zero`. `median`, `flipped only`: ratio of the
        two numbers over all steps, without an interval; undefined (NaN) where one is zero or no step flips.
        """
        rows = []
        for coarse, fine in PAIRS:
            if coarse not in self.config.dtypes or fine not in self.config.dtypes:
                continue
            unit = UNIT_ROUNDOFF[to_dtype(coarse)] / UNIT_ROUNDOFF[to_dtype(fine)]
            for metric, power in (("kl", 2), ("max_abs_dz", 1)):
                head = {"coarse": coarse, "fine": fine, "metric": metric, "predicted": power * math.log10(unit)}
                a, b = (self.decoded[self.decoded["dtype"] == dtype] for dtype in (coarse, fine))
                rows.append(head | {"statistic": "mean"} | _mean_orders(a, b, metric, seed))
                for name, x, y in (
                    ("median", a[metric].median(), b[metric].median()),
                    ("flipped only", a.loc[a["flip"] == 1, metric].mean(), b.loc[b["flip"] == 1, metric].mean()),
                ):
                    orders = math.log10(x / y) if x > 0 and y > 0 else math.nan
                    rows.append(head | {"statistic": name, "observed": orders})
        return pd.DataFrame(rows).assign(bound=lambda table: table["fine"] == "float64")

    def plot(self) -> "dict[str, Figure]":
        """The figures by name (see `plots_precision`)."""
        from mechkv import plots_precision

        return plots_precision.ladder_figures(self)


def precision_ladder(
    source: str | Path | TransformerBridge,
    prompts: Sequence[str | Tensor],
    config: LadderConfig | None = None,
    *,
    device: str = "auto",
    folder: Path | str | None = None,
    progress: bool | None = None,
) -> PrecisionLadder:
    """The same tokens on every rung.

    Args:
        source: What `load_model` takes, read anew for every rung; or a bridge, whose weights every rung rounds.
        prompts: Texts or `[pos]` token tensors.
        config: Rungs, steps, weights.
        device: Where to run, for a source that is loaded.
        folder: Keep every finished prompt there, and go on from what is there.
        progress: Show a progress bar with an estimate.

    Raises:
        InputError: Prompts or configuration that cannot be used; `common` weights that leave float16's range.
        GuardError, NonFiniteError: A number would not mean what it seems to mean.
    """
    config = chosen(config, LadderConfig)
    base = admit(source) if isinstance(source, TransformerBridge) else None

    def fresh(dtype: str) -> TransformerBridge:
        if base is not None:
            return base if info(base).dtype == dtype else recast(base, dtype)
        return load_model(source, dtype=dtype, device=device)

    first = fresh(config.reference)
    tokens = token_lists(first, prompts, config.n_steps)
    settings = run_settings("precision_ladder", first, tokens, asdict(config))
    run = RunFolder(folder, settings)
    shared = first if config.weights == "own" else _common(first, config.dtypes)
    fed = continuations(run, shared, tokens, config.n_steps)
    if config.weights == "own":
        del shared, first

    def condition(dtype: str) -> Condition:
        @contextmanager
        def rung() -> Iterator[TransformerBridge]:
            if config.weights == "own":
                yield fresh(dtype)
            else:
                yield shared if info(shared).dtype == dtype else recast(shared, dtype)

        return rung

    frame, guards, models = run_conditions(
        run, {name: condition(name) for name in config.dtypes}, tokens, fed, column="dtype", progress=progress
    )
    return PrecisionLadder(frame, prompt_table(tokens, fed), config, guards, provenance.collect() | {"models": models})


def _common(model: TransformerBridge, dtypes: Sequence[str]) -> TransformerBridge:
    """`model` with its weights rounded to every 16-bit dtype of the ladder in turn: all rungs hold them exactly."""
    low = [dtype for dtype in dtypes if dtype in ("bfloat16", "float16")] or [dtypes[0]]
    rounded = model
    for dtype in low:
        wanted = to_dtype(dtype)
        bad = [n for n, p in rounded.original_model.named_parameters() if not torch.isfinite(p.to(wanted)).all()]
        if bad:
            raise InputError(
                "weights leave the range of a rung",
                got=f"{len(bad)} parameters that are not finite in {dtype}",
                expected="weights that every rung can hold",
                remedy="Leave float16 out, or use weights='own'.",
            )
        rounded = recast(rounded, dtype)
    final = recast(rounded, info(model).dtype)
    for dtype in low:
        wanted = to_dtype(dtype)
        if not all(torch.equal(p.to(wanted).to(p.dtype), p) for p in final.original_model.parameters()):
            raise ModelError(
                "common weights", got=f"values that {dtype} cannot hold", expected="exact ones", remedy="Report this."
            )
    return final


def _mean_orders(a: pd.DataFrame, b: pd.DataFrame, metric: str, seed: int) -> dict[str, float]:
    means = a.groupby("prompt")[metric].mean().to_frame("a").join(b.groupby("prompt")[metric].mean().rename("b"))
    usable = means[(means > 0).all(axis=1)]
    found = {"observed": math.nan, "low": math.nan, "high": math.nan, "n_zero": len(means) - len(usable)}
    if len(usable):
        orders = np.log10(usable["a"] / usable["b"]).rename("orders").reset_index()
        row = cluster_bootstrap(orders, "orders", seed=seed).iloc[0]
        found |= {"observed": float(row["estimate"]), "low": float(row["low"]), "high": float(row["high"])}
    return found
