"""Which heads, dimensions and rotary frequencies carry the drift of one prompt?

Drift is cached minus recomputed, teacher-forced, at the row of the newest token. Per step and layer it is given for
every head of `q`, `z` (query heads) and of `k`, `rot_k`, `v` (KV heads). `k` is the projection's output: before
rotation, and before the norm of K where the family has one. `rot_k` is what attention reads: it is taken from the KV
state, which has it in every family. Query head h reads KV head h // (n_heads / n_kv); those heads are its **group**.

Squared drift is also summed over steps for every dimension of a head; dimensions that rotation pairs (i and i + d/2)
have one frequency. Attention rows: total variation, entropy on both paths, and where the moved mass is (first key, the
token itself, rows that decoding wrote). Window layers are compared on the keys that both paths hold; what the
recomputed path gives to any other key is reported (it must be 0).

Sharing within a group: the cosine between the drift vectors of two heads' outputs, averaged over pairs of heads within
groups and between them. Heads of a group read the same V rows, so their outputs have the same basis; heads of different
groups do not, and `within_shifted`, the cosine of one head's drift with another's of the same group one step earlier,
is the control that has the basis but not the step.

Controls: step 0 is exactly zero; a sample of steps is done twice and must be bitwise the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechkv import guards
from mechkv.comparison import compare_rows
from mechkv.errors import InputError
from mechkv.guards import GuardLog
from mechkv.models import info
from mechkv.paths import PathRunner, Step, lockstep
from mechkv.policies import Forced, Greedy, TokenPolicy
from mechkv.sites import supported, to_hook_layout
from mechkv.stats import rng

QUERY_SITES: tuple[str, ...] = ("q", "z")
KV_SITES: tuple[str, ...] = ("k", "rot_k", "v")
HEAD_SITES: tuple[str, ...] = (*QUERY_SITES, *KV_SITES)
_HOOKED: tuple[str, ...] = ("q", "k", "z", "pattern")


@dataclass(frozen=True)
class HeadLayout:
    """How the heads of a model are laid out.

    Attributes:
        n_heads: Query heads.
        n_kv: KV heads.
        d_head: Dimensions of a head.
        kinds: Per layer `window` or `full`.
        frequencies: Per layer `[pair]`, radians a token, of the rotated pairs; empty where nothing is rotated.
        pairing: `halves` (i with i + d/2) or `neighbours` (2i with 2i + 1).
    """

    n_heads: int
    n_kv: int
    d_head: int
    kinds: tuple[str, ...]
    frequencies: tuple[tuple[float, ...], ...]
    pairing: str

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.n_heads // self.n_kv

    def pairs(self, layer: int) -> np.ndarray:
        """`[d_head]`: the rotary pair of every dimension, -1 where it is not rotated."""
        n = len(self.frequencies[layer])
        index = np.full(self.d_head, -1)
        index[: 2 * n] = np.tile(np.arange(n), 2) if self.pairing == "halves" else np.repeat(np.arange(n), 2)
        return index


def head_layout(model: TransformerBridge) -> HeadLayout:
    """Read the layout of heads from an admitted model."""
    known = info(model)
    kinds = tuple("full" if window is None else "window" for window in known.windows)
    tables: dict[str, tuple[float, ...]] = {}
    for name, table in model.original_model.named_buffers():
        leaf = name.rsplit(".", 1)[-1]
        if leaf.endswith("inv_freq") and not leaf.endswith("original_inv_freq"):
            tables[leaf.removesuffix("inv_freq")] = tuple(table.double().tolist())
    by_kind = {"window": tables.get("sliding_attention_"), "full": tables.get("full_attention_")}
    shared = tables.get("", ())
    return HeadLayout(
        known.n_heads,
        known.n_kv,
        known.d_head,
        kinds,
        tuple(by_kind[kind] or shared for kind in kinds),
        "neighbours" if getattr(model.cfg, "rotary_adjacent_pairs", False) else "halves",
    )


@dataclass(frozen=True)
class PromptHeads:
    """One prompt, one model; frames as in `heads.HeadAnalysis`, without `dtype` and `prompt`."""

    heads: pd.DataFrame
    patterns: pd.DataFrame
    groups: pd.DataFrame
    dims: pd.DataFrame
    tokens: Int[Tensor, "pos"]
    guards: dict[str, int] = field(default_factory=dict)


def measure_heads(
    model: TransformerBridge,
    prompt: Int[Tensor, "pos"],
    *,
    n_steps: int,
    continuation: Sequence[int] | None = None,
    n_repeats: int = 1,
    seed: int = 0,
    label: str | int = 0,
) -> PromptHeads:
    """Both paths in lockstep on one prompt.

    Args:
        model: An admitted bridge.
        prompt: `[pos]`.
        n_steps: Decode steps; those of `continuation` where it is given.
        continuation: Tokens to feed after the prompt; by default the cached path's greedy choice.
        n_repeats: Steps that are done twice, on both paths.
        seed: Chooses the repeated steps, with `label`.
        label: Names the prompt.

    Raises:
        InputError: The family has no per-head hook points.
        GuardError, NonFiniteError: See `guards` and `paths`.
    """
    n_steps = n_steps if continuation is None else len(continuation)
    policy: TokenPolicy = Greedy() if continuation is None else Forced([*prompt.tolist(), *continuation])
    sites = head_sites(model)
    repeated = set((1 + rng(seed, "repeat heads", label).permutation(n_steps)[:n_repeats]).tolist())
    log = GuardLog()

    def checked() -> Iterator[tuple[Step, Step]]:
        for cached, recomputed in lockstep(model, prompt, policy=policy, n_steps=n_steps, sites=sites, log=log):
            if cached.index in repeated:
                _repeat(model, cached, recomputed, sites, log)
            yield cached, recomputed

    found = reduce_pairs(checked(), head_layout(model))
    return PromptHeads(**found, guards=dict(log))


def head_sites(model: TransformerBridge) -> tuple[str, ...]:
    """The hook sites that the analysis records.

    Raises:
        InputError: The family lacks one.
    """
    if len(found := supported(model, _HOOKED)) < len(_HOOKED):
        raise InputError(
            "this family has no per-head hook points",
            got=f"{info(model).family} with {', '.join(found) or 'none'}",
            expected=", ".join(_HOOKED),
            remedy="Use drift_profile, which needs residual sites and the KV state only.",
        )
    return _HOOKED


def reduce_pairs(pairs: Iterable[tuple[Step, Step]], layout: HeadLayout) -> dict[str, Any]:
    """Everything `PromptHeads` holds, from (cached, recomputed) steps that recorded `head_sites`, reduced as they come.

    The steps may come from anywhere (a path with interventions, for one): this is where a planted error is looked for.
    """
    heads, patterns, groups = [], [], []
    sums: dict[str, list[Tensor]] = {}
    before: Tensor | None = None
    tokens = torch.zeros(0, dtype=torch.int64)
    for cached, recomputed in pairs:
        ours, theirs = _newest(cached), _newest(recomputed)
        heads += [_head_rows(cached, site, ours[site], theirs[site], layout) for site in HEAD_SITES]
        patterns += list(_pattern_rows(cached, recomputed, layout))
        drift = ours["z"].double() - theirs["z"].double()
        if cached.index:
            groups.append(_group_rows(cached.index, drift, before, layout))
            _add(sums, ours, theirs)
        before, tokens = drift, cached.tokens
    return {
        "heads": pd.concat(heads, ignore_index=True),
        "patterns": pd.concat(patterns, ignore_index=True),
        "groups": pd.concat(groups, ignore_index=True) if groups else pd.DataFrame(),
        "dims": _dim_rows(sums, layout),
        "tokens": tokens.cpu(),
    }


def _newest(step: Step) -> dict[str, Float[Tensor, "layer head d_head"]]:
    """The newest row of every site, all layers."""
    found = {site: torch.stack([value[-1] for value in step.activations[site]]) for site in ("q", "k", "z")}
    for site, state in (("rot_k", step.kv.keys), ("v", step.kv.values)):
        found[site] = torch.stack([to_hook_layout(rows)[-1] for rows in state])
    return found


def _head_rows(step: Step, site: str, ours: Tensor, theirs: Tensor, layout: HeadLayout) -> pd.DataFrame:
    n_layers, n_heads, d_head = ours.shape
    table = compare_rows(ours, theirs, dim=(0, 1))
    square = table["rms"] ** 2 * d_head
    total = square.sum(1, keepdims=True)
    head = np.tile(np.arange(n_heads), n_layers)
    return pd.DataFrame(
        {
            "step": step.index,
            "position": step.positions[-1],
            "site": site,
            "layer": np.repeat(np.arange(n_layers), n_heads),
            "kind": np.repeat(layout.kinds, n_heads),
            "head": head,
            "group": head // layout.group_size if site in QUERY_SITES else head,
            "rel_l2": table["rel_l2"].ravel(),
            "rms": table["rms"].ravel(),
            "max_ulp": table["max_ulp"].ravel(),
            "bitwise_equal": table["bitwise_equal"].ravel(),
            "share": (square / np.where(total > 0, total, 1.0)).ravel(),
        }
    )


def _pattern_rows(cached: Step, recomputed: Step, layout: HeadLayout) -> Iterator[pd.DataFrame]:
    for layer, (a, b) in enumerate(zip(cached.activations["pattern"], recomputed.activations["pattern"], strict=True)):
        p, q = (rows[:, -1].double() for rows in (a, b))
        width = min(p.shape[-1], q.shape[-1])
        outside = p[:, :-width].sum(-1) + q[:, :-width].sum(-1)
        p, q = p[:, -width:], q[:, -width:]
        moved = (p - q).abs() / 2
        first_key = cached.kv.n_tokens - width
        n_decode = min(max(cached.kv.n_tokens - max(cached.kv.n_prompt, first_key), 0), width)
        head = np.arange(layout.n_heads)
        values = {
            "tv": moved.sum(-1),
            "tv_first": moved[:, 0],
            "tv_self": moved[:, -1],
            "tv_decode": moved[:, width - n_decode :].sum(-1),
            "entropy_cached": _entropy(p),
            "entropy_recomputed": _entropy(q),
            "mass_first": q[:, 0],
            "mass_self": q[:, -1],
            "mass_decode": q[:, width - n_decode :].sum(-1),
            "outside": outside,
        }
        place = {"step": cached.index, "layer": layer, "kind": layout.kinds[layer], "head": head}
        place |= {"group": head // layout.group_size, "n_keys": width, "first_key": first_key}
        yield pd.DataFrame(place | {name: value.cpu().numpy() for name, value in values.items()})


def _entropy(rows: Tensor) -> Tensor:
    return -torch.special.xlogy(rows, rows).sum(-1)


def _group_rows(index: int, drift: Tensor, before: Tensor | None, layout: HeadLayout) -> pd.DataFrame:
    """Cosines of head-output drift within and between groups; pairs with a head that did not drift are left out."""
    n_layers = drift.shape[0]
    now = _unit(drift)
    earlier = now if before is None else _unit(before)
    cosine = torch.einsum("l i d, l j d -> l i j", now, now)
    shifted = torch.einsum("l i d, l j d -> l i j", now, earlier)
    group = torch.arange(layout.n_heads, device=drift.device) // layout.group_size
    same = group[:, None] == group[None, :]
    other = ~torch.eye(layout.n_heads, dtype=torch.bool, device=drift.device)
    columns = {
        "within": _mean_over(cosine, same & other),
        "between": _mean_over(cosine, ~same),
        "within_shifted": _mean_over(shifted, same & other),
    }
    return pd.DataFrame(
        {"step": index, "layer": np.arange(n_layers), "kind": layout.kinds}
        | {name: value.cpu().numpy() for name, value in columns.items()}
        | {"n_drifting": (drift.abs().amax(-1) > 0).sum(-1).cpu().numpy()}
    )


def _unit(drift: Tensor) -> Tensor:
    """Unit vectors; NaN where there is no drift, so that such a head is in no pair."""
    norm = torch.linalg.vector_norm(drift, dim=-1, keepdim=True)
    return torch.where(norm > 0, drift / norm, torch.nan)


def _mean_over(cosine: Tensor, chosen: Tensor) -> Tensor:
    """`[layer]`: the mean over chosen pairs that are defined; NaN where there is none."""
    values = cosine[:, chosen]
    return torch.nanmean(values, dim=-1) if values.shape[-1] else cosine.new_full((len(cosine),), torch.nan)


def _add(sums: dict[str, list[Tensor]], ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for site in HEAD_SITES:
        a, b = ours[site].double(), theirs[site].double()
        new = [(a - b).square(), b.square()]
        sums[site] = [old + value for old, value in zip(sums[site], new, strict=True)] if site in sums else new


def _dim_rows(sums: dict[str, list[Tensor]], layout: HeadLayout) -> pd.DataFrame:
    frames = []
    for site, (error, reference) in sums.items():
        n_layers, n_heads, d_head = error.shape
        layer = np.repeat(np.arange(n_layers), n_heads * d_head)
        pair = np.concatenate([np.tile(layout.pairs(i), n_heads) for i in range(n_layers)])
        table = [np.array(f, dtype=np.float64) for f in layout.frequencies]
        frequency = [table[i][p] if p >= 0 else np.nan for i, p in zip(layer, pair, strict=True)]
        frames.append(
            pd.DataFrame(
                {
                    "site": site,
                    "layer": layer,
                    "kind": np.repeat(layout.kinds, n_heads * d_head),
                    "head": np.tile(np.repeat(np.arange(n_heads), d_head), n_layers),
                    "dim": np.tile(np.arange(d_head), n_layers * n_heads),
                    "pair": pair,
                    "frequency": frequency,
                    "square": rearrange(error, "l h d -> (l h d)").cpu().numpy(),
                    "reference": rearrange(reference, "l h d -> (l h d)").cpu().numpy(),
                }
            )
        )
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _repeat(model: TransformerBridge, cached: Step, recomputed: Step, sites: Sequence[str], log: GuardLog) -> None:
    for step in (cached, recomputed):
        with PathRunner(model, step.path, sites=sites, log=log) as runner:
            again = runner.step(step.tokens, cached.kv_before, step.index, len(cached.positions))
        guards.check_repeat(step, again, log)
