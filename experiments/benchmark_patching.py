"""What does a sweep cost? Patched steps against bare decode steps, side by side.

A sweep over layers x {residual, K, V, K and V} at one step is timed against as many bare decode steps (the model called
on one token with the same KV state, no hooks of ours), in alternating blocks, after a short and after a long run.

    python -m experiments.benchmark_patching [model] [dtype]

prints one JSON document on its last line. Target: ratio at most 1.15, whatever the number of steps before.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformer_lens.model_bridge import TransformerBridge

from mechkv.cache import KVState, StateCache, blank_layers
from mechkv.guards import GuardLog
from mechkv.models import load_model
from mechkv.patch_bench import PatchBench, distances
from mechkv.patching import TARGETS, _patches
from mechkv.policies import Greedy
from mechkv.prompts import format_prompt, word_problems
from mechkv.sources import Pair, pairs

TARGET = 1.15
STEPS = (2, 12)


def sweep_cost(source: str = "smollm2-135m", dtype: str = "float32", layers_every: int = 5, blocks: int = 5) -> dict:
    """The ratio after `STEPS` steps, from the same process."""
    model = load_model(source, dtype=dtype)
    prompt = torch.tensor(model.tokenizer(format_prompt(word_problems()[0]))["input_ids"])
    found = {}
    for pair in pairs(model, prompt, policy=Greedy(), n_steps=max(STEPS)):
        if pair.index in STEPS:
            found[pair.index] = _ratio(model, pair, layers_every, blocks)
    ratios = [entry["ratio"] for entry in found.values()]
    return {
        "benchmark": "patch_sweep",
        "model": source,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "after_steps": found,
        "worst_ratio": max(ratios),
        "target": TARGET,
        "met": max(ratios) <= TARGET,
    }


def _ratio(model: TransformerBridge, pair: Pair, layers_every: int, blocks: int) -> dict[str, float]:
    layers = range(0, len(pair.cached.kv.keys), layers_every)
    trials = [(target, layer) for layer in layers for target in TARGETS]
    source = pair.source("recomputed")
    with PatchBench(model, "cached", log=GuardLog()) as bench:

        def sweep() -> None:
            logits = [
                bench.patched(pair.cached, *_patches(source, "cached", target, layers=(layer,))).logits
                for target, layer in trials
            ]
            distances(logits, pair.recomputed.logits)

        patched, bare = [], []
        sweep_time: list[float] = []
        for _ in range(blocks):
            bare.append(_timed(lambda: _bare_steps(model, pair, len(trials))))
            sweep_time.append(_timed(sweep))
            patched.append(sweep_time[-1] / bare[-1])
    return {
        "n_patches": len(trials),
        "bare_step_ms": 1e3 * min(bare) / len(trials),
        "patched_step_ms": 1e3 * min(sweep_time) / len(trials),
        "ratio": min(sweep_time) / min(bare),
        "ratio_median_of_blocks": statistics.median(patched),
    }


def _bare_steps(model: TransformerBridge, pair: Pair, n: int) -> None:
    config: Any = model.original_model.config
    step = pair.cached
    state: KVState = step.kv_before
    fed = step.tokens[state.n_tokens :][None]
    with torch.no_grad():
        for _ in range(n):
            model(fed, past_key_values=StateCache(blank_layers(config), state), logits_to_keep=1)


def _timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    given = dict(zip(("source", "dtype"), sys.argv[1:3], strict=False))
    print(json.dumps(sweep_cost(given.get("source", "smollm2-135m"), given.get("dtype", "float32"))))
