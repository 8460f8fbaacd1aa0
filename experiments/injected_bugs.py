"""Small random models of eleven families, and sixteen ways to break one of two decoding paths.

Every bug changes one path only, and says what the evidence of a check must be: its kind, the first bad layer and the
first bad position. Masks are four-dimensional, so kinds that use them need models without windows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from mechkv.localise import find_blocks

WINDOW = 6
_COMMON = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "bos_token_id": 98,
    "eos_token_id": 99,
    "pad_token_id": 99,
}
_GEMMA = {"num_key_value_heads": 2, "head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": WINDOW}
_KV: dict[str, Any] = {"num_key_value_heads": 2}
FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, _KV),
    "mistral": (MistralConfig, _KV | {"sliding_window": WINDOW}),
    "gemma2": (Gemma2Config, _GEMMA),
    "gemma3": (
        Gemma3TextConfig,
        _GEMMA | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "qwen2": (Qwen2Config, _KV),
    "qwen3": (Qwen3Config, _KV | {"head_dim": 12}),
    "phi3": (Phi3Config, _KV),
    "olmo2": (Olmo2Config, _KV),
    "gpt2": (GPT2Config, {}),
    "gpt-neox": (GPTNeoXConfig, {}),
    "opt": (OPTConfig, {"ffn_dim": 80, "word_embed_proj_dim": 48}),
}
NO_4D_MASKS = ("mistral", "gemma2", "gemma3", "opt")
"""Layers with windows, or positions that are counted from the mask."""
LEARNED = ("gpt2", "opt")
Path = Callable[[PreTrainedModel, Tensor, int], Tensor]


def random_model(family: str, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Weights of std 0.12 (attention far from uniform), the same numbers in every dtype; tables stay in float32."""
    make, extra = FAMILIES[family]
    model = AutoModelForCausalLM.from_config(make(**{**_COMMON, **extra}), attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = (0.12 * noise if parameter.ndim > 1 else parameter.data + 0.05 * noise).to(dtype)
    return model.eval()


def cached(
    model: PreTrainedModel,
    fed: Tensor,
    n_prompt: int,
    *,
    chunk: int = 1,
    cache: DynamicCache | None = None,
    options: Callable[[int, int], dict[str, Any]] | None = None,
    decoding: Callable[[PreTrainedModel], Any] = nullcontext,
) -> Tensor:
    """Prefill, then `chunk` tokens a call; `options` and the context `decoding` are where bugs get in."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    rows, start, stop = [], 0, n_prompt
    while start < len(fed):
        given = options(start, stop) if options else {}
        with decoding(model) if start else nullcontext():
            out = model(fed[None, start:stop], past_key_values=cache, use_cache=True, **given)
        rows.append(out.logits[0] if start else out.logits[0, -1:])
        start, stop = stop, min(len(fed), stop + chunk)
    return torch.cat(rows)


def recomputed(model: PreTrainedModel, fed: Tensor, n_prompt: int, **given: Any) -> Tensor:
    """One pass over everything."""
    return model(fed[None], use_cache=False, **given).logits[0, n_prompt - 1 :]


@dataclass(frozen=True)
class Bug:
    """A broken pair and the evidence it must leave.

    Attributes:
        cached, recomputed: The paths.
        kinds: Kinds that are right.
        layer: First bad layer.
        position: First bad position.
    """

    cached: Path
    recomputed: Path
    kinds: tuple[str, ...]
    layer: int
    position: int


def _positions(shift: Callable[[int], int]) -> Path:
    def path(model: PreTrainedModel, fed: Tensor, n_prompt: int) -> Tensor:
        def options(start: int, stop: int) -> dict[str, Any]:
            return {"position_ids": torch.arange(start, stop)[None] + (shift(start) if start else 0)}

        return cached(model, fed, n_prompt, options=options)

    return path


def _masked(hide: Callable[[int, int], list[int]]) -> Path:
    """On decode steps the columns `hide(start, stop)` are masked out."""

    def path(model: PreTrainedModel, fed: Tensor, n_prompt: int) -> Tensor:
        def options(start: int, stop: int) -> dict[str, Any]:
            if start == 0:
                return {}
            mask = torch.zeros(1, 1, stop - start, stop, dtype=model.dtype)
            mask[..., hide(start, stop)] = torch.finfo(model.dtype).min
            return {"attention_mask": mask}

        return cached(model, fed, n_prompt, options=options)

    return path


def _no_cache(model: PreTrainedModel, fed: Tensor, n_prompt: int) -> Tensor:
    rows, start = [], 0
    for stop in range(n_prompt, len(fed) + 1):
        places = torch.arange(start, stop)[None]
        rows.append(model(fed[None, start:stop], position_ids=places, use_cache=False).logits[0, -1])
        start = stop
    return torch.stack(rows)


def _chunk_sees_ahead(model: PreTrainedModel, fed: Tensor, n_prompt: int) -> Tensor:
    def options(start: int, stop: int) -> dict[str, Any]:
        return {"attention_mask": torch.zeros(1, 1, stop - start, stop, dtype=model.dtype)} if start else {}

    return cached(model, fed, n_prompt, chunk=3, options=options)


def _not_causal(model: PreTrainedModel, fed: Tensor, n_prompt: int) -> Tensor:
    return recomputed(model, fed, n_prompt, attention_mask=torch.zeros(1, 1, len(fed), len(fed), dtype=model.dtype))


def _banded(width: int) -> Path:
    def path(model: PreTrainedModel, fed: Tensor, n_prompt: int) -> Tensor:
        row, column = torch.arange(len(fed))[:, None], torch.arange(len(fed))[None]
        hidden = (column > row) | (column <= row - width)
        mask = torch.zeros(len(fed), len(fed), dtype=model.dtype).masked_fill(hidden, torch.finfo(model.dtype).min)
        return recomputed(model, fed, n_prompt, attention_mask=mask[None, None])

    return path


def _store(edit: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]], layer: int | None) -> Path:
    """A cache that hands `edit(keys, values, new rows)` to attention on decode steps, in one layer or in all."""

    class Edited(DynamicCache):
        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
            keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            n_new = key_states.shape[-2]
            if keys.shape[-2] > n_new and layer in (None, layer_idx):
                return edit(keys, values, n_new)
            return keys, values

    return lambda model, fed, n_prompt: cached(model, fed, n_prompt, cache=Edited(config=model.config))


def _row_zeroed(keys: Tensor, values: Tensor, n_new: int) -> tuple[Tensor, Tensor]:
    keys = keys.clone()
    keys[..., 1, :] = 0
    return keys, values


def _stale_row(keys: Tensor, values: Tensor, n_new: int) -> tuple[Tensor, Tensor]:
    keys, values = keys.clone(), values.clone()
    keys[..., -1, :], values[..., -1, :] = keys[..., -2, :], values[..., -2, :]
    return keys, values


def _heads_swapped(keys: Tensor, values: Tensor, n_new: int) -> tuple[Tensor, Tensor]:
    return keys, values.roll(1, dims=1)


def _eight_bits(keys: Tensor, values: Tensor, n_new: int) -> tuple[Tensor, Tensor]:
    def rounded(x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round() * scale

    return rounded(keys), rounded(values)


def _scaled(choose: Callable[[PreTrainedModel], nn.Parameter], share: float = 0.5) -> Path:
    """One weight is another on decode steps: a kernel that forgets a scale, a layer that was merged twice."""

    @contextmanager
    def decoding(model: PreTrainedModel) -> Iterator[None]:
        weight = choose(model)
        before = weight.detach().clone()
        weight.data[: round(share * len(weight))] *= 1.02  # half of it: a norm behind would undo a common factor
        try:
            yield
        finally:
            weight.data.copy_(before)

    return lambda model, fed, n_prompt: cached(model, fed, n_prompt, decoding=decoding)


def _mlp_weight(layer: int) -> Callable[[PreTrainedModel], nn.Parameter]:
    def choose(model: PreTrainedModel) -> nn.Parameter:
        named = find_blocks(model)[1][layer].named_parameters()
        return [p for n, p in named if p.ndim == 2 and "attn" not in n and "attention" not in n][-1]

    return choose


def _norm_weight(layer: int) -> Callable[[PreTrainedModel], nn.Parameter]:
    def choose(model: PreTrainedModel) -> nn.Parameter:
        named = find_blocks(model)[1][layer].named_parameters()
        return next(p for n, p in named if n.endswith("weight") and p.ndim == 1 and ("norm" in n or "ln" in n))

    return choose


def _embedding(model: PreTrainedModel) -> nn.Parameter:
    return model.get_input_embeddings().weight  # type: ignore[return-value]


def bug(kind: str, family: str, n_prompt: int, layer: int) -> Bug:
    """The pair of one kind; `layer` is where bugs of a single layer go."""
    start = -1 if family in LEARNED else 0
    attention, position = ("attention",), ("positions",)
    makes: dict[str, Callable[[], Bug]] = {
        "position off by one": lambda: Bug(_positions(lambda s: 1), recomputed, position, start, n_prompt),
        "positions restart": lambda: Bug(_positions(lambda s: -s), recomputed, position, start, n_prompt),
        "cache not passed": lambda: Bug(_no_cache, recomputed, attention, 0, n_prompt),
        "new token blind to itself": lambda: Bug(
            _masked(lambda s, e: list(range(s, e))), recomputed, attention, 0, n_prompt
        ),
        "first token masked": lambda: Bug(_masked(lambda s, e: [0]), recomputed, attention, 0, n_prompt),
        "last cached row masked": lambda: Bug(_masked(lambda s, e: [s - 1]), recomputed, attention, 0, n_prompt),
        "no causal mask": lambda: Bug(cached, _not_causal, ("causality",), 0, n_prompt - 1),
        "chunk sees ahead": lambda: Bug(_chunk_sees_ahead, recomputed, ("causality",), 0, n_prompt),
        "window on one path": lambda: Bug(cached, _banded(n_prompt + 2), attention, 0, n_prompt + 2),
        "cached row zeroed": lambda: Bug(_store(_row_zeroed, layer), recomputed, attention, layer, n_prompt),
        "stale row stored": lambda: Bug(_store(_stale_row, layer), recomputed, attention, layer, n_prompt),
        "value heads swapped": lambda: Bug(_store(_heads_swapped, layer), recomputed, attention, layer, n_prompt),
        "8-bit store": lambda: Bug(_store(_eight_bits, None), recomputed, attention, 0, n_prompt),
        "MLP scaled": lambda: Bug(_scaled(_mlp_weight(layer)), recomputed, ("layer",), layer, n_prompt),
        "norm scaled": lambda: Bug(_scaled(_norm_weight(layer)), recomputed, ("layer",), layer, n_prompt),
        "embedding scaled": lambda: Bug(_scaled(_embedding, 1.0), recomputed, position, -1, n_prompt),
    }
    return makes[kind]()


KINDS = (
    "position off by one",
    "positions restart",
    "cache not passed",
    "new token blind to itself",
    "first token masked",
    "last cached row masked",
    "no causal mask",
    "chunk sees ahead",
    "window on one path",
    "cached row zeroed",
    "stale row stored",
    "value heads swapped",
    "8-bit store",
    "MLP scaled",
    "norm scaled",
    "embedding scaled",
)
_NEED_4D_MASKS = KINDS[3:9]


def possible(kind: str, family: str) -> bool:
    """Whether a kind can be built in a family: some cannot take four-dimensional masks."""
    return not (family in NO_4D_MASKS and kind in _NEED_4D_MASKS)
