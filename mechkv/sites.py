"""Which place in the model is meant, and what shape does it have there?

A **site** is a short name for a TransformerLens hook point (`resid_pre`, `attn_out`, ...), for the model's output
(`logits`) or for the cache state (`cache_k`, `cache_v`). A TransformerLens hook name (`blocks.3.hook_resid_pre`,
`ln_final.hook_normalized`) is accepted wherever a site is; it then means that one layer only.

Conventions. Shapes carry no batch axis (batch size is 1 everywhere). `pos` counts the rows of one forward pass.
Hooks give K/V as `[pos, n_kv, d_head]`, the cache holds `[n_kv, pos, d_head]`; `to_cache_layout` and `to_hook_layout`
are the only code that knows. Hook-point K of rotary models is taken before (`k`) or after (`rot_k`) rotation; the cache
holds what attention reads, that is after rotation, in every family. Some families declare `rot_k` and never fire it
(Phi-3, GPT-NeoX in TransformerLens 4.3): a requested site that does not fire is an error, not an empty result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from einops import rearrange
from jaxtyping import Shaped
from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge

from mechkv.errors import InputError

HOOKS: dict[str, str] = {
    "resid_pre": "hook_resid_pre",
    "resid_mid": "hook_resid_mid",
    "resid_post": "hook_resid_post",
    "q": "attn.hook_q",
    "k": "attn.hook_k",
    "v": "attn.hook_v",
    "rot_q": "attn.hook_rot_q",
    "rot_k": "attn.hook_rot_k",
    "pattern": "attn.hook_pattern",
    "z": "attn.hook_z",
    "attn_out": "hook_attn_out",
    "mlp_out": "hook_mlp_out",
}
"""Site name -> TransformerLens hook name inside `blocks.{layer}`."""

CACHE_SITES: tuple[str, ...] = ("cache_k", "cache_v")
"""K and V as attention reads them: all rows visible to this forward pass, old and new, `[n_kv, pos, d_head]`."""

RESIDUAL_SITES: tuple[str, ...] = ("resid_pre", "resid_mid", "resid_post")

AXES: dict[str, str] = {
    **dict.fromkeys((*RESIDUAL_SITES, "attn_out", "mlp_out"), "pos d_model"),
    **dict.fromkeys(("q", "rot_q", "z"), "pos n_heads d_head"),
    **dict.fromkeys(("k", "rot_k", "v"), "pos n_kv d_head"),
    **dict.fromkeys(CACHE_SITES, "n_kv pos d_head"),
    "pattern": "n_heads pos key",
    "logits": "d_vocab",
}
"""Axis names of a site's value for one layer, without the batch axis."""

SITES: tuple[str, ...] = (*HOOKS, *CACHE_SITES, "logits")


@dataclass(frozen=True)
class Tap:
    """One hook point to read or write: the name it was asked for by, its layer and where its position axis is."""

    key: str
    layer: int | None
    hook_name: str
    hook_point: HookPoint
    pos_axis: int


def to_cache_layout(rows: Shaped[Tensor, "pos n_kv d_head"]) -> Shaped[Tensor, "n_kv pos d_head"]:
    """K or V rows from the layout of hooks to the layout of the cache."""
    return rearrange(rows, "pos n_kv d_head -> n_kv pos d_head")


def to_hook_layout(state: Shaped[Tensor, "n_kv pos d_head"]) -> Shaped[Tensor, "pos n_kv d_head"]:
    """K or V rows from the layout of the cache to the layout of hooks."""
    return rearrange(state, "n_kv pos d_head -> pos n_kv d_head")


def resolve(
    model: TransformerBridge,
    names: Sequence[str],
    layers: Sequence[int] | None = None,
    hooks: dict[str, HookPoint] | None = None,
) -> list[Tap]:
    """The hook points that `names` stand for, in layer order.

    Args:
        model: The bridge.
        names: Sites of `HOOKS` or full TransformerLens hook names. `logits`, `cache_k` and `cache_v` have no hook point
            and are left out here: the decode loop has them anyway.
        layers: Restrict site names to these layers (full hook names already name theirs).
        hooks: `model.hook_dict`, for a caller that has it: it is made anew at every call.

    Raises:
        InputError: A name is neither, or the model's family has no such hook point.
    """
    hooks = model.hook_dict if hooks is None else hooks
    taps: list[Tap] = []
    for name in dict.fromkeys(names):
        if not isinstance(name, str):
            raise InputError("not a site", got=repr(name), expected="a name", remedy=_HOOK_HINT)
        if name in CACHE_SITES or name == "logits":
            continue
        if name in HOOKS:
            wanted = range(model.cfg.n_layers) if layers is None else layers
            taps += [_tap(hooks, name, layer, f"blocks.{layer}.{HOOKS[name]}") for layer in wanted]
        elif "hook_" in name:
            parts = name.split(".")
            layer = int(parts[1]) if parts[0] == "blocks" and len(parts) > 1 and parts[1].isdigit() else None
            taps.append(_tap(hooks, name, layer, name))
        else:
            raise InputError("unknown site", got=repr(name), expected=f"one of {', '.join(SITES)}", remedy=_HOOK_HINT)
    return taps


def supported(model: TransformerBridge, names: Sequence[str]) -> list[str]:
    """Those of `names` that the model's family has (a parallel block has no `resid_mid`, for one)."""
    hooks = model.hook_dict
    return [name for name in names if name not in HOOKS or f"blocks.0.{HOOKS[name]}" in hooks]


_HOOK_HINT = "A full TransformerLens hook name such as 'blocks.0.hook_resid_pre' works as well."


def _tap(hooks: dict[str, HookPoint], key: str, layer: int | None, hook_name: str) -> Tap:
    point = hooks.get(hook_name)
    if point is None:
        block = [name for name in hooks if name.startswith(f"blocks.{layer}.hook") or name.startswith("ln_final")]
        raise InputError(
            f"this model has no hook point for {key!r}",
            got=hook_name,
            expected=f"a hook of the model, such as {', '.join(sorted(block)[:6]) or 'those of model.hook_dict'}",
            remedy="Models with parallel attention and MLP have no resid_mid; models without rotation no rot_k."
            if key in HOOKS
            else "model.hook_dict lists them all.",
        )
    leaf = hook_name.rsplit(".", 1)[-1]
    default = -2 if leaf in ("hook_pattern", "hook_attn_scores") else 1
    axis = point.pos_dim if point.pos_dim is not None else default
    return Tap(key, layer, hook_name, point, axis - 1 if axis > 0 else axis)
