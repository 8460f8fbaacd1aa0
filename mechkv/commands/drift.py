"""`mechkv drift`: the layer-wise drift profile of any model."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro


@dataclass(frozen=True)
class Drift:
    """Profile the drift of cached against recomputed decoding, layer by layer, beside the same tokens in float32."""

    model: tyro.conf.Positional[str]
    """A packaged model (see `mechkv models`), a .gguf file, a local folder or a hub id."""
    prompts: Path | None = None
    """Problems in GSM8K's JSONL format; by default the word problems that come with mechkv."""
    n_prompts: int = 4
    """How many of them, from the first."""
    steps: int = 24
    """Decode steps after the prompt."""
    dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float16"
    """Dtype under study."""
    device: str = "auto"
    """Where to run: auto, cpu, cuda, cuda:1, mps, ..."""
    control: bool = True
    """Run the same tokens in float32 as well."""
    out: Path | None = None
    """Folder for tables and figures; finished prompts are kept there and a killed run goes on from them."""
    json: bool = False
    """Print the summary as one JSON document."""

    def run(self) -> int:
        """Profile and print."""
        from mechkv import figure_style, plain_json, result_folder, terminal
        from mechkv.drift import KIND, DriftConfig, drift_profile
        from mechkv.models import load_model
        from mechkv.prompts import format_prompt, load_problems, sample, word_problems

        problems = word_problems() if self.prompts is None else load_problems(self.prompts)
        texts = [format_prompt(problem) for problem in sample(problems, self.n_prompts)]
        config = DriftConfig(n_steps=self.steps)
        if self.out is not None:
            result_folder.refuse_taken(self.out / "profile", KIND)
        model = load_model(self.model, dtype=self.dtype, device=self.device)
        profile = drift_profile(
            model,
            texts,
            config,
            control="float32" if self.control else None,
            folder=None if self.out is None else self.out / "run",
        )
        summary = profile.summary()
        if self.out is not None:
            profile.save(self.out / "profile")
            for name, figure in profile.plot().items():
                figure_style.save(figure, self.out / "figures" / name)
            print(f"tables and figures: {self.out}", file=sys.stderr)
        if self.json:
            print(json.dumps(plain_json.records(summary), indent=1))
            return 0
        last = summary[(summary["site"] == "resid_post") & (summary["layer"] == profile.frame["layer"].max() - 1)]
        print("relative L2 drift of the residual stream after the last block, mean over steps and prompts")
        for row in last.itertuples():
            print(
                f"  {row.dtype:<9} {row.estimate:.2e}  {terminal.interval(row.low, row.high, row.n_clusters, '.2e')}  "
                f"{100 * row.bitwise_equal:.0f} % of steps bitwise equal"
            )
        print(terminal.table(profile.onset()))
        return 0
