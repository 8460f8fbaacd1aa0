"""How reproducible are several runs of the same problems? LayerCast's four metrics (arXiv 2506.09501, section 3.1).

A run is one way of computing the same thing (a path, a dtype, a thread count, a device). Per problem, over its runs:

- Div_Index: the first index at which not all runs have the same token (a run that has ended differs from one that has
  not); undefined, and counted, where all texts are the same: the paper reports divergent problems.
- Avg_Std@top1_prob: standard deviation over runs of the probability of the top token, averaged over the positions
  before Div_Index and the one at it (there the contexts are still the same), then over problems.
- Avg_Std@Output_Length: standard deviation over runs of the number of tokens, averaged over problems.
- Std@Acc: standard deviation over runs of the accuracy.

Conventions: sample standard deviations (n - 1), in float64; two runs give |a - b| / sqrt 2. Problems are averaged with
equal weight. The published code of the paper (nanomaoli/llm_reproducibility) stores log-probabilities and scores
answers, and holds none of the four metrics: what the text leaves open (n - 1, whether the position of Div_Index itself
counts) is our reading, so compare values of one implementation only.
Control: copies of one run give Std 0 everywhere and no divergence.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from mechkv.errors import InputError


@dataclass(frozen=True)
class LayerCastMetrics:
    """The four numbers, and what they were averaged over.

    Attributes:
        frame: A row per problem: `div_index` (missing where all runs agree), `std_top1_prob`, `std_length`.
        div_index: Mean over the problems that diverge; NaN where none does.
        n_divergent, n_problems, n_runs: Counts.
        std_accuracy: Std@Acc; NaN where runs carry no score.
        avg_std_top1_prob, avg_std_length: Averages over problems.
    """

    frame: pd.DataFrame
    div_index: float
    n_divergent: int
    n_problems: int
    n_runs: int
    std_accuracy: float
    avg_std_top1_prob: float
    avg_std_length: float


def layercast_metrics(runs: pd.DataFrame) -> LayerCastMetrics:
    """The metrics of a frame with a row per `run` and `problem`: `tokens`, `top1_prob` (a list each), and `correct`
    where there is a score.

    Raises:
        InputError: Fewer than two runs, or a problem that some run lacks.
    """
    needed = ["run", "problem", "tokens", "top1_prob"]
    missing = [name for name in needed if name not in runs.columns]
    n_runs = 0 if missing else runs["run"].nunique()
    if n_runs < 2 or runs.duplicated(["run", "problem"]).any() or len(runs) != n_runs * runs["problem"].nunique():
        raise InputError(
            "runs",
            got=f"no column {missing}" if missing else f"{n_runs} runs, {len(runs)} rows",
            expected="two or more runs, each of every problem once",
            remedy="One row per run and problem.",
        )
    rows = []
    for problem, part in runs.groupby("problem", sort=False):
        texts = [[int(token) for token in tokens] for tokens in part["tokens"]]
        probabilities = [np.asarray(values, dtype=np.float64) for values in part["top1_prob"]]
        index = divergence_index(texts)
        shared = min(len(values) for values in probabilities) if index is None else index + 1
        shared = min(shared, *(len(values) for values in probabilities))
        shifts = [values[:shared] - probabilities[0][:shared] for values in probabilities]  # exact for copies
        spread = np.std(shifts, axis=0, ddof=1)
        rows.append(
            {
                "problem": problem,
                "div_index": pd.NA if index is None else index,
                "std_top1_prob": float(spread.mean()) if shared else 0.0,
                "std_length": float(np.std([len(text) for text in texts], ddof=1)),
            }
        )
    frame = pd.DataFrame(rows).astype({"div_index": "Int64"})
    divergent = frame["div_index"].dropna()
    accuracy = runs.groupby("run")["correct"].mean().std(ddof=1) if "correct" in runs else math.nan
    return LayerCastMetrics(
        frame=frame,
        div_index=float(divergent.mean()) if len(divergent) else math.nan,
        n_divergent=len(divergent),
        n_problems=len(frame),
        n_runs=n_runs,
        std_accuracy=float(accuracy),
        avg_std_top1_prob=float(frame["std_top1_prob"].mean()),
        avg_std_length=float(frame["std_length"].mean()),
    )


def divergence_index(texts: Sequence[Sequence[int]]) -> int | None:
    """First index at which not all texts have the same token (or some have ended); None where all are the same."""
    for index in range(max(len(text) for text in texts)):
        if len({text[index] if index < len(text) else None for text in texts}) > 1:
            return index
    return None
