"""When does drift flip the most likely token?

Certificate: a margin (first minus second logit, of either path) above 2 max |dz| excludes a flip, by arithmetic.
Law: if each path's two top logits carry independent errors of standard deviation sigma / sqrt 2 against each other's
position, the gap between them moves by a normal variable of standard deviation sigma sqrt 2, and

    P(flip) = Phi(-margin / (sigma sqrt 2)).

sigma is fitted by maximum likelihood to (margin of the recomputed path, flipped or not), per model and dtype, with a
bootstrap interval that resamples prompts. It can be checked without any flip: the standard deviation of the measured
shift of that gap (`gap_shift`) is sigma sqrt 2 if the law holds.

Conventions: teacher-forced steps >= 1. Exact ties have margin 0 and probability 1/2. Steps with equal logits on both
paths are part of the data: the law then speaks of the mixture.
Controls: calibration, predicted beside observed flips in bins of equal numbers of steps; sigma from the shifts beside
sigma from the flips; the certificate counted, a contradiction is an error.
"""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import norm

from mechkv.distributions import require_certificate
from mechkv.errors import InputError
from mechkv.stats import Interval, cluster_bootstrap, proportion_interval

_COLUMNS = ("prompt", "step", "margin_b", "flip", "certified")


@dataclass(frozen=True)
class FlipLaw:
    """The fitted law.

    Attributes:
        sigma: Fitted to flips, in logits; undefined (NaN) where nothing flips.
        sigma_shift: Standard deviation of the gap's shift / sqrt 2; NaN where it was not measured.
        calibration: Bins of equal numbers of steps by margin: mean margin, predicted and observed share of flips.
        n_steps, n_flips: Data of the fit.
        n_certified: Steps at which a flip is excluded.
    """

    sigma: Interval
    sigma_shift: float
    calibration: pd.DataFrame
    n_steps: int
    n_flips: int
    n_certified: int


def flip_probability(margin: np.ndarray | float, sigma: float) -> np.ndarray:
    """Phi(-margin / (sigma sqrt 2))."""
    return np.asarray(norm.cdf(-np.asarray(margin, dtype=np.float64) / (sigma * math.sqrt(2.0))))


def certificate(frame: pd.DataFrame) -> tuple[int, int]:
    """Certified steps and all decode steps of a teacher-forced frame.

    Raises:
        GuardError: A certified step flipped.
    """
    decoded = _decoded(frame)
    certified, flip = (torch.tensor(decoded[name].to_numpy(bool)) for name in ("certified", "flip"))
    require_certificate(certified, flip)
    return int(certified.sum()), len(decoded)


def fit_flip_law(frame: pd.DataFrame, *, n_bins: int = 8, seed: int = 0, n_resamples: int = 400) -> FlipLaw:
    """Fit the law to a teacher-forced frame (`TokenDivergence.frame` of one strategy, `PrecisionLadder.frame` of one
    dtype, ...)."""
    n_certified, n_steps = certificate(frame)
    decoded = _decoded(frame)
    n_flips = int(decoded["flip"].sum())
    sigma = Interval(math.nan, math.nan, math.nan)
    if 0 < n_flips < n_steps:
        signed = decoded.assign(signed=np.copysign(decoded["margin_b"], 0.5 - decoded["flip"]))
        row = cluster_bootstrap(
            signed, "signed", statistic=_sigma, support=(0.0, math.inf), n_resamples=n_resamples, seed=seed
        ).iloc[0]
        sigma = Interval(float(row["estimate"]), float(row["low"]), float(row["high"]))
    shift = float(decoded["gap_shift"].std() / math.sqrt(2.0)) if "gap_shift" in decoded else math.nan
    return FlipLaw(sigma, shift, _calibration(decoded, sigma.estimate, n_bins), n_steps, n_flips, n_certified)


def _sigma(signed: np.ndarray) -> float:
    """Maximum likelihood; a flip is marked by the sign bit of its margin. Without a flip sigma is 0."""
    margin, flip = np.abs(signed), np.signbit(signed)
    if not flip.any():
        return 0.0

    def loss(log_sigma: float) -> float:
        z = margin / (math.exp(log_sigma) * math.sqrt(2.0))
        return -float(np.where(flip, norm.logcdf(-z), norm.logcdf(z)).sum())

    scale = max(float(margin[flip].max()), 1e-12)
    found = minimize_scalar(loss, bounds=(math.log(scale) - 12, math.log(scale) + 6), method="bounded")
    return math.exp(float(found.x))


def _calibration(decoded: pd.DataFrame, sigma: float, n_bins: int) -> pd.DataFrame:
    ordered = decoded.sort_values("margin_b", kind="stable")
    rows = []
    for part in np.array_split(np.arange(len(ordered)), min(n_bins, len(ordered))):
        bin_ = ordered.iloc[part]
        observed = proportion_interval(int(bin_["flip"].sum()), len(bin_))
        predicted = float(flip_probability(bin_["margin_b"].to_numpy(), sigma).mean()) if sigma > 0 else math.nan
        rows.append(
            {
                "margin_low": bin_["margin_b"].min(),
                "margin_high": bin_["margin_b"].max(),
                "margin": bin_["margin_b"].mean(),
                "predicted": predicted,
                "observed": observed.estimate,
                "low": observed.low,
                "high": observed.high,
                "n_steps": len(bin_),
            }
        )
    return pd.DataFrame(rows)


def _decoded(frame: pd.DataFrame) -> pd.DataFrame:
    missing = [name for name in _COLUMNS if name not in frame.columns]
    decoded = frame if missing else frame[frame["step"] > 0]
    if missing or decoded.empty:
        raise InputError(
            "teacher-forced steps",
            got=f"no column {missing}" if missing else "no decode step",
            expected=f"columns {_COLUMNS} and steps from 1 on",
            remedy="Pass the frame of a token divergence or of one rung of a ladder.",
        )
    return decoded
