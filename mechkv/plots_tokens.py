"""How long do the texts of the two paths agree, and does the flip law hold? Figures of token-level results.

A figure takes a result and draws it: curves, intervals and bins are those of `TokenDivergence.survival`, `.rates` and
`flip_law.fit_flip_law`; nothing is estimated here. Looks, widths and how exact zeros are shown: `figure_style`.
"""

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from mechkv.errors import InputError
from mechkv.figure_style import (
    COLUMN,
    DOUBLE,
    SERIES_LOOKS,
    Look,
    draw_line,
    integer_axis,
    new_figure,
    style,
    zero_aware_log_axis,
)
from mechkv.flip_law import FlipLaw, fit_flip_law

if TYPE_CHECKING:
    from mechkv.divergence import TokenDivergence


def divergence_figures(result: "TokenDivergence") -> dict[str, Figure]:
    """Agreement, the three rates, and the flip law where some step flips."""
    figures = {"agreement": agreement(result), "rates": rates(result)}
    law = fit_flip_law(one_context(result))
    if law.n_flips:
        figures["flip_law"] = flip_law(law)
    return figures


def one_context(result: "TokenDivergence") -> pd.DataFrame:
    """The teacher-forced steps of the first strategy: strategies share prompts, so their steps are not pooled."""
    first = result.config.strategies[0].name
    return result.frame[result.frame["strategy"] == first]


def agreement(result: "TokenDivergence") -> Figure:
    """Share of prompts whose texts still agree, by token: common random numbers beside draws of their own."""
    curves = {draws: result.survival(draws) for draws in ("common", "noise")}
    end = float(result.outcomes["n_compared"].max())
    with style():
        figure = new_figure(COLUMN, 2.7)
        axes = figure.add_subplot()
        for index, strategy in enumerate(s.name for s in result.config.strategies):
            look = _look(index)
            part = curves["common"][curves["common"]["strategy"] == strategy]
            x, y, low, high = _steps(part, end)
            axes.plot(x, y, color=look.colour, linestyle=look.dash, label=strategy, drawstyle="steps-post", gid="line")
            axes.fill_between(x, low, high, step="post", color=look.colour, alpha=0.15, linewidth=0, gid="band")
            if strategy != "greedy":
                x, y, *_ = _steps(curves["noise"][curves["noise"]["strategy"] == strategy], end)
                axes.plot(x, y, color="0.55", linewidth=0.8, drawstyle="steps-post", gid="noise")
        axes.plot([], [], color="0.55", linewidth=0.8, label="cached path, other draws")
        integer_axis(axes, "tokens after the prompt")
        axes.set_ylabel("share of prompts in agreement")
        axes.set_ylim(0, 1.03)
        axes.set_xlim(0, end)
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def rates(result: "TokenDivergence") -> Figure:
    """The three divergence rates, never one alone."""
    table = result.rates()
    names = list(dict.fromkeys(table["rate"]))
    with style():
        figure = new_figure(DOUBLE, 2.3)
        axes = figure.subplots(1, len(names))
        for place, name in zip(axes, names, strict=True):
            part = table[table["rate"] == name].reset_index(drop=True)
            ends = [value for value in part["low"] if value > 0]
            strip = zero_aware_log_axis(place, [*part["estimate"], *part["high"], *ends, 1.0])
            for index, (_, row) in enumerate(part.iterrows()):
                look = _look(index)
                _error(place, float(index), row["estimate"], row["low"], row["high"], look, strip)
            place.set_xticks(range(len(part)), part["strategy"], rotation=25, ha="right")
            place.set_xlim(-0.6, len(part) - 0.4)
            place.set_title(f"{name}\n({part['clock'].iloc[0]})")
        axes[0].set_ylabel("rate")
    return figure


def flip_law(law: FlipLaw) -> Figure:
    """Flips by margin: observed in bins of equal numbers of steps, beside the fitted law."""
    if not law.n_flips:
        raise InputError("no flip to draw", got=f"0 of {law.n_steps} steps", expected="some", remedy="See certificate.")
    bins = law.calibration
    with style():
        figure = new_figure(COLUMN, 2.6)
        axes = figure.add_subplot()
        strip = zero_aware_log_axis(axes, [*bins["observed"], *bins["high"], 1.0])
        for row in bins.itertuples():
            _error(axes, row.margin, row.observed, row.low, row.high, SERIES_LOOKS[0], strip)
        x = np.linspace(0, float(bins["margin_high"].max()), 400)
        y = np.asarray(_law(x, law.sigma.estimate))
        keep = y >= strip.bottom
        label = f"P(flip), sigma = {law.sigma.estimate:.2g} [{law.sigma.low:.2g}, {law.sigma.high:.2g}]"
        axes.plot(x[keep], y[keep], color="0.2", linestyle="--", label=label, gid="law")
        axes.plot([], [], color=SERIES_LOOKS[0].colour, marker="o", linestyle="none", label="observed, 95 %")
        axes.set_xlim(0, float(bins["margin"].max()) * 1.05)
        axes.set_xlabel("margin of the recomputed path (logits)")
        axes.set_ylabel("share of steps that flip")
        figure.legend(loc="outside lower center")
    return figure


def task_table(table: pd.DataFrame) -> Figure:
    """Accuracy difference per condition with its interval, beside what the design could have detected."""
    with style():
        figure = new_figure(COLUMN, 0.6 + 0.35 * len(table))
        axes = figure.add_subplot()
        for index, row in table.reset_index(drop=True).iterrows():
            axes.plot([row["low"], row["high"]], [index, index], color=SERIES_LOOKS[0].colour, gid="interval")
            axes.plot(row["difference"], index, marker="o", color=SERIES_LOOKS[0].colour, gid="estimate")
        axes.axvline(0, color="0.6", linewidth=0.6)
        axes.set_yticks(range(len(table)), table["condition"])
        axes.set_ylim(len(table) - 0.5, -0.5)
        axes.set_xlabel("accuracy, cached minus recomputed")
    return figure


def _law(margin: np.ndarray, sigma: float) -> np.ndarray:
    from mechkv.flip_law import flip_probability

    return flip_probability(margin, sigma)


def _look(index: int) -> Look:
    return SERIES_LOOKS[index % len(SERIES_LOOKS)]


def _error(axes, x: float, y: float, low: float, high: float, look: Look, strip) -> None:
    """One estimate with its interval; a lower end of zero runs to the edge of the logarithmic part."""
    draw_line(axes, [x], [y], look, "_", strip=strip)
    if high > 0:
        axes.plot([x, x], [max(low, strip.bottom), high], color=look.colour, linewidth=1.0, gid="interval")


def _steps(part: pd.DataFrame, end: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A survival curve as steps that run on to the last token decoded."""
    part = pd.concat([part, part.iloc[-1:].assign(time=end)], ignore_index=True)
    low, high = part["low"].fillna(0.0), part["high"].fillna(part["survival"])
    time, survival = (part[name].to_numpy(float) for name in ("time", "survival"))
    return time, survival, low.to_numpy(), high.to_numpy()
