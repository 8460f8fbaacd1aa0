"""Is a difference more than the luck of the prompts? Intervals and tests that every experiment shares.

Question: given outcomes per prompt, what interval, test or smallest detectable effect goes with them?

Equations: the clustered mean is sum_c S_c / sum_c N_c over prompts c with row sums S_c and row counts N_c; its interval
is the studentised bootstrap (bootstrap-t; Efron & Tibshirani 1993, section 12.5) that resamples whole prompts, with the
linearised standard error of a ratio, se^2 = C / (C - 1) sum_c (S_c - mean N_c)^2 / (sum_c N_c)^2, recomputed in every
resample. Percentile and BCa intervals of the same resamples cover too little with the 4 to 60 prompts that are usual
here (a nominal 95 % of normal prompt means: 78 % with 4 prompts, 86 % with 8, 93 % with 60). Other statistics get the
BCa interval (Efron 1987). Proportions: Clopper-Pearson. Paired outcomes: exact McNemar. Survival: Kaplan-Meier with the
log-log band.

Conventions: rows of one prompt are dependent, prompts are independent; so prompts are resampled and a prompt keeps all
its rows. Non-finite values are an error: whoever drops rows does it in sight. Randomness comes from a seed and labels
only.

Controls: tests compare each function with a closed form or another implementation, and simulate the coverage of the
intervals.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import pandas as pd
import statsmodels.api as sm
import torch
from scipy import stats
from statsmodels.duration.survfunc import SurvfuncRight
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from mechkv.errors import InputError

# Fewer clusters than this have too few distinct resamples for a 95 % interval (3 clusters: 10): bounds are NaN.
MIN_CLUSTERS = 4
Numbers: TypeAlias = Sequence[float | int] | np.ndarray | pd.Series
Statistic = Callable[[np.ndarray], float]


class Interval(NamedTuple):
    """A point estimate with its lower and upper bound."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class PairedTest:
    """Exact two-sided test that `wins` and `losses` are equally likely; `share` is wins / (wins + losses)."""

    wins: int
    losses: int
    p_value: float
    share: Interval


@dataclass(frozen=True)
class PowerLaw:
    """y = prefactor * x ** exponent, fitted on logarithms; the interval is the exponent's."""

    exponent: Interval
    prefactor: float
    n: int
    n_clusters: int | None


# ------------------------------------------------------------------------------------------------------ randomness


def _digest(seed: int, labels: Sequence[str | int]) -> bytes:
    return hashlib.sha256(json.dumps([seed, *labels]).encode()).digest()


def rng(seed: int, *labels: str | int) -> np.random.Generator:
    """A numpy generator that depends on the seed and the labels alone (SHA-256 of both)."""
    return np.random.default_rng(int.from_bytes(_digest(seed, labels), "big"))


def torch_rng(seed: int, *labels: str | int, device: str | torch.device = "cpu") -> torch.Generator:
    """A torch generator that depends on the seed, the labels and the kind of device alone."""
    return torch.Generator(device=device).manual_seed(int.from_bytes(_digest(seed, labels)[:8], "big") >> 1)


# ------------------------------------------------------------------------------------------------ cluster bootstrap


