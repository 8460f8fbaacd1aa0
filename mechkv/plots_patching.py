"""What do the causal experiments look like? Figures from their results; nothing is computed here but reshaping.

Conventions: `figure_style`. Recovery is drawn on a linear axis from 0 (nothing happened) to 1 (the source path's
logits), and clipped below at -1, where a patch makes the difference twice as large: a triangle marks what lies lower.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from mechkv.figure_style import (
    DOUBLE,
    SERIES_LOOKS,
    Look,
    draw_line,
    integer_axis,
    new_figure,
    settle,
    style,
    zero_aware_log_axis,
)

if TYPE_CHECKING:
    from mechkv.factorial import CausalFactorial
    from mechkv.onset import DriftOnset
    from mechkv.patching import PatchSweep
    from mechkv.trajectory import TeacherForced

LOWEST = -1.0
HIGHEST = 2.0
_TARGET_LOOKS = dict(zip(("residual", "k", "v", "kv"), SERIES_LOOKS, strict=False))
_NAMES = {"residual": "residual", "k": "K", "v": "V", "kv": "K and V"}
_CELL_NAMES = {
    ("cached", "one-token"): "cached path",
    ("recomputed", "one-token"): "recomputed state,\none token",
    ("cached", "full"): "cached state,\nfull pass",
}


def factorial_figures(result: "CausalFactorial") -> dict[str, Figure]:
    """Every figure of a factorial, by name."""
    return {"factorial_cells": factorial_cells(result), "factorial_shares": factorial_shares(result)}


def factorial_cells(result: "CausalFactorial") -> Figure:
    """Distance of three cells from the fourth, the recomputed path: one marker a step, exact zeros apart."""
    frame = result.frame[(result.frame["quantity"] == "logits")]
    with style():
        figure = new_figure(DOUBLE / 2, 2.6)
        axes = figure.add_subplot()
        shown = [frame[(frame["state"] == s) & (frame["computation"] == c)] for s, c in _CELL_NAMES]
        strip = zero_aware_log_axis(axes, pd.concat(shown)["rel_l2"].to_numpy())
        rng = np.random.default_rng(0)
        for place, (part, look) in enumerate(zip(shown, SERIES_LOOKS, strict=False)):
            x = place + rng.uniform(-0.25, 0.25, len(part))
            above = (part["rel_l2"] > 0).to_numpy()
            axes.plot(
                x[above], part["rel_l2"][above], linestyle="none", marker=look.marker, color=look.colour, alpha=0.6
            )
            if not above.all():
                strip.mark(x[~above], look)
            axes.annotate(
                f"{(~above).sum()} of {len(above)}\nbitwise equal",
                (place, 1.0),
                xycoords=axes.get_xaxis_transform(),
                ha="center",
                va="bottom",
                fontsize=6,
            )
        axes.set_xticks(range(3), list(_CELL_NAMES.values()), fontsize=6)
        axes.set_xlim(-0.6, 2.6)
        axes.set_ylabel("relative L2 of the logits\nfrom the recomputed path")
        sns.despine(ax=axes)
    return settle(figure)


def factorial_shares(result: "CausalFactorial") -> Figure:
    """Share of the drift that is inherited and that is made afresh, with 95 % intervals over prompts."""
    table = result.summary()
    order = [
        ("logits", "inherited_share", "logits,\ninherited"),
        ("logits", "new_share", "logits,\nmade afresh"),
        ("residual", "inherited_share", "residual,\ninherited"),
        ("residual", "new_share", "residual,\nmade afresh"),
        ("logits", "kl_inherited_share", "KL,\ninherited"),
        ("logits", "kl_new_share", "KL,\nmade afresh"),
    ]
    with style():
        figure = new_figure(DOUBLE / 2, 2.6)
        axes = figure.add_subplot()
        for place, (quantity, measure, _) in enumerate(order):
            row = table[(table["quantity"] == quantity) & (table["measure"] == measure)]
            look = SERIES_LOOKS[place % 2]
            _interval(axes, place, row, look)
        for height in (0.0, 1.0):
            axes.axhline(height, color="0.6", linewidth=0.5, zorder=0)
        axes.set_xticks(range(len(order)), [name for *_, name in order], fontsize=6)
        axes.set_ylim(1.25 * LOWEST, 1.25 * HIGHEST)
        axes.set_ylabel("share of the drift\n(triangles: the interval goes on)")
        sns.despine(ax=axes)
    return settle(figure)


def _interval(axes: Axes, place: int, row: pd.DataFrame, look: Look) -> None:
    if row.empty or not np.isfinite(row["estimate"].iloc[0]):
        axes.annotate("no drift", (place, 0.5), ha="center", rotation=90, fontsize=6)
        return
    estimate, low, high = (float(row[name].iloc[0]) for name in ("estimate", "low", "high"))
    shown = float(np.clip(estimate, LOWEST, HIGHEST))
    axes.plot([place], [shown], marker=look.marker, color=look.colour, linestyle="none", markersize=5)
    if shown != estimate:
        axes.annotate(f" {estimate:.1g}", (place, shown), fontsize=6, va="center")
    if np.isfinite([low, high]).all():
        axes.vlines(place, max(low, LOWEST), min(high, HIGHEST), color=look.colour)
        ends = [end for end, inside in ((LOWEST, low >= LOWEST), (HIGHEST, high <= HIGHEST)) if not inside]
        for end in ends:  # the interval goes on
            axes.plot([place], [1.1 * end], marker="v" if end == LOWEST else "^", color=look.colour, markersize=4)


def sweep_figures(result: "PatchSweep") -> dict[str, Figure]:
    """Every figure of a sweep, by name."""
    return {"recovery_by_layer": recovery_by_layer(result), "recovery_all_layers": recovery_all_layers(result)}


def recovery_by_layer(result: "PatchSweep", metric: str = "rel_l2") -> Figure:
    """Recovery by patched layer, the same step and later steps apart, with the noise placebo."""
    table = result.summary(metric)
    table = table[table["layer"] >= 0]
    laters = sorted(table["later"].unique())
    with style():
        figure = new_figure(DOUBLE, 2.6)
        panels = figure.subplots(1, len(laters), sharey=True, squeeze=False)[0]
        for axes, later in zip(panels, laters, strict=True):
            part = table[table["later"] == later]
            for target, look in _TARGET_LOOKS.items():
                line = part[(part["target"] == target) & (part["kind"] == "patch")].sort_values("layer")
                if len(line):
                    _recovery_line(axes, line, look, _NAMES[target])
                hiss = part[(part["target"] == target) & (part["kind"] == "noise")].sort_values("layer")
                if len(hiss):
                    _recovery_line(
                        axes, hiss, Look("0.55", look.dash, look.marker), f"{_NAMES[target]}, noise", faint=True
                    )
            for height in (0.0, 1.0):
                axes.axhline(height, color="0.6", linewidth=0.5, zorder=0)
            axes.set_title("the patched step" if later == 0 else f"{later} step{'s' * int(later > 1)} later, unpatched")
            integer_axis(axes, "patched layer")
            sns.despine(ax=axes)
        panels[0].set_ylim(LOWEST - 0.1, 1.15)
        panels[0].set_ylabel("recovery (relative L2 of the logits)")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=6)
    return settle(figure)


def _recovery_line(axes: Axes, line: pd.DataFrame, look: Look, label: str, faint: bool = False) -> None:
    y = line["estimate"].to_numpy(np.float64)
    band = None if faint else (line["low"].clip(LOWEST), line["high"].clip(LOWEST))
    drawn = draw_line(axes, line["layer"], np.clip(y, LOWEST, None), look, label, band=band)
    if faint:
        drawn.set(linewidth=0.7, markersize=2.5, zorder=1.5)
    below = y < LOWEST
    axes.plot(line["layer"][below], np.full(below.sum(), LOWEST), marker="v", color=look.colour, linestyle="none")


def recovery_all_layers(result: "PatchSweep", metric: str = "rel_l2") -> Figure:
    """Recovery when all layers are patched: targets, parts of the KV state, doses and placebos."""
    table = result.summary(metric)
    table = table[(table["layer"] < 0) | (table["kind"] == "one_ulp")]
    names = [
        f"{_NAMES.get(row.target, row.target.replace('kv_', 'K and V, '))}"
        + ("" if row.kind == "patch" else f", dose {row.dose:g}" if row.kind == "dose" else f", {row.kind}")
        for row in table.itertuples()
    ]
    table = table.assign(name=[name.replace("_", " ") for name in names])
    order = list(dict.fromkeys(table["name"]))
    with style():
        figure = new_figure(DOUBLE, 0.17 * len(order) + 0.9)
        axes = figure.add_subplot()
        for i, later in enumerate(sorted(table["later"].unique())):
            part, look = table[table["later"] == later], SERIES_LOOKS[i % len(SERIES_LOOKS)]
            y = np.array([order.index(name) for name in part["name"]]) + 0.18 * i
            x = part["estimate"].to_numpy(np.float64)
            axes.plot(
                np.clip(x, LOWEST, None),
                y,
                linestyle="none",
                marker=look.marker,
                color=look.colour,
                label="the patched step" if later == 0 else f"{later} later, unpatched",
            )
            low, high = (np.clip(part[name].to_numpy(np.float64), LOWEST, HIGHEST) for name in ("low", "high"))
            axes.hlines(y, low, high, color=look.colour, linewidth=0.8)
            for lost in np.flatnonzero(x < LOWEST):
                axes.annotate(f" {x[lost]:.1g}", (LOWEST + 0.15 * i, y[lost]), fontsize=6, va="center")
        for place in (0.0, 1.0):
            axes.axvline(place, color="0.6", linewidth=0.5, zorder=0)
        axes.set_yticks(range(len(order)), order)
        axes.invert_yaxis()
        axes.set_xlim(LOWEST - 0.08, 1.15)
        axes.set_xlabel("recovery (relative L2 of the logits), all layers patched")
        sns.despine(ax=axes)
        figure.legend(loc="outside lower center", ncols=3)
    return settle(figure)


def trajectory_figures(result: "TeacherForced") -> dict[str, Figure]:
    """Every figure of teacher-forced trajectories, by name."""
    return {"trajectory_drift": trajectory_drift(result)}


def trajectory_drift(result: "TeacherForced", metric: str = "rel_l2") -> Figure:
    """Drift of each condition by step, mean over prompts: as it was run, and the inherited state without a patch."""
    frame = result.frame.groupby(["view", "condition", "step"])[metric].mean().reset_index()
    conditions = list(dict.fromkeys(result.frame["condition"]))
    with style():
        figure = new_figure(DOUBLE, 2.6)
        panels = figure.subplots(1, 2, sharey=True)
        zeros = [c for c in conditions if (frame[frame["condition"] == c][metric] == 0).any()]
        for axes, view in zip(panels, ("patched", "probe"), strict=True):
            part = frame[frame["view"] == view]
            strip = zero_aware_log_axis(axes, frame[metric].to_numpy(), max(len(zeros), 1))
            for condition, look in zip(conditions, SERIES_LOOKS, strict=False):
                line = part[part["condition"] == condition].sort_values("step")
                row = zeros.index(condition) if condition in zeros else 0
                draw_line(axes, line["step"], line[metric], look, condition, strip=strip, series=row)
            axes.axvline(result.config.at, color="0.6", linewidth=0.5, linestyle=(0, (1, 2)), zorder=0)
            axes.set_title("the step as it was run" if view == "patched" else "the same inherited state, unpatched")
            integer_axis(axes, "step")
            sns.despine(ax=axes)
        panels[0].set_ylabel("relative L2 of the logits\nfrom the recomputed path")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=6)
    return settle(figure)


def onset_figures(result: "DriftOnset") -> dict[str, Figure]:
    """Every figure of an onset, by name: a provenance map of the first prompt."""
    return {"provenance_map": provenance_map(result)}


def provenance_map(result: "DriftOnset", prompt: int = 0) -> Figure:
    """Position x layer at the last step: relative L2 difference of K and V rows; grey: bitwise equal."""
    table = result.map[result.map["prompt"] == prompt]
    n_prompt = int(result.prompts.loc[result.prompts["prompt"] == prompt, "n_prompt"].iloc[0])
    above = table.loc[table["rel_l2"] > 0, "rel_l2"]
    norm = LogNorm(above.min(), above.max()) if len(above) and above.min() < above.max() else LogNorm(1e-8, 1e-1)
    with style():
        figure = new_figure(DOUBLE, 2.6)
        panels = figure.subplots(1, 2, sharey=True)
        mesh: Any = None
        for axes, site in zip(panels, ("cache_k", "cache_v"), strict=True):
            wide = table[table["site"] == site].pivot(index="layer", columns="position", values="rel_l2")
            values = wide.to_numpy(np.float64)
            axes.set_facecolor("0.85")
            mesh = axes.pcolormesh(
                wide.columns, wide.index, np.ma.masked_where(~(values > 0), values), norm=norm, cmap="viridis"
            )
            axes.axvline(n_prompt - 0.5, color="black", linewidth=0.8)
            axes.set_title("K rows" if site == "cache_k" else "V rows")
            integer_axis(axes, "position (line: end of the prompt)")
        panels[0].set_ylabel("layer")
        figure.colorbar(mesh, ax=list(panels), label="relative L2 (grey: bitwise equal)")
    return settle(figure)
