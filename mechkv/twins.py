"""Is it the architecture, with the function held fixed? Other parametrisations of exactly the same function.

A **twin** is a new bridge that computes what `model` computes, in another shape:

- `materialise_kv_heads`: every KV head copied r times, so that query head h reads copy h // (n_heads / n_kv') of the
  same K and V (GQA or MQA to MHA, or to any number between that the groups divide);
- `pad_head_dim`: dimensions that are zero in Q, K and V, whose rows in W_O are zero. Rotation pairs dimension i with
  i + d/2, so each half is padded on its own; the frequencies and the score scale stay those of the old width;
- `window_off`, `window_on`: another sliding window, the same function for texts that fit into both windows;
- `permute_heads`: KV heads, and query heads within their group, in another order: the control. It changes nothing but
  the order in which the output projection adds up heads.

Normalisation of Q and K over d_head (Qwen3, Gemma-3): with zeros added the mean of squares is d/d' of what it was. With
epsilon d/d' as well, both come out sqrt(d'/d) too long; the score scale takes d/d' and undoes it.

Controls. Every twin is proved before it is given away (`twin_proof`): the float64 logits of model and twin agree on
random tokens, on both paths. One that does not is a `GuardError`. `twin_info` gives the proof, and the
longest text that it holds for.
"""

import copy
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge
from transformers import PretrainedConfig, PreTrainedModel

from mechkv.errors import InputError, ModelError
from mechkv.models import DTYPES, info
from mechkv.rebuilding import Refit, plain_state, rebuild, refit_of
from mechkv.stats import rng
from mechkv.twin_proof import PROOF_TOKENS, logits_of_both_paths, prove, reference_logits

_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Olmo2")
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_ATTENTION = re.compile(r"^(.*layers\.(\d+)\.self_attn)\.(.+)$")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")


@dataclass(frozen=True)
class Twin:
    """What is known about a twin.

    Attributes:
        cause: The one thing that differs: `kv_heads`, `head_dim`, `window` or `order`.
        change: In words.
        max_tokens: The function is the same up to this many tokens; None: always.
        float64_rel_l2: Largest relative L2 difference of the float64 logits in the proof.
        bitwise: Whether the proof's logits in the model's own dtype are bitwise those of the model, on both paths.
        n_tokens: Random tokens in the proof.
    """

    cause: str
    change: str
    max_tokens: int | None
    float64_rel_l2: float
    bitwise: bool
    n_tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


_TWINS: "weakref.WeakKeyDictionary[TransformerBridge, Twin]" = weakref.WeakKeyDictionary()


def twin_info(model: TransformerBridge) -> Twin:
    """What is known about a twin that this module made.

    Raises:
        InputError: It was not made here.
    """
    if model not in _TWINS:
        raise InputError("not a twin", got="a model as it is", expected="a twin", remedy="Make one; see mechkv.twins.")
    return _TWINS[model]


def materialise_kv_heads(model: TransformerBridge, n_kv: int | None = None) -> TransformerBridge:
    """The same function with `n_kv` KV heads (by default one for every query head), each a copy.

    Raises:
        InputError: Not a larger multiple of the KV heads that there are, or not a divisor of the query heads.
        GuardError: The twin does not compute the same function.
    """
    shape = _shape(model)
    wanted = shape.n_heads if n_kv is None else n_kv
    if wanted <= shape.n_kv or wanted % shape.n_kv or shape.n_heads % wanted:
        raise InputError(
            "KV heads cannot be materialised so",
            got=f"{wanted} from {shape.n_kv} KV heads under {shape.n_heads} query heads",
            expected=f"a larger multiple of {shape.n_kv} that divides {shape.n_heads}",
            remedy="A model with one KV head for every query head has none to materialise.",
        )
    copies = wanted // shape.n_kv

    def change(name: str, value: Tensor) -> Tensor:
        if name.split(".")[0] not in ("k_proj", "v_proj") and not _is_flat_norm(name, value, shape.n_kv * shape.d_head):
            return value
        return repeat(value, "(kv d) ... -> (kv r d) ...", r=copies, d=shape.d_head)

    config = _config(model, num_key_value_heads=wanted)
    twin = _remade(model, config, change, refit_of(model))
    return _proved(model, twin, "kv_heads", f"{shape.n_kv} KV heads materialised to {wanted}")


