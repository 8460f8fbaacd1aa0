"""Does a number computed now mean what it seems to mean? The guards that run before any drift is reported.

Each guard is a function that raises `GuardError` (what was got, what was expected, what to do) or counts itself in a
`GuardLog`, which every result carries. None can be switched off. What they prove:

- `parameters_dtype`, `eval_mode`, `attention_implementation`: the model is the one that was asked for (at the start of
  a run), and `no_autocast`: no surrounding context casts what it computes (every step);
- `cache_live`: overwriting one cached value changes the next logits, so attention reads the cache (once per model);
- `cache_grew`, `old_rows_unchanged`, `attention_width`: every pass appended exactly the tokens fed, in every layer,
  left old rows alone, and attention had all visible rows (every step, every layer; old rows are not compared where an
  intervention writes to the cache state);
- `repeatable`: a step done twice from the same state is bitwise the same (a sample of steps);
- `null_control`: at step 0, where both paths do the same work, the drift is exactly zero at every site recorded.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow
import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge

from mechkv.cache import KVState
from mechkv.errors import CacheError, GuardError, InputError
from mechkv.step import Step

_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
_WORD = torch.int64
"""Bits are compared a word at a time where rows allow it, which is faster."""


class GuardLog(Counter[str]):
    """How often each guard ran (and passed: a failure is an error)."""


def check_model(model: TransformerBridge, dtype: torch.dtype | None, log: GuardLog) -> str:
    """Parameters in `dtype` (None: all in one), eval mode, attention implementation readable; returns the latter."""
    inner = model.original_model
    modules = every_module(inner)
    dtypes = {p.dtype for p in every_parameter(modules) if p.is_floating_point()}
    dtype = next(p.dtype for p in inner.parameters() if p.is_floating_point()) if dtype is None else dtype
    if dtypes != {dtype}:
        held = {name: p.dtype for name, p in inner.named_parameters() if p.is_floating_point() and p.dtype != dtype}
        some = [f"{name.replace('._original_component', '')}: {found}" for name, found in held.items()][:3]
        raise GuardError(
            f"{len(held)} parameters do not have the requested dtype",
            got=", ".join(some),
            expected=str(dtype),
            remedy="Load with the dtype you want, or name the dtype the weights have.",
        )
    log["parameters_dtype"] += 1
    if any(module.training for module in modules):
        training = [name for name, module in inner.named_modules() if module.training]
        raise GuardError(
            "the model is in training mode",
            got=f"{len(training)} modules with training=True, the first {training[0]!r}",
            expected="eval mode",
            remedy="Call model.eval() first: dropout would be counted as drift.",
        )
    log["eval_mode"] += 1
    found = getattr(model.original_model.config, "_attn_implementation", None)
    if found != "eager":
        raise GuardError(
            "hooks need the attention implementation that fires them",
            got=repr(found),
            expected="'eager'",
            remedy="Load the model with attn_implementation='eager'.",
        )
    log["attention_implementation"] += 1
    return found


def every_module(root: nn.Module) -> list[nn.Module]:
    """`root.modules()` without hook points, which hold and compute nothing and are most of them: it is walked before
    every run."""
    found = {root: None}
    waiting = [root]
    while waiting:
        for module in waiting.pop()._modules.values():
            if module is not None and type(module) is not HookPoint and module not in found:
                found[module] = None
                waiting.append(module)
    return list(found)


def every_parameter(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Those that modules hold themselves; a tied one as often as it is held."""
    held = [module._parameters for module in modules if module._parameters]
    return [parameter for own in held for parameter in own.values() if parameter is not None]


def text_config(model: TransformerBridge) -> Any:
    """The Hugging Face config of the decoder that processes text."""
    config: Any = model.original_model.config
    return config.get_text_config(decoder=True)


def input_device(model: TransformerBridge) -> torch.device:
    """Where token ids must be: the device of the embedding."""
    embeddings: Any = model.original_model.get_input_embeddings()  # type: ignore[operator]
    return embeddings.weight.device


