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
    """`95 % over prompts [low, high]`, or why there is none: `n_prompts`, those with a defined value, are too few."""
    if not (math.isnan(low) or math.isnan(high)):
        return f"95 % over prompts [{low:{form}}, {high:{form}}]{unit}"
    if n_prompts == 0:
        return "undefined in every prompt"
    return _too_few(n_prompts) if n_prompts < MIN_CLUSTERS else "no interval"


def table(frame: pd.DataFrame, n_prompts: int | None = None) -> str:
    """A table as text, without its index; undefined cells are `-`. Given the number of prompts, a line below says where
    bounds (`low`, `..._low`) are missing because it is too small."""
    shown = {  # pandas has its own word for what is missing among whole numbers
        name: column.astype(object).where(column.notna(), UNDEFINED) if column.dtype.name == "Int64" else column
        for name, column in frame.items()
    }
    text = pd.DataFrame(shown).to_string(index=False, na_rep=UNDEFINED, float_format="{:.3g}".format)
    bounds = [name for name in frame if str(name) == "low" or str(name).endswith("_low")]
    if n_prompts is not None and n_prompts < MIN_CLUSTERS and frame[bounds].isna().any(axis=None):
        text += f"\n({_too_few(n_prompts)}: bounds are {UNDEFINED})"
    return text


def _too_few(n_prompts: int) -> str:
    return f"too few prompts for an interval ({n_prompts}; it takes {MIN_CLUSTERS})"
