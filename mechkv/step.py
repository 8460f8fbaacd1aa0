"""What goes into and comes out of one pass: the step that it gives, and how interventions are asked on the way."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from mechkv.cache import KVState

Path = Literal["cached", "recomputed"]
RowsKept = Literal["new", "last", "all"]


@dataclass(frozen=True)
class At:
    """Where an intervention is being asked for a value."""

    path: Path
    step: int
    site: str
    layer: int | None
    positions: range
    """Absolute positions along the value's position axis."""
    n_before: int
    """Tokens processed before this step: positions from here on are the newest."""


@runtime_checkable
class Intervention(Protocol):
    """Changes values while a path runs; `mechkv.interventions` has patches, the decode loop knows this much."""

    @property
    def sites(self) -> tuple[str, ...]:
        """Sites or hook names it wants to be asked about."""
        ...

    def __call__(self, value: Tensor, at: At) -> Tensor | None:
        """A new tensor of the same shape, dtype and device, or None to leave the value; never changes it in place."""
        ...


@dataclass(frozen=True)
class Step:
    """What one pass of one path gave.

    Attributes:
        index: 0 for the prompt, then 1, 2, ...
        path: `cached` or `recomputed`.
        tokens: `[pos]`, all tokens processed so far.
        positions: Absolute positions of the rows in `activations`.
        logits: `[d_vocab]`, the last row, in the model's dtype.
        activations: Site (or hook name) -> one tensor per layer (one tensor in all for a hook name).
        kv_before: The KV state that this pass attended to (empty on the recomputed path).
        kv: The KV state after this pass.
        n_new: How many of the tokens are new in this step.
    """

    index: int
    path: Path
    tokens: Int[Tensor, "pos"]
    positions: range
    logits: Float[Tensor, "d_vocab"]
    activations: Mapping[str, tuple[Tensor, ...]]
    kv_before: KVState
    kv: KVState
    n_new: int
