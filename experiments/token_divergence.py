"""Do the two paths write different text, and does one of them solve more problems? Claims C1 and C2.

Every prompt is decoded on both clocks under every strategy with common random numbers (`mechkv.divergence`); beside it
stands the luck of independent draws. The texts are scored against the problems' answers, paired (`mechkv.task_score`).

Verdict on C1: `reproduced` when every prompt differs in every condition, `partly` when some do, `not reproduced` when
none does, and `not testable here` when none does within fewer than `ENOUGH_TOKENS` tokens (agreement beyond the tokens
decoded is not known) or on fewer than `ENOUGH_PROMPTS` prompts; every one of fewer prompts is `partly`.

Verdict on C2 from scores: `reproduced` when the sign test over conditions says so; `not reproduced` when a condition,
or the sign test, says the opposite and none agrees, or when nothing is significant and the interval of the difference
leaves out `SMALLEST_DIFFERENCE` in every condition; `partly` when a condition alone says so; else, and when no pair is
discordant or most texts were cut off, `not testable here`.
"""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from experiments.outcome import ModelPool, Outcome, number
from mechkv.claims import Finding
from mechkv.divergence import RATES, TokenDivergence, TokenDivergenceConfig, token_divergence
from mechkv.errors import InputError
from mechkv.flip_law import fit_flip_law
from mechkv.layercast_metrics import LayerCastMetrics, layercast_metrics
from mechkv.plots_tokens import one_context, task_table
from mechkv.policies import Strategy
from mechkv.prompts import Problem, format_prompt, load_problems, sample, word_problems
from mechkv.report import Section
from mechkv.task_score import TaskScore, outcomes, task_score

NAME = "token_divergence"
ENOUGH_TOKENS = 32
ENOUGH_PROMPTS = 6
"""The fewest whose 95 % interval (Clopper-Pearson) at none or all of them leaves out one half."""
SMALLEST_DIFFERENCE = 0.05
"""Accuracy difference that the intervals must leave out before the absence of an effect counts."""
GREEDY, TOP_K, TOP_P = Strategy(), Strategy(temperature=1.0, top_k=50), Strategy(temperature=1.0, top_p=0.9)


@dataclass(frozen=True)
class Config:
    """Settings. `longest_prompt`: leave out problems of more tokens (None: take all)."""

    model: str = "smollm2-135m"
    dtype: str = "float16"
    n_prompts: int = 4
    n_tokens: int = 6
    strategies: tuple[Strategy, ...] = (GREEDY, TOP_P)
    prompts: Path | None = None
    sample_seed: int | None = None
    longest_prompt: int | None = 66
    seed: int = 0


PRESETS: dict[str, Config] = {
    "quick": Config(),
    "full": Config(dtype="bfloat16", n_prompts=100, n_tokens=24, sample_seed=0, longest_prompt=72),
    "paper": Config(n_prompts=600, n_tokens=256, strategies=(GREEDY, TOP_K, TOP_P), longest_prompt=None),
}


def run(config: Config, pool: ModelPool, folder: Path) -> Outcome:
    """Decode, score, draw, judge; everything is kept below `folder`."""
    model = pool.get(config.model, config.dtype)
    problems = chosen(config, model.tokenizer)
    settings = TokenDivergenceConfig(n_tokens=config.n_tokens, strategies=config.strategies, seed=config.seed)
    found = token_divergence(model, [format_prompt(p) for p in problems], settings, folder=folder / "run")
    found.save(folder / "divergence")
    return report(found, problems, config)


