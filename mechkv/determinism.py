"""Is the divergence the same every time: in another process, and with another number of threads?

The same prompt and tokens are run on both paths in fresh processes (`python -m mechkv.determinism`), each with a number
of threads set before anything is computed, and the logits of every step are compared bit for bit with those of the
first process. A second process with the same number of threads must agree exactly (claim C6); another number of threads
changes how kernels split their sums, so it may change the bits, the drift, and where it appears: that is measured,
not assumed.

Conventions: tokens are given (the cached path's greedy choice of the first process), so that a difference stays where
it arises. Processes run one after the other.
Controls: inside each process step 0 is exactly zero (guard); the first process against itself is zero by definition and
left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mechkv import provenance
from mechkv.comparison import compare
from mechkv.distributions import kl
from mechkv.errors import InputError, ModelError

PATHS = ("cached", "recomputed")


@dataclass(frozen=True)
class Determinism:
    """Bits of the same run in several processes.

    Attributes:
        frame: A row per prompt, run (`process`, `threads`), path and step: `equal` to the first process, and
            `max_abs`, the largest difference of the logits; `drift_kl`, KL(cached || recomputed) in that process.
        provenance: Versions, machine, kernels; source, dtype.
    """

    frame: pd.DataFrame
    provenance: dict[str, Any]

    def summary(self) -> pd.DataFrame:
        """Per run: share of equal steps on each path, largest difference, share of steps whose drift has the same KL,
        and mean KL."""
        table = self.frame[self.frame["process"] > 0]
        keys = ["process", "threads", "path"]
        found = table.groupby(keys).agg(
            n_steps=("equal", "size"),
            equal=("equal", "mean"),
            max_abs=("max_abs", "max"),
            drift_kl=("drift_kl", "mean"),
        )
        first = self.frame[self.frame["process"] == 0].set_index(["prompt", "path", "step"])["drift_kl"]
        same = table.set_index(["prompt", "path", "step"])
        same = same.assign(same=same["drift_kl"] == first.reindex(same.index)).reset_index()
        return found.join(same.groupby(keys)["same"].mean().rename("same_drift")).reset_index()


def determinism(
    source: str,
    prompts: Sequence[Tensor],
    *,
    dtype: str = "float16",
    n_steps: int = 8,
    threads: Sequence[int] = (1, 1, 2),
    device: str = "cpu",
) -> Determinism:
    """Run the same thing in one process per entry of `threads`.

    Args:
        source: What `load_model` takes.
        prompts: `[pos]` token tensors.
        dtype: Of the model.
        n_steps: Decode steps after each prompt.
        threads: Threads of each process; the first is what the others are compared with.
        device: Where to run.

    Raises:
        InputError: Fewer than two processes.
        ModelError: A process failed; its message is given.
    """
    if len(threads) < 2 or min(threads) < 1 or n_steps < 1:
        raise InputError("processes", got=threads, expected="two or more, each with threads", remedy="See threads.")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        request = {"source": source, "dtype": dtype, "device": device, "n_steps": n_steps}
        request |= {"prompts": [t.tolist() for t in prompts]}
        (place / "request.json").write_text(json.dumps(request))
        for process, count in enumerate(threads):
            _start(place, process, count)
            rows += _compared(place, process, count, len(prompts))
    known = {"source": source, "dtype": dtype, "device": device, "threads": list(threads)}
    return Determinism(pd.DataFrame(rows), provenance.collect() | {"determinism": known})


def _start(place: Path, process: int, threads: int) -> None:
    command = [sys.executable, "-m", "mechkv.determinism", str(place), str(process), str(threads)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ModelError(
            "a process of the determinism check failed",
            got=(done.stderr.strip().splitlines() or ["no message"])[-1][:300],
            expected="logits of both paths",
            remedy="Run the same source with mechkv drift first.",
        )


def _compared(place: Path, process: int, threads: int, n_prompts: int) -> list[dict[str, Any]]:
    rows = []
    with safe_open(place / "0.safetensors", "pt") as first, safe_open(place / f"{process}.safetensors", "pt") as here:
        for prompt in range(n_prompts):
            logits = {path: here.get_tensor(f"{prompt}-{path}") for path in PATHS}
            for path in PATHS:
                reference = first.get_tensor(f"{prompt}-{path}")
                for step in range(len(reference)):
                    difference = compare(logits[path][step], reference[step])
                    rows.append(
                        {
                            "prompt": prompt,
                            "process": process,
                            "threads": threads,
                            "path": path,
                            "step": step,
                            "equal": difference.bitwise_equal,
                            "max_abs": difference.max_abs,
                            "drift_kl": float(kl(logits["cached"][step], logits["recomputed"][step])),
                        }
                    )
    return rows


def main() -> None:
    """One process: read the request, run both paths, write the logits."""
    parser = argparse.ArgumentParser(description="One process of the determinism check.")
    parser.add_argument("place", type=Path)
    parser.add_argument("process", type=int)
    parser.add_argument("threads", type=int)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    from mechkv.forced_study import greedy_continuation
    from mechkv.guards import input_device
    from mechkv.models import load_model
    from mechkv.paths import lockstep
    from mechkv.policies import Forced

    request = json.loads((asked.place / "request.json").read_text())
    model = load_model(request["source"], dtype=request["dtype"], device=request["device"])
    device = input_device(model)
    chosen_file = asked.place / "chosen.json"
    prompts = [torch.tensor(ids, device=device) for ids in request["prompts"]]
    if not chosen_file.exists():
        chosen_file.write_text(json.dumps([greedy_continuation(model, p, request["n_steps"]) for p in prompts]))
    found: dict[str, Tensor] = {}
    for index, (prompt, fed) in enumerate(zip(prompts, json.loads(chosen_file.read_text()), strict=True)):
        steps = list(lockstep(model, prompt, policy=Forced([*prompt.tolist(), *fed]), n_steps=len(fed)))
        for side, path in enumerate(PATHS):
            found[f"{index}-{path}"] = torch.stack([pair[side].logits for pair in steps]).cpu()
    save_file(found, asked.place / f"{asked.process}.safetensors")


if __name__ == "__main__":
    main()
