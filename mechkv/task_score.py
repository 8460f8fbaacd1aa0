"""Does one path solve more problems than the other?

A problem is solved when `prompts.final_number` of the generated text (its rule is written there) equals the problem's
number. Outcomes are paired: the same problem, the same draws, both paths. Per condition (strategy, dtype, model): the
2 x 2 table, b = only the cached path right, c = only the recomputed one; exact McNemar test on b and c; the accuracy
difference (b - c) / n with a bootstrap interval that resamples problems, kept within the Clopper-Pearson bound of the
discordant share, which no difference exceeds; and the smallest difference that the test
would find with 80 % power at this n and this share of discordant pairs. Over conditions: the sign test, whose
conditions share problems and are therefore not independent: its p-value is too small rather than too large.

Where no pair is discordant the data hold no information about the claim, however many problems there are; the rule of
three then bounds the discordant share.
Controls: a text that was cut off before it came to an answer is counted (`n_cut`): a score of cut texts measures the
token budget.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from mechkv.errors import InputError
from mechkv.prompts import Problem, final_number, load_problems, word_problems
from mechkv.stats import (
    PairedTest,
    cluster_bootstrap,
    mcnemar_exact,
    minimum_detectable_effect,
    proportion_interval,
    sign_test,
)

GSM8K = "openai/gsm8k"
_FILE = "main/test-00000-of-00001.parquet"


def problems_from(source: str | Path | None = None) -> list[Problem]:
    """Problems: the package's own (None), those of a JSONL file, or GSM8K's test set from the hub (`openai/gsm8k`).

    Raises:
        InputError: No such file, or the hub cannot be reached.
    """
    if source is None:
        return word_problems()
    if str(source) != GSM8K:
        return load_problems(source)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        file = hf_hub_download(GSM8K, _FILE, repo_type="dataset")
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise InputError(
            f"problems {GSM8K!r}",
            got=str(error).strip().splitlines()[0][:200],
            expected="a network, or the data set in the hub's cache",
            remedy="Pass a JSONL file in GSM8K's format, or leave it out for the package's own problems.",
        ) from error
    table = pd.read_parquet(file)
    return [Problem(row.question, row.answer) for row in table.itertuples()]


@dataclass(frozen=True)
class TaskScore:
    """Paired scores.

    Attributes:
        frame: A row per condition and problem: `cached`, `recomputed` (solved or not), `cut`.
        table: A row per condition: n, accuracies, b, c, McNemar p, difference with interval, detectable difference.
        conditions: Sign test over conditions (ties in neither count).
    """

    frame: pd.DataFrame
    table: pd.DataFrame
    conditions: PairedTest


def outcomes(generations: pd.DataFrame, problems: Sequence[Problem], condition: str | None = None) -> pd.DataFrame:
    """Solved or not, per strategy and problem, from `TokenDivergence.generations` (prompt i asks problem i)."""
    rows = []
    for (strategy, prompt), pair in generations.groupby(["strategy", "prompt"], sort=False, observed=True):
        texts = pair.set_index("path")
        number = problems[int(prompt)].number
        solved = {path: final_number(texts.loc[path, "text"]) == number for path in ("cached", "recomputed")}
        name = str(strategy) if condition is None else f"{condition}, {strategy}"
        rows.append({"condition": name, "problem": problems[int(prompt)].id, **solved, "cut": not pair["ended"].all()})
    return pd.DataFrame(rows)


def task_score(frame: pd.DataFrame, *, power: float = 0.8, seed: int = 0) -> TaskScore:
    """The paired tables and tests of a frame with `condition`, `problem`, `cached`, `recomputed` (and `cut`)."""
    needed = ["condition", "problem", "cached", "recomputed"]
    missing = [name for name in needed if name not in frame.columns]
    if missing or frame.empty or frame.duplicated(["condition", "problem"]).any():
        raise InputError(
            "paired outcomes",
            got=f"{len(frame)} rows, without {missing}" if missing or frame.empty else "a problem twice in a condition",
            expected="one row per condition and problem, with cached and recomputed",
            remedy="Use mechkv.task_score.outcomes.",
        )
    rows = [_paired(str(name), part, power, seed) for name, part in frame.groupby("condition", sort=False)]
    table = pd.DataFrame(rows)
    wins, losses = int((table["difference"] > 0).sum()), int((table["difference"] < 0).sum())
    return TaskScore(frame, table, sign_test(wins, losses))


def _paired(name: str, part: pd.DataFrame, power: float, seed: int) -> dict[str, float | int | str]:
    cached, recomputed = part["cached"].astype(bool), part["recomputed"].astype(bool)
    b, c, n = int((cached & ~recomputed).sum()), int((~cached & recomputed).sum()), len(part)
    test = mcnemar_exact(b, c)
    gap = part.assign(gap=cached.astype(float) - recomputed.astype(float))
    # A difference is never larger than the discordant share, whose bound holds where few or no pairs are discordant and
    # resampling knows little or nothing of the spread.
    upper = proportion_interval(b + c, n).high
    row = cluster_bootstrap(gap, "gap", cluster="problem", support=(-upper, upper), seed=seed).iloc[0]
    low, high = (float(row["low"]), float(row["high"])) if b + c else (-upper, upper)
    return {
        "condition": name,
        "n": n,
        "accuracy_cached": float(cached.mean()),
        "accuracy_recomputed": float(recomputed.mean()),
        "both": int((cached & recomputed).sum()),
        "neither": int((~cached & ~recomputed).sum()),
        "b": b,
        "c": c,
        "p_value": test.p_value,
        "difference": (b - c) / n,
        "low": low,
        "high": high,
        "detectable": minimum_detectable_effect(n, (b + c) / n, power=power) if b + c else math.inf,
        "detectable_at_bound": minimum_detectable_effect(n, upper, power=power),
        "n_cut": int(part["cut"].sum()) if "cut" in part else 0,
    }
