"""Models and paths of the collected cases: small Hugging Face models with random weights, and plain decode loops."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedModel,
    StaticCache,
)

import mechkv

VOCABULARY, PADS = 101, 4
_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "bos_token_id": 98,
    "eos_token_id": 99,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": (LlamaConfig, {"num_key_value_heads": 2}),
    "mistral": (MistralConfig, {"num_key_value_heads": 2, "sliding_window": 8}),
    "gpt2": (GPT2Config, {}),
    "neox": (GPTNeoXConfig, {}),
    "opt": (OPTConfig, {"ffn_dim": 96, "word_embed_proj_dim": 64}),
}


def model(kind: str, dtype: torch.dtype, *, seed: int = 0, attention: str = "eager", **changes) -> PreTrainedModel:
    """Random weights of std 0.12, the same numbers in every dtype; tables stay in float32."""
    make, extra = CONFIGS[kind]
    found = AutoModelForCausalLM.from_config(make(**{**_COMMON, **extra, **changes}), attn_implementation=attention)
    generator = torch.Generator().manual_seed(seed)
    for parameter in found.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = (0.12 * noise if parameter.ndim > 1 else parameter.data + 0.05 * noise).to(dtype)
    return found.eval()


def builder(kind: str, **changes) -> Callable[[torch.dtype], PreTrainedModel]:
    return lambda dtype: model(kind, dtype, **changes)


def tokens(n: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 97, (n,), generator=torch.Generator().manual_seed(seed))


def cached(
    net: PreTrainedModel,
    fed: Tensor,
    n_prompt: int,
    *,
    chunk: int = 1,
    pads: int = 0,
    options: Callable[[int, int], dict] = lambda start, stop: {},
    cache=None,
) -> Tensor:
    """Prefill, then `chunk` tokens a call; `options(start, stop)` gives mask or positions of a call, pads included."""
    cache = DynamicCache(config=net.config) if cache is None else cache
    row = torch.cat([fed.new_zeros(pads), fed])
    rows, start, stop = [], 0, pads + n_prompt
    while start < len(row):
        out = net(row[None, start:stop], past_key_values=cache, use_cache=True, **options(start, stop))
        rows.append(out.logits[0] if start else out.logits[0, -1:])
        start, stop = stop, min(len(row), stop + chunk)
    return torch.cat(rows)


def full(net: PreTrainedModel, fed: Tensor, n_prompt: int, **options) -> Tensor:
    """One pass over everything."""
    return net(fed[None], use_cache=False, **options).logits[0, n_prompt - 1 :]


def every_step(net: PreTrainedModel, fed: Tensor, n_prompt: int) -> Tensor:
    """A pass over all tokens so far, at every step."""
    return torch.stack([net(fed[None, :stop], use_cache=False).logits[0, -1] for stop in range(n_prompt, len(fed) + 1)])


def pad_mask(start: int, stop: int) -> dict:
    """The right mask of a left-padded row."""
    mask = torch.ones(1, stop, dtype=torch.long)
    mask[:, :PADS] = 0
    return {"attention_mask": mask}


def padded(net: PreTrainedModel, fed: Tensor, n_prompt: int, **more) -> Tensor:
    """A left-padded row with its mask and whatever positions the model makes of it."""
    return cached(net, fed, n_prompt, pads=PADS, options=pad_mask, **more)


def pads_by_mask(net: PreTrainedModel, fed: Tensor, n_prompt: int, *, hidden: float | None = None) -> Tensor:
    """One pass over a left-padded row with a mask made by hand, `hidden` where it hides: whole rows, for padding."""
    row = torch.cat([fed.new_zeros(PADS), fed])
    closed = torch.ones(len(row), len(row), dtype=torch.bool).triu(1)
    closed[:, :PADS] = True
    value = torch.finfo(net.dtype).min if hidden is None else hidden
    mask = torch.zeros(len(row), len(row), dtype=net.dtype).masked_fill(closed, value)
    return net(row[None], attention_mask=mask[None, None], use_cache=False).logits[0, PADS + n_prompt - 1 :]


def static(net: PreTrainedModel, fed: Tensor, n_prompt: int) -> Tensor:
    return cached(net, fed, n_prompt, cache=StaticCache(config=net.config, max_cache_len=len(fed)))


def batch_of_8(net: PreTrainedModel, fed: Tensor, n_prompt: int) -> Tensor:
    """Row 3 of a batch, on a cache."""
    batch = torch.stack([fed.roll(5 * (row - 3)) for row in range(8)])
    cache, rows, start = DynamicCache(config=net.config), [], 0
    for stop in range(n_prompt, len(fed) + 1):
        rows.append(net(batch[:, start:stop], past_key_values=cache, use_cache=True).logits[3, -1])
        start = stop
    return torch.stack(rows)


def full_batch_of_8(net: PreTrainedModel, fed: Tensor, n_prompt: int) -> Tensor:
    batch = torch.stack([fed.roll(5 * (row - 3)) for row in range(8)])
    return net(batch, use_cache=False).logits[3, n_prompt - 1 :]


def check(build, ours, theirs, *, n: int = 14, n_prompt: int = 6, seed: int = 0, **more) -> mechkv.CheckReport:
    more.setdefault("dtypes", ("float64", "float32", "bfloat16"))
    return mechkv.check_paths(build, ours, theirs, tokens(n, seed), n_prompt=n_prompt, **more)
