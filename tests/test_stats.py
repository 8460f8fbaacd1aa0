import hashlib
import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats as scipy_stats
from statsmodels.stats.contingency_tables import mcnemar

from mechkv.errors import InputError
from mechkv.stats import (
    MIN_CLUSTERS,
    cluster_bootstrap,
    holm,
    kaplan_meier,
    loglog_slope,
    mcnemar_exact,
    minimum_detectable_effect,
    proportion_interval,
    rng,
    sign_test,
    torch_rng,
)

# Binomial noise of a coverage of 95 % over 1000 studies is 0.7 %: 0.93 to 0.97 is just under three of it.
COVERAGE = (0.93, 0.97)


def studies(n_studies: int, n_prompts: int, n_steps: int = 6, prompt_effect: float = 1.0) -> pd.DataFrame:
    """Many studies at once: prompts differ (skewed), steps of a prompt are alike, prompts have different lengths."""
    g = rng(3, "studies", n_studies, n_prompts)
    study, prompt, step = (
        axis.ravel() for axis in np.meshgrid(*map(np.arange, (n_studies, n_prompts, n_steps)), indexing="ij")
    )
    effect = prompt_effect * (g.gamma(4.0, 0.5, size=(n_studies, n_prompts)) - 2.0)
    value = effect[study, prompt] + 0.3 * g.normal(size=study.size)
    frame = pd.DataFrame({"study": study, "prompt": prompt, "step": step, "value": value})
    return frame[step < 2 + prompt % 5]


# ------------------------------------------------------------------------------------------------------ randomness


def test_generators_depend_on_seed_and_labels_alone():
    assert rng(1, "a", 2).random() == rng(1, "a", 2).random()
    assert torch.equal(torch.rand(3, generator=torch_rng(1, "a")), torch.rand(3, generator=torch_rng(1, "a")))
    numbers = {
        rng(*key).random() for key in [(1, "a", 2), (2, "a", 2), (1, "a", "2"), (1, "a2"), (1, "a", 2, ""), (1,)]
    }
    assert len(numbers) == 6
    assert torch_rng(1, "a").initial_seed() != torch_rng(1, "b").initial_seed()
    # The derivation is fixed: a stored result must be reproducible by a later version.
    digest = hashlib.sha256(b'[0, "pin"]').hexdigest()
    assert rng(0, "pin").bit_generator.seed_seq.entropy == int(digest, 16)
    assert torch_rng(0, "pin").initial_seed() == int(digest[:16], 16) >> 1


# ------------------------------------------------------------------------------------------------- cluster bootstrap


@pytest.mark.parametrize("n_prompts", [8, 60])
def test_interval_covers_the_truth_as_often_as_it_says(n_prompts):
    result = cluster_bootstrap(studies(1000, n_prompts), "value", by=["study"], n_resamples=1000)
    covered = ((result.low <= 0) & (result.high >= 0)).mean()
    assert COVERAGE[0] <= covered <= COVERAGE[1]


def test_resampling_rows_instead_of_prompts_covers_far_too_little():
    frame = studies(200, 60)
    frame = frame.assign(row=frame.prompt * 100 + frame.step)
    result = cluster_bootstrap(frame, "value", by=["study"], cluster="row", n_resamples=1000)
    assert ((result.low <= 0) & (result.high >= 0)).mean() < 0.85


def test_estimate_is_the_plain_mean_and_width_that_of_the_cluster_means():
    frame = studies(1, 60)
    got = cluster_bootstrap(frame, "value").iloc[0]
    assert got.estimate == pytest.approx(frame.value.mean(), rel=1e-12)
    assert (got.n_clusters, got.n_rows) == (60, len(frame))
    balanced = frame[frame.step < 2]
    means = balanced.groupby("prompt").value.mean()
    want = scipy_stats.t.interval(0.95, 59, means.mean(), scipy_stats.sem(means))
    got = cluster_bootstrap(balanced, "value", n_resamples=20_000).iloc[0]
    assert got.low == pytest.approx(want[0], abs=0.1 * (want[1] - want[0]))
    assert got.high == pytest.approx(want[1], abs=0.1 * (want[1] - want[0]))


