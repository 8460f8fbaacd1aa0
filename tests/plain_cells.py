"""The four cells of the causal factorial with plain Hugging Face models and caches, in a process without any bridge.

`python -m tests.plain_cells FILE tiny|FOLDER DTYPE THREADS` writes the logits of every cell.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from mechkv.prompts import format_prompt, word_problems
from tests.tiny import tiny_hf, tokens

TINY = [(tokens(15, 0), 11, (2, 4)), (tokens(14, 1), 7, (1, 7))]
"""(tokens, prompt length, steps)."""


REAL_STEPS = (5, 7, 8)
"""On the CPUs tried, float16 drift begins at step 6 or 7 of the first word problem."""


def real_run(model, folder):
    """The first word problem and the tokens that plain cached decoding adds to it: (tokens, prompt length, steps)."""
    ids = AutoTokenizer.from_pretrained(folder)(format_prompt(word_problems()[0]))["input_ids"]
    fed, cache = torch.tensor(ids), DynamicCache(config=model.config)
    chunk = fed
    with torch.no_grad():
        for _ in range(max(REAL_STEPS)):
            logits = model(chunk[None], past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
            chunk = logits.argmax()[None]
            fed = torch.cat([fed, chunk])
    return fed, len(ids), REAL_STEPS


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
        runs = [real_run(model, source)]
    found = {
        f"{number} {step} {name}": logits
        for number, (fed, n_prompt, steps) in enumerate(runs)
        for step in steps
        for name, logits in four_cells(model, fed, n_prompt, step).items()
    }
    for number, (fed, n_prompt, _) in enumerate(runs):
        found |= {f"{number} fed": fed, f"{number} n_prompt": torch.tensor(n_prompt)}
    save_file(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