def chosen(config: Config, tokenizer) -> list[Problem]:
    """The problems asked, in order, without those whose prompt is too long for the budget."""
    problems = word_problems() if config.prompts is None else load_problems(config.prompts)
    if config.sample_seed is not None:
        problems = sample(problems, len(problems), config.sample_seed)
    if config.longest_prompt is not None:
        lengths = [len(tokenizer(format_prompt(problem))["input_ids"]) for problem in problems]
        problems = [p for p, length in zip(problems, lengths, strict=True) if length <= config.longest_prompt]
        if not problems:
            raise InputError(
                "no problem is short enough",
                got=f"prompts of {min(lengths)} tokens and more",
                expected=f"some of at most longest_prompt={config.longest_prompt}",
                remedy="Raise longest_prompt, or set it to None to take them all.",
            )
    return sample(problems, min(config.n_prompts, len(problems)))


def report(found: TokenDivergence, problems: list[Problem], config: Config) -> Outcome:
    """What the texts say, for the claims table and the report."""
    n = found.outcomes["prompt"].nunique()
    where = f"{config.model}, {config.dtype}, {n} prompts x {config.n_tokens} tokens"
    score = task_score(outcomes(found.generations, problems))
    law = fit_flip_law(one_context(found))
    figures = {name: (figure, f"{_CAPTIONS[name]} {where}.") for name, figure in found.plot().items()}
    figures["task_score"] = (task_table(score.table), f"Paired accuracy, 95 % over problems. {where}.")
    tables = {
        "rates": (found.rates(), f"The three divergence rates, {where}."),
        "luck": (found.sampling_noise(), f"The same rates with draws of their own: luck, not drift. {where}."),
        "teacher-forced": (found.steps_summary(), f"Distributions on the same text, steps >= 1, {where}."),
        "score": (score.table, f"Paired task score, {where}."),
        "layercast": (_layercast_table(found, score), f"LayerCast's metrics, the two paths as runs, {where}."),
        "flip law": (law.calibration, f"Flips by margin, {config.strategies[0].name}, {where}."),
    }
    text = _words(found, score, where) + (
        f" The margin excludes a flip at {law.n_certified} of {law.n_steps} teacher-forced steps, and the data never "
        f"contradict that; {law.n_flips} steps flip."
    )
    return Outcome(
        findings=[text_finding(found, config, where), score_finding(score, where)],
        sections=[Section(title="Tokens", text=text, figures=figures, tables=tables)],
        method=[(f"{NAME}: {key}", _setting(value)) for key, value in vars(config).items()],
        limits=[
            f"Measured on {config.model}; it says nothing about a 7B model.",
            f"Texts are known for {config.n_tokens} tokens; agreement beyond them is not.",
        ],
        provenance={"models": {f"{config.model} {config.dtype}": found.provenance["model"]}},
    )


_CAPTIONS = {
    "agreement": "Kaplan-Meier curve of prompts whose texts still agree; grey: the cached path against itself with "
    "other draws, which is luck alone. Bands: 95 %.",
    "rates": "Three divergence rates; 95 % over prompts.",
    "flip_law": "Share of teacher-forced steps that flip, by margin, and the fitted law.",
}


def text_finding(found: TokenDivergence, config: Config, where: str) -> Finding:
    """C1, from free-running texts with common random numbers."""
    table = found.rates()
    rows = {rate: table[table["rate"] == rate].set_index("strategy") for rate in RATES}
    prompts = rows[RATES[0]]
    verdict, enough = "partly", bool((prompts["of"] >= ENOUGH_PROMPTS).all())
    if (prompts["estimate"] == 1).all() and enough:
        verdict = "reproduced"
    elif (prompts["estimate"] == 0).all():
        verdict = "not reproduced" if enough and config.n_tokens >= ENOUGH_TOKENS else "not testable here"
    worst = prompts.loc[prompts["estimate"].idxmax()]
    noise = found.sampling_noise().query("draws == 'noise'").set_index("strategy")["prompts_differ"]
    parts = [
        f"{name}: {row['count']} of {row['of']} prompts, {100 * rows[RATES[1]].loc[name, 'estimate']:.1f} % of aligned "
        f"positions, {100 * rows[RATES[2]].loc[name, 'estimate']:.2f} % of teacher-forced steps"
        for name, row in prompts.iterrows()
    ]
    luck = ", ".join(f"{name} {100 * share:.0f} %" for name, share in noise.items())
    return Finding(
        claim="C1",
        verdict=verdict,
        ours="; ".join(parts),
        value=float(worst["estimate"]),
        low=float(worst["low"]),
        high=float(worst["high"]),
        controls=f"common random numbers; prompts that differ by luck alone (same path, other draws): {luck}",
        model=where,
        source=NAME,
        note=f"Value: prompts with any difference in the condition where most differ ({worst.name}), within "
        f"{config.n_tokens} tokens.",
    )


