"""What is in the KV cache, as a value that goes in and comes out of every step?

A `KVState` holds, for every layer, the K and V rows that the next token can still see, and the absolute position of
the first of them, so that the same row of two paths always lines up. Layers with a sliding window hold only the last
`window - 1` rows (transformers' `DynamicSlidingWindowLayer`), so states are ragged over layers.

`StateCache` is the Hugging Face cache that a forward pass runs on. It is made anew from a `KVState` for every pass and
lets interventions change K and V at the one place that every family passes through: after projection, normalisation
and rotation, before attention reads them. `update` makes new tensors, so a state is a list of references, not a copy.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from jaxtyping import Shaped
from torch import Tensor
from transformers import Cache, DynamicCache, PretrainedConfig

from mechkv.errors import CacheError, GuardError

Rows = Shaped[Tensor, "n_kv pos d_head"]

KVEdit = Callable[[int, Rows, Rows, int], tuple[Rows, Rows]]
"""(layer, keys, values, first absolute position) -> (keys, values): all rows that attention is about to read."""


@dataclass(frozen=True)
class KVState:
    """The KV cache after some tokens.

    Attributes:
        keys: Per layer `[n_kv, pos, d_head]`, after rotation; as many rows as the layer keeps.
        values: Per layer `[n_kv, pos, d_head]`.
        n_tokens: Tokens processed so far; the last row of every layer is at absolute position `n_tokens - 1`.
        n_prompt: Rows at positions below this have provenance `prefill`, the others `decode`.
    """

    keys: tuple[Shaped[Tensor, "n_kv _pos d_head"], ...]
    values: tuple[Shaped[Tensor, "n_kv _pos d_head"], ...]
    n_tokens: int
    n_prompt: int

    @classmethod
    def empty(cls, n_prompt: int = 0) -> "KVState":
        """The state before the first token."""
        return cls((), (), 0, n_prompt)

    def first_position(self, layer: int) -> int:
        """Absolute position of the first row that `layer` still holds."""
        return self.n_tokens - self.keys[layer].shape[1]

    def positions(self, layer: int) -> range:
        """Absolute positions of the rows that `layer` holds."""
        return range(self.first_position(layer), self.n_tokens)

    def provenance(self, layer: int) -> list[str]:
        """`prefill` or `decode` for every row that `layer` holds."""
        return ["prefill" if position < self.n_prompt else "decode" for position in self.positions(layer)]


def blank_layers(config: PretrainedConfig) -> list[Any]:
    """Empty cache layers of the kinds that `generate` would use for this model.

    They are worked out once a run: reading them from the config takes as long as several layers of a small model.
    """
    return DynamicCache(config=config).layers


class StateCache(DynamicCache):
    """A Hugging Face cache filled from a `KVState`; gives the next state back."""

    layers: list[Any]

    def __init__(self, blank: Sequence[Any], state: KVState, edit: KVEdit | None = None) -> None:
        """Fill copies of `blank_layers` from `state`."""
        Cache.__init__(self, layers=[copy(layer) for layer in blank])
        self._edit = edit
        self._n_prompt = state.n_prompt
        self._n_before = state.n_tokens
        self.visible: dict[int, int] = {}
        """Layer -> rows handed to attention in this pass."""
        for layer, keys, values in zip(self.layers, state.keys, state.values, strict=bool(state.keys)):
            layer.lazy_initialization(keys[None], values[None])
            layer.keys, layer.values = keys[None], values[None]
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = state.n_tokens

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """Append rows, let the edit change what attention reads, store what the window keeps."""
        stored = self.layers[layer_idx].keys if layer_idx < len(self.layers) else None
        if stored is not None and stored.dtype != key_states.dtype and stored.numel():
            raise GuardError(
                f"the cache of layer {layer_idx} does not have the model's dtype",
                got=f"cache rows in {stored.dtype}, new rows in {key_states.dtype}",
                expected="one dtype",
                remedy="Make the cache from a run of this model, or cast the model and the cache alike.",
            )
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.visible[layer_idx] = keys.shape[-2]
        if self._edit is None:
            return keys, values
        first = self._n_before + key_states.shape[-2] - keys.shape[-2]
        old_keys, old_values = keys[0], values[0]
        new_keys, new_values = self._edit(layer_idx, old_keys, old_values, first)
        if new_keys is old_keys and new_values is old_values:
            return keys, values
        layer, kept = self.layers[layer_idx], self.layers[layer_idx].keys.shape[-2]
        keys, values = new_keys[None], new_values[None]
        layer.keys, layer.values = keys[..., keys.shape[-2] - kept :, :], values[..., values.shape[-2] - kept :, :]
        return keys, values

    def state(self, n_tokens: int) -> KVState:
        """The state after the pass, `n_tokens` tokens in all."""
        if not self.layers or not all(layer.is_initialized for layer in self.layers):
            missing = [index for index, layer in enumerate(self.layers) if not layer.is_initialized]
            raise CacheError(
                "the model did not write to its KV cache",
                got=f"nothing written in layers {missing or 'all'}",
                expected=f"{n_tokens} tokens in every layer",
                remedy="transformers 5.24 renamed the decoder's cache keyword, which TransformerLens 4.3 then drops: "
                "install 'transformers>=5.9,<5.24'.",
            )
        self._n_before = n_tokens
        keys = tuple(layer.keys[0] for layer in self.layers)
        return KVState(keys, tuple(layer.values[0] for layer in self.layers), n_tokens, self._n_prompt)
