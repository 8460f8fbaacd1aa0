"""Where does a drift begin, and how does it spread through the cache? The provenance map of the KV state.

For every decode step t the K and V rows of both paths are compared position by position: D[t, layer, position] is the
relative L2 difference between the cached row at that position and the recomputed path's row of the same position at
step t. Three things make a row differ, and they are told apart:

    born       the row is the newest one, written at this step, and differs between the paths already
    inherited  an older row that differed at the step before and has the same difference now
    moved      an older row whose value *on the recomputed path* changed since the step before: a full pass over one
               more token may use other kernels, so the reference itself moves while the cached row stays as written

Controls: step 0 is exactly zero on every row (guard `null_control`); cached rows never change once written (guard
`old_rows_unchanged`).
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

from mechkv.causal_run import CausalResult, Frames, Walks, run_prompts, walk
from mechkv.comparison import compare_rows
from mechkv.configs import check_kinds, chosen, require
from mechkv.guards import GuardLog
from mechkv.interventions import bits_differ
from mechkv.sites import CACHE_SITES
from mechkv.sources import Held, Pair


@dataclass(frozen=True)
class OnsetConfig:
    """How far to look.

    Attributes:
        n_steps: Decode steps after the prompt, on the cached path's greedy tokens.
    """

    n_steps: int = 12

    def __post_init__(self) -> None:
        check_kinds(self)
        require(self.n_steps >= 1, "steps", got=self.n_steps, expected="at least 1")


@dataclass(frozen=True)
class DriftOnset(CausalResult):
    """Where drift begins in the KV state.

    Attributes:
        frame: One row per prompt, step, layer and site (`cache_k`, `cache_v`): whether the newest row is born different
            (`born`), its relative L2 difference, how many older rows differ, and how many of them moved on the
            recomputed path since the step before.
        map: One row per prompt, layer, position and site, at the last step: relative L2 difference of the rows,
            provenance, and the step at which the row was written (0: the prompt).
    """

    map: pd.DataFrame

    KIND: ClassVar[str] = "drift_onset"
    TABLES: ClassVar[tuple[str, ...]] = ("frame", "map")
    CONFIG: ClassVar[type] = OnsetConfig

    def onset(self) -> pd.DataFrame:
        """Per prompt the first step at which any newly written row differs, with the first layer and site in the order
        of computation (K before V); and the first step and layer at which an older row moved on the recomputed path.
        Missing if never. A row that is born at the step and in or after the layer of a move may owe its difference to
        it; one that is born before is the one-token computation's own."""
        rows = []
        for prompt, part in self.frame.groupby("prompt"):
            row: dict[str, Any] = {"prompt": prompt}
            for name, hit in (("", part["born"]), ("moved_", part["n_moved"] > 0)):
                found = part[hit].sort_values(["step", "layer", "site"]).head(1)
                for column in ("step", "layer", "site"):
                    row[f"{name}{column}"] = found[column].iloc[0] if len(found) else pd.NA
            rows.append(row)
        whole = ("step", "layer", "moved_step", "moved_layer")
        return pd.DataFrame(rows).astype(dict.fromkeys(whole, "Int64"))

    def shares(self) -> pd.DataFrame:
        """Per site: share of newly written rows (layers x steps) that are born different, and the share of older rows
        that differ, and that moved, at the last step."""
        last = (
            self.frame[self.frame["step"] == self.frame["step"].max()]
            .groupby("site")[["n_old", "n_differ", "n_moved"]]
            .sum()
        )
        born = self.frame.groupby("site")["born"].mean()
        return pd.DataFrame(
            {
                "born": born,
                "old_rows_differ": last["n_differ"] / last["n_old"],
                "old_rows_moved": last["n_moved"] / last["n_old"],
            }
        ).reset_index()

    def plot(self) -> dict[str, Any]:
        """The figures of this result by name."""
        from mechkv import plots_patching

        return plots_patching.onset_figures(self)


def drift_onset(
    model: TransformerBridge,
    prompts: Sequence[str | Tensor],
    config: OnsetConfig | None = None,
    *,
    folder: Path | str | None = None,
    walks: Walks | None = None,
    progress: bool | None = None,
) -> DriftOnset:
    """Map the difference of every K and V row; arguments as for `causal_factorial`."""
    config = chosen(config, OnsetConfig)

    def measure(number: int, prompt: Tensor, log: GuardLog) -> Frames:
        before: Pair | None = None
        rows: list[dict[str, Any]] = []
        last: list[pd.DataFrame] = []
        for pair in walk(walks, model, prompt, config.n_steps, log):
            if before is not None:
                last = []
                for site in CACHE_SITES:
                    for layer in range(len(pair.cached.kv.keys)):
                        row, table = _rows(pair, before, site, layer, len(prompt))
                        rows.append(row)
                        last.append(table)
            before = pair
        return {"frame": pd.DataFrame(rows), "map": pd.concat(last, ignore_index=True)}

    return run_prompts(
        DriftOnset, model, prompts, config, measure, n_steps=config.n_steps, folder=folder, progress=progress
    )


def _rows(pair: Pair, before: Pair, site: str, layer: int, n_prompt: int) -> tuple[dict[str, Any], pd.DataFrame]:
    """One layer of one step: its row of the frame, and its part of the map."""
    ours, theirs = pair.rows("cached")[site, layer], pair.rows("recomputed")[site, layer]
    positions = ours.positions
    table = compare_rows(ours.value, _at(theirs, positions), dim=1)
    differs = ~table["bitwise_equal"].astype(bool)
    earlier = before.rows("recomputed")[site, layer]
    known = range(max(positions.start, earlier.positions.start), earlier.positions.stop)
    moved = int(bits_differ(_at(theirs, known), _at(earlier, known)).any(-1).any(0).sum())
    place = np.arange(positions.start, positions.stop)
    row = {
        "step": pair.index,
        "layer": layer,
        "site": site,
        "born": bool(differs[-1]),
        "born_rel_l2": float(table["rel_l2"][-1]),
        "n_old": len(positions) - 1,
        "n_differ": int(differs[:-1].sum()),
        "n_moved": moved,
    }
    frame = pd.DataFrame(
        {
            "layer": layer,
            "position": place,
            "site": site,
            "rel_l2": table["rel_l2"],
            "provenance": np.where(place < n_prompt, "prefill", "decode"),
            "written_at": np.maximum(place - n_prompt + 1, 0),
        }
    )
    return row, frame


def _at(held: Held, positions: range) -> Tensor:
    """Rows at these positions, `[n_kv, pos, d_head]`."""
    return torch.narrow(held.value, 1, positions.start - held.positions.start, len(positions)).contiguous()
