"""One step again, with patches: the part that every causal experiment shares.

A `PatchBench` holds one path of one model with its hooks attached once. `patched` reruns a single step from its KV
state, a list of references, with other patches in force each time, and proves each time that the patches landed and
that nothing else was written (`interventions.check_landed`). Nothing before that step is done again, so the cost of a
sweep is that of the steps it patches, whatever the length of the run before them.

Also here: how a patched step is measured. With `clean` the logits of the source path,

    recovery = 1 - D(patched, clean) / D(unpatched, clean),      D = KL(. || clean) or relative L2 of the logits,

undefined (NaN) where the denominator is at or below its floor: the larger of the difference of a path with itself,
measured (0 for repeatable kernels, else the run is refused), and the metric's round-off (`comparison.metric_floor`).
Recovery is 1 for bitwise equality, 0 where the patch changes nothing, and negative where it makes things worse.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechkv import guards
from mechkv.cache import KVState
from mechkv.comparison import compare_rows, kl, metric_floor, top1_flip
from mechkv.guards import GuardLog
from mechkv.interventions import Board, Patch, Write, check_landed
from mechkv.paths import Path, PathRunner, Step
from mechkv.sites import CACHE_SITES

_CHUNK = 8
"""Logit rows measured at once: float64 copies of a large vocabulary are the largest thing in memory."""

DISTANCES = ("kl", "rel_l2")
PROVEN = ("resid_post",)
"""Sites that a step must have recorded for the proof that a patch changed nothing else."""


class PatchBench:
    """One path of one model, hooks attached once; use as a context manager."""

    def __init__(self, model: TransformerBridge, path: Path, *, sites: Sequence[str] = PROVEN, log: GuardLog) -> None:
        self.path, self.log = path, log
        self._board = Board((*sites, *CACHE_SITES))
        self._runner = PathRunner(model, path, sites=sites, interventions=(self._board,), log=log)

    def __enter__(self) -> "PatchBench":
        self._runner.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._runner.__exit__(*exc)

    @property
    def writes(self) -> list[Write]:
        """What the last patched step wrote."""
        return self._board.writes

    def plain(self, tokens: Tensor, state: KVState, index: int, n_new: int | None = None) -> Step:
        """A step without patches."""
        self._board.arm()
        return self._runner.step(tokens, state, index, n_new)

    def patched(self, base: Step, *patches: Patch) -> Step:
        """`base`, the unpatched step, done again with patches, and proven."""
        self._board.arm(*patches)
        state = KVState((), (), len(base.tokens) - base.n_new, base.kv.n_prompt)
        start = base.kv_before if self.path == "cached" else state
        step = self._runner.step(base.tokens, start, base.index, base.n_new)
        check_landed(step, self._board.writes, base, self.log)
        return step

    def again(self, base: Step) -> None:
        """The unpatched step, bit for bit as it was: patches left nothing behind."""
        start = base.kv_before
        guards.check_repeat(base, self.plain(base.tokens, start, base.index, base.n_new), self.log)


def distances(logits: Sequence[Float[Tensor, "d_vocab"]], clean: Float[Tensor, "d_vocab"]) -> dict[str, np.ndarray]:
    """KL(. || clean), relative L2, bitwise equality and top-1 flip of each logit vector, in float64."""
    parts: dict[str, list[np.ndarray]] = {name: [] for name in (*DISTANCES, "bitwise_equal", "flip")}
    for start in range(0, len(logits), _CHUNK):
        rows = torch.stack(list(logits[start : start + _CHUNK]))
        reference = clean.expand_as(rows)
        found = compare_rows(rows, reference)
        found |= {"kl": kl(rows, reference).cpu().numpy(), "flip": top1_flip(rows, reference).cpu().numpy()}
        for name, values in parts.items():
            values.append(found[name])
    return {name: np.concatenate(values) for name, values in parts.items()}


def floor(metric: str, n: int, value: float) -> float:
    """Below this a distance of `value` over `n` logits is not told from zero."""
    return metric_floor(metric, n, value)


def recovery(patched: float, unpatched: float, floor: float) -> float:
    """1 - patched / unpatched; NaN where the denominator is at or below its floor."""
    if not unpatched > floor:
        return math.nan
    return 1.0 - patched / unpatched
