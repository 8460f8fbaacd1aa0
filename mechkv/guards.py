"""Does a number computed now mean what it seems to mean? The guards that run before any drift is reported.

Each guard is a function that raises `GuardError` (what was got, what was expected, what to do) or counts itself in a
`GuardLog`, which every result carries. None can be switched off. What they prove:

- `parameters_dtype`, `eval_mode`, `attention_implementation`: the model is the one that was asked for;
- `cache_live`: overwriting one cached value changes the next logits, so attention reads the cache (once per model);
- `cache_grew`, `old_rows_unchanged`, `attention_width`: every pass appended exactly the tokens fed, in every layer,
  left old rows alone, and attention had all visible rows (every step, every layer);
- `repeatable`: a step done twice from the same state is bitwise the same (a sample of steps);
- `null_control`: at step 0, where both paths do the same work, the drift is exactly zero at every site recorded.
"""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechkv.cache import KVState
from mechkv.errors import GuardError

if TYPE_CHECKING:
    from mechkv.paths import Step


class GuardLog(Counter[str]):
    """How often each guard ran (and passed: a failure is an error)."""


def check_model(model: TransformerBridge, dtype: torch.dtype, log: GuardLog) -> str:
    """Parameters in `dtype`, eval mode, attention implementation readable; returns the latter."""
    wrong = [(name, p.dtype) for name, p in model.original_model.named_parameters() if p.is_floating_point()]
    wrong = [(name, found) for name, found in wrong if found != dtype]
    if wrong:
        raise GuardError(
            f"{len(wrong)} parameters do not have the requested dtype",
            got=", ".join(f"{name.replace('._original_component', '')}: {found}" for name, found in wrong[:3]),
            expected=str(dtype),
            remedy="Load with the dtype you want, or name the dtype the weights have.",
        )
    log["parameters_dtype"] += 1
    training = [name for name, module in model.original_model.named_modules() if module.training]
    if training:
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


def check_cache(
    before: KVState, after: KVState, visible: Mapping[int, int], widths: Mapping[int, int], log: GuardLog
) -> None:
    """The cache grew by exactly the tokens fed, old rows are the same, and attention had every visible row.

    Args:
        before: State that went in (empty for a full pass).
        after: State that came out.
        visible: Layer -> rows of K the cache handed to attention.
        widths: Layer -> width of the attention pattern.
    """
    n_new = after.n_tokens - before.n_tokens
    for layer, keys in enumerate(after.keys):
        held = before.keys[layer].shape[1] if before.keys else 0
        if visible.get(layer) != held + n_new or after.values[layer].shape[1] != keys.shape[1]:
            raise GuardError(
                f"the cache of layer {layer} did not grow by the tokens fed",
                got=f"{visible.get(layer, 0)} rows handed to attention",
                expected=f"{held} held + {n_new} new",
                remedy="The model ignores or rewrites its cache; check that transformers and TransformerLens agree "
                "(transformers>=5.9,<5.24 with TransformerLens 4.3).",
            )
        if layer in widths and widths[layer] != held + n_new:
            raise GuardError(
                f"attention of layer {layer} did not see the cache",
                got=f"a pattern over {widths[layer]} keys",
                expected=f"{held + n_new} keys",
                remedy="The attention module does not read what the cache returned.",
            )
        _check_old_rows(before, after, layer)
    log["cache_grew"] += 1
    log["attention_width"] += len(widths)
    log["old_rows_unchanged"] += 1 if before.keys else 0


def _check_old_rows(before: KVState, after: KVState, layer: int) -> None:
    if not before.keys:
        return
    start, stop = after.first_position(layer), before.n_tokens
    if start >= stop:
        return
    offset = start - before.first_position(layer)
    for name, old, new in (("K", before.keys, after.keys), ("V", before.values, after.values)):
        if not torch.equal(old[layer][:, offset:], new[layer][:, : stop - start]):
            raise GuardError(
                f"{name} rows of layer {layer} changed while a new token was processed",
                got=f"different values among positions {start}..{stop - 1}",
                expected="old rows bit for bit as they were",
                remedy="A cache that rewrites old rows (quantised, evicting or rotating) cannot be profiled as one.",
            )


def check_repeat(first: "Step", again: "Step", log: GuardLog) -> None:
    """A step done twice from the same state gives the same bits at every site, in the logits and in the cache."""
    _check_same(first, again, "a step done twice does not give the same bits", "repeatable", log)


def check_null(cached: "Step", recomputed: "Step", log: GuardLog) -> None:
    """Step 0: both paths process the prompt from an empty cache, so every value must be bitwise equal."""
    _check_same(cached, recomputed, "the paths differ on the prompt, where both do the same work", "null_control", log)


def _check_same(a: "Step", b: "Step", what: str, name: str, log: GuardLog) -> None:
    pairs: list[tuple[str, Tensor, Tensor]] = [("logits", a.logits, b.logits)]
    for site, values in a.activations.items():
        pairs += [
            (f"{site}, layer {i}", x, y) for i, (x, y) in enumerate(zip(values, b.activations[site], strict=True))
        ]
    pairs += [(f"cache_k, layer {i}", x, y) for i, (x, y) in enumerate(zip(a.kv.keys, b.kv.keys, strict=True))]
    pairs += [(f"cache_v, layer {i}", x, y) for i, (x, y) in enumerate(zip(a.kv.values, b.kv.values, strict=True))]
    for where, x, y in pairs:
        if not torch.equal(x, y):
            raise GuardError(
                what,
                got=f"a difference at step {a.index} in {where}",
                expected="bitwise equality",
                remedy="Look for nondeterministic kernels (torch.use_deterministic_algorithms), state kept on the "
                "model between calls, or another thread changing the thread count.",
            )
    log[name] += 1
