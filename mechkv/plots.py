"""What does a drift profile look like? Figures from results.

A figure takes a result and reshapes it: estimates and intervals are those of `DriftProfile.summary`, and of
`DriftProfile.split_summary`. The heatmap shows the mean over prompts of one step and
layer; it is undefined where the metric is undefined for any prompt.

Conventions: `figure_style` (looks, widths, how exact zeros are shown). Layers count from 0; steps from 0, which is the
prompt.

Controls: the control dtypes of the profile are drawn with the dtype under study; step 0 is part of the heatmap; the
floor, each path against itself, is stated with how often it was measured.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from mechkv.errors import InputError
from mechkv.figure_style import (
    COLUMN,
    DOUBLE,
    DTYPE_LOOKS,
    SERIES_LOOKS,
    Look,
    ZeroStrip,
    draw_line,
    dtype_look,
    integer_axis,
    new_figure,
    note,
    png,
    save,
    settle,
    style,
    zero_aware_log_axis,
)
from mechkv.sites import CACHE_SITES

if TYPE_CHECKING:
    from mechkv.drift import DriftProfile

__all__ = [
    "COLUMN",
    "DOUBLE",
    "DTYPE_LOOKS",
    "SERIES_LOOKS",
    "Look",
    "ZeroStrip",
    "draw_line",
    "drift_by_layer",
    "drift_captions",
    "drift_figures",
    "drift_heatmap",
    "dtype_look",
    "equal_share",
    "integer_axis",
    "kv_drift",
    "new_figure",
    "note",
    "png",
    "save",
    "settle",
    "split_by_layer",
    "step_by_layer",
    "style",
    "zero_aware_log_axis",
]

METRIC_LABELS: dict[str, str] = {
    "max_abs": "largest absolute drift",
    "rel_l2": "relative L2 drift",
    "rel_linf": "relative L-infinity drift",
    "cosine_distance": "cosine distance",
    "rms": "RMS drift",
    "max_ulp": "largest drift (ULP)",
    "signed_mean": "mean signed drift",
    "equal_fraction": "share of equal elements",
}
"""Metrics that a figure can show, with the name of their axis."""

_LINEAR = ("signed_mean", "equal_fraction")
_PROVENANCES = {"prefill": SERIES_LOOKS[2], "decode": SERIES_LOOKS[0], "new": SERIES_LOOKS[1]}
_PARTS = {"injected": SERIES_LOOKS[1], "propagated": SERIES_LOOKS[0], "drift": SERIES_LOOKS[5]}
_ZERO, _UNDEFINED = "0.82", "1.0"


def drift_by_layer(profile: "DriftProfile", site: str = "resid_post", metric: str = "rel_l2") -> Figure:
    """Mean of `metric` at `site` by layer, with its 95 % interval over prompts, one line per dtype."""
    table = _rows(profile, profile.summary(_known_metric(metric)), site)
    lines = []
    for dtype in _dtypes(profile, table):
        role = "" if dtype == profile.dtype else ", control"
        lines.append(_Line(table[table["dtype"] == dtype], dtype_look(dtype), f"{dtype}{role}", dtype))
    with style():
        figure = new_figure()
        axes = figure.add_subplot()
        _draw(axes, lines, metric)
        n = _repeats(profile)
        note(axes, f"floor: exactly 0 ({n} repeats)" if n else "floor: not measured")
        _finish(axes, f"{METRIC_LABELS[metric]}\nat {site}")
        figure.legend(loc="outside lower center", ncols=2)
    return settle(figure)


def step_by_layer(
    profile: "DriftProfile", site: str = "resid_post", metric: str = "rel_l2", dtype: str | None = None
) -> pd.DataFrame:
    """Mean of `metric` over prompts, a row per layer and a column per step; NaN where any prompt's is undefined."""
    _known_metric(metric)
    part = _rows(profile, profile.frame[profile.frame["dtype"] == _dtype(profile, dtype)], site)
    grouped = part.groupby(["layer", "step"], observed=True)[metric]
    return grouped.mean().where(grouped.count() == grouped.size()).unstack("step")


