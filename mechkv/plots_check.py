"""What does a check look like? The ladder and the layer profile, each beside its bound. Figures compute nothing.

Conventions: `figure_style`. On the ladder, precisions go from the finest to the coarsest; a rung that is missing or not
finite has no marker. Layer -1 is what enters block 0.
"""

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from mechkv.figure_style import (
    COLUMN,
    SERIES_LOOKS,
    draw_line,
    integer_axis,
    new_figure,
    settle,
    style,
    zero_aware_log_axis,
)

if TYPE_CHECKING:
    from mechkv.checking import CheckReport


def ladder(report: "CheckReport", case: str | None = None) -> Figure:
    """Largest logit difference and bound in every precision, for one case (by default the first)."""
    name = case or str(report.rungs["case"].iloc[0])
    part = report.rungs[report.rungs["case"] == name].sort_values("unit_roundoff")
    x = np.arange(len(part))
    with style():
        figure = new_figure(COLUMN, 2.4)
        axes = figure.add_subplot()
        strip = zero_aware_log_axis(axes, np.concatenate([part["max_abs"], part["bound"]]))
        draw_line(axes, x, part["max_abs"], SERIES_LOOKS[0], "cached against recomputed", strip=strip)
        draw_line(axes, x, part["bound"], SERIES_LOOKS[5], "bound of rounding")
        axes.set_xticks(x, part["dtype"])
        axes.set_ylabel("max abs difference of logits")
        axes.legend(loc="best")
        axes.set_title(f"{report.verdict} ({name})")
    return settle(figure)


def layers(report: "CheckReport") -> Figure:
    """Difference of what enters block 0 and of every block's output at the first bad position, and its bound."""
    profile = report.profile
    with style():
        figure = new_figure(COLUMN, 2.4)
        axes = figure.add_subplot()
        strip = zero_aware_log_axis(axes, np.concatenate([profile["max_abs"], profile["bound"]]))
        draw_line(axes, profile["layer"], profile["max_abs"], SERIES_LOOKS[0], "cached against recomputed", strip=strip)
        draw_line(axes, profile["layer"], profile["bound"], SERIES_LOOKS[5], "bound of rounding")
        integer_axis(axes, "layer (-1: what enters block 0)")
        axes.set_ylabel("max abs difference of output")
        axes.legend(loc="best")
        axes.set_title(f"{report.verdict}: {report.evidence['profile_shape']}")
    return settle(figure)
