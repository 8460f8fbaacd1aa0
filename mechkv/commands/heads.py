"""`mechkv heads`: drift by head, group, dimension, rotary frequency, and twins that compute the same function."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

if TYPE_CHECKING:
    import pandas as pd

_LONG, _SHOWN = 60, 3


@dataclass(frozen=True)
class Heads:
    """Which heads carry the drift of cached against recomputed decoding, and does the architecture matter?"""

    model: tyro.conf.Positional[str]
    """A packaged model (see `mechkv models`), a .gguf file, a local folder or a hub id."""
    prompts: Path | None = None
    """Problems in GSM8K's JSONL format; by default the word problems that come with mechkv."""
    n_prompts: int = 4
    """How many of them, from the first."""
    steps: int = 16
    """Decode steps after the prompt."""
    dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float16"
    """Dtype under study."""
    device: str = "auto"
    """Where to run: auto, cpu, cuda, cuda:1, mps, ..."""
    control: bool = True
    """Run the same tokens in float32 as well."""
    twins: bool = False
    """Also profile twins that compute the same function: KV heads materialised, head dimension doubled, window off
    (where the texts fit), heads in another order."""
    out: Path | None = None
    """Folder for tables and figures; finished prompts are kept there and a killed run goes on from them."""
    json: bool = False
    """Print the results as one JSON document."""

    def run(self) -> int:
        """Analyse and print."""
        from mechkv import plain_json, result_folder, twin_drift
        from mechkv.heads import KIND, HeadConfig, head_analysis
        from mechkv.models import load_model
        from mechkv.prompts import format_prompt, load_problems, sample, word_problems

        problems = word_problems() if self.prompts is None else load_problems(self.prompts)
        texts = [format_prompt(problem) for problem in sample(problems, self.n_prompts)]
        if self.out is not None:
            result_folder.refuse_taken(self.out / "heads", KIND)
            result_folder.refuse_taken(self.out / "twins", twin_drift.KIND)
        model = load_model(self.model, dtype=self.dtype, device=self.device)
        analysis = head_analysis(
            model,
            texts,
            HeadConfig(n_steps=self.steps),
            control="float32" if self.control else None,
            folder=None if self.out is None else self.out / "run",
        )
        tables = {
            "concentration": analysis.concentration(),
            "sharing": analysis.sharing(),
            "attention": analysis.attention(),
            "by_dimension": analysis.by_dimension(),
            "by_frequency": analysis.by_frequency(),
        }
        figures = analysis.plot()
        if self.out is not None:
            analysis.save(self.out / "heads")
        if self.twins:
            study = self._study(model, texts)
            tables |= {"effects": study.effects(), "verdicts": study.verdicts()}
            figures |= study.plot()
            if self.out is not None:
                study.save(self.out / "twins")
        if self.out is not None:
            from mechkv import plots

            for name, figure in figures.items():
                plots.save(figure, self.out / "figures" / name)
            print(f"tables and figures: {self.out}", file=sys.stderr)
        if self.json:
            print(json.dumps({name: plain_json.records(t) for name, t in tables.items()}, indent=1))
            return 0
        for name, table in tables.items():
            print(f"{_shortened(name, table, len(texts))}\n")
        return 0

    def _study(self, model, texts: list[str]):
        from mechkv.twin_drift import TwinConfig, standard_twins, twin_study

        longest = max(len(model.tokenizer(text)["input_ids"]) for text in texts) + self.steps
        return twin_study(
            model,
            standard_twins(model, longest),
            texts,
            TwinConfig(n_steps=self.steps),
            folder=None if self.out is None else self.out / "twin_run",
        )


def _shortened(name: str, table: "pd.DataFrame", n_prompts: int) -> str:
    """A table as text; of a long one the largest drift of every dtype and site."""
    from mechkv import terminal

    shown, note = table, ""
    if len(table) > _LONG:
        first = table.sort_values("estimate", ascending=False, kind="stable").groupby(["dtype", "site"], observed=True)
        shown = first.head(_SHOWN).sort_index()
        note = f", the {_SHOWN} largest of each dtype and site; all {len(table)} rows with --json"
    return f"{name}{note}\n{terminal.table(shown, n_prompts)}"