def drift_heatmap(
    profile: "DriftProfile", site: str = "resid_post", metric: str = "rel_l2", dtype: str | None = None
) -> Figure:
    """Layer x step: mean of `metric` over prompts in logarithmic colour; exact zeros are hatched grey."""
    if metric in _LINEAR:
        raise InputError("metric without a logarithm", got=metric, expected="one >= 0", remedy="Use drift_by_layer.")
    table = step_by_layer(profile, site, metric, dtype)
    values = table.to_numpy(np.float64)
    edges = [
        np.arange(n + 1) - 0.5 + start
        for n, start in zip(values.T.shape, (table.columns[0], table.index[0]), strict=True)
    ]
    with style():
        figure = new_figure(height=2.7)
        axes = figure.add_subplot()
        positive = values[values > 0]
        limits = (positive.min(), positive.max()) if len(positive) else (0.1, 1.0)
        shown = np.ma.masked_where(~(values > 0), values)
        mesh = axes.pcolormesh(*edges, shown, cmap="cividis", norm=LogNorm(*limits), rasterized=True, gid="drift")
        keys = []
        for name, cells, face, hatch in (
            ("exactly 0 for every prompt", values == 0, _ZERO, "/////"),
            ("undefined", np.isnan(values), _UNDEFINED, "xxxxx"),
        ):
            if cells.any():
                flat = np.ma.masked_where(~cells, np.zeros_like(values))
                drawn = axes.pcolor(*edges, flat, cmap=ListedColormap([face]), hatch=hatch, gid=name)
                drawn.set_edgecolor("0.35")
                drawn.set_linewidth(0)
                keys.append(Patch(label=name, facecolor=face, edgecolor="0.35", hatch=hatch, linewidth=0))
        if keys:
            figure.legend(handles=keys, loc="outside lower center", ncols=2)
        if len(positive):
            figure.colorbar(mesh, ax=axes, label=f"{METRIC_LABELS[metric]}, {_dtype(profile, dtype)}")
        integer_axis(axes, "decode step (0: prompt)")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel(f"layer ({site})")
    return settle(figure)


def kv_drift(profile: "DriftProfile", metric: str = "rel_l2") -> Figure:
    """Drift of K and V by layer and provenance of the rows, with 95 % intervals; the controls in thin grey lines."""
    _known_metric(metric)
    table = profile.summary(metric)
    table = table[table["site"].isin(CACHE_SITES)]
    lines: dict[str, list[_Line]] = {site: [] for site in CACHE_SITES}
    for dtype in reversed(_dtypes(profile, table)):
        main = dtype == profile.dtype
        for provenance, look in _PROVENANCES.items():
            shown = look if main else look._replace(colour="0.6")
            part = table[(table["dtype"] == dtype) & (table["provenance"] == provenance)]
            for site in CACHE_SITES:
                own = part[part["site"] == site].sort_values("layer")
                lines[site].append(_Line(own, shown, f"{dtype}, {provenance} rows", provenance, main))
    with style():
        figure = new_figure(DOUBLE, 2.7)
        panels = figure.subplots(1, 2, sharey=True)
        for axes, (site, drawn) in zip(panels, lines.items(), strict=True):
            _draw(axes, drawn, metric, scale_of=[line for both in lines.values() for line in both])
            axes.set_title(f"{'keys' if site == 'cache_k' else 'values'} ({site})")
            _finish(axes, METRIC_LABELS[metric] if site == "cache_k" else "")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=2)
    return settle(figure)