def test_rows_that_repeat_within_a_prompt_add_no_certainty_and_new_prompts_do():
    frame = studies(1, 30)
    doubled = pd.concat([frame, frame])
    more = pd.concat([frame, frame.assign(prompt=frame.prompt + 30)])
    width = [np.ptp(cluster_bootstrap(f, "value")[["low", "high"]].to_numpy()) for f in (frame, doubled, more)]
    assert width[1] == pytest.approx(width[0], rel=1e-9)
    assert width[2] == pytest.approx(width[0] / math.sqrt(2), rel=0.1)


def test_median_matches_scipy_when_every_prompt_has_one_row():
    values = rng(5, "median").gamma(2.0, size=80)
    frame = pd.DataFrame({"prompt": np.arange(80), "value": values})
    got = cluster_bootstrap(frame, "value", statistic=np.median, n_resamples=4000).iloc[0]
    want = scipy_stats.bootstrap((values,), np.median, n_resamples=4000, rng=rng(5, "scipy")).confidence_interval
    assert got.estimate == np.median(values)
    spread = want.high - want.low
    assert got.low == pytest.approx(want.low, abs=0.1 * spread)
    assert got.high == pytest.approx(want.high, abs=0.1 * spread)


def test_groups_with_other_prompts_are_kept_apart():
    frame = studies(3, 12)
    frame = frame[~((frame.study == 1) & (frame.prompt > 6))].assign(layer=frame.study * 7)
    together = cluster_bootstrap(frame, "value", by=["layer", "study"])
    assert together.n_clusters.tolist() == [12, 7, 12]
    for i, study in enumerate((0, 1, 2)):
        alone = cluster_bootstrap(frame[frame.study == study], "value")
        columns = ["estimate", "low", "high", "n_clusters", "n_rows"]
        np.testing.assert_allclose(
            together.loc[i, columns].astype(float), alone.loc[0, columns].astype(float), rtol=1e-9
        )


def test_seed_decides_and_row_order_does_not():
    frame = studies(1, 20)
    first = cluster_bootstrap(frame, "value", seed=1)
    pd.testing.assert_frame_equal(first, cluster_bootstrap(frame.sample(frac=1.0, random_state=0), "value", seed=1))
    assert first.low[0] != cluster_bootstrap(frame, "value", seed=2).low[0]


@pytest.mark.parametrize("statistic", [np.mean, np.median])
def test_too_few_prompts_have_no_interval_and_enough_have_one(statistic):
    few = cluster_bootstrap(studies(1, MIN_CLUSTERS - 1), "value", statistic=statistic)
    enough = cluster_bootstrap(studies(1, MIN_CLUSTERS), "value", statistic=statistic)
    assert np.isfinite(few.estimate[0])
    assert few[["low", "high"]].isna().all(axis=None)
    assert enough.low[0] < enough.estimate[0] < enough.high[0]


def test_rare_events_give_a_wide_interval_and_equal_prompts_none():
    frame = pd.DataFrame({"prompt": np.arange(20), "value": [1.0] + [0.0] * 19})
    rare = cluster_bootstrap(frame, "value", support=(0, 1)).iloc[0]
    assert (rare.estimate, rare.high) == (0.05, 1.0)
    assert np.isinf(cluster_bootstrap(frame, "value").high[0])
    assert rare.low >= 0
    flat = cluster_bootstrap(frame.assign(value=0.25), "value").iloc[0]
    assert (flat.low, flat.estimate, flat.high) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_values_are_refused_not_dropped(bad):
    frame = studies(1, 10).reset_index(drop=True)
    cluster_bootstrap(frame, "value")
    frame.loc[3, "value"] = bad
    with pytest.raises(InputError, match="1 non-finite"):
        cluster_bootstrap(frame, "value")


@pytest.mark.parametrize(
    ("change", "keywords"),
    [
        (lambda f: f, {"cluster": "nobody"}),
        (lambda f: f, {"by": ["nothing"]}),
        (lambda f: f, {"level": 95.0}),
        (lambda f: f, {"n_resamples": 10}),
        (lambda f: f.iloc[:0], {}),
        (lambda f: f.assign(prompt=[math.nan] + [1.0] * (len(f) - 1)), {}),
    ],
)
def test_bad_bootstrap_input_is_refused(change, keywords):
    with pytest.raises(InputError):
        cluster_bootstrap(change(studies(1, 10)), "value", **keywords)


