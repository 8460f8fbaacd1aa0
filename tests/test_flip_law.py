"""The flip law recovers the sigma that made the data, is calibrated then, and is not when the data break it."""

import math

import numpy as np
import pandas as pd
import pytest

from mechkv.errors import GuardError, InputError
from mechkv.flip_law import certificate, fit_flip_law, flip_probability


def simulated(sigma: float, n_prompts: int = 40, n_steps: int = 50, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    n = n_prompts * n_steps
    margin = rng.exponential(1.0, size=n)
    shift = rng.normal(scale=sigma * math.sqrt(2), size=n)
    frame = pd.DataFrame(
        {"prompt": np.repeat(np.arange(n_prompts), n_steps), "step": np.tile(np.arange(1, 51), n_prompts)}
    )
    flip = (margin + shift < 0).astype(float)
    return frame.assign(margin_b=margin, flip=flip, gap_shift=shift, certified=0.0)


@pytest.mark.parametrize("sigma", [0.05, 0.3])
def test_sigma_is_recovered_from_flips_and_from_shifts(sigma) -> None:
    law = fit_flip_law(simulated(sigma), n_resamples=100)
    assert law.sigma.low < sigma < law.sigma.high
    assert law.sigma.estimate == pytest.approx(sigma, rel=0.25)
    assert law.sigma_shift == pytest.approx(sigma, rel=0.05)


def test_intervals_of_sigma_cover_the_truth() -> None:
    hits = [
        law.sigma.low <= 0.3 <= law.sigma.high
        for law in (fit_flip_law(simulated(0.3, 20, 50, seed), n_resamples=100, seed=seed) for seed in range(8))
    ]
    assert sum(hits) >= 6


def test_calibration_holds_for_the_law_and_breaks_for_another() -> None:
    good = fit_flip_law(simulated(0.3), n_resamples=100).calibration
    inside = (good["low"] <= good["predicted"]) & (good["predicted"] <= good["high"])
    assert inside.mean() >= 0.75
    frame = simulated(0.3)
    frame["flip"] = (np.random.default_rng(1).random(len(frame)) < 0.2).astype(float)  # flips that ignore the margin
    bad = fit_flip_law(frame, n_resamples=100).calibration
    assert ((bad["low"] <= bad["predicted"]) & (bad["predicted"] <= bad["high"])).mean() < 0.5


def test_probability_is_half_at_a_tie_and_falls_with_the_margin() -> None:
    assert flip_probability(0.0, 0.3) == pytest.approx(0.5)
    assert flip_probability(0.3 * math.sqrt(2), 0.3) == pytest.approx(0.158655, abs=1e-6)
    assert flip_probability(10.0, 0.3) < 1e-100


def test_without_flips_there_is_no_sigma_but_the_certificate_is_counted() -> None:
    frame = simulated(0.3).assign(flip=0.0, certified=1.0)
    law = fit_flip_law(frame)
    assert math.isnan(law.sigma.estimate)
    assert (law.n_flips, law.n_certified) == (0, len(frame))
    assert certificate(frame) == (len(frame), len(frame))
    frame.loc[3, "flip"] = 1.0
    with pytest.raises(GuardError, match="flip certificate"):
        fit_flip_law(frame)


def test_step_zero_is_left_out_and_frames_without_steps_are_refused() -> None:
    frame = simulated(0.3)
    null = frame.assign(step=0, margin_b=0.0, flip=0.0)
    joined = fit_flip_law(pd.concat([frame, null]), n_resamples=100)
    assert joined.sigma.estimate == fit_flip_law(frame, n_resamples=100).sigma.estimate
    with pytest.raises(InputError, match="teacher-forced"):
        fit_flip_law(null)
    with pytest.raises(InputError, match="no column"):
        fit_flip_law(frame.drop(columns="margin_b"))
