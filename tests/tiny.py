"""Tiny models in memory: ten families, seeded, with attention far from uniform (std 0.12), and a word-level tokenizer.

Axis sizes differ from each other, so that a swapped axis cannot pass, and layers never alias.
"""

import tempfile

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen3Config,
)

import mechkv

VOCABULARY = 101
WINDOW = 8
_COMMON = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "bos_token_id": 98,
    "eos_token_id": 99,
    "pad_token_id": 99,
}
_GEMMA = {"num_key_value_heads": 2, "head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": WINDOW}

FAMILIES: dict[str, tuple[type[PretrainedConfig], dict]] = {
    "llama-mha": (LlamaConfig, {"num_key_value_heads": 4}),
    "llama-gqa": (LlamaConfig, {"num_key_value_heads": 2}),
    "mistral": (MistralConfig, {"num_key_value_heads": 2, "sliding_window": None}),
    "mistral-window": (MistralConfig, {"num_key_value_heads": 2, "sliding_window": WINDOW}),
    "gemma2": (Gemma2Config, _GEMMA),
    "gemma3": (
        Gemma3TextConfig,
        {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 1 + ["sliding_attention"]},
    ),
    "qwen2": (Qwen2Config, {"num_key_value_heads": 2}),
    "qwen3": (Qwen3Config, {"num_key_value_heads": 2, "head_dim": 12}),
    "phi3": (Phi3Config, {"num_key_value_heads": 2}),
    "olmo2": (Olmo2Config, {"num_key_value_heads": 2}),
    "gpt2": (GPT2Config, {}),
    "gpt-neox": (GPTNeoXConfig, {}),
}


def tiny_hf(
    family: str = "llama-gqa", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes
) -> PreTrainedModel:
    """A seeded Hugging Face model of `family`; `changes` override its config. Weights are drawn in float32 and then
    rounded, so models of two dtypes hold the same function."""
    make, extra = FAMILIES[family]
    config = make(**{**_COMMON, **extra, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    config.architectures = [type(model).__name__]
    model.config.architectures = [type(model).__name__]
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.12, generator=generator)
        else:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.eval()


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Words w0 .. w97, <s> = 98, </s> = 99, <unk> = 100."""
    words = {**{f"w{i}": i for i in range(98)}, "<s>": 98, "</s>": 99, "<unk>": 100}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
    with tempfile.TemporaryDirectory() as folder:
        fast.save_pretrained(folder)
        return AutoTokenizer.from_pretrained(folder)


def tiny_bridge(family: str = "llama-gqa", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes):
    """The same, as an admitted bridge."""
    return mechkv.from_hf(tiny_hf(family, seed=seed, dtype=dtype, **changes), tiny_tokenizer())


def tokens(n: int, seed: int = 0) -> torch.Tensor:
    """`[pos]` random ordinary tokens."""
    return torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(seed))
