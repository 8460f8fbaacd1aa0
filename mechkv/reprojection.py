"""Are K and V exact functions of the residual stream? K and V projected again from the recorded residual, bit by bit.

KV-Direct (arXiv 2603.19664) drops the KV cache and computes K and V again from the residual stream, on the ground that
they are the same numbers. As mathematics, row by row and layer by layer,

    K = rotate(norm_k(W_K norm(x))),   V = W_V norm(x),   x = `resid_pre`,

so they are. As bits, W x depends on how many rows are projected at once, because kernels differ by shape. The residual
rows of one run are therefore given to every layer again, and K and V read where attention reads them:

    one-row     one position at a time (a decode step)
    many-row    all rows of the run in one pass
    prompt      the rows of the prompt in one pass, as the prompt was processed

and compared with the K and V rows that were cached, by the way in which these were written: `prefill` (the prompt's
pass), `decode` (one-row steps), `full` (the recomputed path's last pass).

Controls: projecting with the shape of the writing pass must be bitwise equal, on every row and layer (guard
`same_shape_projection`), so what differs elsewhere is the shape and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechkv.cache import KVState
from mechkv.causal_run import CausalResult, Frames, run_prompts
from mechkv.comparison import compare_rows
from mechkv.configs import check_kinds, chosen, require
from mechkv.errors import GuardError
from mechkv.guards import GuardLog
from mechkv.interventions import Patch
from mechkv.paths import Path as PathName
from mechkv.paths import PathRunner, Step, decode
from mechkv.policies import Forced, Greedy
from mechkv.sources import Held, KVReader, TensorSource
from mechkv.stats import rng

SITE = "resid_pre"
SAME_SHAPE = {("prefill", "prompt"), ("decode", "one-row"), ("full", "many-row")}
Rows = dict[tuple[str, int], Held]


@dataclass(frozen=True)
class ReprojectionConfig:
    """What to project again.

    Attributes:
        n_steps: Decode steps after the prompt, on the cached path's greedy tokens.
        n_sampled: Prompt rows that are projected one at a time (decode rows all are).
        seed: Chooses them.
    """

    n_steps: int = 8
    n_sampled: int = 6
    seed: int = 0

    def __post_init__(self) -> None:
        check_kinds(self)
        require(self.n_steps >= 1 and self.n_sampled >= 1, "steps, rows", got=self, expected="at least 1 of each")


@dataclass(frozen=True)
class Reprojection(CausalResult):
    """K and V, cached against projected again.

    Attributes:
        frame: One row per prompt, writer (`prefill`, `decode`, `full`), projection (`one-row`, `many-row`, `prompt`),
            layer, site and position: relative L2, ULP distance, bit equality of the row.
    """

    KIND: ClassVar[str] = "reprojection"
    CONFIG: ClassVar[type] = ReprojectionConfig

    def summary(self) -> pd.DataFrame:
        """Per writer, projection and site: share of bitwise equal rows, largest relative L2 and ULP distance."""
        grouped = self.frame.groupby(["writer", "projection", "site"], sort=False)
        return grouped.agg(
            bitwise_equal=("bitwise_equal", "mean"),
            rel_l2=("rel_l2", "max"),
            max_ulp=("max_ulp", "max"),
            n_rows=("bitwise_equal", "size"),
        ).reset_index()


def reprojection_check(
    model: TransformerBridge,
    prompts: Sequence[str | Tensor],
    config: ReprojectionConfig | None = None,
    *,
    folder: Path | str | None = None,
    progress: bool | None = None,
) -> Reprojection:
    """Project K and V again from the residual stream; arguments as for `causal_factorial`."""
    config = chosen(config, ReprojectionConfig)

    def measure(number: int, prompt: Tensor, log: GuardLog) -> Frames:
        frames = _cached_run(model, prompt, config, number, log)
        return {"frame": pd.concat(frames, ignore_index=True)}

    return run_prompts(
        Reprojection, model, prompts, config, measure, n_steps=config.n_steps, folder=folder, progress=progress
    )


def _cached_run(
    model: TransformerBridge, prompt: Tensor, config: ReprojectionConfig, number: int, log: GuardLog
) -> list[pd.DataFrame]:
    n_prompt, parts = len(prompt), []
    written: dict[tuple[str, int, int], Tensor] = {}
    step: Step | None = None
    for step in decode(model, prompt, path="cached", policy=Greedy(), n_steps=config.n_steps, sites=(SITE,), log=log):
        parts.append(step.activations[SITE])
        written |= _newest(step)
    assert step is not None
    tokens, residual = step.tokens, [torch.cat(rows) for rows in zip(*parts, strict=True)]
    drawn = rng(config.seed, "rows", number).permutation(n_prompt)[: config.n_sampled].tolist()
    one = _one_row(model, tokens, step.kv, residual, [*sorted(drawn), *range(n_prompt, len(tokens))], log)
    prompt_rows = _one_pass(model, prompt, n_prompt, [rows[:n_prompt] for rows in residual], log)
    many = _one_pass(model, tokens, n_prompt, residual, log)
    full, full_residual = _full_run(model, tokens, n_prompt, log)
    again = _one_pass(model, tokens, n_prompt, full_residual, log)
    full_one = _one_row(model, tokens, step.kv, full_residual, [*sorted(drawn), *range(n_prompt, len(tokens))], log)
    cells = [
        ("prefill", "prompt", written, prompt_rows),
        ("prefill", "many-row", written, many),
        ("prefill", "one-row", written, one),
        ("decode", "one-row", written, one),
        ("decode", "many-row", written, many),
        ("full", "many-row", full, again),
        ("full", "one-row", full, full_one),
    ]
    return [_compared(*cell, n_prompt, log) for cell in cells]


def _newest(step: Step) -> dict[tuple[str, int, int], Tensor]:
    """K and V rows that this step wrote and that its state still holds, `[n_kv, 1, d_head]` each."""
    found = {}
    for site, rows in (("cache_k", step.kv.keys), ("cache_v", step.kv.values)):
        for layer, held in enumerate(rows):
            first = len(step.tokens) - held.shape[1]
            for position in range(max(first, len(step.tokens) - step.n_new), len(step.tokens)):
                found[site, layer, position] = held[:, position - first : position - first + 1]
    return found


def _give(into: PathName, residual: Sequence[Tensor]) -> Patch:
    tensors = {(SITE, layer): (rows, 0) for layer, rows in enumerate(residual)}
    return Patch(TensorSource(tensors), into, (SITE,))


def _one_pass(
    model: TransformerBridge, tokens: Tensor, n_prompt: int, residual: Sequence[Tensor], log: GuardLog
) -> dict[tuple[str, int, int], Tensor]:
    """All rows in one pass, every layer given its recorded residual."""
    reader = KVReader()
    given = (_give("recomputed", residual), reader)
    with PathRunner(model, "recomputed", interventions=given, log=log) as runner:
        runner.step(tokens, KVState((), (), 0, n_prompt), 0)
    return _by_position(reader.rows)


def _full_run(
    model: TransformerBridge, tokens: Tensor, n_prompt: int, log: GuardLog
) -> tuple[dict[tuple[str, int, int], Tensor], list[Tensor]]:
    """The recomputed path's pass over all tokens: its K and V rows and its residual stream."""
    reader = KVReader()
    runs = decode(
        model, tokens, path="recomputed", policy=Forced([]), n_steps=0, sites=(SITE,), interventions=(reader,), log=log
    )
    (step,) = list(runs)
    return _by_position(reader.rows), list(step.activations[SITE])