def split_by_layer(profile: "DriftProfile", dtype: str | None = None) -> Figure:
    """Injected, propagated and total error at each block's output: mean over prompts and sampled steps, with 95 %
    intervals for the two parts.

    Raises:
        InputError: The profile has no split (`split_every` was 0).
    """
    name = _dtype(profile, dtype)
    if profile.split.empty or name not in set(profile.split["dtype"]):
        raise InputError(
            "a profile without the injected / propagated split",
            got=f"split_every={profile.config.split_every}",
            expected="at least one sampled step",
            remedy="Run drift_profile with split_every >= 1.",
        )
    table = profile.split_summary()
    table = table[table["dtype"] == name]
    lines = []
    for column, look in _PARTS.items():
        label = f"total, {name}" if column == "drift" else column
        lines.append(_Line(table[table["part"] == column], look, label, column, column != "drift"))
    with style():
        figure = new_figure()
        axes = figure.add_subplot()
        _draw(axes, lines, "rel_l2")
        _finish(axes, "error at resid_post,\nrelative to its L2 norm")
        figure.legend(loc="outside lower center", ncols=3)
    return settle(figure)


def equal_share(profile: "DriftProfile", site: str = "resid_post") -> Figure:
    """Share of decode steps, over all prompts, at which both paths have the same bits at `site`, by layer."""
    table = _rows(profile, profile.summary(), site)
    with style():
        figure = new_figure()
        axes = figure.add_subplot()
        axes.set_ylim(-0.05, 1.05)
        for dtype in _dtypes(profile, table):
            part = table[table["dtype"] == dtype]
            draw_line(axes, part["layer"], part["bitwise_equal"], dtype_look(dtype), dtype)
        _finish(axes, f"share of steps bitwise\nequal at {site}")
        figure.legend(loc="outside lower center", ncols=2)
    return settle(figure)


def drift_figures(profile: "DriftProfile") -> dict[str, Figure]:
    """Every figure of a profile, by the name of the function that draws it."""
    figures = {
        "drift_by_layer": drift_by_layer(profile),
        "drift_heatmap": drift_heatmap(profile),
        "kv_drift": kv_drift(profile),
        "equal_share": equal_share(profile),
    }
    if not profile.split.empty:
        figures["split_by_layer"] = split_by_layer(profile)
    return figures


def drift_captions(profile: "DriftProfile") -> dict[str, str]:
    """A caption for each of `drift_figures`: what is shown, model, dtype, prompts, steps and what the band is."""
    source = profile.provenance.get("models", {}).get(profile.dtype, {}).get("source", "model not named")
    n = len(profile.prompts)
    where = f"{source}, {profile.dtype}, {n} prompt{'s' * (n != 1)}, {int(profile.steps['step'].max())} decode steps"
    band = (
        "Band: 95 % interval that resamples prompts; one that reaches zero runs to the bottom of the logarithmic part."
        if profile.summary()["low"].notna().any()
        else f"No band: {n} prompts are too few for an interval."
    )
    n_repeats = _repeats(profile)
    floor = f"Floor, each path against itself: exactly 0 in all {n_repeats} repeats." if n_repeats else ""
    zeros = "Exact zeros stand as hollow markers at 0 below the logarithmic axis."
    controls = [dtype for dtype in profile.frame["dtype"].unique() if dtype != profile.dtype]
    same = f"Control on the same tokens: {', '.join(controls)}." if controls else "No control dtype was run."
    return {
        "drift_by_layer": f"Cached against recomputed path at resid_post, newest position: relative L2 drift by layer, "
        f"mean over decode steps ({where}). {band} {same} {floor} {zeros}",
        "drift_heatmap": f"Relative L2 drift at resid_post by layer and step, mean over prompts ({where}). Step 0 "
        "processes the prompt on both paths: the null control. Hatched: exactly 0 for every prompt.",
        "kv_drift": f"Relative L2 drift of keys and values by layer and by what wrote the rows: the prompt (prefill), "
        f"earlier one-token steps (decode), this step (new) ({where}). {band} {same} {zeros}",
        "equal_share": f"Share of decode steps at which both paths have the same bits at resid_post, newest position "
        f"({where}; all prompts pooled, no band). {same}",
        "split_by_layer": f"Error at the block's output: injected by the block itself, propagated from its input, and "
        f"their sum, relative to the L2 norm of the recomputed output, mean over sampled steps "
        f"(1 in {profile.config.split_every}; {where}). {band} The total has none. {zeros}",
    }


