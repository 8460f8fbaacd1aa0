"""What do heads, frequencies, twins and sweeps look like? Figures from results.

A figure takes a result and reshapes it: estimates and intervals are those of the result's own methods. Conventions:
`figure_style` (looks, widths, how exact zeros are shown); layers and heads count from 0; bands are 95 % intervals over
prompts, over seeds where there are no prompts. Controls are drawn with what they control: the float32 run beside the
dtype under study, the head-order twin beside the others, the lines of summation theory beside the sweeps.
"""

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from mechkv.errors import InputError
from mechkv.figure_style import (
    COLUMN,
    DOUBLE,
    SERIES_LOOKS,
    draw_line,
    dtype_look,
    integer_axis,
    new_figure,
    style,
    zero_aware_log_axis,
)
from mechkv.models import to_dtype
from mechkv.reduction import summation_line

if TYPE_CHECKING:
    from mechkv.heads import HeadAnalysis
    from mechkv.synthetic import Sweep
    from mechkv.twin_drift import TwinStudy


def profile_by_twin(study: "TwinStudy") -> Figure:
    """Relative L2 drift at resid_post by layer, one line per twin, bands over prompts."""
    table = study.profiles()
    with style():
        figure = new_figure(COLUMN, 2.9)
        axes = figure.add_subplot()
        strip = zero_aware_log_axis(axes, table[["estimate", "high"]].to_numpy().ravel(), 1 + len(study.twins))
        for i, name in enumerate(["model", *study.twins]):
            part = table[table["twin"] == name].sort_values("layer")
            label = name if name == "model" else f"{name} ({study.twins[name].cause.replace('_', ' ')})"
            look, (x, y, band) = SERIES_LOOKS[i % len(SERIES_LOOKS)], _curve(part, "layer")
            series = min(i, max(len(strip.heights) - 1, 0))
            draw_line(axes, x, y, look, label, band=band, strip=strip, series=series)
        integer_axis(axes, "layer")
        axes.set_ylabel(f"relative L2 drift\nat resid_post, {study.dtype}")
        sns.despine(ax=axes)
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def head_heatmap(analysis: "HeadAnalysis", site: str = "z", metric: str = "rel_l2") -> Figure:
    """Head x layer: mean of `metric` over steps and prompts in logarithmic colour; white lines part the groups."""
    table = analysis.summary(metric)
    table = table[(table["dtype"] == analysis.dtype) & (table["site"] == site)]
    if table.empty:
        raise InputError("nothing to draw", got=site, expected="a site of `heads`", remedy="See HEAD_SITES.")
    values = table.pivot(index="head", columns="layer", values="estimate")
    grid = values.to_numpy(np.float64)
    edges = [np.arange(n + 1) - 0.5 for n in grid.T.shape]
    with style():
        figure = new_figure(COLUMN, 2.4)
        axes = figure.add_subplot()
        positive = grid[grid > 0]
        limits = (positive.min(), positive.max() * (1 + 1e-9)) if len(positive) else (0.1, 1.0)
        shown = np.ma.masked_where(~(grid > 0), grid)
        mesh = axes.pcolormesh(*edges, shown, cmap="cividis", norm=LogNorm(*limits), rasterized=True, gid="drift")
        if (grid == 0).any():
            flat = np.ma.masked_where(grid != 0, np.zeros_like(grid))
            drawn = axes.pcolor(*edges, flat, cmap=ListedColormap(["0.82"]), hatch="/////", gid="zeros")
            drawn.set_edgecolor("0.35")
            drawn.set_linewidth(0)
            key = Patch(label="exactly 0", facecolor="0.82", edgecolor="0.35", hatch="/////", linewidth=0)
            figure.legend(handles=[key], loc="outside lower center")
        if len(positive):
            figure.colorbar(mesh, ax=axes, label=f"relative L2 drift, {analysis.dtype}")
        size = analysis.layout.group_size if site in ("q", "z") else 1
        for edge in range(size, len(values), size):
            axes.axhline(edge - 0.5, color="white", linewidth=1.5)
        integer_axis(axes, "layer")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel(f"{'query' if site in ('q', 'z') else 'KV'} head ({site})")
    return figure


def drift_by_frequency(analysis: "HeadAnalysis") -> Figure:
    """Relative drift of K per rotary pair, before and after rotation, by frequency; one panel per kind of layer."""
    table = analysis.by_frequency()
    table = table[table["dtype"] == analysis.dtype]
    kinds = [kind for kind in ("full", "window") if (table["kind"] == kind).any()]
    if not kinds:
        raise InputError("no rotary pairs", got="no rotation", expected="a rotary model", remedy="Leave it out.")
    with style():
        figure = new_figure(COLUMN if len(kinds) == 1 else DOUBLE, 2.5)
        panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
        for axes, kind in zip(panels, kinds, strict=True):
            strip = zero_aware_log_axis(axes, table[["estimate", "high"]].to_numpy().ravel(), 2)
            for i, (site, label) in enumerate((("k", "before rotation"), ("rot_k", "after rotation"))):
                part = table[(table["kind"] == kind) & (table["site"] == site) & (table["frequency"] > 0)]
                x, y, band = _curve(part.sort_values("frequency"), "frequency")
                series = min(i, max(len(strip.heights) - 1, 0))
                draw_line(axes, x, y, SERIES_LOOKS[i], label, band=band, strip=strip, series=series)
            axes.set_xscale("log")
            axes.set_xlabel("rotary frequency (radians a token)")
            if len(kinds) > 1:
                axes.set_title(f"{kind} layers")
            sns.despine(ax=axes)
        panels[0].set_ylabel(f"relative L2 drift of K,\n{analysis.dtype}")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