# -------------------------------------------------------------------------------------------- counts and proportions


@pytest.mark.parametrize(("b", "c"), [(0, 0), (1, 0), (3, 11), (8, 1), (40, 55)])
def test_mcnemar_agrees_with_statsmodels(b, c):
    got = mcnemar_exact(b, c)
    want = mcnemar([[100, b], [c, 50]], exact=True).pvalue if b + c else 1.0
    assert got.p_value == pytest.approx(want, rel=1e-12)
    assert got.p_value == mcnemar_exact(c, b).p_value
    assert got.share.low <= got.share.high


def test_eight_of_nine_conditions_closed_form():
    assert sign_test(8, 1).p_value == pytest.approx(2 * (9 + 1) / 2**9, rel=1e-12)
    assert sign_test(5, 4).p_value == 1.0
    assert math.isnan(sign_test(0, 0).share.estimate)


def test_proportion_interval_closed_forms_at_the_edges():
    n, a = 300, 0.025
    assert proportion_interval(0, n).high == pytest.approx(1 - a ** (1 / n), rel=1e-9)
    assert proportion_interval(n, n).low == pytest.approx(a ** (1 / n), rel=1e-9)
    assert proportion_interval(0, n).low == 0.0
    assert proportion_interval(0, n, level=0.90).high == pytest.approx(3 / n, rel=0.01)  # the rule of three
    want = scipy_stats.binomtest(7, 31).proportion_ci(0.95, "exact")
    assert proportion_interval(7, 31)[1:] == pytest.approx((want.low, want.high), rel=1e-9)


@pytest.mark.parametrize("p", [0.02, 0.3, 0.5])
def test_proportion_interval_covers_at_least_its_level(p):
    n = 60
    intervals = [proportion_interval(k, n) for k in range(n + 1)]
    inside = [interval.low <= p <= interval.high for interval in intervals]
    covered = scipy_stats.binom.pmf(np.arange(n + 1), n, p) @ inside
    assert 0.95 <= covered < 0.995


def power_of_mcnemar(n: int, discordant: float, effect: float) -> float:
    """Exact power of the asymptotic McNemar test, by summing over all discordant counts."""
    total = 0.0
    for m in range(1, n + 1):
        b = np.arange(m + 1)
        rejected = np.abs(2 * b - m) / math.sqrt(m) > scipy_stats.norm.ppf(0.975)
        chance = scipy_stats.binom.pmf(b, m, (discordant + effect) / (2 * discordant))
        total += scipy_stats.binom.pmf(m, n, discordant) * chance[rejected].sum()
    return total


@pytest.mark.parametrize(("n", "discordant", "power"), [(200, 0.3, 0.8), (400, 0.1, 0.8), (200, 0.3, 0.9)])
def test_minimum_detectable_effect_has_the_power_it_promises(n, discordant, power):
    effect = minimum_detectable_effect(n, discordant, power=power)
    assert power_of_mcnemar(n, discordant, effect) == pytest.approx(power, abs=0.02)
    assert power_of_mcnemar(n, discordant, effect / 2) < power - 0.3


@pytest.mark.parametrize("power", [0.3, 0.5, 0.8, 0.95])
def test_minimum_detectable_effect_solves_its_equation(power):
    n, psi = 500, 0.2
    d = minimum_detectable_effect(n, psi, power=power)
    z_a, z_b = scipy_stats.norm.ppf([0.975, power])
    assert d * math.sqrt(n) == pytest.approx(z_a * math.sqrt(psi) + z_b * math.sqrt(psi - d * d), rel=1e-12)


def test_nothing_is_detectable_with_too_few_pairs():
    assert minimum_detectable_effect(5, 0.05) == math.inf
    assert minimum_detectable_effect(5000, 0.05) < 0.05


def test_holm_by_hand():
    np.testing.assert_allclose(holm([0.04, 0.01, 0.03]), [0.06, 0.03, 0.06], rtol=1e-12)
    assert holm([0.04])[0] == 0.04


# ------------------------------------------------------------------------------------------------ survival, power laws


