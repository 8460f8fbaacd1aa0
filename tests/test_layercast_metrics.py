"""The four metrics on runs written by hand, and on copies of one run."""

import math

import numpy as np
import pandas as pd
import pytest

from mechkv.errors import InputError
from mechkv.layercast_metrics import divergence_index, layercast_metrics


def runs(**texts) -> pd.DataFrame:
    rows = []
    for run, problems in texts.items():
        for problem, (tokens, probabilities, correct) in enumerate(problems):
            row = {"run": run, "problem": problem, "tokens": tokens, "top1_prob": probabilities, "correct": correct}
            rows.append(row)
    return pd.DataFrame(rows)


def test_numbers_by_hand() -> None:
    found = layercast_metrics(
        runs(
            cached=[([1, 2, 3], [0.5, 0.6, 0.7], True), ([4, 5], [0.9, 0.8], True)],
            recomputed=[([1, 9, 3, 7], [0.5, 0.4, 0.1, 0.1], False), ([4, 5], [0.7, 0.8], True)],
        )
    )
    root = math.sqrt(2)
    assert found.div_index == 1
    assert (found.n_divergent, found.n_problems, found.n_runs) == (1, 2, 2)
    assert found.frame["div_index"].isna().tolist() == [False, True]
    # before and at the divergence only: what follows has another context
    assert found.frame["std_top1_prob"].tolist() == pytest.approx([(0 + 0.2 / root) / 2, (0.2 / root + 0) / 2])
    assert found.avg_std_length == pytest.approx((1 / root + 0) / 2)
    assert found.std_accuracy == pytest.approx(0.5 / root)


def test_copies_of_one_run_have_no_spread() -> None:
    problem = [([1, 2, 3], [0.5, 0.6, 0.7], True), ([4], [0.3], False)]
    found = layercast_metrics(runs(a=problem, b=problem, c=problem))
    assert math.isnan(found.div_index)
    assert found.n_divergent == 0
    assert (found.std_accuracy, found.avg_std_top1_prob, found.avg_std_length) == (0, 0, 0)


def test_a_shorter_text_diverges_where_it_ends() -> None:
    assert divergence_index([[1, 2, 3], [1, 2]]) == 2
    assert divergence_index([[1, 2], [1, 2]]) is None
    assert divergence_index([[1, 2], [1, 3], [0, 2]]) == 0


def test_three_runs_use_the_sample_standard_deviation() -> None:
    lengths = [3, 5, 10]
    made = {f"r{n}": [(list(range(n)), [0.5] * n, True)] for n in lengths}
    assert layercast_metrics(runs(**made)).avg_std_length == pytest.approx(np.std(lengths, ddof=1))


def test_incomplete_runs_are_refused() -> None:
    frame = runs(a=[([1], [0.5], True)], b=[([1], [0.5], True)])
    for wrong in (frame[frame["run"] == "a"], frame.drop(columns="tokens"), pd.concat([frame, frame])):
        with pytest.raises(InputError, match="runs"):
            layercast_metrics(wrong)
    with pytest.raises(InputError, match="runs"):
        layercast_metrics(pd.concat([frame, runs(a=[([1], [0.5], True)]).assign(problem=5)]))
