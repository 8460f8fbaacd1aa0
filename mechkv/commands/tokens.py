"""`mechkv tokens`: what a user sees; when, how often and why the two paths write different text."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro


@dataclass(frozen=True)
class Tokens:
    """Compare the texts of cached and recomputed decoding: greedy, temperature, top-k and top-p, with common random
    numbers."""

    model: tyro.conf.Positional[str]
    """A packaged model (see `mechkv models`), a .gguf file, a local folder or a hub id."""
    prompts: str | None = None
    """Problems in GSM8K's JSONL format, or 'openai/gsm8k' from the hub; by default the word problems of mechkv."""
    n_prompts: int = 4
    """How many of them, from the first."""
    n_tokens: int = 24
    """Tokens after the prompt, at most."""
    strategies: tuple[Literal["greedy", "temperature", "top-k", "top-p"], ...] = ("greedy", "top-p")
    """How tokens are chosen."""
    temperature: float = 1.0
    """Of every sampled strategy."""
    top_k: int = 50
    """For top-k."""
    top_p: float = 0.9
    """For top-p."""
    coupling: Literal["uniform", "gumbel"] = "uniform"
    """Common random numbers: one uniform a token, or Gumbel noise."""
    shots: int = 0
    """Worked examples before each question, taken from the problems that are not asked."""
    seed: int = 0
    """Of the draws."""
    dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float16"
    """Dtype under study."""
    device: str = "auto"
    """Where to run: auto, cpu, cuda, cuda:1, mps, ..."""
    out: Path | None = None
    """Folder for tables and figures; finished prompts are kept there and a killed run goes on from them."""
    json: bool = False
    """Print rates and scores as one JSON document."""

    def run(self) -> int:
        """Decode, score and print."""
        from mechkv import figure_style, plain_json, result_folder, terminal
        from mechkv.divergence import KIND, TokenDivergenceConfig, token_divergence
        from mechkv.flip_law import fit_flip_law
        from mechkv.models import load_model
        from mechkv.plots_tokens import one_context
        from mechkv.prompts import format_prompt, sample
        from mechkv.task_score import outcomes, problems_from, task_score

        problems = sample(problems_from(self.prompts), self.n_prompts + self.shots)
        asked, shots = problems[: self.n_prompts], problems[self.n_prompts :]
        config = TokenDivergenceConfig(
            n_tokens=self.n_tokens,
            strategies=self._strategies(),
            coupling=self.coupling,
            seed=self.seed,
        )
        if self.out is not None:
            result_folder.refuse_taken(self.out / "divergence", KIND)
        model = load_model(self.model, dtype=self.dtype, device=self.device)
        texts = [format_prompt(problem, shots=shots) for problem in asked]
        found = token_divergence(model, texts, config, folder=None if self.out is None else self.out / "run")
        score = task_score(outcomes(found.generations, asked))
        law = fit_flip_law(one_context(found))
        if self.out is not None:
            found.save(self.out / "divergence")
            for name, figure in found.plot().items():
                figure_style.save(figure, self.out / "figures" / name)
            print(f"tables and figures: {self.out}", file=sys.stderr)
        rates, noise = found.rates(), found.sampling_noise()
        if self.json:
            tables = {"rates": rates, "sampling_noise": noise, "score": score.table}
            document: dict[str, Any] = {name: plain_json.records(table) for name, table in tables.items()}
            document["flip_law"] = {"sigma": _finite(law.sigma), "n_flips": law.n_flips, "n_steps": law.n_steps}
            document["certified_steps"] = law.n_certified
            print(json.dumps(document, indent=1))
            return 0
        for strategy, part in rates.groupby("strategy", sort=False):
            print(strategy)
            for row in part.itertuples():
                bounds = terminal.interval(100 * row.low, 100 * row.high, len(asked), ".2f", " %")
                print(f"  {row.rate:<32}{100 * row.estimate:6.2f} %  {bounds}  {row.count} of {row.of}, {row.clock}")
        print("draws (common random numbers, independent draws, the cached path against itself with other draws)")
        print(terminal.table(noise, len(asked)))
        print(f"a flip is excluded by the margin at {law.n_certified} of {law.n_steps} steps; {law.n_flips} flip")
        print(terminal.table(score.table[["condition", "n", "b", "c", "p_value", "n_cut"]]))
        return 0

    def _strategies(self):
        from mechkv.policies import Strategy

        made = {
            "greedy": Strategy(),
            "temperature": Strategy(temperature=self.temperature),
            "top-k": Strategy(temperature=self.temperature, top_k=self.top_k),
            "top-p": Strategy(temperature=self.temperature, top_p=self.top_p),
        }
        return tuple(made[name] for name in self.strategies)


def _finite(values: tuple[float, ...]) -> list[float | None]:
    return [value if value == value and abs(value) != float("inf") else None for value in values]
