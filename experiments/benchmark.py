"""What does the instrument cost? Ratios measured side by side in one run; one JSON document on the last line.

    python -m experiments.benchmark
    python -m experiments.benchmark --dtype float16 --pieces recorded profile

(a) `recorded`: a recorded cached run (residual stream, attention and MLP output, K, V and logits of all layers) against
    the bare bridge loop; target 1.05. Beside it, TransformerLens' own `run_with_cache` of everything.
(b) `profile`: `profile_prompt` against the two bare loops it needs; target 1.15.
(c) `memory_mb`: growth of the peak of `profile_prompt` from 16 to 128 steps beyond the model's own cache; target 20.
(d) `help`: `mechkv --help` against `python -c "import tyro"`; target 3.

The machine is noisy, so what is compared takes turns step by step, and a ratio is the median over rounds. Garbage is
collected before each round: a full collection takes as long as several steps and strikes either side by chance.
Memory is the peak resident size of processes of their own: the growth of the profile's, less that of one KV cache
for each path, which is the model's own (beside it, the growth of the two bare loops).
"""

import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor
from tqdm.auto import tqdm
from transformer_lens.model_bridge import TransformerBridge
from transformers import DynamicCache

from mechkv.drift_measure import DriftConfig, profile_prompt
from mechkv.guards import text_config
from mechkv.models import DTYPES, info, load_model
from mechkv.prompts import format_prompt, word_problems
from mechkv.recording import estimate_bytes, record

TARGETS = {"recorded": 1.05, "profile": 1.15, "memory_mb": 20.0, "help": 3.0}


@dataclass(frozen=True)
class Benchmark:
    """Measure the instrument's cost on one model."""

    model: str = "smollm2-135m"
    """Model to measure on."""
    dtype: str = "float32"
    """Its dtype. Half precision is slower on most CPUs and hides the instrument's share: float32 is the hard case."""
    steps: int = 32
    """Decode steps."""
    repeats: int = 5
    """Rounds; one more comes first to warm up."""
    pieces: tuple[Literal["recorded", "profile", "memory_mb", "help"], ...] = (
        "recorded",
        "profile",
        "memory_mb",
        "help",
    )
    """What to measure."""


def bare_cached(model: TransformerBridge, tokens: Tensor, n_prompt: int) -> Iterator[Tensor]:
    """The bridge alone on a Hugging Face cache, teacher-forced, a step at a time."""
    cache = DynamicCache(config=text_config(model))
    fed = tokens[:n_prompt]
    for stop in range(n_prompt, len(tokens) + 1):
        with torch.no_grad():
            yield model(fed[None], past_key_values=cache, logits_to_keep=1)[0, -1]
        fed = tokens[stop : stop + 1]


def bare_recomputed(model: TransformerBridge, tokens: Tensor, n_prompt: int) -> Iterator[Tensor]:
    """The bridge alone, a full pass a step."""
    for stop in range(n_prompt, len(tokens) + 1):
        with torch.no_grad():
            yield model(tokens[None, :stop], use_cache=False, logits_to_keep=1)[0, -1]


def run_with_cache(model: TransformerBridge, tokens: Tensor, n_prompt: int) -> Iterator[object]:
    """TransformerLens' own recording of everything, on the steps of `bare_cached`."""
    cache = DynamicCache(config=text_config(model))
    fed = tokens[:n_prompt]
    for stop in range(n_prompt, len(tokens) + 1):
        with torch.no_grad():
            yield model.run_with_cache(fed[None], past_key_values=cache, logits_to_keep=1)
        fed = tokens[stop : stop + 1]


class Beside:
    """Walks bare loops a step at a time between the steps of a run that reports its progress, and keeps the two apart.

    A slow moment of the machine then falls on both sides of a ratio.
    """

    def __init__(self, *loops: Iterator[object]) -> None:
        self._loops = loops
        self.seconds = [0.0] * len(loops)

    def step(self, done: int = 1, *_: int) -> None:
        """What the run calls after each step (`done` is 0 before the first pass of a recorded run)."""
        if not done:
            return
        for index, loop in enumerate(self._loops):
            start = time.perf_counter()
            next(loop, None)
            self.seconds[index] += time.perf_counter() - start

    def time(self, run: Callable[[], object]) -> float:
        """Seconds of the run alone; those of the loops are in `seconds`."""
        start = time.perf_counter()
        run()
        return time.perf_counter() - start - sum(self.seconds)


def recording_round(model: TransformerBridge, tokens: Tensor, n_prompt: int) -> dict[str, float]:
    """Seconds of a recorded cached run and of the bare loop."""
    beside = Beside(bare_cached(model, tokens, n_prompt))
    spent = beside.time(lambda: record(model, tokens, n_prompt=n_prompt, path="cached", progress=beside.step))
    return {"recorded": spent, "bare": beside.seconds[0]}


def everything_round(model: TransformerBridge, tokens: Tensor, n_prompt: int) -> dict[str, float]:
    """Seconds of `run_with_cache` of everything and of the bare loop, apart from the recorded run: what it leaves of
    the processor's caches would be charged to the step after it."""
    beside = Beside(bare_cached(model, tokens, n_prompt), run_with_cache(model, tokens, n_prompt))
    for _ in range(len(tokens) - n_prompt + 1):
        beside.step()
    return dict(zip(("bare", "run_with_cache"), beside.seconds, strict=True))


