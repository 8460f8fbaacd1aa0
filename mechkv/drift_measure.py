"""How much do the paths differ on one prompt, step by step and layer by layer, and where does it come from?

Both paths walk in lockstep, teacher-forced on the same tokens; drift is cached minus recomputed at the same site, layer
and absolute position. Everything is reduced as it goes, so memory does not grow with the number of steps.

Per step and layer the drift at the block's output is also split in two (metrics: injected / propagated error). With
f_c and f_r one block as the cached and the recomputed path compute it, and x_c, x_r the residual stream that enters it,

    f_c(x_c) - f_r(x_r)  =  [f_c(x_r) - f_r(x_r)]  +  [f_c(x_c) - f_c(x_r)]
          drift                  injected                  propagated

f_c(x_r) is one more cached step in which every block is given the recomputed path's residual stream, done on every
`split_every`-th step. `injected` holds what the inherited cache and the one-token kernels of this very block add.

KV drift is given by provenance: `prefill` rows (written by the prompt), `decode` rows (written by one-token steps) and
`new`, the row of the newest token, which is not counted in `decode`.

Controls in every profile: step 0 (exactly zero), a repeated step (each path against itself, exactly zero), and the same
tokens in float32, from the same weights.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechkv import guards
from mechkv.cache import KVState
from mechkv.comparison import compare_logits, compare_rows
from mechkv.configs import check_kinds
from mechkv.errors import InputError
from mechkv.guards import GuardLog
from mechkv.models import info
from mechkv.paths import At, PathRunner, Step, lockstep
from mechkv.policies import Forced, Greedy, TokenPolicy
from mechkv.sites import AXES, CACHE_SITES, supported
from mechkv.stats import rng

METRICS: tuple[str, ...] = (
    "max_abs",
    "rel_l2",
    "rel_linf",
    "cosine_distance",
    "signed_mean",
    "rms",
    "max_ulp",
    "equal_fraction",
    "bitwise_equal",
    "nonfinite",
)
PROVENANCES = ("activation", "prefill", "decode", "new")
_NUMBERS = ("step", "position", "layer", "n_rows", "n")
_SITES = (*AXES, "logits")
_AT_ONCE = 2**19
"""Elements of K and V that are copied side by side to be compared: memory must not grow with the number of steps."""
DEFAULT_SITES: tuple[str, ...] = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")


@dataclass(frozen=True)
class DriftConfig:
    """What to measure.

    Attributes:
        n_steps: Decode steps after the prompt.
        sites: Sites with one `[d_model]` row a position; those that the family lacks are left out of the default.
        split_every: Injected / propagated error on every so many steps; 0: never.
        n_repeats: Steps per prompt that are done twice, on both paths, as the floor and the reproducibility guard.
        seed: Chooses the repeated steps.
    """

    n_steps: int = 24
    sites: tuple[str, ...] = DEFAULT_SITES
    split_every: int = 8
    n_repeats: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_kinds(self)
        if self.n_steps < 1:
            raise InputError("too few steps", got=self.n_steps, expected="at least 1", remedy="Step 0 cannot drift.")
        if self.split_every < 0 or not 1 <= self.n_repeats <= self.n_steps:
            raise InputError(
                "impossible sampling of steps",
                got=f"split_every={self.split_every}, n_repeats={self.n_repeats}",
                expected=f"split_every >= 0 and n_repeats in 1..{self.n_steps}",
                remedy="At least one step is repeated: a profile without its floor means nothing.",
            )
        wrong = [site for site in self.sites if AXES.get(site) != "pos d_model"]
        if wrong or not self.sites:
            raise InputError(
                "sites without one residual-sized row a position",
                got=wrong or "none",
                expected=f"some of {', '.join(DEFAULT_SITES)}",
                remedy="K, V and logits are profiled anyway; heads are the business of head_analysis.",
            )


@dataclass(frozen=True)
class PromptDrift:
    """One prompt, one model.

    Attributes:
        frame: A row per step, layer, site (and provenance of K/V); columns as in `drift.DriftProfile.frame`.
        steps: A row per step: token fed, metrics of the logits.
        split: A row per sampled step and layer: injected, propagated and total error, relative to the L2 norm of the
            recomputed output.
        tokens: `[pos]`, the prompt and the tokens fed.
        n_prompt: Tokens in the prompt.
        guards: How often each guard ran.
    """

    frame: pd.DataFrame
    steps: pd.DataFrame
    split: pd.DataFrame
    tokens: Int[Tensor, "pos"]
    n_prompt: int
    guards: dict[str, int] = field(default_factory=dict)


def profile_prompt(
    model: TransformerBridge,
    prompt: Int[Tensor, "pos"],
    config: DriftConfig,
    *,
    continuation: Sequence[int] | None = None,
    label: str | int = 0,
    progress: Callable[[], object] | None = None,
) -> PromptDrift:
    """Profile one prompt on both paths.

    Args:
        model: An admitted bridge.
        prompt: `[pos]`.
        config: What to measure.
        continuation: Tokens to feed after the prompt; by default the cached path's greedy choice.
        label: Names the prompt in the seed of the repeated steps.
        progress: Called after every step, step 0 included.

    Raises:
        GuardError, NonFiniteError: See `guards` and `paths`.
    """
    n_steps = config.n_steps if continuation is None else len(continuation)
    policy: TokenPolicy = Greedy() if continuation is None else Forced([*prompt.tolist(), *continuation])
    sites = tuple(supported(model, config.sites))
    sample = rng(config.seed, "repeat", label).permutation(np.arange(1, n_steps + 1))
    repeated = set(sample[: config.n_repeats].tolist())
    log, steps, split = GuardLog(), [], []
    table = _Table((n_steps + 1) * (info(model).n_layers * (len(sites) + 2 * len(PROVENANCES)) + 1))
    for cached, recomputed in lockstep(model, prompt, policy=policy, n_steps=n_steps, sites=sites, log=log):
        _put_step(table, cached, recomputed, sites)
        steps.append(_logit_row(cached, recomputed))
        if cached.index in repeated:
            _repeat(model, cached, recomputed, sites, log)
        if config.split_every and cached.index and (cached.index - 1) % config.split_every == 0:
            split += list(_split_rows(model, cached, recomputed, log))
        tokens = cached.tokens
        del cached, recomputed  # before the next step is made: each holds KV states
        if progress is not None:
            progress()
    return PromptDrift(
        frame=table.frame(),
        steps=pd.DataFrame(steps),
        split=pd.DataFrame(split, columns=["step", "layer", "injected", "propagated", "drift"]),
        tokens=tokens.cpu(),
        n_prompt=len(prompt),
        guards=dict(log),
    )


class _Table:
    """Rows of a frame, in blocks made before the first step.

    Small arrays kept from every step would lie between the large ones that come and go, and the process would grow.
    """

    def __init__(self, capacity: int) -> None:
        self._n = 0
        self._metrics = np.empty((capacity, len(METRICS)))
        self._numbers = np.empty((capacity, len(_NUMBERS)), dtype=np.int64)
        self._names = np.empty((capacity, 2), dtype=np.int8)

    def put(
        self,
        step: Step,
        provenance: str,
        places: Sequence[tuple[str, int]],
        found: dict[str, np.ndarray],
        *,
        n: int,
        n_rows: int = 1,
    ) -> None:
        """Rows of one step, one for each (site, layer), each over `n` elements."""
        room = slice(self._n, self._n + len(places))
        for column, name in enumerate(METRICS):
            self._metrics[room, column] = found[name]
        self._numbers[room] = (step.index, step.positions[-1], 0, n_rows, n)
        self._numbers[room, _NUMBERS.index("layer")] = [layer for _, layer in places]
        self._names[room, 0] = [_SITES.index(site) for site, _ in places]
        self._names[room, 1] = PROVENANCES.index(provenance)
        self._n += len(places)

    def frame(self) -> pd.DataFrame:
        """All rows so far."""
        numbers, names = self._numbers[: self._n].T, self._names[: self._n].T
        head = dict(zip(_NUMBERS, numbers, strict=True))
        head |= {"site": np.array(_SITES)[names[0]], "provenance": np.array(PROVENANCES)[names[1]]}
        head = {name: head[name] for name in ("step", "position", "site", "layer", "provenance", "n_rows", "n")}
        frame = pd.DataFrame(head | dict(zip(METRICS, self._metrics[: self._n].T, strict=True)))
        return frame.astype({"bitwise_equal": bool, "nonfinite": np.int64})


def _put_step(table: _Table, cached: Step, recomputed: Step, sites: Sequence[str]) -> None:
    """Drift of one step at the newest position, and of the KV state."""
    last = [_last_rows([value for site in sites for value in s.activations[site]]) for s in (cached, recomputed)]
    n_layers = len(cached.activations[sites[0]])
    places = [(site, layer) for site in sites for layer in range(n_layers)]
    table.put(cached, "activation", places, compare_rows(last[0], last[1]), n=last[0].shape[1])
    logits = compare_rows(cached.logits[None], recomputed.logits[None])
    table.put(cached, "activation", [("logits", n_layers)], logits, n=cached.logits.numel())
    for layers in _alike(cached.kv):
        _put_kv(table, cached, recomputed, layers)


def _last_rows(values: Sequence[Float[Tensor, "pos d_model"]]) -> Float[Tensor, "value d_model"]:
    return torch.cat([value if len(value) == 1 else value[-1:] for value in values])


def _alike(kv: KVState) -> list[list[int]]:
    """Layers whose K and V have one shape."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for layer, keys in enumerate(kv.keys):
        groups.setdefault(tuple(keys.shape), []).append(layer)
    return list(groups.values())


