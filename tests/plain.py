"""Plain Hugging Face decode loops, for processes that never wrap a model: the reference that bridges are held against.

`python -m tests.plain FILE tiny float64 gemma2 ...` or `python -m tests.plain FILE folder float16 FOLDER` writes the
logits of both paths. Prompts and continuations are fixed, so that both sides process the same tokens.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from tests.tiny import tiny_hf, tokens

N_PROMPT, N_STEPS = 13, 8
REAL_PROMPTS, REAL_STEPS = 3, 16


def plain_cached(model: PreTrainedModel, fed: torch.Tensor, n_prompt: int) -> torch.Tensor:
    """`[step, d_vocab]`: prefill, then one token at a time, as `generate` calls the model."""
    cache, rows = DynamicCache(config=model.config), []
    with torch.no_grad():
        for chunk in (fed[:n_prompt], *fed[n_prompt:].split(1)):
            rows.append(model(chunk[None], past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1])
    return torch.stack(rows)


def plain_recomputed(model: PreTrainedModel, fed: torch.Tensor, n_prompt: int) -> torch.Tensor:
    """`[step, d_vocab]`: a whole forward over all tokens so far, at every step."""
    with torch.no_grad():
        rows = [
            model(fed[None, :stop], use_cache=False, logits_to_keep=1).logits[0, -1]
            for stop in range(n_prompt, len(fed) + 1)
        ]
    return torch.stack(rows)


def real_prompt(index: int) -> torch.Tensor:
    """Ordinary token ids of SmolLM2, of three lengths."""
    generator = torch.Generator().manual_seed(index)
    return torch.randint(1000, 40000, (8 + 5 * index + REAL_STEPS,), generator=generator)


def in_another_process(out: Path, kind: str, dtype: str, *names: str) -> dict[str, torch.Tensor]:
    """Run this module as a program and read what it wrote."""
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"}
    environment["PLAIN_THREADS"] = str(torch.get_num_threads())
    command = [sys.executable, "-W", "ignore", "-m", "tests.plain", str(out), kind, dtype, *names]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    return load_file(out)


def main(out: str, kind: str, dtypes: str, *names: str) -> None:
    found: dict[str, torch.Tensor] = {}
    torch.set_num_threads(int(os.environ["PLAIN_THREADS"]))
    for name in names:
        for dtype in dtypes.split(","):
            wanted = getattr(torch, dtype)
            if kind == "tiny":
                model, runs = tiny_hf(name, dtype=wanted), [(tokens(N_PROMPT + N_STEPS), N_PROMPT)]
            else:
                model = AutoModelForCausalLM.from_pretrained(name, dtype=wanted, attn_implementation="eager").eval()
                prompts = [real_prompt(index) for index in range(REAL_PROMPTS)]
                runs = [(prompt, len(prompt) - REAL_STEPS) for prompt in prompts]
            for index, (fed, n_prompt) in enumerate(runs):
                key = f"{name if kind == 'tiny' else index} {dtype}"
                found[f"{key} cached"] = plain_cached(model, fed, n_prompt)
                found[f"{key} recomputed"] = plain_recomputed(model, fed, n_prompt)
    save_file(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