@dataclass(frozen=True)
class TokenLimits:
    """What token ids a model can process: read from it once a run, checked at every step."""

    device: torch.device
    d_vocab: int
    n_ctx: int | None

    def check(self, tokens: Int[Tensor, "pos"], n_new: int) -> None:
        """Token ids that the model can process, `n_new` of them new.

        Raises:
            InputError: Another shape, dtype or device, out of the vocabulary, none new, or beyond the context.
        """
        if not isinstance(tokens, Tensor):
            raise InputError(
                "not tokens", got=type(tokens).__name__, expected="a tensor", remedy="Use torch.tensor(ids)."
            )
        got: object
        expected: object
        if tokens.ndim != 1 or tokens.is_floating_point() or tokens.dtype == torch.bool:
            got, expected = f"{tokens.dtype} {list(tokens.shape)}", "integers of shape [pos], without a batch axis"
            remedy = "Batch size is 1: pass one row of token ids."
        elif tokens.is_meta:
            got, expected = "the meta device, which holds no ids", self.device
            remedy = "Make them anew: torch.tensor(ids)."
        elif tokens.device != self.device:
            got, expected, remedy = tokens.device, self.device, "Move the tokens to the device of the embedding."
        elif not 1 <= n_new <= len(tokens):
            got, expected = f"{n_new} new tokens of {len(tokens)}", "at least one"
            remedy = "Give a prompt of at least one token."
        elif not 0 <= (ends := [int(end) for end in tokens.aminmax()])[0] <= ends[1] < self.d_vocab:
            got, expected = f"ids {ends[0]}..{ends[1]}", f"0..{self.d_vocab - 1}"
            remedy = "The tokens come from another tokenizer."
        elif self.n_ctx and len(tokens) > self.n_ctx:
            got, expected = f"{len(tokens)} tokens", f"at most {self.n_ctx}"
            remedy = "Shorten the prompt or decode less."
        else:
            return
        raise InputError("these tokens cannot be processed", got=got, expected=expected, remedy=remedy)


def token_limits(model: TransformerBridge) -> TokenLimits:
    """Those of a model."""
    return TokenLimits(input_device(model), text_config(model).vocab_size, getattr(model.cfg, "n_ctx", None))


def check_cache(
    before: KVState,
    after: KVState,
    visible: Mapping[int, int],
    widths: Mapping[int, int],
    log: GuardLog,
    *,
    edited: bool = False,
) -> None:
    """The cache grew by exactly the tokens fed, old rows are the same, and attention had every visible row.

    Args:
        before: State that went in (empty for a full pass).
        after: State that came out.
        visible: Layer -> rows of K the cache handed to attention.
        widths: Layer -> width of the attention pattern.
        edited: An intervention may have changed old rows on purpose: do not compare them.
    """
    n_new = after.n_tokens - before.n_tokens
    compared = bool(before.keys) and not edited
    for layer, keys in enumerate(after.keys):
        seen = n_new + (before.keys[layer].shape[1] if before.keys else 0)
        if visible.get(layer) != seen or after.values[layer].shape[1] != keys.shape[1]:
            raise CacheError(
                f"the cache of layer {layer} did not grow by the tokens fed",
                got=f"{visible.get(layer, 0)} rows handed to attention",
                expected=f"{seen - n_new} held + {n_new} new",
                remedy="The model ignores or rewrites its cache; check that transformers and TransformerLens agree "
                "(transformers>=5.9,<5.24 with TransformerLens 4.3).",
            )
        if widths.get(layer) != seen:
            raise CacheError(
                f"attention of layer {layer} did not see the cache",
                got=f"a pattern over {widths[layer]} keys" if layer in widths else "no attention pattern",
                expected=f"{seen} keys",
                remedy="The attention module does not read what the cache returned, is not the eager one, or its "
                "Hugging Face model was wrapped again later: then use the newer bridge.",
            )
        if compared:
            _check_old_rows(before, after, layer, n_new)
    log["cache_grew"] += 1
    log["attention_width"] += len(widths)
    log["old_rows_unchanged"] += int(compared)


