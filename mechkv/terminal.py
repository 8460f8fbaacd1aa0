"""How are numbers told on a terminal? An undefined one is a dash with its reason, never `nan`.

Conventions. Intervals resample prompts, so they exist from `stats.MIN_CLUSTERS` prompts on; with fewer, that is said
instead. On `--json` the same bounds are null.
"""

import math

import pandas as pd

from mechkv.stats import MIN_CLUSTERS

UNDEFINED = "-"


def number(value: float, form: str) -> str:
    """`value` in a format such as `.2e`; `-` where it is undefined."""
    return UNDEFINED if math.isnan(value) else format(value, form)


def interval(low: float, high: float, n_prompts: int, form: str, unit: str = "") -> str:
    """`95 % over prompts [low, high]`, or that `n_prompts`, those with a defined value, are too few for it."""
    if math.isnan(low) or math.isnan(high):
        few = f"too few prompts for an interval ({n_prompts}; it takes {MIN_CLUSTERS})"
        return few if n_prompts < MIN_CLUSTERS else "no interval"
    return f"95 % over prompts [{low:{form}}, {high:{form}}]{unit}"


def table(frame: pd.DataFrame) -> str:
    """A table as text, without its index; undefined cells are `-`."""
    shown = {  # pandas has its own word for what is missing among whole numbers
        name: column.astype(object).where(column.notna(), UNDEFINED) if column.dtype.name == "Int64" else column
        for name, column in frame.items()
    }
    return pd.DataFrame(shown).to_string(index=False, na_rep=UNDEFINED)


def interval_note(n_prompts: int) -> str:
    """A line to print under tables with bounds: why they have none; empty where there are prompts enough."""
    if n_prompts >= MIN_CLUSTERS:
        return ""
    return f"too few prompts for intervals ({n_prompts}; it takes {MIN_CLUSTERS}): bounds over prompts are {UNDEFINED}"