def pad_head_dim(model: TransformerBridge, d_head: int) -> TransformerBridge:
    """The same function with `d_head` dimensions a head, the new ones zero.

    Raises:
        InputError: Not an even number above the present one.
        ModelError: Rotary tables that depend on the length of the text, or a model that is padded already.
        GuardError: The twin does not compute the same function.
    """
    shape = _shape(model)
    if d_head <= shape.d_head or d_head % 2:
        raise InputError(
            "head dimension cannot be padded so",
            got=d_head,
            expected=f"an even number above {shape.d_head}",
            remedy="Rotation works on pairs of dimensions.",
        )
    _check_rope(model)

    def padded(value: Tensor, dim: int, heads: int) -> Tensor:
        halves = value.movedim(dim, 0).unflatten(0, (heads, 2, shape.d_head // 2))
        room = halves.new_zeros(heads, 2, (d_head - shape.d_head) // 2, *halves.shape[3:])
        return torch.cat([halves, room], dim=2).flatten(0, 2).movedim(0, dim)

    def change(name: str, value: Tensor) -> Tensor:
        if name == "o_proj.weight":
            return padded(value, 1, shape.n_heads)
        if name.split(".")[0] in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm"):
            return padded(value, 0, value.shape[0] // shape.d_head)
        return value

    config = _config(model, head_dim=d_head)
    source = model.original_model
    twin = _remade(model, config, change, _keep_scale_and_rotation(source, shape.d_head, d_head))
    return _proved(model, twin, "head_dim", f"head dimension {shape.d_head} padded to {d_head}")


def window_off(model: TransformerBridge) -> TransformerBridge:
    """The same function, for texts that fit into the window, without a window.

    Layers become full-attention layers, with an ordinary cache. Gemma-3 chooses its rotary base by the kind of layer:
    there the kinds stay and the window becomes longer than any text the model takes.

    Raises:
        InputError: The model has no window.
    """
    window = _window(model)
    config = _config(model)
    text = config.get_text_config(decoder=True)
    if _rope_by_kind(text):
        text.sliding_window = max(text.max_position_embeddings, window) + 1
    elif getattr(text, "layer_types", None):
        text.layer_types = ["full_attention"] * len(text.layer_types)
    else:
        text.sliding_window = None
    twin = _remade(model, config, lambda name, value: value, refit_of(model))
    return _proved(model, twin, "window", f"window of {window} tokens off", max_tokens=window)


def window_on(model: TransformerBridge, window: int, layers: Sequence[int] | None = None) -> TransformerBridge:
    """The same function, for texts of at most `window` tokens, with a sliding window.

    Args:
        model: A bridge of a family that has windows.
        window: Tokens that a row sees, itself included.
        layers: The layers that get it; by default all (Gemma-3: those that are sliding layers by kind).

    Raises:
        InputError: A family without windows, or layers that cannot be chosen.
    """
    config = _config(model)
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    if not hasattr(text, "sliding_window") or window < 2:
        raise InputError(
            "no window can be set",
            got=f"window {window} on {info(model).family}",
            expected="a window of 2 or more on a family that has them",
            remedy="Mistral, Qwen2, Qwen3, Gemma-2 and Gemma-3 do.",
        )
    if layers is not None and (not kinds or _rope_by_kind(text)):
        raise InputError(
            "the layers with a window cannot be chosen",
            got=list(layers),
            expected="no choice",
            remedy="This family's layers are all alike, or tied to their rotary base.",
        )
    text.sliding_window = window
    if hasattr(text, "use_sliding_window"):
        text.use_sliding_window = True
    if kinds and not _rope_by_kind(text):
        chosen = range(len(kinds)) if layers is None else layers
        text.layer_types = ["sliding_attention" if i in chosen else "full_attention" for i in range(len(kinds))]
    limits = [window, *(w for w in info(model).windows if w is not None)]
    twin = _remade(model, config, lambda name, value: value, refit_of(model))
    return _proved(model, twin, "window", f"window of {window} tokens on", max_tokens=min(limits))


def permute_heads(model: TransformerBridge, *, seed: int = 0) -> TransformerBridge:
    """The same function with KV heads, and the query heads of each, in another order: the control of the others."""
    shape = _shape(model)
    order = head_order(shape.n_heads, shape.n_kv, seed)
    group = shape.n_heads // shape.n_kv
    kv_order = torch.tensor([int(h) // group for h in order[::group]])

    def change(name: str, value: Tensor) -> Tensor:
        kind = name.split(".")[0]
        if name == "o_proj.weight":
            heads = rearrange(value, "m (h d) -> h d m", d=shape.d_head)
            return rearrange(heads[order.to(value.device)], "h d m -> m (h d)")
        for prefix, n, which in (("q", shape.n_heads, order), ("k", shape.n_kv, kv_order), ("v", shape.n_kv, kv_order)):
            if kind == f"{prefix}_proj" or (kind == f"{prefix}_norm" and value.shape[0] == n * shape.d_head and n > 1):
                return value.unflatten(0, (n, shape.d_head))[which.to(value.device)].flatten(0, 1)
        return value

    twin = _remade(model, _config(model), change, refit_of(model))
    return _proved(model, twin, "order", f"heads in the order {order.tolist()}")


def head_order(n_heads: int, n_kv: int, seed: int) -> Tensor:
    """The order that `permute_heads` uses: entry i is the old number of new query head i. Never the old order."""
    if n_heads == 1:
        raise InputError("nothing to permute", got="one head", expected="two or more", remedy="Leave this control out.")
    generator, group = rng(seed, "heads", n_heads, n_kv), n_heads // n_kv
    while True:
        order = [int(kv) * group + int(i) for kv in generator.permutation(n_kv) for i in generator.permutation(group)]
        if order != list(range(n_heads)):
            return torch.tensor(order)


# ------------------------------------------------------------------------------------------------------ the machinery


@dataclass(frozen=True)
class _Shape:
    n_heads: int
    n_kv: int
    d_head: int


def _shape(model: TransformerBridge) -> _Shape:
    known = info(model)
    attention = {_ATTENTION.match(name)[3] for name in plain_state(model) if _ATTENTION.match(name)}  # type: ignore[index]
    names = {name.split(".")[0] for name in attention}
    if not known.family.startswith(_FAMILIES) or not {"q_proj", "k_proj", "v_proj", "o_proj"} <= names:
        raise ModelError(
            "twins of this family are not known here",
            got=known.family,
            expected=f"separate Q, K, V and output projections, as in {', '.join(_FAMILIES)}",
            remedy="Fused projections and other attention modules need a transformation of their own.",
        )
    unknown = sorted(names - set(_PROJECTIONS) - set("qkvo"))  # the bridge's short names of the same weights
    if unknown:
        raise ModelError(
            "attention has parts that a twin would have to change",
            got=", ".join(unknown),
            expected=", ".join(_PROJECTIONS),
            remedy="This model's attention is not the plain one of its family.",
        )
    return _Shape(known.n_heads, known.n_kv, known.d_head)


def _config(model: TransformerBridge, **changes: Any) -> PretrainedConfig:
    config = copy.deepcopy(model.original_model.config)
    for name, value in changes.items():
        setattr(config.get_text_config(decoder=True), name, value)
    return config


def _remade(
    model: TransformerBridge, config: PretrainedConfig, change: Callable[[str, Tensor], Tensor], refit: Refit | None
) -> TransformerBridge:
    """A bridge with every attention weight changed by `change(name inside self_attn, value)`."""
    state: Mapping[str, Tensor] = plain_state(model)
    changed = {}
    for name, value in state.items():
        found = _ATTENTION.match(name)
        changed[name] = change(found[3], value).contiguous() if found else value
    known = info(model)
    return rebuild(model, dtype=DTYPES[known.dtype], config=config, state=changed, refit=refit, weights=known.weights)


def _is_flat_norm(name: str, value: Tensor, width: int) -> bool:
    """A K norm over all heads at once (OLMo-2), not over d_head."""
    return name == "k_norm.weight" and value.shape[0] == width


def _keep_scale_and_rotation(source: PreTrainedModel, old: int, new: int) -> Refit:
    """Score scale, norm epsilon and rotary tables of the old width on a model of the new one."""
    old_config = copy.deepcopy(source.config)
    normed = any(name.endswith("self_attn.q_norm.weight") for name in _plain_names(source))

    def refit(fresh: PreTrainedModel) -> None:
        for name, module in fresh.named_modules():
            if name.endswith("self_attn"):
                width = module.head_dim
                module.scaling = module.scaling * width**0.5 * old**-0.5 if _scaled_by_width(module) else module.scaling
                module.scaling *= old / new if normed else 1.0
            if name.endswith(("self_attn.q_norm", "self_attn.k_norm")):
                attribute = "eps" if hasattr(module, "eps") else "variance_epsilon"
                setattr(module, attribute, getattr(module, attribute) * old / new)
            if name.endswith("rotary_emb"):
                _pad_tables(module, type(module)(old_config.get_text_config(decoder=True)), new)

    return refit


def _scaled_by_width(attention: nn.Module) -> bool:
    """Whether the score scale follows d_head (Gemma sets it apart, by `query_pre_attn_scalar`)."""
    return not hasattr(attention.config, "query_pre_attn_scalar")


def _pad_tables(module: nn.Module, old: nn.Module, width: int) -> None:
    for name, table in old.named_buffers():
        if not name.endswith("inv_freq"):
            continue
        room = table.new_zeros(width // 2 - table.shape[0])
        held = getattr(module, name)
        setattr(module, name, nn.Buffer(torch.cat([table, room]).to(held.device), persistent=False))


def _plain_names(model: PreTrainedModel) -> list[str]:
    return [name.replace("._original_component", "") for name in model.state_dict()]


def _check_rope(model: TransformerBridge) -> None:
    if refit_of(model) is not None:
        raise ModelError(
            "this model is padded already",
            got=f"a twin with d_head {info(model).d_head}",
            expected="the model as it was",
            remedy="Pad the original to the width you want.",
        )
    text = model.original_model.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    settings = list(rope.values()) if _rope_by_kind(text) else [rope]
    kinds = {str(s.get("rope_type", "default")) for s in settings}
    partial = {float(s.get("partial_rotary_factor", 1.0)) for s in settings} - {1.0}
    if kinds - set(_STATIC_ROPE) or partial:
        raise ModelError(
            "rotary tables that a padded twin cannot keep",
            got=f"rope type {', '.join(sorted(kinds))}, rotated share {sorted(partial) or 1}",
            expected=f"all dimensions rotated, type {', '.join(_STATIC_ROPE)}",
            remedy="Tables that follow the length of the text are computed anew from the head dimension.",
        )


def _rope_by_kind(text: PretrainedConfig) -> bool:
    """Whether rotary parameters are given per kind of layer (Gemma-3)."""
    return any(isinstance(value, dict) for value in (getattr(text, "rope_parameters", None) or {}).values())


def _window(model: TransformerBridge) -> int:
    windows = [window for window in info(model).windows if window is not None]
    if not windows:
        raise InputError(
            "no window to take off", got="full attention in every layer", expected="a window", remedy="Leave it out."
        )
    return min(windows)


def _proved(
    model: TransformerBridge, twin: TransformerBridge, cause: str, change: str, max_tokens: int | None = None
) -> TransformerBridge:
    n = PROOF_TOKENS if max_tokens is None else min(PROOF_TOKENS, max_tokens)
    worst = prove(model, twin, n_tokens=n)
    bitwise = all(
        torch.equal(a, b) for a, b in zip(reference_logits(model, n), logits_of_both_paths(twin, n), strict=True)
    )
    earlier = _TWINS[model].max_tokens if model in _TWINS else None
    limits = [limit for limit in (max_tokens, earlier) if limit is not None]
    _TWINS[twin] = Twin(cause, change, min(limits, default=None), worst, bitwise, n)
    return twin
