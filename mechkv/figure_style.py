"""How does every figure look, and how does a logarithmic axis show a drift of exactly zero?

Conventions
    Widths are those of a two-column page (`COLUMN`, `DOUBLE`, in inches), text has 8 points. A line is told apart by
    colour, dash and marker at once, so that it can be read in grey and by colour-blind people; a dtype has the same
    look in every figure. Figures are made without pyplot's state: nothing stays open, no backend is chosen.
    Exact zeros are results here (step 0, a prefill row, a bitwise equal layer), and a logarithmic axis has no place for
    them: `zero_aware_log_axis` keeps a strip at the bottom, with the tick `0`, where they stand as hollow markers.
    `save` writes PNG and PDF without times, so that the same figure gives the same bytes.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import matplotlib
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, LogFormatterSciNotation, LogLocator, MaxNLocator

from mechkv.errors import InputError
from mechkv.storage import write_bytes

Numbers: TypeAlias = Sequence[float] | Sequence[int] | np.ndarray | pd.Series

COLUMN, DOUBLE = 3.35, 6.9
"""Width of one and of two columns in inches."""

DPI = 300
PIXELS = 1.33 * 96
"""Pixels of a screen per inch of a figure: a third larger than in print."""
_COLOURS = sns.color_palette("colorblind").as_hex()
_STRIP = 0.07
"""Height of one row of zeros, as a share of the axis."""

_RC: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 2.8,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "hatch.linewidth": 0.5,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "savefig.dpi": DPI,
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "svg.hashsalt": "mechkv",
}


@contextmanager
def style() -> Iterator[None]:
    """The settings of every figure, for the length of a `with` block. The caller's own settings have no say in it, and
    come back; the backend stays as it is."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield


class Look(NamedTuple):
    """What tells a line apart: colour, dash and marker."""

    colour: str
    dash: Any
    marker: str


DTYPE_LOOKS: dict[str, Look] = {
    "float16": Look(_COLOURS[0], "-", "o"),
    "bfloat16": Look(_COLOURS[3], (0, (5, 1.5)), "s"),
    "float32": Look(_COLOURS[1], (0, (1, 1)), "^"),
    "float64": Look("#444444", (0, (4, 1, 1, 1)), "D"),
}
"""The look of each dtype in every figure."""

SERIES_LOOKS: tuple[Look, ...] = (
    Look(_COLOURS[0], "-", "o"),
    Look(_COLOURS[1], (0, (5, 1.5)), "s"),
    Look(_COLOURS[2], (0, (1, 1)), "^"),
    Look(_COLOURS[3], (0, (4, 1, 1, 1)), "D"),
    Look(_COLOURS[4], (0, (7, 2, 2, 2)), "v"),
    Look("#444444", (0, (2, 2)), "X"),
)
"""Looks for lines that are not dtypes, in this order."""


def dtype_look(dtype: str) -> Look:
    """The look of a dtype.

    Raises:
        InputError: It has none.
    """
    if dtype not in DTYPE_LOOKS:
        raise InputError("unknown dtype", got=dtype, expected=f"one of {', '.join(DTYPE_LOOKS)}", remedy="Name one.")
    return DTYPE_LOOKS[dtype]


