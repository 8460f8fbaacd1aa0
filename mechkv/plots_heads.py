"""What do heads, frequencies, twins and sweeps look like? Figures from results.

A figure takes a result and reshapes it: estimates and intervals are those of the result's own methods. Conventions:
`figure_style` (looks, widths, how exact zeros are shown); layers and heads count from 0; bands are 95 % intervals over
prompts, over seeds where there are no prompts. Controls are drawn with what they control: the float32 run beside the
dtype under study, the head-order twin beside the others, the lines of summation theory beside the sweeps.
"""

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from mechkv.errors import InputError
from mechkv.figure_style import (
    COLUMN,
    DOUBLE,
    SERIES_LOOKS,
    Look,
    ZeroStrip,
    draw_line,
    dtype_look,
    integer_axis,
    new_figure,
    style,
    zero_aware_log_axis,
)
from mechkv.models import to_dtype
from mechkv.reduction import OWN, Law, summation_line

if TYPE_CHECKING:
    from mechkv.heads import HeadAnalysis
    from mechkv.synthetic import Sweep
    from mechkv.twin_drift import TwinStudy

_Line: TypeAlias = tuple[str, str, str]
"""What tells the lines of a sweep apart: how, dtype, accumulator."""
_Looks: TypeAlias = dict[_Line, tuple[str, Look]]
_LAWS: dict[Law, tuple[str, Any]] = {
    "worst case": ("(n - 1) u, worst case", "-"),
    "random walk": ("sqrt(n) u, random walk", (0, (6, 2))),
    "pairwise": ("ceil(log2 n) u, pairwise", (0, (1, 1.5))),
}


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


