"""What does a report of `check` show? Rows of the ladder, rows by position, and the first flip of every rung."""

from typing import Any

import numpy as np
import pandas as pd

from mechkv.examine import CaseReport
from mechkv.verdict import ROUNDOFF, bounds


def rung_rows(report: CaseReport) -> list[dict[str, Any]]:
    """One row per rung: status, largest difference, bound, floor, flips and the first position beyond."""
    rows = []
    for rung in report.rungs:
        e = rung.evidence
        limit = bounds(report.sensitivity, e.unit_roundoff)
        judged = bounds(report.sensitivity, max(e.unit_roundoff, report.decision.roundoff or 0.0))
        over: Any = []
        if judged is not None and e.status == "ok":
            over = np.flatnonzero(np.asarray(e.difference) > judged)
        row: dict[str, Any] = {"case": report.case.name, "dtype": e.dtype, "status": e.status}
        row |= {"max_abs": e.largest if e.status == "ok" else np.nan}
        row |= {"bound": float(limit.max()) if limit is not None else np.nan}
        row |= {"floor": max(e.repeat.values(), default=np.nan), "unit_roundoff": e.unit_roundoff}
        row |= {"flips": int(np.nansum(rung.table["flip"])) if rung.table else 0}
        row |= {"n_positions": len(report.case.positions)}
        row |= {"first_beyond": report.case.positions[over[0]] if len(over) else None, "error": e.error}
        rows.append(row)
    return rows


def position_frame(report: CaseReport) -> pd.DataFrame:
    """One row per rung and position: difference, bound, flip and margins."""
    frames = []
    for rung in report.rungs:
        if not rung.table:
            continue
        limit = bounds(report.sensitivity, rung.evidence.unit_roundoff)
        columns = {name: rung.table[name] for name in ("max_abs_dz", "flip", "margin_a", "margin_b")}
        head = {"case": report.case.name, "dtype": rung.evidence.dtype, "position": list(report.case.positions)}
        frames.append(pd.DataFrame(head | {"bound": np.nan if limit is None else limit} | columns))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def first_flips(report: CaseReport) -> list[dict[str, Any]]:
    """The first flip of every rung, with its margin in the most precise rung and the drift bound there."""
    usable = [r for r in report.rungs if r.table and r.evidence.status == "ok"]
    reference = min(
        (r for r in usable), key=lambda r: abs(r.evidence.unit_roundoff - ROUNDOFF["float32"]), default=None
    )
    found = []
    for rung in usable:
        at = np.flatnonzero(rung.table["flip"] == 1)
        if not len(at) or reference is None:
            continue
        limit = bounds(report.sensitivity, rung.evidence.unit_roundoff)
        first = int(at[0])
        flip = {"case": report.case.name, "dtype": rung.evidence.dtype, "n_flips": len(at)}
        flip |= {"position": report.case.positions[first], "cached_token": int(rung.table["top_a"][first])}
        flip |= {"recomputed_token": int(rung.table["top_b"][first]), "difference": rung.evidence.difference[first]}
        flip |= {"margin": float(reference.table["margin_b"][first]), "margin_dtype": reference.evidence.dtype}
        flip["bound"] = None if limit is None else float(limit[first])
        found.append(flip)
    return found


def flip_words(flip: dict[str, Any]) -> str:
    """A flip in words."""
    bound = "unknown" if flip["bound"] is None else f"{flip['bound']:.2g}"
    return (
        f"{flip['dtype']}, position {flip['position']}: token {flip['cached_token']} against "
        f"{flip['recomputed_token']}; margin {flip['margin']:.2g} in {flip['margin_dtype']}, the logits differ by "
        f"{flip['difference']:.2g} (bound {bound})"
    )


def rung_table(rungs: pd.DataFrame) -> str:
    """The ladder as text, for a terminal."""
    shown = rungs[["case", "dtype", "status", "max_abs", "bound", "floor", "flips", "first_beyond"]]
    return shown.to_string(index=False, float_format=lambda x: f"{x:.2g}", na_rep="-")
