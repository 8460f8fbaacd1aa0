"""The paths that `check` drives on a model: prompts of several lengths, prefill sizes, chunks, batches, left padding.

Kernels change with the number of rows, so one prompt shows little: every case has another length, and positions after
the prompt are compared from step 0 on. On models too large to recompute every step, a sample of steps is compared.

Conventions. Cached and recomputed steps are those of `paths` (batch size 1). The batched and left-padded variants, made
on request, call the Hugging Face model itself, because the decode loop has no batch axis: they compare a row of a batch
with the row alone, both on a cache, and a padded row on a cache with the unpadded row recomputed.
"""

import copy
import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformers import DynamicCache, PreTrainedModel

from mechkv.cache import KVState
from mechkv.errors import InputError, NonFiniteError
from mechkv.ladder import Case
from mechkv.models import admit, from_hf, info, load_model
from mechkv.paths import PathRunner, decode
from mechkv.policies import Forced
from mechkv.prompts import format_prompt, word_problems
from mechkv.rebuilding import recast
from mechkv.tokens import as_tokens

PREFILLS = (3, 24, 40)
"""Prompt lengths of the cases."""
SMALL = 5_000_000
"""Models with fewer parameters are recomputed at every step, larger ones at a sample."""
N_BATCH, N_PAD = 4, 3


class ModelBuild:
    """Fresh bridges from a source; the first one is handed out once more, since nothing has run on it yet."""

    def __init__(self, make: partial[TransformerBridge]) -> None:
        self._make = make
        self._ready: tuple[torch.dtype, TransformerBridge] | None = None

    def __call__(self, dtype: torch.dtype) -> TransformerBridge:
        """A fresh bridge in this precision."""
        ready, self._ready = self._ready, None
        return ready[1] if ready is not None and ready[0] == dtype else self._make(dtype=dtype)

    def first(self, dtypes: Sequence[torch.dtype]) -> TransformerBridge:
        """A bridge to ask for its tokenizer and sizes, before anything runs: the first that can be made.

        Raises:
            NonFiniteError: None can.
        """
        for dtype in dtypes:
            try:
                self._ready = (dtype, self(dtype))
                return self._ready[1]
            except NonFiniteError:
                if dtype == dtypes[-1]:
                    raise
        raise InputError("no dtypes", got="none", expected="one or more", remedy="Name some.")


def model_build(model_or_source: Any, device: str) -> ModelBuild:
    """How to make the model anew in any precision.

    A Hugging Face model is copied and its parameters cast, so that tables it computes (rotary frequencies) stay as they
    are; it is itself left alone. A bridge is made anew from its weights.
    """
    if isinstance(model_or_source, TransformerBridge):
        admit(model_or_source)
        return ModelBuild(partial(_recast, model_or_source))
    if isinstance(model_or_source, PreTrainedModel):
        return ModelBuild(partial(_copied, model_or_source))
    return ModelBuild(partial(load_model, model_or_source, device=device))


def _recast(model: TransformerBridge, dtype: torch.dtype) -> TransformerBridge:
    return recast(model, dtype)


def _copied(model: PreTrainedModel, dtype: torch.dtype) -> TransformerBridge:
    fresh = copy.deepcopy(model)
    for parameter in fresh.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    fresh.config.dtype = dtype
    return from_hf(fresh)


def model_cases(
    bridge: TransformerBridge,
    prompts: Sequence[str | Tensor] | None,
    *,
    n_steps: int,
    chunk: int,
    batched: bool,
    left_padded: bool,
) -> list[Case]:
    """The cases for one model."""
    known = info(bridge)
    small = known.n_parameters < SMALL
    streams = _streams(bridge, prompts, n_steps)
    cases = [_plain(tokens, n, _sample(n, len(tokens), small)) for tokens, n in streams]
    tokens, n_prompt = streams[min(1, len(streams) - 1)]
    if chunk > 1:
        ends = [p for p in range(n_prompt - 1, len(tokens)) if (p - n_prompt + 1) % chunk == 0]
        case = _plain(tokens, n_prompt, tuple(ends), chunk)
        cases.append(case)
    every = tuple(range(n_prompt - 1, len(tokens)))
    if batched:
        alone, within = partial(_rows, n_batch=1), partial(_rows, n_batch=N_BATCH)
        cases.append(Case(f"row in a batch of {N_BATCH}", within, alone, tokens, n_prompt, every))
    if left_padded:
        padded, full = partial(_rows, n_pad=N_PAD), _full
        cases.append(Case(f"{N_PAD} left pads", padded, full, tokens, n_prompt, every))
    return cases


