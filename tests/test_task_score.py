"""Paired scores: p-values of scipy and statsmodels, intervals that cover, and what no discordant pair means."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats
from statsmodels.stats.contingency_tables import mcnemar

from mechkv.errors import InputError
from mechkv.prompts import Problem
from mechkv.stats import proportion_interval
from mechkv.task_score import outcomes, problems_from, task_score


def table(both: int, b: int, c: int, neither: int, condition: str = "greedy") -> pd.DataFrame:
    cached = [True] * (both + b) + [False] * (c + neither)
    recomputed = [True] * both + [False] * b + [True] * c + [False] * neither
    frame = pd.DataFrame({"cached": cached, "recomputed": recomputed})
    return frame.assign(condition=condition, problem=[f"p{i}" for i in range(len(frame))])


@pytest.mark.parametrize(("both", "b", "c", "neither"), [(40, 9, 2, 49), (10, 3, 3, 4), (0, 1, 12, 7), (5, 1, 0, 94)])
def test_p_values_are_those_of_statsmodels_and_scipy(both, b, c, neither) -> None:
    row = task_score(table(both, b, c, neither)).table.iloc[0]
    theirs = mcnemar([[both, b], [c, neither]], exact=True)
    assert row["p_value"] == pytest.approx(min(theirs.pvalue, 1.0), abs=1e-12)
    assert row["p_value"] == pytest.approx(scipy_stats.binomtest(b, b + c).pvalue, abs=1e-12)
    assert (row["b"], row["c"], row["both"], row["neither"]) == (b, c, both, neither)
    assert row["difference"] == pytest.approx((b - c) / (both + b + c + neither))
    assert row["low"] <= row["difference"] <= row["high"]
    swapped = task_score(table(both, c, b, neither)).table.iloc[0]
    assert swapped["p_value"] == pytest.approx(row["p_value"])
    assert swapped["difference"] == pytest.approx(-row["difference"])


def test_eight_of_nine_conditions_is_the_papers_own_sign_test() -> None:
    frames = [table(5, 3, 1, 11, f"c{i}") for i in range(8)] + [table(5, 1, 2, 12, "c8")]
    test = task_score(pd.concat(frames)).conditions
    assert (test.wins, test.losses) == (8, 1)
    assert test.p_value == pytest.approx(0.0390625)
    ties = task_score(pd.concat([table(5, 2, 2, 11, f"c{i}") for i in range(9)])).conditions
    assert (ties.wins, ties.losses, ties.p_value) == (0, 0, 1.0)


def test_without_a_discordant_pair_nothing_is_detectable_and_the_share_is_bounded() -> None:
    row = task_score(table(2, 0, 0, 98)).table.iloc[0]
    assert row["p_value"] == 1
    assert math.isinf(row["detectable"])
    assert row["high"] == pytest.approx(1 - 0.025 ** (1 / 100))
    assert row["low"] == -row["high"]
    assert row["high"] < row["detectable_at_bound"] or row["detectable_at_bound"] < 0.2


def test_intervals_of_the_difference_cover_over_simulated_studies() -> None:
    rng, n, truth, covered = np.random.default_rng(1), 80, 0.15 - 0.05, 0
    studies = 200
    for _ in range(studies):
        kind = rng.choice(4, size=n, p=[0.3, 0.15, 0.05, 0.5])
        counts = np.bincount(kind, minlength=4)
        row = task_score(table(*counts)).table.iloc[0]
        covered += row["low"] <= truth <= row["high"]
    assert 0.91 <= covered / studies <= 0.985


def test_answers_are_read_from_both_texts_of_a_prompt() -> None:
    problems = [Problem("How many?", "Work.\n#### 12"), Problem("And now?", "#### 7")]
    rows = [
        ("greedy", 0, "cached", "so #### 12", True),
        ("greedy", 0, "recomputed", "so 13", True),
        ("greedy", 1, "cached", "we have", False),
        ("greedy", 1, "recomputed", "7 apples, 7", True),
    ]
    frame = outcomes(pd.DataFrame(rows, columns=["strategy", "prompt", "path", "text", "ended"]), problems, "bfloat16")
    assert frame["cached"].tolist() == [True, False]
    assert frame["recomputed"].tolist() == [False, True]
    assert frame["cut"].tolist() == [False, True]
    assert frame["condition"].unique().tolist() == ["bfloat16, greedy"]
    assert task_score(frame).table["n_cut"].tolist() == [1]


def test_unpaired_outcomes_are_refused() -> None:
    frame = table(1, 1, 1, 1)
    with pytest.raises(InputError, match="paired outcomes"):
        task_score(frame.drop(columns="cached"))
    with pytest.raises(InputError, match="twice"):
        task_score(pd.concat([frame, frame]))


def test_problems_come_from_the_package_a_file_or_the_hub(tmp_path, monkeypatch) -> None:
    assert len(problems_from()) > 10
    file = tmp_path / "some.jsonl"
    file.write_text('{"question": "How many?", "answer": "#### 3"}\n')
    assert [int(problem.number) for problem in problems_from(file)] == [3]
    parquet = tmp_path / "test.parquet"
    pd.DataFrame({"question": ["What?"], "answer": ["#### 1,200"]}).to_parquet(parquet)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *args, **kwargs: str(parquet))
    assert [int(problem.number) for problem in problems_from("openai/gsm8k")] == [1200]

    def offline(*args, **kwargs):
        raise OSError("no route to the hub")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    with pytest.raises(InputError, match="no route"):
        problems_from("openai/gsm8k")


def test_one_discordant_pair_leaves_no_wild_interval():
    """The difference is at most the discordant share: 1 of 100, at most 5.4 % by Clopper and Pearson."""
    rows = [{"condition": "x", "problem": i, "cached": i < 4, "recomputed": i < 3} for i in range(100)]
    row = task_score(pd.DataFrame(rows)).table.iloc[0]
    bound = proportion_interval(1, 100).high
    assert -bound <= row["low"] <= row["difference"] == 0.01 <= row["high"] <= bound < 0.055
