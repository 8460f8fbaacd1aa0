"""A new bridge like one that is there: other weights, another configuration or another dtype, the same kind of model.

`recast` (another dtype) and `twins` (another parametrisation of the same function) both go through `rebuild`: a
fresh Hugging Face model from a configuration, filled with a state dict, then booted and admitted. Nothing of the old
model is changed, and tables that the architecture computes are made anew. What a configuration cannot say (a score
scale, rotary tables of another width) is set by a `Refit`, which stays with the new bridge, so that a recast twin is
still a twin.
"""

import copy
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from mechkv.errors import ModelError
from mechkv.models import admit, boot, dtype_name, info, to_dtype

Refit = Callable[[PreTrainedModel], None]
"""Sets what a configuration cannot say on a fresh Hugging Face model, before it is booted."""

_REFITS: "weakref.WeakKeyDictionary[TransformerBridge, Refit]" = weakref.WeakKeyDictionary()


def refit_of(model: TransformerBridge) -> Refit | None:
    """What `rebuild` was given beside the configuration when it made this model."""
    return _REFITS.get(model)


def plain_state(model: TransformerBridge) -> dict[str, torch.Tensor]:
    """The state dict of the wrapped model under Hugging Face's own names."""
    held = model.original_model.state_dict()
    return {name.replace("._original_component", ""): value for name, value in held.items()}


def rebuild(
    model: TransformerBridge,
    *,
    dtype: torch.dtype,
    config: PretrainedConfig,
    state: Mapping[str, torch.Tensor],
    refit: Refit | None = None,
    weights: str = "as stored",
) -> TransformerBridge:
    """A new bridge like `model`.

    Args:
        model: Gives the tokenizer and the name of the source.
        dtype: Dtype of the new parameters; the values of `state` are cast to it.
        config: Configuration of the new model.
        state: Every weight under its Hugging Face name; entries that the new model lacks are left out.
        refit: Applied to the fresh Hugging Face model.
        weights: Where the values come from, for `ModelInfo`.

    Raises:
        ModelError: The weights do not fit the configuration.
    """
    with no_init_weights():  # every weight is loaded below, or that is an error; tables are made all the same
        fresh = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    expected = set(fresh.state_dict()) & set(state)
    try:
        fresh.load_state_dict({name: state[name] for name in expected}, strict=True)
    except RuntimeError as error:
        raise ModelError(
            "these weights do not fit the configuration",
            got=str(error).strip().splitlines()[-1].strip()[:200],
            expected=f"the weights of {type(fresh).__name__}",
            remedy="Change weights and configuration together.",
        ) from error
    fresh.tie_weights()
    fresh.to(state[next(iter(expected))].device).eval()
    if refit is not None:
        refit(fresh)
    source = info(model).source
    bridge = boot(fresh, model.tokenizer, source)
    if refit is not None:
        _REFITS[bridge] = refit
    return admit(bridge, source=source, dtype=dtype, weights=weights)


def recast(model: TransformerBridge, dtype: str | torch.dtype) -> TransformerBridge:
    """The same weights in another dtype, as a new bridge; `model` is left alone.

    The values are those that `model` holds: float16 weights recast to float32 are the float16 values exactly, so the
    two models compute the same function and differ in arithmetic only. Tables that the architecture computes (rotary
    frequencies) are made anew, not rounded and widened.
    """
    wanted, known = to_dtype(dtype), info(model)
    config: Any = model.original_model.config
    return rebuild(
        model,
        dtype=wanted,
        config=copy.deepcopy(config),
        state=plain_state(model),
        refit=refit_of(model),
        weights=f"{known.dtype} values in {dtype_name(wanted)}",
    )
