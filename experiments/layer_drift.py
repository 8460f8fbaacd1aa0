"""Where along the layers do cached and recomputed decoding differ, and is it gone in float32?

Main job: drift by layer of one model in half precision, teacher-forced on the cached path's greedy tokens, beside the
same weights and tokens in float32. It speaks to C3 (what float32 does to KL and flips) and, for one process, to C6
(every repeated step must be bitwise the same); the profile by layer is what C4 is about, whose causes are tested by
twins elsewhere.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.outcome import ModelPool, Outcome, problem_texts
from mechkv import plots
from mechkv.claims import Finding
from mechkv.distributions import UNIT_ROUNDOFF
from mechkv.drift import DriftConfig, DriftProfile, drift_profile
from mechkv.models import to_dtype
from mechkv.report import Section
from mechkv.stats import cluster_bootstrap, proportion_interval

NAME = "layer_drift"


def predicted_orders(dtype: str) -> float:
    """C3: orders of magnitude between KL in a dtype and in float32, since KL is quadratic in the logit error and that
    goes with the unit roundoff (2^13 between float16 and float32, 2^16 between bfloat16 and float32)."""
    return 2 * math.log10(UNIT_ROUNDOFF[to_dtype(dtype)] / UNIT_ROUNDOFF[to_dtype("float32")])


@dataclass(frozen=True)
class Config:
    """Settings of the main job."""

    model: str = "smollm2-135m"
    dtype: str = "float16"
    n_prompts: int = 4
    n_steps: int = 24
    prompts: Path | None = None
    seed: int = 0


PRESETS: dict[str, Config] = {
    "quick": Config(),
    "paper": Config(n_prompts=600, n_steps=32),
}


def run(config: Config, pool: ModelPool, folder: Path) -> Outcome:
    """Profile, draw, judge; everything is kept below `folder`."""
    texts = problem_texts(config.n_prompts, config.prompts)
    model = pool.get(config.model, config.dtype)
    profile = drift_profile(model, texts, DriftConfig(n_steps=config.n_steps, seed=config.seed), folder=folder / "run")
    profile.save(folder / "profile")
    return report(profile, config)


def report(profile: DriftProfile, config: Config) -> Outcome:
    """What the profile says, for the claims table and the report."""
    where = (
        f"{config.model}, {profile.dtype}, {len(profile.prompts)} prompts x {profile.steps['step'].max()} decode steps"
    )
    figures = profile.plot()
    captions = plots.drift_captions(profile)
    section = Section(
        title="Drift by layer",
        text=_words(profile, where),
        figures={name: (figure, captions[name]) for name, figure in figures.items()},
        tables={
            "by layer": (_layer_table(profile), f"Mean relative L2 drift at resid_post, {where}."),
            "onset": (profile.onset(), "First step and layer with any difference, per prompt."),
        },
    )
    return Outcome(
        findings=[precision_finding(profile, where), determinism_finding(profile, where)],
        sections=[section],
        method=[(f"{NAME}: {key}", str(value)) for key, value in vars(config).items()],
        limits=[
            f"Measured on {config.model}; it says nothing about a 7B model.",
            "Teacher-forced on greedy tokens: what a user sees when the paths feed themselves is another question.",
        ],
        provenance=profile.provenance,
    )


def precision_finding(profile: DriftProfile, where: str) -> Finding:
    """C3: orders of magnitude between the KL in the dtype under study and in float32, and flips in float32.

    The ratio is of mean KL; the interval resamples prompts. `reproduced` needs the whole interval of the ratio within
    one order of the prediction and no float32 flip; a flip in float32 is `not reproduced`.
    """
    decoded = profile.steps[profile.steps["step"] > 0]
    half, single = (decoded[decoded["dtype"] == dtype] for dtype in (profile.dtype, "float32"))
    if not len(single) or profile.dtype == "float32":
        return Finding("C3", "not measured", "no float32 control in this run", "", where, NAME)
    both = half.groupby("prompt")["kl"].mean().to_frame("half").join(single.groupby("prompt")["kl"].mean())
    if (both <= 0).any(axis=None):
        return Finding("C3", "not testable here", "a prompt without any drift", "", where, NAME)
    orders = np.log10(both["half"] / both["kl"]).rename("orders").reset_index()
    row = cluster_bootstrap(orders, "orders").iloc[0]
    flips, n = int(single["flip"].sum()), len(single)
    predicted = predicted_orders(profile.dtype)
    near = abs(row["low"] - predicted) < 1 and abs(row["high"] - predicted) < 1
    verdict = "not reproduced" if flips else "reproduced" if near else "partly"
    upper = proportion_interval(flips, n).high
    return Finding(
        claim="C3",
        verdict=verdict,
        ours=f"KL lower by {row['estimate']:.1f} orders in float32; {flips} of {n} float32 steps flip "
        f"(at most {100 * upper:.1f} %)",
        value=float(row["estimate"]),
        low=float(row["low"]),
        high=float(row["high"]),
        controls=f"step 0 exactly zero on every prompt; {int(half['flip'].sum())} of {len(half)} {profile.dtype} steps "
        f"flip; unit roundoffs predict {predicted:.1f} orders for {profile.dtype}",
        model=where,
        source=NAME,
        note="Mean over prompts of log10 of the ratio of mean KL(cached || recomputed), teacher-forced.",
    )


def determinism_finding(profile: DriftProfile, where: str) -> Finding:
    """C6 in one process: repeated steps are a guard, so a profile exists only when all were bitwise equal."""
    n = sum(counts.get("repeatable", 0) for counts in profile.guards.values())
    return Finding(
        claim="C6",
        verdict="partly",
        ours=f"{n} of {n} steps done twice were bitwise equal (logits, residual stream, K and V)",
        value=1.0,
        low=proportion_interval(n, n).low,
        high=1.0,
        controls="a difference would have stopped the run",
        model=where,
        source=NAME,
        note="One process; two processes and other thread counts are measured by token_divergence.",
    )


def _layer_table(profile: DriftProfile) -> pd.DataFrame:
    summary = profile.summary()
    part = summary[(summary["site"] == "resid_post")]
    return part[["dtype", "layer", "estimate", "low", "high", "bitwise_equal", "n_clusters"]].reset_index(drop=True)


def _words(profile: DriftProfile, where: str) -> str:
    summary = profile.summary()
    last = summary[(summary["site"] == "resid_post")].groupby("dtype")["layer"].transform("max")
    rows = summary[(summary["site"] == "resid_post")]
    rows = rows[rows["layer"] == last]
    parts = [f"{row.dtype}: {row.estimate:.2e}" for row in rows.itertuples()]
    onset = profile.onset()
    main = onset[onset["dtype"] == profile.dtype]
    began = ", ".join("never" if pd.isna(r.step) else f"step {r.step}, layer {r.layer}" for r in main.itertuples())
    return (
        f"Relative L2 drift of the residual stream after the last block, mean over decode steps ({where}): "
        f"{'; '.join(parts)}. The paths first differ, prompt by prompt, at: {began}."
    )