def _put_kv(table: _Table, cached: Step, recomputed: Step, alike: list[int]) -> None:
    """K and V of layers of one shape, by provenance, as many layers together as are compared at once."""
    first, newest = cached.kv.first_position(alike[0]), cached.kv.n_tokens - 1
    edge = cached.kv.n_prompt
    spans = {
        "prefill": (first, min(edge, newest + 1)),
        "decode": (max(first, edge), newest),
        "new": (newest, newest + 1),
    }
    if cached.index == 0:
        spans = {"prefill": (first, newest + 1)}
    n_kv, _, d_head = cached.kv.keys[alike[0]].shape
    for provenance, (start, stop) in spans.items():
        if start >= stop:
            continue
        n = n_kv * (stop - start) * d_head
        some = max(1, _AT_ONCE // (2 * n))
        for layers in (alike[i : i + some] for i in range(0, len(alike), some)):
            parts = [
                torch.stack([rows[layer][:, start - first : stop - first] for rows in both for layer in layers])
                for both in ((cached.kv.keys, cached.kv.values), (recomputed.kv.keys, recomputed.kv.values))
            ]
            places = [(site, layer) for site in CACHE_SITES for layer in layers]
            table.put(cached, provenance, places, compare_rows(parts[0], parts[1]), n=n, n_rows=stop - start)


def _logit_row(cached: Step, recomputed: Step) -> dict[str, Any]:
    row = {"step": cached.index, "position": cached.positions[-1], "token": int(cached.tokens[-1])}
    return row | compare_logits(cached.logits, recomputed.logits).to_dict()


def _repeat(model: TransformerBridge, cached: Step, recomputed: Step, sites: Sequence[str], log: GuardLog) -> None:
    """Do both halves of a step again, from the same state."""
    n_new = len(cached.positions)
    for step in (cached, recomputed):
        with PathRunner(model, step.path, sites=sites, log=log) as runner:
            state = cached.kv_before
            guards.check_repeat(step, runner.step(step.tokens, state, step.index, n_new), log)


class _GiveResidual:
    """Every block gets the recomputed path's residual stream."""

    sites = ("resid_pre",)

    def __init__(self, rows: Sequence[Float[Tensor, "row d_model"]]) -> None:
        self._rows = rows

    def __call__(self, value: Tensor, at: At) -> Tensor:
        assert at.layer is not None
        return self._rows[at.layer].clone()


def _split_rows(model: TransformerBridge, cached: Step, recomputed: Step, log: GuardLog) -> Iterator[dict[str, Any]]:
    given = [_GiveResidual(_site(model, recomputed, "resid_pre", log))]
    with PathRunner(model, "cached", sites=("resid_post",), interventions=given, log=log) as runner:
        mixed = runner.blocks(cached.tokens, cached.kv_before, cached.index)["resid_post"]
    ours, theirs = (_site(model, step, "resid_post", log) for step in (cached, recomputed))
    size = ours[0][-1].numel()
    stacks = [_last_rows(values) for values in (mixed, ours, theirs)]
    norms = torch.linalg.vector_norm(stacks[2].double(), dim=-1).cpu().numpy() / np.sqrt(size)
    parts = {
        "injected": compare_rows(stacks[0], stacks[2])["rms"] / norms,
        "propagated": compare_rows(stacks[1], stacks[0])["rms"] / norms,
        "drift": compare_rows(stacks[1], stacks[2])["rms"] / norms,
    }
    for layer in range(len(norms)):
        yield {"step": cached.index, "layer": layer} | {name: values[layer] for name, values in parts.items()}


def _site(model: TransformerBridge, step: Step, site: str, log: GuardLog) -> tuple[Tensor, ...]:
    """A site of a step that is already done; from the step when it recorded it, else by doing the step again."""
    if site in step.activations:
        return step.activations[site]
    with PathRunner(model, step.path, sites=(site,), log=log) as runner:
        return runner.step(step.tokens, step.kv_before, step.index, len(step.positions)).activations[site]