def cluster_bootstrap(
    frame: pd.DataFrame,
    value: str,
    *,
    cluster: str = "prompt",
    by: Sequence[str] = (),
    statistic: Statistic = np.mean,
    support: tuple[float | int, float | int] = (-math.inf, math.inf),
    n_resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> pd.DataFrame:
    """`statistic` of column `value` within each group of `by`, with an interval that resamples clusters.

    Returns one row per group: the `by` columns, estimate, low, high, n_clusters, n_rows. `np.mean` gets the studentised
    interval, anything else BCa. Bounds are clipped to `support`, the range the statistic can have (a rate: (0, 1)).
    They are NaN with fewer than `MIN_CLUSTERS` clusters. A bound is infinite (then clipped) where too many resamples
    have no spread, as for rare events in few prompts, and the width is 0 where all clusters agree: for one yes or no a
    prompt use `proportion_interval`. Groups with the same clusters share their resamples: their differences are paired.
    """
    by = list(by)
    _check_frame(frame, value, [cluster, *by])
    _check_resampling(n_resamples, level)
    bootstrap = _mean_intervals if statistic is np.mean else _statistic_intervals
    rows = bootstrap(frame, value, cluster, by, statistic, n_resamples, level, seed)
    result = pd.DataFrame(rows, columns=[*by, "estimate", "low", "high", "n_clusters", "n_rows"])
    result[["low", "high"]] = result[["low", "high"]].clip(*support)
    return result.sort_values(by, ignore_index=True) if by else result


def _mean_intervals(
    frame: pd.DataFrame,
    value: str,
    cluster: str,
    by: list[str],
    _: Statistic,
    n_resamples: int,
    level: float,
    seed: int,
) -> list[tuple]:
    """Groups that have the same clusters are done together, by matrix products over [resample, cluster]."""
    keyed = frame.assign(_all=0).groupby(["_all", *by, cluster], sort=True, observed=True)[value]
    sums, counts = (
        table.unstack(cluster, fill_value=0)
        for table in (keyed.sum().astype(np.float64), keyed.count().astype(np.float64))
    )
    present = counts.to_numpy() > 0
    rows: list[tuple] = []
    for pattern in np.unique(present, axis=0):
        members = np.flatnonzero((present == pattern).all(1))
        block_sums = sums.to_numpy()[np.ix_(members, np.flatnonzero(pattern))].T
        block_counts = counts.to_numpy()[np.ix_(members, np.flatnonzero(pattern))].T
        n_clusters = len(block_sums)
        estimate, low, high = _studentised(
            block_sums, block_counts, rng(seed, "clusters", n_clusters), n_resamples, level
        )
        for j, i in enumerate(members):
            key = counts.index[i][1:] if by else ()
            rows.append((*key, estimate[j], low[j], high[j], n_clusters, int(block_counts[:, j].sum())))
    return rows


def _studentised(
    sums: np.ndarray, counts: np.ndarray, generator: np.random.Generator, n_resamples: int, level: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bootstrap-t for the ratio of sums, [cluster, group] in, [group] out. Without spread t is infinite."""
    n_clusters = len(sums)
    estimate = sums.sum(0) / counts.sum(0)
    undefined = np.full_like(estimate, math.nan)
    if n_clusters < MIN_CLUSTERS:
        return estimate, undefined, undefined
    residual = sums - estimate * counts
    standard_error = np.sqrt(n_clusters / (n_clusters - 1) * (residual**2).sum(0)) / counts.sum(0)
    weights = _resample_weights(generator, n_resamples, n_clusters)
    total = weights @ counts
    shift = (weights @ residual) / total
    squares = weights @ residual**2 - 2 * shift * (weights @ (residual * counts)) + shift**2 * (weights @ counts**2)
    spread = np.sqrt(n_clusters / (n_clusters - 1) * squares.clip(0)) / total
    # Below this the spread is round-off of the cancelling sums above.
    usable = spread > 1e-6 * standard_error
    unbounded = np.where(np.abs(shift) > 1e-6 * standard_error, np.copysign(math.inf, shift), 0.0)
    t = np.where(usable, shift / np.where(usable, spread, 1.0), unbounded)
    upper = np.quantile(t, (1 + level) / 2, axis=0, method="higher")
    lower = np.quantile(t, (1 - level) / 2, axis=0, method="lower")
    return estimate, estimate - upper * standard_error, estimate - lower * standard_error


def _resample_weights(generator: np.random.Generator, n_resamples: int, n_clusters: int) -> np.ndarray:
    """How often each cluster occurs in each resample, [resample, cluster]."""
    return generator.multinomial(n_clusters, np.full(n_clusters, 1 / n_clusters), size=n_resamples).astype(np.float64)


def _statistic_intervals(
    frame: pd.DataFrame, value: str, cluster: str, by: list[str], statistic: Statistic, n: int, level: float, seed: int
) -> list[tuple]:
    groups = frame.groupby(by, sort=True, observed=True) if by else [((), frame)]
    rows = []
    for key, group in groups:
        parts = [part.to_numpy(np.float64) for _, part in group.groupby(cluster, sort=True, observed=True)[value]]
        rows.append(
            (*key, *_bca(parts, statistic, rng(seed, "clusters", len(parts)), n, level), len(parts), len(group))
        )
    return rows


def _bca(
    parts: list[np.ndarray], statistic: Statistic, generator: np.random.Generator, n_resamples: int, level: float
) -> Interval:
    """Bias-corrected and accelerated interval; clusters are the units of the resampling and of the jackknife."""
    n_clusters = len(parts)
    estimate = float(statistic(np.concatenate(parts)))
    if n_clusters < MIN_CLUSTERS:
        return Interval(estimate, math.nan, math.nan)
    draws = generator.integers(n_clusters, size=(n_resamples, n_clusters))
    replicates = np.array([statistic(np.concatenate([parts[i] for i in draw])) for draw in draws])
    left_out = np.array([statistic(np.concatenate(parts[:i] + parts[i + 1 :])) for i in range(n_clusters)])
    below = (np.mean(replicates < estimate) + np.mean(replicates <= estimate)) / 2
    if np.ptp(replicates) == 0 or not 0 < below < 1:
        return Interval(estimate, float(replicates.min()), float(replicates.max()))
    bias = stats.norm.ppf(below)
    influence = left_out.mean() - left_out
    scale = (influence**2).sum() ** 1.5
    acceleration = (influence**3).sum() / (6 * scale) if scale > 0 else 0.0
    z = bias + stats.norm.ppf([(1 - level) / 2, (1 + level) / 2])
    low, high = np.quantile(replicates, stats.norm.cdf(bias + z / (1 - acceleration * z)))
    return Interval(estimate, float(low), float(high))


# ------------------------------------------------------------------------------------------- counts and proportions


def mcnemar_exact(b: int, c: int) -> PairedTest:
    """Exact McNemar test from the discordant counts: `b` only the cached path right, `c` only the recomputed one."""
    return _even_odds(b, c)


def sign_test(wins: int, losses: int) -> PairedTest:
    """Exact two-sided sign test over conditions; ties are in neither count."""
    return _even_odds(wins, losses)


def _even_odds(wins: int, losses: int) -> PairedTest:
    """Two-sided binomial test against one half. Without any discordant pair p = 1 and the share is undefined (NaN)."""
    _check_counts(wins, losses)
    n = wins + losses
    if n == 0:
        return PairedTest(wins, losses, 1.0, Interval(math.nan, 0.0, 1.0))
    return PairedTest(wins, losses, float(stats.binomtest(wins, n).pvalue), proportion_interval(wins, n))


def proportion_interval(k: int, n: int, level: float = 0.95) -> Interval:
    """Clopper-Pearson interval of k successes in n trials: coverage at least `level`, also at k = 0 (rule of three)."""
    _check_counts(k, n - k)
    _check_level(level)
    if n == 0:
        raise InputError("trials", got=0, expected="at least 1", remedy="A proportion of nothing is undefined.")
    low, high = proportion_confint(k, n, alpha=1 - level, method="beta")
    return Interval(k / n, float(low), float(high))


def minimum_detectable_effect(n: int, discordant: float, *, power: float = 0.8, level: float = 0.95) -> float:
    """Smallest difference of paired proportions that McNemar's test finds with `power`, `n` pairs and a discordant
    share.

    The d that solves n d^2 = (z_a sqrt(psi) + z_b sqrt(psi - d^2))^2 (Connor, Biometrics 43, 1987), where psi is
    the discordant share, z_a and z_b the normal quantiles of (1 + level) / 2 and of `power`. Infinite when d would
    exceed psi: a difference is never larger than the discordant share, so that no effect at all is detectable.
    """
    _check_level(level)
    _check_level(power)
    if n < 1 or not 0 < discordant <= 1:
        raise InputError(
            "design", got=(n, discordant), expected="n >= 1 and 0 < discordant <= 1", remedy="Pass counts."
        )
    z_a, z_b = stats.norm.ppf([(1 + level) / 2, power])
    a = z_a * math.sqrt(discordant)
    root = math.sqrt(max(n * a**2 - (n + z_b**2) * (a**2 - z_b**2 * discordant), 0.0))
    effect = float((a * math.sqrt(n) + math.copysign(root, z_b)) / (n + z_b**2))
    return effect if effect <= discordant else math.inf


def holm(pvalues: Numbers) -> np.ndarray:
    """Holm's step-down adjustment: p-values that control the family-wise error."""
    p = np.asarray(pvalues, dtype=np.float64)
    if p.size == 0 or not ((p >= 0) & (p <= 1)).all():
        raise InputError(
            "p-values", got=pvalues, expected="one or more numbers from 0 to 1", remedy="Drop undefined tests."
        )
    return multipletests(p, method="holm")[1]


# --------------------------------------------------------------------------------------------- survival, power laws


def kaplan_meier(
    times: Numbers, observed: Sequence[bool] | np.ndarray | pd.Series, level: float = 0.95
) -> pd.DataFrame:
    """Kaplan-Meier curve of the time to an event; `observed` is False where the time is right-censored.

    Columns time, at_risk, events, survival, low, high; the first row is time 0 (survival 1), then one row per event
    time. The band is pointwise, S^exp(+- z se / (S ln S)) with Greenwood's se (Kalbfleisch & Prentice 1980); it is NaN
    once survival is 0, and after time 0 there is no row at all when every time is censored: use `proportion_interval(0,
    n)`.
    """
    t, event = np.asarray(times, dtype=np.float64), np.asarray(observed, dtype=bool)
    _check_level(level)
    if t.ndim != 1 or t.shape != event.shape or t.size == 0 or not np.isfinite(t).all() or (t < 0).any():
        raise InputError(
            "times",
            got=f"{t.shape} times, {event.shape} flags",
            expected="equally many, finite, >= 0",
            remedy="Check both.",
        )
    start = pd.DataFrame({"time": [0.0], "at_risk": [t.size], "events": [0], "survival": 1.0, "low": 1.0, "high": 1.0})
    if not event.any():
        return start
    fit = SurvfuncRight(t, event.astype(int))
    survival = fit.surv_prob
    with np.errstate(divide="ignore", invalid="ignore"):
        width = stats.norm.ppf((1 + level) / 2) * fit.surv_prob_se / np.abs(survival * np.log(survival))
        low, high = survival ** np.exp(width), survival ** np.exp(-width)
    low[survival == 0] = high[survival == 0] = math.nan
    columns = {"time": fit.surv_times, "at_risk": fit.n_risk.astype(int), "events": fit.n_events.astype(int)}
    return pd.concat(
        [start, pd.DataFrame(columns | {"survival": survival, "low": low, "high": high})], ignore_index=True
    )


def loglog_slope(
    x: Numbers, y: Numbers, cluster: Sequence[object] | np.ndarray | pd.Series | None = None, level: float = 0.95
) -> PowerLaw:
    """Least-squares exponent of y = c x^k on logarithms, with a Student-t interval.

    With `cluster` (one label a point, such as the prompt) the standard error is cluster-robust with C - 1 degrees of
    freedom; without it the points are taken as independent.
    """
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    _check_level(level)
    if a.shape != b.shape or not ((a > 0) & (b > 0) & np.isfinite(a) & np.isfinite(b)).all() or np.unique(a).size < 2:
        raise InputError(
            "points", got=f"{a.size} x, {b.size} y", expected="positive, finite, two x", remedy="Drop zeros."
        )
    if a.size < 3:
        raise InputError("points", got=a.size, expected="at least 3", remedy="Two points leave no interval.")
    model = sm.OLS(np.log(b), sm.add_constant(np.log(a)))
    n_clusters = None
    if cluster is None:
        fit = model.fit()
    else:
        codes, labels = pd.factorize(np.asarray(cluster, dtype=object))
        n_clusters = len(labels)
        if n_clusters < 2 or codes.size != a.size:
            raise InputError(
                "clusters", got=f"{n_clusters} of {codes.size}", expected="2+", remedy="One label a point."
            )
        fit = model.fit(cov_type="cluster", cov_kwds={"groups": codes}, use_t=True)
    low, high = fit.conf_int(alpha=1 - level)[1]
    exponent = Interval(float(fit.params[1]), float(low), float(high))
    return PowerLaw(exponent, math.exp(fit.params[0]), a.size, n_clusters)


# ----------------------------------------------------------------------------------------------------------- checks


def _check_frame(frame: pd.DataFrame, value: str, keys: Sequence[str]) -> None:
    missing = [name for name in (value, *keys) if name not in frame.columns]
    if missing:
        raise InputError(
            "frame", got=f"no column {missing}", expected="value, cluster and by", remedy="Check the names."
        )
    if frame.empty:
        raise InputError("frame", got="no rows", expected="at least one", remedy="Check the selection that made it.")
    bad = int((~np.isfinite(frame[value].to_numpy(np.float64))).sum())
    if bad or frame[list(keys)].isna().any(axis=None):
        raise InputError(
            f"column {value!r}",
            got=f"{bad} non-finite values of {len(frame)}, or missing keys",
            expected="finite values and no missing key",
            remedy="Report undefined rows, then drop them before the call; no average is taken over NaN.",
        )


def _check_resampling(n_resamples: int, level: float) -> None:
    _check_level(level)
    if n_resamples < 100:
        raise InputError("n_resamples", got=n_resamples, expected="at least 100", remedy="Quantiles need resamples.")


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise InputError("level or power", got=level, expected="between 0 and 1", remedy="For 95 % pass 0.95.")


def _check_counts(*counts: int) -> None:
    if any(count < 0 or count != int(count) for count in counts):
        raise InputError("counts", got=counts, expected="whole numbers, 0 or more, k <= n", remedy="Pass counts.")