def _streams(
    bridge: TransformerBridge, prompts: Sequence[str | Tensor] | None, n_steps: int
) -> list[tuple[Int[Tensor, "pos"], int]]:
    """Tokens and prompt length of every case."""
    model: Any = bridge.original_model
    device = model.get_input_embeddings().weight.device
    known, limit = info(bridge), getattr(bridge.cfg, "n_ctx", None)
    if prompts is not None:
        given = as_tokens(bridge.tokenizer, prompts, vocab_size=known.d_vocab, max_positions=limit)
        short = [len(t) for t in given if len(t) <= n_steps]
        if short:
            raise InputError(
                "prompts too short",
                got=f"{short[0]} tokens",
                expected=f"more than n_steps = {n_steps}",
                remedy="The last n_steps tokens of a prompt are fed one by one; give longer prompts or fewer steps.",
            )
        return [(tokens.to(device), len(tokens) - n_steps) for tokens in given]
    windows = [w for w in known.windows if w is not None and w <= 64]
    lengths = sorted({*PREFILLS, *(w + 2 for w in windows)})
    lengths = [n for n in lengths if limit is None or n + n_steps <= limit] or [1]
    stream = _default_stream(bridge, sum(lengths) + n_steps * len(lengths), known.d_vocab)
    found, start = [], 0
    for n in lengths:
        found.append((stream[start : start + n + n_steps].to(device), n))
        start += n + n_steps
    return found


def _default_stream(bridge: TransformerBridge, n: int, vocabulary: int) -> Int[Tensor, "pos"]:
    """Ordinary text, or seeded tokens where there is no tokenizer."""
    if bridge.tokenizer is None:
        return torch.randint(0, vocabulary, (n,), generator=torch.Generator().manual_seed(0))
    tokenizer: Any = bridge.tokenizer
    texts = [format_prompt(problem) for problem in word_problems()]
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text)["input_ids"]
        if len(ids) >= n:
            break
    return torch.tensor(ids[:n], dtype=torch.int64)


def _sample(n_prompt: int, n_tokens: int, small: bool) -> tuple[int, ...]:
    every = range(n_prompt - 1, n_tokens)
    if small:
        return tuple(every)
    middle = n_prompt - 1 + (len(every) // 2)
    return tuple(sorted({n_prompt - 1, n_prompt, middle, n_tokens - 1} & set(every)))


def _plain(tokens: Int[Tensor, "pos"], n_prompt: int, positions: tuple[int, ...], chunk: int = 1) -> Case:
    name = f"prefill {n_prompt} + {len(tokens) - n_prompt}" + (f" in chunks of {chunk}" if chunk > 1 else "")
    cached = partial(_cached, start=n_prompt, positions=positions, chunk=chunk)
    recomputed = partial(_recomputed, start=n_prompt, positions=positions)
    stepwise = partial(_cached, start=1, positions=positions, chunk=1)
    sensitivity = partial(_one_pass, positions=positions)
    return Case(name, cached, recomputed, tokens, n_prompt, positions, sensitivity, stepwise, chunk)


def _cached(
    bridge: TransformerBridge, tokens: Int[Tensor, "pos"], *, start: int, positions: tuple[int, ...], chunk: int
) -> Float[Tensor, "position d_vocab"]:
    rows: dict[int, Tensor] = {}
    policy = Forced(tokens.tolist(), chunk=chunk)
    for step in decode(bridge, tokens[:start], path="cached", policy=policy, n_steps=len(tokens) - start):
        rows[len(step.tokens) - 1] = step.logits
    return torch.stack([rows[p] for p in positions if p < len(tokens)])


def _recomputed(
    bridge: TransformerBridge, tokens: Int[Tensor, "pos"], *, start: int, positions: tuple[int, ...]
) -> Float[Tensor, "position d_vocab"]:
    with PathRunner(bridge, "recomputed") as runner:
        found = [
            runner.step(tokens[: p + 1], KVState.empty(start), index, n_new=1).logits
            for index, p in enumerate(positions)
            if p < len(tokens)
        ]
    return torch.stack(found)


def _one_pass(
    bridge: TransformerBridge, tokens: Int[Tensor, "pos"], *, positions: tuple[int, ...]
) -> Float[Tensor, "position d_vocab"]:
    """All positions from one pass: for the response to perturbed weights, where the kernel does not matter."""
    logits = bridge.original_model(tokens[None], use_cache=False).logits[0]
    return logits[[p for p in positions if p < len(tokens)]]


def _rows(
    bridge: TransformerBridge, tokens: Int[Tensor, "pos"], *, n_prompt: int, n_batch: int = 1, n_pad: int = 0
) -> Float[Tensor, "position d_vocab"]:
    """Row 0 of a batch (the other rows are the same tokens, rolled), with left pads, decoded on a cache."""
    model: Any = bridge.original_model
    batch = torch.stack([tokens.roll(row) for row in range(n_batch)])
    batch = torch.cat([batch.new_zeros(n_batch, n_pad), batch], dim=1)
    mask = torch.ones_like(batch)
    mask[:, :n_pad] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, found, start = DynamicCache(config=model.config), [], 0
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    for stop in range(n_pad + n_prompt, batch.shape[1] + 1):
        options: dict[str, Tensor] = {"position_ids": places[:, start:stop]} if takes_positions and n_pad else {}
        options |= {"attention_mask": mask[:, :stop]} if n_pad else {}
        out = model(batch[:, start:stop], past_key_values=cache, use_cache=True, **options)
        found.append(out.logits[0, -1])
        start = stop
    return torch.stack(found)


def _full(bridge: TransformerBridge, tokens: Int[Tensor, "pos"], *, n_prompt: int) -> Float[Tensor, "position d_vocab"]:
    """The unpadded row in one pass."""
    return bridge.original_model(tokens[None], use_cache=False).logits[0, n_prompt - 1 :]
