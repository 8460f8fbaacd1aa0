"""Two pairs of paths for `mechkv check`: run from this folder

mechkv check --paths paths:planted     # exit code 1: semantic, positions
mechkv check --paths paths:right       # exit code 0: rounding
"""

from dataclasses import dataclass

import torch
from model import SmallGPT
from torch import Tensor


@dataclass
class Paths:
    """What `mechkv check --paths` looks for: build, cached, recomputed, tokens, n_prompt."""

    bug: bool
    tokens: Tensor
    n_prompt: int = 8

    def build(self, dtype: torch.dtype) -> SmallGPT:
        """Fresh weights in this precision."""
        return SmallGPT(planted=self.bug).to(dtype).eval()

    @staticmethod
    def cached(model: SmallGPT, tokens: Tensor, n_prompt: int) -> Tensor:
        """Prefill, then one token at a time."""
        return model.decode(tokens, n_prompt)

    @staticmethod
    def recomputed(model: SmallGPT, tokens: Tensor, n_prompt: int) -> Tensor:
        """One pass over everything."""
        return model.full(tokens, n_prompt)


_TOKENS = torch.randint(0, 101, (24,), generator=torch.Generator().manual_seed(1))
planted = Paths(True, _TOKENS)
right = Paths(False, _TOKENS)