def drift_by_dimension(analysis: "HeadAnalysis") -> Figure:
    """Relative drift per dimension of a head, over layers and heads: K before and after rotation, and q, v, z."""
    table = analysis.by_dimension()
    table = table[table["dtype"] == analysis.dtype]
    groups = ((("k", "K before rotation"), ("rot_k", "after rotation")), (("q", "q"), ("v", "v"), ("z", "z")))
    with style():
        figure = new_figure(COLUMN, 3.9)
        panels = figure.subplots(2, 1, sharex=True, sharey=True)
        for axes, sites in zip(panels, groups, strict=True):
            strip = zero_aware_log_axis(axes, table[["estimate", "high"]].to_numpy().ravel(), len(sites))
            for i, (site, label) in enumerate(sites):
                x, y, band = _curve(table[table["site"] == site].sort_values("dim"), "dim")
                series = min(i, max(len(strip.heights) - 1, 0))
                line = draw_line(axes, x, y, SERIES_LOOKS[i], label, band=band, strip=strip, series=series)
                line.set_markevery((i * max(len(x) // 24, 1), max(len(x) // 8, 1)))
            axes.legend(ncols=len(sites), loc="lower center", bbox_to_anchor=(0.5, 1.0))
            axes.set_ylabel(f"relative L2 drift,\n{analysis.dtype}")
            sns.despine(ax=axes)
        integer_axis(panels[1], "dimension of a head")
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
    figures["drift_by_dimension"] = drift_by_dimension(analysis)
    if (analysis.dims["pair"] >= 0).any():
        figures["drift_by_frequency"] = drift_by_frequency(analysis)
    return figures


def sweep_figure(sweep: "Sweep", name: str, axis: str) -> Figure:
    """Drift by one axis of one sweep, a panel per stage, or per accumulator where there is one stage.

    Points are seeds, lines their means, thin lines summation theory for the terms of a stage, coloured by the dtype
    whose unit roundoff they take. A dtype of the data has its colour and marker, the arithmetic a dash; where every
    panel has one dtype, orders have looks of their own. Zeros stand in the order of the legend.
    """
    part = sweep.frame[(sweep.frame["sweep"] == name) & (sweep.frame["axis"] == axis)]
    if part.empty:
        raise InputError("nothing to draw", got=f"{name}, {axis}", expected="a sweep", remedy="See Sweep.frame.")
    split = "stage" if part["stage"].nunique() > 1 else "accumulator"
    names = list(dict.fromkeys(part[split]))
    n_columns = min(len(names), 4)
    n_rows = -(-len(names) // n_columns)
    looks = _sweep_looks(part, split)
    theory = {panel: _theory(part[part[split] == panel]) for panel in names}
    means = part.groupby(["how", "dtype", "accumulator", "stage", "x"])["drift"].mean()
    with_zeros = {key[:3] for key in means.index[means == 0]}
    rows = {key: row for row, key in enumerate(key for key in looks if key in with_zeros)}
    with style():
        figure = new_figure(COLUMN if n_columns == 1 else DOUBLE, 1.1 + 1.9 * n_rows)
        panels = figure.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False)
        drawn = [part["drift"].to_numpy(), *(line[-1] for lines in theory.values() for line in lines)]
        for axes, panel in zip(panels.flat, names, strict=False):
            strip = zero_aware_log_axis(axes, np.concatenate(drawn), max(len(rows), 1))
            _sweep_panel(axes, part[part[split] == panel], looks, rows, strip)
            for name_of, law, x, y in theory[panel]:
                colour, dash = dtype_look(name_of).colour, _LAWS[law][1]
                axes.plot(x, y, color=colour, alpha=0.7, linewidth=0.7, linestyle=dash, gid="theory")
            if len(names) > 1:
                axes.set_title(panel if split == "stage" else f"{panel} sums")
            sns.despine(ax=axes)
        for axes in panels.flat[len(names) :]:
            axes.set_visible(False)
        for axes in panels[-1]:
            axes.set_xlabel({"n": "terms", "context": "context (tokens)", "window": "window (keys)"}.get(axis, axis))
        for axes in panels[:, 0]:
            axes.set_ylabel("relative drift")
        _sweep_legend(figure, panels, {law for lines in theory.values() for _, law, *_ in lines})
    return figure


def _sweep_legend(figure: Figure, panels: np.ndarray, laws: set[Law]) -> None:
    found: dict[str, Artist] = {}
    for axes in panels.flat:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    for law, (label, dash) in _LAWS.items():
        if law in laws:
            found[label] = Line2D([], [], color="0.4", linewidth=0.7, linestyle=dash)
    figure.legend(found.values(), found, loc="outside lower center", ncols=min(max(panels.shape[1], 2), 3))


def _sweep_looks(part: pd.DataFrame, split: str) -> _Looks:
    """The label and look of every (how, dtype, accumulator)."""
    keys = list(dict.fromkeys(zip(part["how"], part["dtype"], part["accumulator"], strict=True)))
    if split == "accumulator":
        orders = list(dict.fromkeys(part["how"]))
        return {key: (key[0], SERIES_LOOKS[orders.index(key[0]) % len(SERIES_LOOKS)]) for key in keys}
    kinds = list(dict.fromkeys((how, "own" if dtype == sums else sums) for how, dtype, sums in keys))
    looks = {}
    for how, dtype, sums in keys:
        dash = SERIES_LOOKS[kinds.index((how, "own" if dtype == sums else sums)) % len(SERIES_LOOKS)].dash
        label = f"{dtype}, {how}" + (f" in {sums}" if sums != OWN else "")
        looks[how, dtype, sums] = (label, dtype_look(dtype)._replace(dash=dash))
    return looks


def _sweep_panel(axes: Axes, part: pd.DataFrame, looks: _Looks, rows: dict[_Line, int], strip: ZeroStrip) -> None:
    for (how, dtype, sums), (label, look) in looks.items():
        own = part[(part["how"] == how) & (part["dtype"] == dtype) & (part["accumulator"] == sums)]
        if own.empty:
            continue
        mean = own.groupby("x")["drift"].mean()
        axes.scatter(own["x"], own["drift"].where(own["drift"] > 0), s=3, color=look.colour, alpha=0.5)
        row = rows.get((how, dtype, sums), 0)
        draw_line(axes, mean.index.to_numpy(), mean.to_numpy(), look, label, strip=strip, series=row)
    axes.set_xscale("log", base=2)


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


def _theory(part: pd.DataFrame) -> list[tuple[str, Law, np.ndarray, np.ndarray]]:
    """Dtype, law, x and y of the lines for the sums that a panel shows; the unit roundoff is that of the stated
    accumulator, of the data where none is stated."""
    points = part[part["n_terms"] > 0].drop_duplicates("x").sort_values("x")
    x, terms = points["x"].to_numpy(np.float64), points["n_terms"].to_numpy(np.float64)
    stated = part[part["accumulator"] != OWN]["accumulator"]
    laws = [law for law in _LAWS if law != "pairwise" or part["how"].str.contains("pairwise").any()]
    return [
        (name, law, x, np.array([summation_line(law, n, to_dtype(name)) for n in terms]))
        for name in dict.fromkeys(stated if len(stated) else part["dtype"])
        for law in laws
        if len(points)
    ]
