"""Is it this patch, or any patch? Changes that a `Patch` writes instead of the source's own rows.

Each is a `Change`: (own rows, the source's rows, where, position axis) -> the rows to write. `noise` has the norm of
the real change row by row, `shuffled` writes the source's rows in another order, `one_ulp` is the smallest change there
is. The patch of another prompt is a source (`sources.ForeignSource`). What is random depends on a seed, labels, the
site, the layer and the step alone.
"""

import torch
from torch import Tensor

from mechkv.interventions import Change
from mechkv.paths import At
from mechkv.stats import torch_rng


def noise(seed: int, *labels: str | int) -> Change:
    """Own rows plus Gaussian noise; each row's change has, after rounding, the norm of the source's change.

    The scale is found by bisection, because small noise is rounded away.
    """

    def change(own: Tensor, other: Tensor, at: At, axis: int) -> Tensor:
        layer = -1 if at.layer is None else at.layer
        generator = torch_rng(seed, "noise", *labels, at.site, layer, at.step)
        direction = torch.randn(own.shape, generator=generator, dtype=torch.float64).to(own.device)
        start, rest = own.double(), [dim for dim in range(own.ndim) if dim != axis]
        target = (other.double() - start).square().sum(rest, keepdim=True).sqrt()
        unit = direction / direction.square().sum(rest, keepdim=True).sqrt()
        low, high = torch.zeros_like(target), 16.0 * target
        for _ in range(40):
            middle = (low + high) / 2
            reached = ((start + middle * unit).to(own.dtype).double() - start).square().sum(rest, keepdim=True).sqrt()
            low, high = torch.where(reached < target, middle, low), torch.where(reached < target, high, middle)
        return torch.where(target > 0, (start + high * unit).to(own.dtype), own)

    return change


def shuffled(seed: int, *labels: str | int) -> Change:
    """The source's rows, in an order without fixed points among positions (one row alone stays)."""

    def change(own: Tensor, other: Tensor, at: At, axis: int) -> Tensor:
        n = other.shape[axis]
        if n < 2:
            return other
        layer = -1 if at.layer is None else at.layer
        order = torch.randperm(n, generator=torch_rng(seed, "shuffle", *labels, at.site, layer, at.step))
        moved = torch.empty_like(order)
        moved[order] = order.roll(1)
        return other.index_select(axis, moved.to(other.device))

    return change


def one_ulp(index: tuple[int, ...]) -> Change:
    """Own rows with the element at `index` (within the selected rows) moved to the next value away from zero."""

    def change(own: Tensor, other: Tensor, at: At, axis: int) -> Tensor:
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[own.element_size()]
        moved = own.clone(memory_format=torch.contiguous_format)
        moved.view(bits)[index] += 1
        return moved

    return change