def pattern_drift(analysis: "HeadAnalysis") -> Figure:
    """Total variation of attention rows by layer, mean over heads, steps and prompts, with the float32 control."""
    table = analysis.attention("tv", by=("layer",))
    with style():
        figure = new_figure()
        axes = figure.add_subplot()
        dtypes = list(dict.fromkeys(table["dtype"]))
        dtypes.sort(key=lambda name: name != analysis.dtype)
        strip = zero_aware_log_axis(axes, table[["estimate", "high"]].to_numpy().ravel(), len(dtypes))
        for i, dtype in enumerate(dtypes):
            part = table[table["dtype"] == dtype].sort_values("layer")
            label = dtype if dtype == analysis.dtype else f"{dtype}, control"
            (x, y, band), series = _curve(part, "layer"), min(i, max(len(strip.heights) - 1, 0))
            draw_line(axes, x, y, dtype_look(dtype), label, band=band, strip=strip, series=series)
        integer_axis(axes, "layer")
        axes.set_ylabel("total variation of\nattention rows")
        sns.despine(ax=axes)
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def head_figures(analysis: "HeadAnalysis") -> dict[str, Figure]:
    """Every figure of an analysis that it has data for."""
    figures = {"head_heatmap": head_heatmap(analysis), "pattern_drift": pattern_drift(analysis)}
    if (analysis.dims["pair"] >= 0).any():
        figures["drift_by_frequency"] = drift_by_frequency(analysis)
    return figures


def sweep_figure(sweep: "Sweep", name: str, axis: str) -> Figure:
    """Drift by one axis of one sweep: points are seeds, lines their means, thin lines summation theory."""
    part = sweep.frame[(sweep.frame["sweep"] == name) & (sweep.frame["axis"] == axis)]
    if part.empty:
        raise InputError("nothing to draw", got=f"{name}, {axis}", expected="a sweep", remedy="See Sweep.frame.")
    stages = list(dict.fromkeys(part["stage"]))
    keys = list(dict.fromkeys(zip(part["how"], part["dtype"], part["accumulator"], strict=True)))
    lines = _theory(part) if axis == "n" else {}
    with style():
        figure = new_figure(COLUMN if len(stages) == 1 else DOUBLE, 2.9)
        panels = figure.subplots(1, len(stages), sharey=True, squeeze=False)[0]
        values = np.concatenate([part["drift"].to_numpy(), *(y for _, y in lines.values())])
        for axes, stage in zip(panels, stages, strict=True):
            strip = zero_aware_log_axis(axes, values, 1)
            for i, (how, dtype, accumulator) in enumerate(keys):
                own = part[(part["stage"] == stage) & (part["how"] == how)]
                own = own[(own["dtype"] == dtype) & (own["accumulator"] == accumulator)]
                mean = own.groupby("x")["drift"].mean()
                look = SERIES_LOOKS[i % len(SERIES_LOOKS)]
                label = f"{how}, {dtype}" + ("" if "kernel" in accumulator else f", {accumulator} sums")
                label = f"{how}, {accumulator}" if axis == "n" else label
                axes.scatter(own["x"], own["drift"].where(own["drift"] > 0), s=3, color=look.colour, alpha=0.5)
                draw_line(axes, mean.index.to_numpy(), mean.to_numpy(), look, label, strip=strip)
            for label, (x, y) in lines.items():
                axes.plot(x, y, color="0.55", linewidth=0.7, linestyle=(0, (1, 1.5)), gid="theory")
                axes.annotate(label, (x[-1], y[-1]), fontsize=5, color="0.4", ha="right", va="bottom")
            axes.set_xscale("log", base=2)
            axes.set_xlabel({"n": "terms", "context": "context (tokens)"}.get(axis, axis))
            if len(stages) > 1:
                axes.set_title(stage)
            sns.despine(ax=axes)
        panels[0].set_ylabel("relative drift")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2 if len(stages) > 1 else 1)
    return figure


def sweep_figures(sweep: "Sweep") -> dict[str, Figure]:
    """One figure per sweep and axis."""
    pairs = sweep.frame[["sweep", "axis"]].drop_duplicates().itertuples(index=False)
    return {
        f"sweep_{name.replace(',', '').replace(' ', '_')}_{axis}": sweep_figure(sweep, name, axis)
        for name, axis in pairs
    }


def _curve(table: pd.DataFrame, x: str) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Abscissae, estimates and band of a table of intervals."""
    low, high = table["low"].to_numpy(), table["high"].to_numpy()
    return table[x].to_numpy(), table["estimate"].to_numpy(), (low, high)


def _theory(part: pd.DataFrame) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    x = np.sort(part["x"].unique()).astype(np.float64)
    lines = {}
    for accumulator in dict.fromkeys(part["accumulator"]):
        for law, text in (("worst case", "(n-1) u"), ("random walk", "sqrt(n) u"), ("pairwise", "log2(n) u")):
            y = np.array([summation_line(law, n, to_dtype(accumulator)) for n in x])  # type: ignore[arg-type]
            lines[f"{text}, {accumulator}"] = (x, y)
    return lines