def _one_row(
    model: TransformerBridge,
    tokens: Tensor,
    like: KVState,
    residual: Sequence[Tensor],
    positions: Sequence[int],
    log: GuardLog,
) -> dict[tuple[str, int, int], Tensor]:
    """One position at a time. The older rows are blank: every layer is given its residual, so attention is of no
    account, and the number of older rows sets the position."""
    found: dict[tuple[str, int, int], Tensor] = {}
    with PathRunner(model, "cached", interventions=(_give("cached", residual),), log=log) as runner:
        for position in positions:
            if position == 0:
                continue
            keys, values = (
                tuple(r.new_zeros(r[:, :position].shape) for r in rows) for rows in (like.keys, like.values)
            )
            state = KVState(keys, values, position, like.n_prompt)
            found |= _newest(runner.step(tokens[: position + 1], state, 1))
    return found


def _by_position(rows: Rows) -> dict[tuple[str, int, int], Tensor]:
    return {
        (site, layer, position): held.value[:, i : i + 1]
        for (site, layer), held in rows.items()
        for i, position in enumerate(held.positions)
    }


def _compared(
    writer: str,
    projection: str,
    cached: dict[tuple[str, int, int], Tensor],
    again: dict[tuple[str, int, int], Tensor],
    n_prompt: int,
    log: GuardLog,
) -> pd.DataFrame:
    meant = {"prefill": lambda p: p < n_prompt, "decode": lambda p: p >= n_prompt, "full": lambda p: True}[writer]
    keys = [key for key in again if key in cached and meant(key[2])]
    table = compare_rows(torch.stack([cached[k] for k in keys]), torch.stack([again[k] for k in keys]))
    equal = table["bitwise_equal"].astype(bool)
    if (writer, projection) in SAME_SHAPE:
        if not equal.all():
            site, layer, position = keys[int(np.flatnonzero(~equal)[0])]
            raise GuardError(
                "projecting the recorded residual with the shape of the pass that wrote it gives other bits",
                got=f"a difference in {site}, layer {layer}, position {position} ({writer}, {projection})",
                expected="bitwise equality",
                remedy="The recorded residual is not what the layer read, or the kernels are not deterministic.",
            )
        log["same_shape_projection"] += len(keys)
    places: dict[str, Any] = {name: [k[i] for k in keys] for i, name in enumerate(("site", "layer", "position"))}
    metrics = {name: table[name] for name in ("rel_l2", "max_ulp")}
    return pd.DataFrame({"writer": writer, "projection": projection} | places | metrics | {"bitwise_equal": equal})
