"""How does the divergence fall with precision, which site matters, which path is nearer? Figures of precision results.

A figure takes a result and draws it: estimates and intervals are those of `PrecisionLadder.summary`,
`SitePrecision.summary` and `OracleStudy`. The predicted line of the ladder starts at the least precise rung and goes
down with the square of the unit roundoff; it is a prediction and is not fitted. Looks and exact zeros: `figure_style`.
"""

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation, LogLocator, NullFormatter

from mechkv.distributions import UNIT_ROUNDOFF
from mechkv.figure_style import COLUMN, SERIES_LOOKS, dtype_look, new_figure, style, zero_aware_log_axis
from mechkv.models import to_dtype

if TYPE_CHECKING:
    from mechkv.oracle import OracleStudy
    from mechkv.precision import PrecisionLadder
    from mechkv.precision_policy import SitePrecision


def ladder_figures(ladder: "PrecisionLadder") -> dict[str, Figure]:
    """KL by precision."""
    return {"kl_by_precision": kl_by_precision(ladder)}


def kl_by_precision(ladder: "PrecisionLadder") -> Figure:
    """KL between the paths by unit roundoff: per prompt, mean with interval, median, and the predicted slope."""
    table = ladder.summary().set_index("dtype")
    dtypes = list(ladder.config.dtypes)
    per_prompt = ladder.decoded.groupby(["dtype", "prompt"])["kl"].mean()
    anchor = dtypes[0]
    predicted = [
        table.loc[anchor, "kl_mean"] * (UNIT_ROUNDOFF[to_dtype(d)] / UNIT_ROUNDOFF[to_dtype(anchor)]) ** 2
        for d in dtypes
    ]
    shown = [d for d in dtypes if d != "float64"]
    line = predicted[: len(shown)]
    with style():
        figure = new_figure(COLUMN, 3.1)
        axes = figure.add_subplot()
        strip = zero_aware_log_axis(axes, [*per_prompt, *table["kl_median"], *line, *table["kl_high"].dropna()])
        rng = np.linspace(-0.18, 0.18, max(2, ladder.prompts.shape[0]))
        for index, dtype in enumerate(dtypes):
            look = dtype_look(dtype)
            values = per_prompt[dtype].to_numpy()
            x = index + rng[: len(values)]
            positive = values > 0
            axes.plot(x[positive], values[positive], ".", color=look.colour, alpha=0.6, markersize=3, gid="prompts")
            row = table.loc[dtype]
            if row["kl_mean"] > 0:
                low = max(row["kl_low"], strip.bottom) if row["kl_low"] == row["kl_low"] else row["kl_mean"]
                high = row["kl_high"] if np.isfinite(row["kl_high"]) else row["kl_mean"]
                axes.plot([index, index], [low, high], color=look.colour, linewidth=1.6, gid="interval")
                axes.plot(index, row["kl_mean"], marker=look.marker, color=look.colour, markersize=5, gid="mean")
            if row["kl_median"] > 0:
                axes.plot(index, row["kl_median"], marker="_", color="0.1", markersize=11, gid="median")
            elif strip.heights:
                strip.mark([index], look)
        axes.plot(range(len(line)), line, color="0.2", linestyle="--", label="predicted: square of unit roundoff")
        axes.plot([], [], marker="o", color="0.4", linestyle="none", label="mean, 95 % over prompts")
        axes.plot([], [], marker="_", color="0.1", linestyle="none", markersize=9, label="median over steps")
        axes.plot([], [], ".", color="0.4", alpha=0.6, label="a prompt")
        axes.set_xticks(range(len(dtypes)), dtypes)
        axes.set_xlim(-0.5, len(dtypes) - 0.5)
        axes.set_ylabel("KL(cached || recomputed), nats")
        figure.legend(loc="outside lower center")
    return figure


def precision_by_site(study: "SitePrecision") -> Figure:
    """KL between the paths under every policy, relative to nothing lifted."""
    table = study.summary().reset_index(drop=True)
    with style():
        figure = new_figure(COLUMN, 0.9 + 0.22 * len(table))
        axes = figure.add_subplot()
        values = table["kl_mean"].to_numpy()
        positive = values[values > 0]
        floor = positive.min() / 10 if len(positive) else 1e-12
        for index, row in table.iterrows():
            kind = 0 if "only" in row["policy"] else 1 if "all but" in row["policy"] else 5
            look = SERIES_LOOKS[kind]
            if row["kl_mean"] > 0:
                low, high = max(row["kl_low"], floor), row["kl_high"]
                if np.isfinite(low) and np.isfinite(high):
                    axes.plot([low, high], [index, index], color=look.colour, gid="interval")
                axes.plot(row["kl_mean"], index, marker=look.marker, color=look.colour, gid="mean")
            else:
                axes.plot(floor, index, marker=look.marker, color=look.colour, markerfacecolor="none", gid="zeros")
        axes.set_xscale("log")
        axes.set_yticks(range(len(table)), table["policy"])
        axes.set_ylim(len(table) - 0.5, -0.5)
        axes.set_xlabel("KL(cached || recomputed), nats\n(hollow: exactly 0)")
    return figure


def nearer_path(study: "OracleStudy", distance: str = "kl") -> Figure:
    """Distance of the recomputed path from the oracle against that of the cached path, a point a step."""
    table = study.decoded.assign(nearer=study.nearer(distance)[study.frame["step"] > 0])
    looks = {"cached": SERIES_LOOKS[0], "recomputed": SERIES_LOOKS[3], "tie": SERIES_LOOKS[5]}
    with style():
        figure = new_figure(COLUMN, 3.1)
        axes = figure.add_subplot()
        both = table[[f"cached_{distance}", f"recomputed_{distance}"]].to_numpy()
        positive = both[both > 0]
        ends = (positive.min() / 1.5, positive.max() * 1.5) if len(positive) else (1e-9, 1.0)
        for name, look in looks.items():
            part = table[table["nearer"] == name]
            label = f"{name} nearer ({len(part)} steps)" if name != "tie" else f"tie ({len(part)} steps)"
            axes.plot(
                part[f"cached_{distance}"],
                part[f"recomputed_{distance}"],
                linestyle="none",
                marker=look.marker,
                color=look.colour,
                markersize=3,
                alpha=0.75,
                label=label,
                gid=name,
            )
        axes.plot(ends, ends, color="0.5", linewidth=0.7)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        for axis in (axes.xaxis, axes.yaxis):
            subs = (1.0,) if ends[1] / ends[0] > 30 else (1.0, 2.0, 5.0)
            axis.set_major_locator(LogLocator(subs=subs, numticks=8))
            axis.set_major_formatter(LogFormatterSciNotation(labelOnlyBase=False, minor_thresholds=(np.inf, np.inf)))
            axis.set_minor_formatter(NullFormatter())
        unit = "KL(oracle || path), nats" if distance == "kl" else "relative L2 of the logits"
        axes.set_xlabel(f"cached: {unit}")
        axes.set_ylabel(f"recomputed: {unit}")
        axes.set_aspect("equal")
        figure.legend(loc="outside lower center", ncols=1)
    return figure
