"""Do users of the two paths read different text, how soon, and how much of it is drift rather than luck?

`token_divergence` decodes every prompt under every strategy on both clocks (see `divergence_measure`). Three rates are
always given together, because they answer three questions and differ by orders of magnitude:

- prompts with any difference (free-running; Clopper-Pearson),
- aligned positions that differ (free-running: same index, different token; over the shorter of the two texts),
- teacher-forced flips a step (same context, different most likely token).

The first divergence index is right-censored where the texts agree to the end: a Kaplan-Meier curve, never a mean.
Agreement is known for the tokens that were decoded and no further.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from torch import Tensor
from tqdm.auto import tqdm
from transformer_lens.model_bridge import TransformerBridge

from mechkv import provenance, result_folder, storage
from mechkv.comparison import metric_range
from mechkv.configs import check_kinds, chosen
from mechkv.divergence_measure import PromptDivergence, measure_prompt
from mechkv.errors import InputError
from mechkv.forced_study import run_settings, token_lists
from mechkv.guards import text_config
from mechkv.models import admit, info
from mechkv.policies import Coupling, Strategy
from mechkv.runs import Piece, RunFolder
from mechkv.stats import cluster_bootstrap, kaplan_meier, proportion_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND = "token_divergence"
DRAWS = ("common", "independent", "noise")
RATES = ("prompts with any difference", "aligned positions that differ", "teacher-forced flips a step")
STRATEGIES: tuple[Strategy, ...] = (
    Strategy(),
    Strategy(temperature=1.0),
    Strategy(temperature=1.0, top_k=50),
    Strategy(temperature=1.0, top_p=0.9),
)
"""Greedy, temperature, top-k, top-p."""


@dataclass(frozen=True)
class TokenDivergenceConfig:
    """What to decode.

    Attributes:
        n_tokens: Tokens after the prompt, at most, on each path.
        strategies: How tokens are chosen.
        coupling: Common random numbers as one uniform a token, or as Gumbel noise.
        stop_at_eos: A path ends after an end-of-text token of the model's generation settings.
        n_repeats: Steps per prompt that are done twice on both paths.
        seed: Of the draws and of the repeated steps.
    """

    n_tokens: int = 32
    strategies: tuple[Strategy, ...] = STRATEGIES
    coupling: Coupling = "uniform"
    stop_at_eos: bool = True
    n_repeats: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_kinds(self)
        if self.n_tokens < 2 or not 1 <= self.n_repeats <= self.n_tokens:
            raise InputError(
                "impossible lengths",
                got=f"n_tokens={self.n_tokens}, n_repeats={self.n_repeats}",
                expected="n_tokens >= 2 (the first token cannot differ) and 1 <= n_repeats <= n_tokens",
                remedy="Decode more tokens; at least one step a prompt is done twice.",
            )
        names = [strategy.name for strategy in self.strategies]
        if not names or len(set(names)) < len(names):
            raise InputError("strategies", got=names, expected="one or more, each once", remedy="Drop the repeats.")


@dataclass(frozen=True)
class TokenDivergence:
    """Token-level divergence of the two paths.

    Attributes:
        frame: Teacher-forced: a row per strategy, prompt and step, with the metrics of the two distributions
            (`distributions`), both paths' choices, and whether the choices differ under common, independent and noise
            draws.
        outcomes: Free-running: a row per strategy and prompt. `first_common`, `first_independent`, `first_noise`: index
            of the first different token, missing where there is none among the `n_compared` tokens decoded.
            `n_differ` of `n_aligned` positions differ; lengths of both texts.
        generations: A row per strategy, prompt and path: tokens, text, probability of the top token at each.
        config: The configuration.
        guards: How often each guard ran and passed.
        provenance: Versions, machine, kernels, model.
    """

    frame: pd.DataFrame
    outcomes: pd.DataFrame
    generations: pd.DataFrame
    config: TokenDivergenceConfig
    guards: dict[str, int]
    provenance: dict[str, Any]

    @property
    def dtype(self) -> str:
        """The model's dtype."""
        return str(self.provenance["model"]["dtype"])

    def rates(self, seed: int = 0) -> pd.DataFrame:
        """The three rates per strategy, each with its clock, 95 % interval and counts."""
        rows = []
        for name, part in self.outcomes.groupby("strategy", sort=False, observed=True):
            k = int(part["first_common"].notna().sum())
            any_difference = proportion_interval(k, len(part))
            rows.append((name, RATES[0], "free-running", *any_difference, k, len(part)))
            spread = part.loc[part.index.repeat(part["n_aligned"])]
            rank = spread.groupby("prompt", observed=True).cumcount()
            positions = spread.assign(value=(rank < spread["n_differ"]).astype(float))
            rows.append((name, RATES[1], "free-running", *_rate(positions, "value", seed)))
            decoded = self.frame[(self.frame["strategy"] == name) & (self.frame["step"] > 0)]
            rows.append((name, RATES[2], "teacher-forced", *_rate(decoded, "flip", seed)))
        return pd.DataFrame(rows, columns=["strategy", "rate", "clock", "estimate", "low", "high", "count", "of"])

    def sampling_noise(self, seed: int = 0) -> pd.DataFrame:
        """How much of a divergence rate is luck: per strategy and kind of draws the share of prompts with any
        difference, and the share of steps whose choices differ (same context)."""
        rows = []
        for name, part in self.outcomes.groupby("strategy", sort=False, observed=True):
            decoded = self.frame[(self.frame["strategy"] == name) & (self.frame["step"] > 0)]
            for draws in DRAWS:
                k = int(part[f"first_{draws}"].notna().sum())
                column = "differs" if draws == "common" else f"differs_{draws}"
                step = _rate(decoded, column, seed)
                rows.append((name, draws, *proportion_interval(k, len(part)), *step[:3]))
        columns = ["strategy", "draws", "prompts_differ", "low", "high", "steps_differ", "steps_low", "steps_high"]
        return pd.DataFrame(rows, columns=columns)

    def survival(self, draws: str = "common") -> pd.DataFrame:
        """Kaplan-Meier curve of agreement per strategy: `survival` is the share of prompts whose texts agree up to
        and including token `time` (tokens are counted from 1 here)."""
        curves = []
        for name, part in self.outcomes.groupby("strategy", sort=False, observed=True):
            first = part[f"first_{draws}"]
            times = np.where(first.notna(), first.fillna(0).astype(int) + 1, part["n_compared"])
            curves.append(kaplan_meier(times, first.notna().to_numpy()).assign(strategy=name))
        return pd.concat(curves, ignore_index=True)

    def steps_summary(self, seed: int = 0) -> pd.DataFrame:
        """Teacher-forced, steps >= 1: mean of each metric per strategy with its 95 % interval over prompts, and its
        median."""
        decoded = self.frame[self.frame["step"] > 0]
        metrics = ["kl", "js", "tv", "max_abs_dz", "flip", "tie_a", "tie_b", "top5_overlap", "margin_b", "certified"]
        metrics += ["near_ties_0_25", "near_ties_0_5", "near_ties_1", "near_ties_2"]
        tables = []
        for metric in metrics:
            part = decoded[decoded[metric].notna()]
            if part.empty:
                continue
            part = part.assign(**{metric: part[metric].astype(float)})
            table = cluster_bootstrap(part, metric, by=["strategy"], support=metric_range(metric), seed=seed)
            median = part.groupby("strategy", observed=True)[metric].median().rename("median").reset_index()
            tables.append(table.merge(median, on="strategy").assign(metric=metric))
        return pd.concat(tables, ignore_index=True)

    def plot(self) -> "dict[str, Figure]":
        """The figures by name (see `plots_tokens`)."""
        from mechkv import plots_tokens

        return plots_tokens.divergence_figures(self)

    def save(self, folder: Path | str) -> Path:
        """Write the tables (parquet) and the rest (JSON) to a folder; sealed last."""
        with result_folder.sealed_folder(folder, KIND) as place:
            for name in ("frame", "outcomes", "generations"):
                storage.write_frame(place / f"{name}.parquet", getattr(self, name))
            meta = {"config": _plain(self.config), "guards": self.guards, "provenance": self.provenance}
            storage.write_json(place / "divergence.json", meta)
        return Path(folder)

    @classmethod
    def load(cls, folder: Path | str) -> "TokenDivergence":
        """Read what `save` wrote.

        Raises:
            StorageError: Missing, altered, truncated, or another kind of result.
        """
        place = Path(folder)
        result_folder.open_folder(place, KIND)
        meta = storage.read_json(place / "divergence.json")
        strategies = tuple(Strategy(**values) for values in meta["config"]["strategies"])
        config = TokenDivergenceConfig(**meta["config"] | {"strategies": strategies})
        tables = {name: storage.read_frame(place / f"{name}.parquet") for name in ("frame", "outcomes", "generations")}
        return cls(**tables, config=config, guards=meta["guards"], provenance=meta["provenance"])