def profile_round(model: TransformerBridge, tokens: Tensor, n_prompt: int) -> dict[str, float]:
    """Seconds of a drift profile of one prompt, and of the two bare loops over the same tokens."""
    beside = Beside(bare_cached(model, tokens, n_prompt), bare_recomputed(model, tokens, n_prompt))
    config, given = DriftConfig(n_steps=len(tokens) - n_prompt), tokens[n_prompt:].tolist()
    spent = beside.time(
        lambda: profile_prompt(model, tokens[:n_prompt], config, continuation=given, progress=beside.step)
    )
    return {"profile": spent, "bare": sum(beside.seconds)}


def ratio(rounds: list[dict[str, float]], over: str, under: str) -> float:
    """Median over rounds of one piece over another."""
    return statistics.median(r[over] / r[under] for r in rounds)


def peak_megabytes(piece: str, settings: Benchmark, n_steps: int) -> float:
    """Peak resident size of a new process while it does `piece` for `n_steps`."""
    code = (
        "from experiments.benchmark import run_piece; "
        f"run_piece({piece!r}, {settings.model!r}, {settings.dtype!r}, {n_steps})"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def run_piece(piece: str, source: str, dtype: str, n_steps: int) -> None:
    """Do a piece in this process and print its peak resident size in megabytes, that of loading left out."""
    model = load_model(source, dtype=dtype)
    prompt = model.to_tokens(format_prompt(word_problems()[0]))[0]
    tokens = torch.cat([prompt, prompt.repeat(4)[:n_steps]])
    _forget_peak()
    if piece == "profile":
        profile_prompt(model, prompt, DriftConfig(n_steps=n_steps), continuation=tokens[len(prompt) :].tolist())
    else:
        for _ in zip(bare_cached(model, tokens, len(prompt)), bare_recomputed(model, tokens, len(prompt)), strict=True):
            pass
    print(_peak())


def _forget_peak() -> None:
    """Linux can start its record of the peak again; elsewhere loading is in it."""
    control = Path("/proc/self/clear_refs")
    if control.exists():
        control.write_text("5")


def _peak() -> float:
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def memory_growth(settings: Benchmark, model: TransformerBridge) -> dict[str, float]:
    """Growth of the peak from 16 to 128 steps, of the profile, of the bare loops, and of a KV cache for each path."""
    grown = {
        piece: peak_megabytes(piece, settings, 128) - peak_megabytes(piece, settings, 16)
        for piece in ("profile", "bare")
    }
    short, long = (estimate_bytes(model, 64 + n, 64, sites=[]) for n in (16, 128))
    logits = (128 - 16) * info(model).d_vocab * DTYPES[settings.dtype].itemsize
    grown["own_cache"] = 2 * (long - short - logits) / 2**20
    return grown | {"beyond": grown["profile"] - grown["own_cache"]}


def help_round() -> dict[str, float]:
    """Seconds of `mechkv --help` and of the import of the parser it is made with."""
    seconds = {}
    for name, arguments in {"help": ("-m", "mechkv", "--help"), "tyro": ("-c", "import tyro")}.items():
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        seconds[name] = time.perf_counter() - start
    return seconds


def measure(settings: Benchmark) -> dict[str, object]:
    """The ratios asked for, with their targets and the seconds behind them."""
    model = load_model(settings.model, dtype=settings.dtype)
    prompt = model.to_tokens(format_prompt(word_problems()[0]))[0]
    tokens, n = torch.cat([prompt, prompt.repeat(4)[: settings.steps]]), len(prompt)
    rounds: dict[str, list[dict[str, float]]] = {}
    found: dict[str, float] = {}
    shown: dict[str, object] = {}
    pieces = {"recorded": recording_round, "everything": everything_round, "profile": profile_round}
    for name, one_round in pieces.items():
        if name in settings.pieces or (name == "everything" and "recorded" in settings.pieces):
            one_round(model, tokens, n)
            rounds[name] = []
            for _ in tqdm(range(settings.repeats), desc=name, disable=None):
                gc.collect()
                rounds[name].append(one_round(model, tokens, n))
    if "recorded" in settings.pieces:
        found["recorded"] = ratio(rounds["recorded"], "recorded", "bare")
        shown["run_with_cache_of_everything"] = round(ratio(rounds["everything"], "run_with_cache", "bare"), 3)
    if "profile" in settings.pieces:
        found["profile"] = ratio(rounds["profile"], "profile", "bare")
    if "memory_mb" in settings.pieces:
        grown = memory_growth(settings, model)
        found["memory_mb"], shown["memory_growth_mb"] = grown["beyond"], grown
    if "help" in settings.pieces:
        rounds["help"] = [help_round() for _ in range(settings.repeats + 1)][1:]
        found["help"] = ratio(rounds["help"], "help", "tyro")
    return {
        "ratios": {name: round(value, 3) for name, value in found.items()},
        "targets": {name: TARGETS[name] for name in found},
        "met": {name: value <= TARGETS[name] for name, value in found.items()},
        **shown,
        "rounds": rounds,
        "settings": vars(settings) | {"n_prompt": n, "threads": torch.get_num_threads()},
    }


if __name__ == "__main__":
    print(json.dumps(measure(tyro.cli(Benchmark))))
