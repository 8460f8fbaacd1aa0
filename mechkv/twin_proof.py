"""Does a twin compute the same function as its model? The proof that every twin has to pass before it is used.

Model and twin, both recast to float64 from the weights that they hold, process the same random tokens on both paths.
Their logits agree to `PROOF_TOLERANCE`: rounding in float64 is 1e-16, but float64 runs have float32 islands (rotary
tables, softmax, norms), where another order of a sum can cost 1e-7.
"""

import math
import weakref

import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechkv.comparison import compare
from mechkv.errors import GuardError
from mechkv.guards import input_device
from mechkv.models import info
from mechkv.paths import Path, decode
from mechkv.policies import Forced
from mechkv.rebuilding import recast
from mechkv.stats import torch_rng

PROOF_TOLERANCE = 2e-6
"""Relative L2 of float64 logits. Measured: 0 to 6e-7 on seven tiny families (wrong twins: above 1e-3)."""
PROOF_TOKENS = 12


def prove(model: TransformerBridge, twin: TransformerBridge, *, n_tokens: int = PROOF_TOKENS) -> float:
    """The largest relative L2 difference of the float64 logits of model and twin over random tokens and both paths.

    Raises:
        GuardError: It is above `PROOF_TOLERANCE`.
    """
    ours = logits_of_both_paths(recast(twin, torch.float64), n_tokens)
    worst = max(_distance(a, b) for a, b in zip(ours, reference_logits(model, n_tokens, wide=True), strict=True))
    if not worst <= PROOF_TOLERANCE:
        raise GuardError(
            "the twin does not compute the same function",
            got=f"float64 logits that differ by {worst:.2g} (relative L2) on {n_tokens} random tokens",
            expected=f"at most {PROOF_TOLERANCE:.0e}",
            remedy=f"Not used. Report the family ({info(model).family}, {info(model).dtype}).",
        )
    return worst


def _distance(a: Tensor, b: Tensor) -> float:
    found = compare(a, b).rel_l2
    return math.inf if found is None else found


_REFERENCES: "weakref.WeakKeyDictionary[TransformerBridge, dict[tuple[int, bool], list[Tensor]]]" = (
    weakref.WeakKeyDictionary()
)


def reference_logits(model: TransformerBridge, n_tokens: int, wide: bool = False) -> list[Tensor]:
    """Logits of the model itself, in its own dtype or in float64; computed once for all of its twins.

    They are those of a copy in fresh memory, where a twin's weights are too: weights that were mapped from a file may
    not be aligned, and CPU kernels choose by alignment, so that the very same weights give other bits.
    """
    held = _REFERENCES.setdefault(model, {})
    if (n_tokens, wide) not in held:
        held[n_tokens, wide] = logits_of_both_paths(
            recast(model, torch.float64 if wide else info(model).dtype), n_tokens
        )
    return held[n_tokens, wide]


def logits_of_both_paths(model: TransformerBridge, n_tokens: int, seed: int = 0) -> list[Tensor]:
    """Logits of every step over random tokens, cached then recomputed; half of the tokens are the prompt."""
    device = input_device(model)
    generator = torch_rng(seed, "twin proof", n_tokens)
    tokens = torch.randint(0, info(model).d_vocab, (n_tokens,), generator=generator).to(device)
    n_prompt = max(n_tokens // 2, 1)
    logits = []
    walks: list[tuple[Path, int]] = [("cached", n_tokens - n_prompt), ("recomputed", min(2, n_tokens - n_prompt))]
    for path, n_steps in walks:
        steps = decode(model, tokens[:n_prompt], path=path, policy=Forced(tokens.tolist()), n_steps=n_steps)
        logits += [step.logits for step in steps]
    return logits