def token_divergence(
    model: TransformerBridge,
    prompts: Sequence[str | Tensor],
    config: TokenDivergenceConfig | None = None,
    *,
    folder: Path | str | None = None,
    progress: bool | None = None,
) -> TokenDivergence:
    """Decode every prompt under every strategy on both paths.

    Args:
        model: A bridge.
        prompts: Texts or `[pos]` token tensors.
        config: What to decode.
        folder: Keep every finished prompt there, and go on from what is there.
        progress: Show a progress bar with an estimate; by default when standard error is a terminal.

    Raises:
        InputError: Prompts or configuration that cannot be used.
        GuardError, NonFiniteError: A number would not mean what it seems to mean.
        StorageError: The folder belongs to another run.
    """
    config = chosen(config, TokenDivergenceConfig)
    admit(model)
    tokens = token_lists(model, prompts, config.n_tokens)
    run = RunFolder(folder, run_settings(KIND, model, tokens, _plain(config)))
    stop = eos_tokens(model) if config.stop_at_eos else ()
    work = [(prompt, strategy) for prompt in range(len(tokens)) for strategy in config.strategies]
    pieces: list[Piece] = []
    bar = tqdm(
        work, desc=f"tokens, {info(model).dtype}", unit="run", disable=None if progress is None else not progress
    )
    for prompt, strategy in bar:
        name = f"{prompt:04d}-{config.strategies.index(strategy)}"
        compute = partial(_piece, model, tokens[prompt], strategy, prompt, stop, config)
        pieces.append(run.piece(name, compute))
    tables = {
        name: pd.concat([piece.frames[name] for piece in pieces], ignore_index=True)
        for name in ("frame", "outcomes", "generations")
    }
    guards: dict[str, int] = {}
    for piece in pieces:
        for guard, count in piece.values["guards"].items():
            guards[guard] = guards.get(guard, 0) + count
    return TokenDivergence(**tables, config=config, guards=guards, provenance=provenance.collect(model))


