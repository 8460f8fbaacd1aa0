"""`mechkv patch`: residual stream or KV cache? The causal experiments on any model."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro


@dataclass(frozen=True)
class Patch:
    """Patch the residual stream and the KV state of one path with the other path's, and say what carries the drift."""

    model: tyro.conf.Positional[str]
    """A packaged model (see `mechkv models`), a .gguf file, a local folder or a hub id."""
    prompts: Path | None = None
    """Problems in GSM8K's JSONL format; by default the word problems that come with mechkv."""
    n_prompts: int = 4
    """How many of them, from the first."""
    steps: int = 8
    """Decode steps after the prompt."""
    every_layer: int = 4
    """Sweep every so many layers, counted down from the last."""
    into: Literal["cached", "recomputed"] = "cached"
    """Path that the sweep patches; the other one is the source."""
    dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float16"
    """Dtype under study."""
    device: str = "auto"
    """Where to run: auto, cpu, cuda, cuda:1, mps, ..."""
    out: Path | None = None
    """Folder for tables and figures; finished prompts are kept there and a killed run goes on from them."""
    json: bool = False
    """Print the summaries as one JSON document."""

    def run(self) -> int:
        """Run the factorial and the sweep, and print."""
        from mechkv import plain_json, plots, result_folder, terminal
        from mechkv.causal_run import Walks
        from mechkv.factorial import CausalFactorial, FactorialConfig, causal_factorial
        from mechkv.models import load_model
        from mechkv.patching import PatchSweep, SweepConfig, patch_sweep
        from mechkv.prompts import format_prompt, load_problems, sample, word_problems

        problems = word_problems() if self.prompts is None else load_problems(self.prompts)
        texts = [format_prompt(problem) for problem in sample(problems, self.n_prompts)]
        factorial_config = FactorialConfig(n_steps=self.steps)
        later = int(self.into == "cached" and self.steps > 1)
        sweep_config = SweepConfig(n_steps=self.steps, every=self.every_layer, into=self.into, later=later)
        if self.out is not None:
            result_folder.refuse_taken(self.out / "factorial", CausalFactorial.KIND)
            result_folder.refuse_taken(self.out / "sweep", PatchSweep.KIND)
        model = load_model(self.model, dtype=self.dtype, device=self.device)
        walks = Walks(model)
        runs = {name: None if self.out is None else self.out / "run" / name for name in ("factorial", "sweep")}
        factorial = causal_factorial(model, texts, factorial_config, folder=runs["factorial"], walks=walks)
        sweep = patch_sweep(model, texts, sweep_config, folder=runs["sweep"], walks=walks)
        if self.out is not None:
            factorial.save(self.out / "factorial")
            sweep.save(self.out / "sweep")
            for name, figure in {**factorial.plot(), **sweep.plot()}.items():
                plots.save(figure, self.out / "figures" / name)
            print(f"tables and figures: {self.out}", file=sys.stderr)
        shares, recovery = factorial.summary(), sweep.summary()
        if self.json:
            tables = {"factorial": shares, "cells": factorial.bitwise(), "sweep": recovery, "parts": sweep.parts()}
            found = {name: plain_json.records(table) for name, table in tables.items()}
            print(json.dumps(found, indent=1))
            return 0
        print("share of the drift (inherited with the KV state, made afresh by the step), mean over steps and prompts")
        for row in shares.itertuples():
            print(
                f"  {row.quantity:<9} {row.measure:<19} {terminal.number(row.estimate, '.3f'):>6}  "
                f"{terminal.interval(row.low, row.high, row.n_clusters, '.3f')}  {row.n_undefined} steps without drift"
            )
        print("recovery of the source path's logits with all layers patched (1: the source's logits, 0: no effect)")
        whole = recovery[(recovery["layer"] < 0) & (recovery["kind"] != "identity")]
        columns = ["kind", "dose", "target", "later", "estimate", "low", "high", "n_undefined", "n_idle"]
        print(terminal.table(whole[columns], len(texts)))
        return 0
