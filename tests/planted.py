"""Drift of known origin: a model whose cached path (passes of one row) computes a little differently."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def planted(model, size: float, layer: int = 1) -> Iterator[None]:
    """Add `size` times a fixed direction to the MLP output of `layer` in passes of a single row."""
    direction = torch.randn(model.cfg.d_model, generator=torch.Generator().manual_seed(5))

    def hook(module, args, output):
        return output + size * direction.to(output.dtype) if output.shape[1] == 1 else output

    handle = model.blocks[layer].mlp.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