def eos_tokens(model: TransformerBridge) -> tuple[int, ...]:
    """End-of-text tokens: those of the model's generation settings, else of its config."""
    found = getattr(getattr(model.original_model, "generation_config", None), "eos_token_id", None)
    found = text_config(model).eos_token_id if found is None else found
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)


def _piece(
    model: TransformerBridge,
    tokens: Tensor,
    strategy: Strategy,
    prompt: int,
    stop: tuple[int, ...],
    config: TokenDivergenceConfig,
) -> Piece:
    found = measure_prompt(
        model,
        tokens,
        strategy,
        n_tokens=config.n_tokens,
        seed=config.seed,
        label=prompt,
        stop=stop,
        coupling=config.coupling,
        n_repeats=config.n_repeats,
    )
    head = {"strategy": strategy.name, "prompt": prompt}
    frame = pd.DataFrame([head | row for row in found.steps])
    written = [
        head
        | {
            "path": path,
            "tokens": np.asarray(text.tokens, dtype=np.int64),
            "top1_prob": np.asarray(text.top1_prob),
            "ended": text.ended,
            "text": model.tokenizer.decode(text.tokens, skip_special_tokens=True) if model.tokenizer else "",
        }
        for path, text in (("cached", found.cached), ("recomputed", found.recomputed))
    ]
    frames = {
        "frame": frame,
        "outcomes": pd.DataFrame([head | outcome(found)]).astype({f"first_{d}": "Int64" for d in DRAWS}),
        "generations": pd.DataFrame(written),
    }
    return Piece(frames, {"guards": found.guards})


def outcome(found: PromptDivergence) -> dict[str, Any]:
    """The free-running row of one prompt."""
    a, b = found.cached.tokens, found.recomputed.tokens
    n_aligned = min(len(a), len(b))
    return {
        "n_compared": len(found.steps),
        **{f"first_{draws}": pd.NA if found.first[draws] is None else found.first[draws] for draws in DRAWS},
        "n_aligned": n_aligned,
        "n_differ": sum(x != y for x, y in zip(a, b, strict=False)),
        "length_cached": len(a),
        "length_recomputed": len(b),
        "length_difference": len(a) - len(b),
    }


def _rate(rows: pd.DataFrame, column: str, seed: int) -> tuple[float, float, float, int, int]:
    """Share of rows, with an interval that resamples prompts; where every prompt has the same share (all or none
    differ) resampling knows no spread, and the bound is that of Clopper-Pearson over prompts."""
    values = rows.assign(value=rows[column].astype(float))
    row = cluster_bootstrap(values, "value", support=(0.0, 1.0), seed=seed).iloc[0]
    low, high, count = float(row["low"]), float(row["high"]), int(values["value"].sum())
    if row["estimate"] in (0.0, 1.0):
        n = int(row["n_clusters"])
        low, high = proportion_interval(n if row["estimate"] else 0, n)[1:]
    return float(row["estimate"]), low, high, count, len(values)


def _plain(config: TokenDivergenceConfig) -> dict[str, Any]:
    return asdict(config) | {"strategies": [asdict(strategy) for strategy in config.strategies]}