def test_kaplan_meier_by_hand():
    got = kaplan_meier([1, 2, 2, 3, 4], [True, True, False, True, False])
    assert got.time.tolist() == [0, 1, 2, 3]
    assert got.at_risk.tolist() == [5, 5, 4, 2]
    assert got.events.tolist() == [0, 1, 1, 1]
    np.testing.assert_allclose(got.survival, [1, 4 / 5, 3 / 5, 3 / 10], rtol=1e-12)
    greenwood = math.sqrt(1 / 20 + 1 / 12 + 1 / 2)
    low = 0.3 ** math.exp(1.959963984540054 * greenwood / abs(math.log(0.3)))
    assert got.low.iloc[-1] == pytest.approx(low, rel=1e-9)
    assert ((got.low <= got.survival) & (got.survival <= got.high)).all()


def test_kaplan_meier_is_not_the_share_of_those_seen():
    """Dropping the censored, or counting them as events, gives other curves."""
    times, observed = [1, 2, 2, 3, 4], [True, True, False, True, False]
    curve = kaplan_meier(times, observed)
    dropped = kaplan_meier([1, 2, 3], [True] * 3)
    assert dropped.survival.iloc[-1] == 0.0
    assert math.isnan(dropped.low.iloc[-1])
    assert curve.survival.iloc[-1] > dropped.survival.iloc[-1]
    assert kaplan_meier([5, 5, 5], [False] * 3).survival.tolist() == [1.0]


def test_kaplan_meier_band_covers_the_truth_as_often_as_it_says():
    """Geometric times with hazard 1/20 a step, censored at a random horizon: survival after step 10."""
    g, hits, naive = rng(0, "survival"), 0, 0
    for _ in range(1000):
        times, horizon = g.geometric(0.05, size=80), g.integers(5, 40, size=80)
        curve = kaplan_meier(np.minimum(times, horizon), times <= horizon)
        at_ten = curve[curve.time <= 10].iloc[-1]
        truth = 0.95**10
        hits += at_ten.low <= truth <= at_ten.high
        share = proportion_interval(int((np.minimum(times, horizon) > 10).sum()), 80)
        naive += share.low <= truth <= share.high
    assert COVERAGE[0] <= hits / 1000 <= COVERAGE[1]
    assert naive / 1000 < 0.8


def test_power_law_is_recovered_and_a_wrong_exponent_is_excluded():
    g = rng(0, "power law")
    x = np.tile([16, 32, 64, 128, 256], 40)
    prompt = np.repeat(np.arange(40), 5)
    y = 3e-4 * x**0.5 * np.exp(0.5 * g.normal(size=40)[prompt] + 0.05 * g.normal(size=200))
    fit = loglog_slope(x, y, cluster=prompt.tolist())
    assert fit.exponent.low < 0.5 < fit.exponent.high < 0.55
    assert (fit.n, fit.n_clusters) == (200, 40)
    exact = loglog_slope([1, 2, 4, 8], [3, 12, 48, 192])
    assert exact.exponent.estimate == pytest.approx(2.0, rel=1e-12)
    assert exact.prefactor == pytest.approx(3.0, rel=1e-12)
    plain = scipy_stats.linregress(np.log(x), np.log(y))
    assert loglog_slope(x, y).exponent.estimate == pytest.approx(plain.slope, rel=1e-9)


@pytest.mark.parametrize(
    "call",
    [
        lambda: mcnemar_exact(-1, 2),
        lambda: proportion_interval(3, 2),
        lambda: proportion_interval(0, 0),
        lambda: minimum_detectable_effect(0, 0.1),
        lambda: minimum_detectable_effect(10, 0.0),
        lambda: holm([0.1, math.nan]),
        lambda: holm([]),
        lambda: kaplan_meier([1, 2], [True]),
        lambda: kaplan_meier([1, math.nan], [True, True]),
        lambda: loglog_slope([1, 2, 3], [1, 0, 2]),
        lambda: loglog_slope([1, 1, 1], [1, 2, 3]),
        lambda: loglog_slope([1, 2], [1, 2]),
        lambda: loglog_slope([1, 2, 3], [1, 2, 3], cluster=["a", "a", "a"]),
    ],
)
def test_bad_input_is_refused(call):
    with pytest.raises(InputError):
        call()
