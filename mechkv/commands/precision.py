"""`mechkv precision`: what precision has to do with it; ladder of dtypes, sites, oracle, determinism."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro


@dataclass(frozen=True)
class Precision:
    """Compare the paths on a ladder of dtypes; ask which site needs float32, and which path is nearer the truth."""

    model: tyro.conf.Positional[str]
    """A packaged model (see `mechkv models`), a .gguf file, a local folder or a hub id."""
    parts: tuple[Literal["ladder", "sites", "oracle", "determinism"], ...] = ("ladder",)
    """What to measure."""
    prompts: Path | None = None
    """Problems in GSM8K's JSONL format; by default the word problems that come with mechkv."""
    n_prompts: int = 4
    """How many of them, from the first."""
    steps: int = 16
    """Decode steps after the prompt."""
    rungs: tuple[Literal["bfloat16", "float16", "float32", "float64"], ...] = ("bfloat16", "float16", "float32")
    """Rungs of the ladder, least precise first."""
    weights: Literal["own", "common"] = "own"
    """Each rung rounds its own weights, or all hold those rounded to the 16-bit rungs."""
    dtype: Literal["float16", "bfloat16"] = "float16"
    """Dtype of sites, oracle and determinism."""
    device: str = "auto"
    """Where to run: auto, cpu, cuda, cuda:1, mps, ..."""
    out: Path | None = None
    """Folder for tables and figures; finished prompts are kept there and a killed run goes on from them."""
    json: bool = False
    """Print the summaries as one JSON document."""

    def run(self) -> int:
        """Measure and print."""
        from mechkv import figure_style, plain_json, storage, terminal
        from mechkv.models import load_model
        from mechkv.prompts import format_prompt, load_problems, sample, word_problems

        problems = word_problems() if self.prompts is None else load_problems(self.prompts)
        texts = [format_prompt(problem) for problem in sample(problems, self.n_prompts)]
        self._refuse_taken()
        tables: dict[str, Any] = {}
        model = None
        for part in self.parts:
            if part == "ladder":
                result: Any = self._ladder(texts)
                tables |= {"ladder": result.summary(), "ratios": result.ratios()}
            else:
                model = model or load_model(self.model, dtype=self.dtype, device=self.device)
                result = self._other(part, model, texts)
                summary = result.summary()
                tables[part] = _table(summary) if isinstance(summary, dict) else summary
            if self.out is not None and not hasattr(result, "save"):
                storage.write_frame(self.out / f"{part}.parquet", tables[part])
            elif self.out is not None:
                result.save(self.out / part)
                for name, figure in result.plot().items():
                    figure_style.save(figure, self.out / "figures" / name)
        if self.out is not None:
            print(f"tables and figures: {self.out}", file=sys.stderr)
        if self.json:
            document = {name: plain_json.records(table) for name, table in tables.items()}
            print(json.dumps(document, indent=1))
            return 0
        for name, table in tables.items():
            print(f"{name}\n{terminal.table(table, len(texts))}\n")
        return 0

    def _ladder(self, texts: list[str]) -> Any:
        from mechkv.precision import LadderConfig, precision_ladder

        config = LadderConfig(dtypes=self.rungs, n_steps=self.steps, weights=self.weights)
        return precision_ladder(self.model, texts, config, device=self.device, folder=self._folder("ladder"))

    def _other(self, part: str, model: Any, texts: list[str]) -> Any:
        from mechkv.determinism import determinism
        from mechkv.forced_study import token_lists
        from mechkv.oracle import OracleConfig, oracle_study
        from mechkv.precision_policy import SiteConfig, precision_by_site

        if part == "sites":
            return precision_by_site(model, texts, SiteConfig(n_steps=self.steps), folder=self._folder(part))
        if part == "oracle":
            config = OracleConfig(n_steps=self.steps, floor_every=min(8, self.steps))
            return oracle_study(model, texts, config, folder=self._folder(part))
        tokens = token_lists(model, texts, self.steps)
        device = str(tokens[0].device)
        return determinism(self.model, tokens, dtype=self.dtype, n_steps=self.steps, device=device)

    def _refuse_taken(self) -> None:
        """Folders that cannot be written at the end are named before anything is run."""
        from mechkv import result_folder
        from mechkv.oracle import OracleStudy
        from mechkv.precision import PrecisionLadder
        from mechkv.precision_policy import SitePrecision

        kinds = {"ladder": PrecisionLadder.KIND, "sites": SitePrecision.KIND, "oracle": OracleStudy.KIND}
        if self.out is not None:
            for part in set(self.parts) & set(kinds):
                result_folder.refuse_taken(self.out / part, kinds[part])

    def _folder(self, part: str) -> Path | None:
        return None if self.out is None else self.out / "run" / part


def _table(values: dict[str, Any]):
    import pandas as pd

    return pd.DataFrame([values])
