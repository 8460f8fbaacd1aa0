"""What does the instrument cost? Ratios measured side by side in one run; one JSON document on the last line.

    python -m experiments.benchmark

(a) `recorded`: a recorded cached run (residual stream, attention and MLP output, K, V and logits of all layers) against
    the bare bridge loop; target 1.05. Beside it, TransformerLens' own `run_with_cache` of everything.
(b) `profile`: `profile_prompt` against the two bare loops it needs; target 1.15.
(c) `memory_mb`: growth of the peak of `profile_prompt` from 16 to 128 steps beyond the model's own cache; target 20.
(d) `help`: `mechkv --help` against `python -c "import tyro"`; target 3.

The machine is noisy, so the compared pieces alternate, and a ratio is the median over rounds of the ratio within one.
Memory is the peak resident size of processes of their own: the growth of the profile's, less the growth of the two bare
loops' over the same tokens, which is the model's own.
"""

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import tyro
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformers import DynamicCache

from mechkv.drift_measure import DEFAULT_SITES, DriftConfig, profile_prompt
from mechkv.guards import text_config
from mechkv.models import load_model
from mechkv.paths import decode
from mechkv.policies import Forced
from mechkv.prompts import format_prompt, word_problems

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
    """How often each piece is timed."""


def bare_cached(model: TransformerBridge, tokens: Tensor, n_prompt: int) -> Tensor:
    """The bridge alone on a Hugging Face cache, teacher-forced."""
    cache = DynamicCache(config=text_config(model))
    with torch.no_grad():
        logits = model(tokens[None, :n_prompt], past_key_values=cache, logits_to_keep=1)
        for index in range(n_prompt, len(tokens)):
            logits = model(tokens[None, index : index + 1], past_key_values=cache, logits_to_keep=1)
    return logits[0, -1]


def bare_recomputed(model: TransformerBridge, tokens: Tensor, n_prompt: int) -> Tensor:
    """The bridge alone, a full pass a step."""
    with torch.no_grad():
        for stop in range(n_prompt, len(tokens) + 1):
            logits = model(tokens[None, :stop], use_cache=False, logits_to_keep=1)
    return logits[0, -1]


def recorded(model: TransformerBridge, tokens: Tensor, n_prompt: int) -> list[object]:
    """The decode loop with every residual-sized site, keeping every step (K and V come with each step)."""
    policy = Forced(tokens.tolist())
    steps = decode(
        model, tokens[:n_prompt], path="cached", policy=policy, n_steps=len(tokens) - n_prompt, sites=DEFAULT_SITES
    )
    return [(step.logits, step.activations, step.kv) for step in steps]


def run_with_cache(model: TransformerBridge, tokens: Tensor, n_prompt: int) -> None:
    """TransformerLens' own recording of everything, on the same steps."""
    cache = DynamicCache(config=text_config(model))
    with torch.no_grad():
        model.run_with_cache(tokens[None, :n_prompt], past_key_values=cache, logits_to_keep=1)
        for index in range(n_prompt, len(tokens)):
            model.run_with_cache(tokens[None, index : index + 1], past_key_values=cache, logits_to_keep=1)


def alternate(pieces: dict[str, Callable[[], object]], repeats: int) -> list[dict[str, float]]:
    """Seconds of each piece, round by round; pieces alternate, so that a slow minute hits all of them."""
    rounds = []
    for _ in range(repeats):
        times = {}
        for name, piece in pieces.items():
            start = time.perf_counter()
            piece()
            times[name] = time.perf_counter() - start
        rounds.append(times)
    return rounds


def ratio(rounds: list[dict[str, float]], over: tuple[str, ...], under: tuple[str, ...]) -> float:
    """Median over rounds of the sum of some pieces over the sum of others."""
    return statistics.median(sum(r[name] for name in over) / sum(r[name] for name in under) for r in rounds)


def peak_megabytes(piece: str, settings: Benchmark, n_steps: int) -> float:
    """Peak resident size of a new process that does `piece` for `n_steps`."""
    code = (
        "from experiments.benchmark import run_piece; "
        f"run_piece({piece!r}, {settings.model!r}, {settings.dtype!r}, {n_steps})"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def run_piece(piece: str, source: str, dtype: str, n_steps: int) -> None:
    """Do a piece in this process and print its peak resident size in megabytes."""
    model = load_model(source, dtype=dtype)
    prompt = model.to_tokens(format_prompt(word_problems()[0]))[0]
    tokens = torch.cat([prompt, prompt.repeat(4)[:n_steps]])
    if piece == "profile":
        profile_prompt(model, prompt, DriftConfig(n_steps=n_steps), continuation=tokens[len(prompt) :].tolist())
    else:
        bare_cached(model, tokens, len(prompt))
        bare_recomputed(model, tokens, len(prompt))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def memory_growth(settings: Benchmark) -> dict[str, float]:
    """Growth of the peak from 16 to 128 steps, of the profile and of the bare loops."""
    grown = {
        piece: peak_megabytes(piece, settings, 128) - peak_megabytes(piece, settings, 16)
        for piece in ("profile", "bare")
    }
    return grown | {"beyond": grown["profile"] - grown["bare"]}


def help_seconds(repeats: int) -> list[dict[str, float]]:
    """`mechkv --help` and the import of the parser it is made with."""

    def run(*arguments: str) -> None:
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)

    return alternate({"help": lambda: run("-m", "mechkv", "--help"), "tyro": lambda: run("-c", "import tyro")}, repeats)


def measure(settings: Benchmark) -> dict[str, object]:
    """All ratios, with their targets and the seconds behind them."""
    model = load_model(settings.model, dtype=settings.dtype)
    prompt = model.to_tokens(format_prompt(word_problems()[0]))[0]
    tokens = torch.cat([prompt, prompt.repeat(4)[: settings.steps]])
    n, given = len(prompt), tokens[len(prompt) :].tolist()
    config = DriftConfig(n_steps=settings.steps)
    pieces: dict[str, Callable[[], object]] = {
        "bare_cached": lambda: bare_cached(model, tokens, n),
        "recorded": lambda: recorded(model, tokens, n),
        "bare_recomputed": lambda: bare_recomputed(model, tokens, n),
        "profile": lambda: profile_prompt(model, prompt, config, continuation=given),
        "run_with_cache": lambda: run_with_cache(model, tokens, n),
    }
    alternate(pieces, 1)
    rounds = alternate(pieces, settings.repeats)
    memory = memory_growth(settings)
    found = {
        "recorded": ratio(rounds, ("recorded",), ("bare_cached",)),
        "profile": ratio(rounds, ("profile",), ("bare_cached", "bare_recomputed")),
        "memory_mb": memory["beyond"],
        "help": ratio(help_seconds(settings.repeats), ("help",), ("tyro",)),
    }
    return {
        "ratios": {name: round(value, 3) for name, value in found.items()},
        "targets": TARGETS,
        "met": {name: value <= TARGETS[name] for name, value in found.items()},
        "run_with_cache_of_everything": round(ratio(rounds, ("run_with_cache",), ("bare_cached",)), 3),
        "memory_growth_mb": memory,
        "median_seconds": {name: statistics.median(r[name] for r in rounds) for name in pieces},
        "settings": vars(settings) | {"n_prompt": n, "threads": torch.get_num_threads()},
    }


if __name__ == "__main__":
    print(json.dumps(measure(tyro.cli(Benchmark))))