def check_no_autocast(device: torch.device, log: GuardLog) -> None:
    """No `torch.autocast` around the run: it would change the dtype of the arithmetic behind the model's back."""
    if torch.is_autocast_enabled(device.type):
        raise GuardError(
            "autocast is on",
            got=f"torch.autocast to {torch.get_autocast_dtype(device.type)}",
            expected="arithmetic in the dtype of the parameters",
            remedy="Leave the autocast context, and load the model in the dtype that you want.",
        )
    log["no_autocast"] += 1


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bits: unlike `torch.equal` it tells -0.0 from 0.0 and takes a NaN for itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    try:
        return torch.equal(a.view(_WORD), b.view(_WORD))
    except RuntimeError:  # a row, or the place where it begins, is not whole words
        integers = _BITS.get(a.dtype, a.dtype)
        return torch.equal(a.view(integers), b.view(integers))


def same_rows(old: Tensor, new: Tensor, kept: int) -> bool:
    """Whether the last `kept` rows of `old` are the first of `new`: `same_bits` of the two, both `[n_kv, pos, d_head]`.

    Old rows of all layers are compared at every step. On the CPU, and where the rows of a head lie one after another,
    their memory is compared as bytes: a read of both, without an operation of torch for each head and layer.
    """
    n_kv, held, d_head = old.shape
    size, first = old.itemsize, held - kept
    (head, *rows), (other_head, *other_rows) = old.stride(), new.stride()
    alike = old.dtype == new.dtype and new.shape[::2] == (n_kv, d_head) and kept <= min(held, new.shape[1])
    if not (alike and old.is_cpu and new.is_cpu and rows == other_rows == [d_head, 1]):
        return same_bits(old[:, first:], new[:, :kept])
    start, other_start, n_bytes = old.data_ptr() + first * d_head * size, new.data_ptr(), kept * d_head * size
    for i in range(n_kv):
        mine = pyarrow.foreign_buffer(start + i * head * size, n_bytes)
        if not mine.equals(pyarrow.foreign_buffer(other_start + i * other_head * size, n_bytes)):
            return False
    return True


def _check_old_rows(before: KVState, after: KVState, layer: int, n_new: int) -> None:
    held, left = before.keys[layer].shape[1], after.keys[layer].shape[1]
    kept = min(held, left - n_new)
    if kept <= 0:
        return
    for name, old, new in (
        ("K", before.keys[layer], after.keys[layer]),
        ("V", before.values[layer], after.values[layer]),
    ):
        if not same_rows(old, new, kept):
            start = after.first_position(layer)
            raise CacheError(
                f"{name} rows of layer {layer} changed while a new token was processed",
                got=f"different values among positions {start}..{start + kept - 1}",
                expected="old rows bit for bit as they were",
                remedy="A cache that rewrites old rows (quantised, evicting or rotating) cannot be profiled as one.",
            )


def check_repeat(first: Step, again: Step, log: GuardLog) -> None:
    """A step done twice from the same state gives the same bits at every site, in the logits and in the cache."""
    _check_same(first, again, "a step done twice does not give the same bits", "repeatable", log)


def check_null(cached: Step, recomputed: Step, log: GuardLog) -> None:
    """Step 0: both paths process the prompt from an empty cache, so every value must be bitwise equal."""
    _check_same(cached, recomputed, "the paths differ on the prompt, where both do the same work", "null_control", log)


def _check_same(a: Step, b: Step, what: str, name: str, log: GuardLog) -> None:
    pairs: list[tuple[str, Tensor, Tensor]] = [("logits", a.logits, b.logits)]
    for site, values in a.activations.items():
        pairs += [
            (f"{site}, layer {i}", x, y) for i, (x, y) in enumerate(zip(values, b.activations[site], strict=True))
        ]
    pairs += [(f"cache_k, layer {i}", x, y) for i, (x, y) in enumerate(zip(a.kv.keys, b.kv.keys, strict=True))]
    pairs += [(f"cache_v, layer {i}", x, y) for i, (x, y) in enumerate(zip(a.kv.values, b.kv.values, strict=True))]
    for where, x, y in pairs:
        if not same_bits(x, y):
            raise GuardError(
                what,
                got=f"a difference at step {a.index} in {where}",
                expected="bitwise equality",
                remedy="Look for nondeterministic kernels (torch.use_deterministic_algorithms), state kept on the "
                "model between calls, or another thread changing the thread count.",
            )
    log[name] += 1
