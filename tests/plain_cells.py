"""The four cells of the causal factorial with plain Hugging Face models and caches, in a process without any bridge.

`python -m tests.plain_cells FILE tiny|FOLDER DTYPE THREADS` writes the logits of every cell.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from tests.tiny import tiny_hf, tokens

TINY = [(tokens(15, 0), 11, (2, 4)), (tokens(14, 1), 7, (1, 7))]
"""(tokens, prompt length, steps)."""


def real_runs():
    """Ordinary token ids of SmolLM2."""
    runs = []
    for seed, (n_prompt, steps) in enumerate(((29, (3, 8)), (41, (5,)))):
        generator = torch.Generator().manual_seed(100 + seed)
        runs.append((torch.randint(1000, 40000, (n_prompt + max(steps),), generator=generator), n_prompt, steps))
    return runs


class OldRows(DynamicCache):
    """A full pass whose attention reads given old rows, and of its own only the newest."""

    def __init__(self, config, old):
        super().__init__(config=config)
        self.old = old

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = self.old[layer_idx]
        return torch.cat([keys, key_states[:, :, -1:]], 2), torch.cat([values, value_states[:, :, -1:]], 2)


def held(cache, stop):
    return [(layer.keys[:, :, :stop].clone(), layer.values[:, :, :stop].clone()) for layer in cache.layers]


def four_cells(model, fed, n_prompt, step):
    n = n_prompt + step

    def last(ids, cache):
        return model(ids[None], past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1].clone()

    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        last(fed[:n_prompt], cache)
        for i in range(n_prompt, n - 1):
            last(fed[i : i + 1], cache)
        cached_rows = held(cache, n - 1)
        one_c = last(fed[n - 1 : n], cache)
        fresh = DynamicCache(config=model.config)
        full_r = last(fed[:n], fresh)
        given = DynamicCache(config=model.config)
        for layer, (keys, values) in enumerate(held(fresh, n - 1)):
            given.update(keys, values, layer)
        one_r = last(fed[n - 1 : n], given)
        full_c = last(fed[:n], OldRows(model.config, cached_rows))
    return {
        "cached one-token": one_c,
        "recomputed one-token": one_r,
        "cached full": full_c,
        "recomputed full": full_r,
    }


def in_another_process(out: Path, source: str, dtype: str) -> dict[str, torch.Tensor]:
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-W", "ignore", "-m", "tests.plain_cells", str(out), source, dtype]
    environment = {**os.environ, "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, str(torch.get_num_threads())], cwd=root, env=environment, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return load_file(out)


def main(out: str, source: str, dtype: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    wanted = getattr(torch, dtype)
    if source == "tiny":
        model, runs = tiny_hf("llama-gqa", dtype=wanted), TINY
    else:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=wanted, attn_implementation="eager").eval()
        runs = real_runs()
    found = {
        f"{number} {step} {name}": logits
        for number, (fed, n_prompt, steps) in enumerate(runs)
        for step in steps
        for name, logits in four_cells(model, fed, n_prompt, step).items()
    }
    save_file(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
