"""What has precision to do with it? Claims C3 (ladder of dtypes), C2 (which path is nearer the truth) and C6.

The ladder feeds the same tokens to both paths in every dtype; the oracle is the same weights in float64; sites are
lifted to float32 one by one; the run is repeated in other processes and with another number of threads.

Verdicts. C3: `reproduced` when the interval of log10 KL(coarse) / KL(float32) lies within one order of the prediction
from unit roundoffs and float32 never flips; `not reproduced` when float32 flips; `not testable here` without that
interval (no drift in the coarse dtype, too few prompts); else `partly`. C2: `reproduced` when the cached path is nearer
to the oracle at more than half of the decided steps, interval and all; `not reproduced` when the interval leaves out
`SMALLEST_ADVANTAGE`; `not testable here` when it holds both. C6: `reproduced` when a second process gives the same bits
everywhere and the paths differ somewhere; `not testable here` without any difference of the paths, or without a second
process of as many threads.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from experiments.outcome import ModelPool, Outcome, number, problem_texts
from mechkv.claims import Finding
from mechkv.determinism import Determinism, determinism
from mechkv.forced_study import token_lists
from mechkv.oracle import OracleConfig, OracleStudy, oracle_study
from mechkv.precision import LadderConfig, PrecisionLadder, precision_ladder
from mechkv.precision_policy import POLICIES, SiteConfig, SitePrecision, precision_by_site
from mechkv.report import Section, format_number
from mechkv.stats import Interval, proportion_interval

NAME = "precision_control"
SMALLEST_ADVANTAGE = 0.6
"""Share of decided steps from which on one path may be called the nearer one."""


@dataclass(frozen=True)
class Config:
    """Settings. `policies` empty: sites are left out. `threads` empty: no other process is started."""

    model: str = "smollm2-135m"
    dtype: str = "float16"
    rungs: tuple[str, ...] = ("float16", "float32")
    weights: Literal["own", "common"] = "own"
    n_prompts: int = 4
    n_steps: int = 3
    policies: tuple[str, ...] = ()
    threads: tuple[int, ...] = (1, 1)
    determinism_prompts: int = 1
    prompts: Path | None = None


PRESETS: dict[str, Config] = {
    "quick": Config(),
    "full": Config(
        rungs=("bfloat16", "float16", "float32", "float64"),
        weights="common",
        n_prompts=12,
        n_steps=24,
        policies=tuple(POLICIES),
        threads=(1, 1, 2),
        determinism_prompts=4,
    ),
    "paper": Config(n_prompts=600, n_steps=32, policies=tuple(POLICIES), threads=(1, 1, 2), determinism_prompts=8),
}


def run(config: Config, pool: ModelPool, folder: Path) -> Outcome:
    """Measure, draw, judge; everything is kept below `folder`."""
    texts = problem_texts(config.n_prompts, config.prompts)
    model = pool.get(config.model, config.dtype)
    device = str(next(model.original_model.parameters()).device)
    ladder = precision_ladder(
        config.model,
        texts,
        LadderConfig(dtypes=config.rungs, n_steps=config.n_steps, weights=config.weights),
        device=device,
        folder=folder / "ladder-run",
    )
    oracle = oracle_study(
        model,
        texts,
        OracleConfig(n_steps=config.n_steps, floor_every=min(8, config.n_steps)),
        folder=folder / "oracle-run",
    )
    sites = None
    if config.policies:
        settings = SiteConfig(policies=config.policies, n_steps=config.n_steps)
        sites = precision_by_site(model, texts, settings, folder=folder / "sites-run")
    repeated = None
    if config.threads:
        tokens = token_lists(model, texts[: config.determinism_prompts], config.n_steps)
        repeated = determinism(
            config.model, tokens, dtype=config.dtype, n_steps=config.n_steps, threads=config.threads, device=device
        )
    ladder.save(folder / "ladder")
    oracle.save(folder / "oracle")
    if sites is not None:
        sites.save(folder / "sites")
    return report(config, ladder, oracle, sites, repeated)


def report(
    config: Config,
    ladder: PrecisionLadder,
    oracle: OracleStudy,
    sites: SitePrecision | None,
    repeated: Determinism | None,
) -> Outcome:
    """What was measured, for the claims table and the report."""
    where = f"{config.model}, {config.n_prompts} prompts x {config.n_steps} decode steps"
    findings = [precision_finding(ladder, where), oracle_finding(oracle, f"{where}, {config.dtype}")]
    figures: dict[str, Any] = {}
    for result in (ladder, oracle, sites):
        for name, figure in {} if result is None else result.plot().items():
            figures[name] = (figure, f"{_CAPTIONS[name]} {where}.")
    tables: dict[str, tuple[pd.DataFrame, str]] = {
        "ladder": (ladder.summary(), f"KL and flips by rung, weights {config.weights!r}, {where}."),
        "ratios": (ladder.ratios(), f"Orders of magnitude between rungs, observed and predicted, {where}."),
        "oracle": (pd.DataFrame([oracle.summary("kl"), oracle.summary("rel_l2")]), f"Which path is nearer, {where}."),
    }
    if sites is not None:
        tables["sites"] = (sites.summary(), f"Sites lifted to float32, {config.dtype}, {where}.")
    if repeated is not None:
        findings.append(determinism_finding(repeated, f"{where}, {config.dtype}"))
        tables["processes"] = (repeated.summary(), "Each process against the first.")
    return Outcome(
        findings=findings,
        sections=[Section(title="Precision", text=_words(ladder, oracle), figures=figures, tables=tables)],
        method=[(f"{NAME}: {key}", str(value)) for key, value in vars(config).items()],
        limits=[f"Measured on {config.model}; it says nothing about a 7B model."],
        provenance={"models": ladder.provenance["models"]},
    )


_CAPTIONS = {
    "kl_by_precision": "KL between the paths by precision; dashed: square of the unit roundoff, from the first rung.",
    "nearer_path": "Distance from the same weights in float64, a point a step; above the line cached is nearer.",
    "precision_by_site": "KL between the paths with sites lifted to float32; 95 % over prompts.",
}


def precision_finding(ladder: PrecisionLadder, where: str) -> Finding:
    """C3, from the coarsest rung that is in the table of predictions (float16 where it is a rung)."""
    table = ladder.ratios()
    coarse = "float16" if "float16" in ladder.config.dtypes else ladder.config.dtypes[0]
    rows = table.query("fine == 'float32' and metric == 'kl'").query("coarse == @coarse").set_index("statistic")
    single = ladder.decoded[ladder.decoded["dtype"] == "float32"]
    if rows.empty or single.empty:
        return Finding("C3", "not measured", "no float32 rung", "", where, NAME)
    mean = rows.loc["mean"]
    flips, n = int(single["flip"].sum()), len(single)
    verdict = "partly"
    if flips:
        verdict = "not reproduced"
    elif not np.isfinite(mean[["observed", "low", "high"]].to_numpy(float)).all():
        verdict = "not testable here"
    elif all(abs(mean[bound] - mean["predicted"]) < 1 for bound in ("low", "high")):
        verdict = "reproduced"
    half = ladder.decoded[ladder.decoded["dtype"] == coarse]
    observed, median, flipped = (
        f"{value:.1f}" if value == value else "undefined"
        for value in rows.loc[["mean", "median", "flipped only"], "observed"]
    )
    return Finding(
        claim="C3",
        verdict=verdict,
        ours=f"KL lower by {observed} orders in float32 than in {coarse} (mean; median {median}, "
        f"flipped only {flipped}); {flips} of {n} float32 steps flip (at most "
        f"{100 * proportion_interval(flips, n).high:.1f} %)",
        value=number(mean["observed"]),
        low=number(mean["low"]),
        high=number(mean["high"]),
        controls=f"step 0 exactly zero on every rung; predicted {mean['predicted']:.1f} orders; "
        f"{int(half['flip'].sum())} of {len(half)} {coarse} steps flip; {int(mean['n_zero'])} "
        f"prompts without drift left out of the ratio",
        model=where,
        source=NAME,
        note=f"Weights: {ladder.config.weights}. Mean over prompts of log10 of the ratio of mean KL, teacher-forced.",
    )


def oracle_finding(study: OracleStudy, where: str) -> Finding:
    """C2 in its honest form: which path is nearer to the same weights in float64?"""
    found = study.summary()
    verdict = "not testable here"  # also for bounds that are NaN: too few prompts for an interval
    if found["share_low"] > 0.5:
        verdict = "reproduced"
    elif found["share_high"] < SMALLEST_ADVANTAGE:
        verdict = "not reproduced"
    return Finding(
        claim="C2",
        verdict=verdict,
        ours=f"the cached path is the nearer one at {format_number(100 * found['share_cached'])} % of "
        f"{found['n_decided']} decided steps; mean KL from the oracle {found['cached']:.3g} (cached) and "
        f"{found['recomputed']:.3g} (recomputed)",
        value=number(found["share_cached"]),
        low=number(found["share_low"]),
        high=number(found["share_high"]),
        controls=f"oracle's own floor {found['floor']:.1g}; {found['n_steps'] - found['n_decided']} ties; nearer on "
        f"{found['prompts_cached']} prompts, farther on {found['prompts_recomputed']} (sign test p = "
        f"{found['p_value']:.3g})",
        model=where,
        source=NAME,
        note="Distance from the same weights in float64, not accuracy: a gain in accuracy would come from it.",
    )


def determinism_finding(found: Determinism, where: str) -> Finding:
    """C6 over processes; what another number of threads does is stated beside it."""
    table = found.summary()
    first = int(found.frame.loc[found.frame["process"] == 0, "threads"].iloc[0])
    same, other = table[table["threads"] == first], table[table["threads"] != first]
    n = int(same["n_steps"].sum())
    k = round(float((same["equal"] * same["n_steps"]).sum()))
    drifts = bool((found.frame["drift_kl"] > 0).any())
    verdict = "not reproduced" if k < n else "reproduced" if n and drifts else "not testable here"
    interval = proportion_interval(k, n) if n else Interval(math.nan, math.nan, math.nan)
    threads = (
        "; ".join(
            f"{r.threads} threads, {r.path}: {100 * r.equal:.0f} % of steps the same bits, at most {r.max_abs:.3g} off"
            for r in other.itertuples()
        )
        or "other thread counts not run"
    )
    return Finding(
        claim="C6",
        verdict=verdict,
        ours=f"{k} of {n} steps (both paths) have the same bits in a second process"
        + ("" if drifts else "; at none of them do the paths differ"),
        value=number(interval.estimate),
        low=number(interval.low),
        high=number(interval.high),
        controls=threads,
        model=where,
        source=NAME,
        note="Same machine, same libraries; another machine was not tried.",
    )


def _words(ladder: PrecisionLadder, oracle: OracleStudy) -> str:
    rows = [f"{r.dtype}: {r.kl_mean:.2e} (median {r.kl_median:.2e})" for r in ladder.summary().itertuples()]
    found = oracle.summary()
    return (
        f"Mean KL between the paths: {'; '.join(rows)} nats. Against the same weights in float64, the cached path is "
        f"the nearer one at {format_number(100 * found['share_cached'])} % of the {found['n_decided']} steps "
        f"at which the paths differ "
        f"by more than the oracle's own floor."
    )