class ResultFigure(Figure):
    """A figure that a notebook shows as the value of a cell, with or without pyplot's inline mode."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        width, height = self.get_size_inches()
        return png(self), {"width": round(width * PIXELS), "height": round(height * PIXELS)}


def new_figure(width: float = COLUMN, height: float = 2.5) -> Figure:
    """An empty figure of this size in inches, unknown to pyplot; call it within `style()`."""
    return ResultFigure(figsize=(width, height), layout="constrained")


def integer_axis(axes: Axes, label: str) -> None:
    """Name the x axis and give it whole numbers as ticks (layers, steps)."""
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


@dataclass(frozen=True)
class ZeroStrip:
    """The place of exact zeros on a logarithmic axis.

    Attributes:
        axes: The axes.
        heights: Where zeros of each series stand, as a share of the axis; empty when there are none.
        bottom: Data value at the lower end of the logarithmic part.
    """

    axes: Axes
    heights: tuple[float, ...]
    bottom: float

    def mark(self, x: Numbers, look: Look, series: int = 0) -> Line2D:
        """Hollow markers in the strip at `x`, for the zeros of one series."""
        (line,) = self.axes.plot(
            x,
            np.full(len(x), self.heights[series]),
            linestyle="none",
            marker=look.marker,
            color=look.colour,
            markerfacecolor="none",
            transform=self.axes.get_xaxis_transform(),
            clip_on=False,
            gid="zeros",
        )
        return line


def zero_aware_log_axis(axes: Axes, values: Numbers, n_series: int = 1) -> ZeroStrip:
    """Make the y axis logarithmic for `values`, with a strip for exact zeros below it where there are any.

    Args:
        axes: The axes; limits and ticks are set here, so call it before drawing and leave them alone.
        values: Everything that will be drawn; infinite and undefined ones do not count.
        n_series: Rows of the strip, so that zeros of several lines do not hide one another.

    Raises:
        InputError: A negative value, which such an axis cannot show.
    """
    array = np.asarray(values, dtype=np.float64)
    if (array < 0).any():
        raise InputError("a value below zero", got=array.min(), expected="values >= 0", remedy="Use a linear axis.")
    positive = array[np.isfinite(array) & (array > 0)]
    low, high = (np.log10([positive.min(), positive.max()])) if len(positive) else (-1.0, 0.0)
    pad = max(0.06 * (high - low), 0.12)
    low, high = low - pad, high + pad
    height = _STRIP * (n_series + 0.4) if (array == 0).any() else 0.0
    floor = high - (high - low) / (1 - height)
    axes.set_yscale("log", nonpositive="mask")
    axes.set_ylim(10**floor, 10**high)
    _ticks(axes, low, high, floor, bool(height), bool(len(positive)))
    if not height:
        return ZeroStrip(axes, (), 10**low)
    axes.axhline(10**low, color="0.6", linewidth=0.5, linestyle=(0, (2, 2)), zorder=0, gid="strip")
    return ZeroStrip(axes, tuple(_STRIP * (i + 0.7) for i in reversed(range(n_series))), 10**low)


def _ticks(axes: Axes, low: float, high: float, floor: float, zeros: bool, any_positive: bool) -> None:
    """Ticks of the logarithmic part alone, and `0` in the middle of the strip."""
    ticks: list[float] = []
    labels: list[str] = []
    if any_positive:
        subs = (1.0,) if high - low > 1.5 else (1.0, 2.0, 5.0)
        found = np.asarray(LogLocator(subs=subs, numticks=8).tick_values(10**low, 10**high))
        ticks = [tick for tick in found.tolist() if 10**low <= tick <= 10**high]
        formatter = LogFormatterSciNotation(labelOnlyBase=False, minor_thresholds=(np.inf, np.inf))
        formatter.set_axis(axes.yaxis)
        labels = [formatter(tick) for tick in ticks]
    if zeros:
        ticks, labels = [10 ** ((floor + low) / 2), *ticks], ["0", *labels]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(FixedFormatter(labels))
    axes.yaxis.set_minor_locator(FixedLocator([]))


def draw_line(
    axes: Axes,
    x: Numbers,
    y: Numbers,
    look: Look,
    label: str,
    *,
    band: tuple[Numbers, Numbers] | None = None,
    strip: ZeroStrip | None = None,
    series: int = 0,
) -> Line2D:
    """A line with its interval; on a zero-aware axis exact zeros stand in the strip and the line has a gap there.

    Args:
        axes: Where.
        x: Abscissae.
        y: Estimates, drawn as they are.
        look: Colour, dash and marker.
        label: For the legend.
        band: Lower and upper bounds. Undefined ones leave no band; one that the axis cannot show (at or below zero, or
            infinite) makes the band run to the edge of the axis.
        strip: What `zero_aware_log_axis` gave; None on a linear axis.
        series: Row of the strip.
    """
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    (line,) = axes.plot(x, y, color=look.colour, linestyle=look.dash, marker=look.marker, label=label, gid="line")
    if band is not None:
        low, high = (np.asarray(bound, dtype=np.float64) for bound in band)
        bottom, top = axes.get_ylim()
        bottom = bottom if strip is None else strip.bottom
        shown = np.isfinite(y) & ~np.isnan(low) & ~np.isnan(high) & ((y > 0) | (strip is None))
        low, high = np.clip(low, bottom, top), np.clip(high, bottom, top)
        axes.fill_between(x, low, high, where=shown, color=look.colour, alpha=0.18, linewidth=0, gid="band")
    zeros = np.flatnonzero(y == 0) if strip is not None else np.array([], dtype=int)
    if strip is not None and len(zeros):
        strip.mark(x[zeros], look, series)
    return line


def note(axes: Axes, text: str) -> None:
    """A line of text in the legend, without a mark of its own."""
    axes.plot([], [], linestyle="none", label=text, gid="note")


def settle(figure: Figure) -> Figure:
    """Fix the layout of a finished figure, so that every rendering of it is the same; returns the figure.

    A constrained layout moves a little each time a figure is drawn. What is added afterwards is not made room for.
    """
    if figure.get_layout_engine() is not None:
        with style():
            figure.draw_without_rendering()
            figure.draw_without_rendering()
        figure.set_layout_engine("none")
    return figure


def png(figure: Figure) -> bytes:
    """The figure as PNG; the same figure gives the same bytes (it is settled)."""
    return _render(figure, "png", {"Software": None})


def save(figure: Figure, path_stem: Path | str) -> list[Path]:
    """Write `<path_stem>.png` and `<path_stem>.pdf`, each in one go and without times; returns both paths."""
    stem = Path(path_stem)
    kinds = {"png": png(figure), "pdf": _render(figure, "pdf", dict.fromkeys(("CreationDate", "Creator", "Producer")))}
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in kinds]
    for path, data in zip(paths, kinds.values(), strict=True):
        write_bytes(path, data)
    return paths


def _render(figure: Figure, kind: str, metadata: dict[str, None]) -> bytes:
    buffer = io.BytesIO()
    settle(figure)
    with style():
        figure.savefig(buffer, format=kind, metadata=metadata)
    return buffer.getvalue()