def score_finding(score: TaskScore, where: str) -> Finding:
    """C2, from paired scores."""
    table, test = score.table, score.conditions
    discordant, cut = int((table["b"] + table["c"]).sum()), int(table["n_cut"].sum())
    row = table.iloc[0]
    return Finding(
        claim="C2",
        verdict="not testable here" if cut > table["n"].sum() / 2 else _score_verdict(score),
        ours=f"{discordant} discordant pairs over {len(table)} conditions; the cached path ahead in {test.wins}, "
        f"behind in {test.losses} (sign test p = {test.p_value:.3g})",
        value=float(row["difference"]),
        low=number(row["low"]),
        high=number(row["high"]),
        controls=f"{cut} of {int(table['n'].sum())} pairs were cut off by the token budget; accuracy "
        f"{100 * row['accuracy_cached']:.0f} % and {100 * row['accuracy_recomputed']:.0f} % ({row['condition']})",
        model=where,
        source=NAME,
        note="Accuracy difference of the first condition; distance from a float64 oracle is in precision_control.",
    )


def _score_verdict(score: TaskScore) -> str:
    table, test = score.table, score.conditions
    if not (table["b"] + table["c"]).any():
        return "not testable here"
    significant, over_conditions = table["p_value"] <= 0.05, test.p_value <= 0.05
    if over_conditions and test.wins > test.losses:
        return "reproduced"
    if (significant & (table["difference"] > 0)).any():
        return "partly"
    if over_conditions or significant.any() or (table["high"] < SMALLEST_DIFFERENCE).all():
        return "not reproduced"
    return "not testable here"


def _layercast_table(found: TokenDivergence, score: TaskScore) -> pd.DataFrame:
    rows = []
    for strategy, part in found.generations.groupby("strategy", sort=False, observed=True):
        solved = score.frame[score.frame["condition"] == strategy].reset_index(drop=True)
        runs = part.rename(columns={"path": "run", "prompt": "problem"})
        correct = [bool(solved.loc[int(r.problem), r.run]) for r in runs.itertuples()]
        m: LayerCastMetrics = layercast_metrics(runs.assign(correct=correct))
        row = {"strategy": strategy, "Div_Index": m.div_index, "divergent": m.n_divergent, "problems": m.n_problems}
        row |= {"Std@Acc": m.std_accuracy, "Avg_Std@top1_prob": m.avg_std_top1_prob}
        rows.append(row | {"Avg_Std@Output_Length": m.avg_std_length})
    return pd.DataFrame(rows)


def _words(found: TokenDivergence, score: TaskScore, where: str) -> str:
    table = found.rates()
    parts = [f"{r.strategy}, {r.rate} ({r.clock}): {100 * r.estimate:.2f} %" for r in table.itertuples()]
    cut = int(score.table["n_cut"].sum())
    return (
        f"Three rates that answer three questions ({where}): {'; '.join(parts)}. With independent draws instead, "
        f"sampled texts differ for reasons that have nothing to do with the cache: see the table of luck. {cut} of "
        f"{int(score.table['n'].sum())} scored pairs were cut off by the token budget, so the score says little."
    )


def _setting(value) -> str:
    return ", ".join(s.name for s in value) if isinstance(value, tuple) else str(value)