# --- the common part -------------------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """One line: table with layer, estimate, low and high; look; label; name of its row of zeros; whether it matters."""

    table: pd.DataFrame
    look: Look
    label: str
    zero_row: str
    main: bool = True


def _draw(axes: Axes, lines: Sequence[_Line], metric: str, scale_of: Sequence[_Line] | None = None) -> None:
    """Lines on an axis that fits `scale_of` (these lines by default); lesser ones are thin and have no band."""
    scaled = scale_of or lines
    with_zeros = dict.fromkeys(line.zero_row for line in scaled if (line.table["estimate"] == 0).any())
    rows = {name: i for i, name in enumerate(with_zeros)}
    values = [line.table[["estimate", "high"] if line.main else ["estimate"]].to_numpy().ravel() for line in scaled]
    strip = None
    if metric in _LINEAR:
        _linear_axis(axes, pd.concat([line.table for line in scaled]))
    else:
        strip = zero_aware_log_axis(axes, np.concatenate(values), max(len(rows), 1))
    for table, look, label, row, main in lines:
        band = (table["low"], table["high"]) if main else None
        series = rows.get(row, 0)
        drawn = draw_line(axes, table["layer"], table["estimate"], look, label, band=band, strip=strip, series=series)
        if not main:
            drawn.set(linewidth=0.7, markersize=2.5, zorder=1.5)


def _linear_axis(axes: Axes, table: pd.DataFrame) -> None:
    bounds = table[["estimate", "low", "high"]].to_numpy(np.float64)
    bounds = bounds[np.isfinite(bounds)]
    pad = 0.05 * np.ptp(bounds) or 0.05
    axes.set_ylim(bounds.min() - pad, bounds.max() + pad)


def _finish(axes: Axes, label: str) -> None:
    integer_axis(axes, "layer")
    axes.set_ylabel(label)
    sns.despine(ax=axes)


def _repeats(profile: "DriftProfile") -> int:
    """How often a path was measured against itself; any difference would have been an error."""
    return sum(found.get("repeatable", 0) for found in profile.guards.values())


def _known_metric(metric: str) -> str:
    if metric not in METRIC_LABELS:
        raise InputError(
            "metric that no figure shows", got=metric, expected=f"one of {', '.join(METRIC_LABELS)}", remedy="Pick one."
        )
    return metric


def _dtype(profile: "DriftProfile", dtype: str | None) -> str:
    known = profile.frame["dtype"].unique()
    if dtype is not None and dtype not in known:
        raise InputError(
            "dtype that was not profiled", got=dtype, expected=f"one of {', '.join(known)}", remedy="Name one of them."
        )
    return dtype or profile.dtype


def _dtypes(profile: "DriftProfile", table: pd.DataFrame) -> list[str]:
    """The dtype under study first, then its controls."""
    return sorted(table["dtype"].unique(), key=lambda dtype: (dtype != profile.dtype, dtype))


def _rows(profile: "DriftProfile", table: pd.DataFrame, site: str) -> pd.DataFrame:
    """The rows of one site that is not K or V, in the order of layers."""
    part = table[table["site"] == site]
    if part.empty or site in CACHE_SITES:
        known = [name for name in profile.frame["site"].unique() if name not in CACHE_SITES]
        raise InputError(
            "site that this figure cannot show",
            got=site,
            expected=f"one of {', '.join(known)}",
            remedy="K and V have a figure of their own: kv_drift.",
        )
    return part.sort_values("layer")
