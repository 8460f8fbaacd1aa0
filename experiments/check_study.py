"""Does `check` raise false alarms, and does it find bugs? Small random models with and without one bug.

Clean: models of eleven families, paths without a bug; any `semantic` verdict is a false alarm. Bugged: the same
with one bug from sixteen kinds on one path; a bug is found when the verdict is `semantic`; its evidence is right when
kind, first layer and first position are those of what was injected. No claim of the paper is tested here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from experiments.injected_bugs import FAMILIES, KINDS, bug, cached, possible, random_model, recomputed
from experiments.outcome import ModelPool, Outcome
from mechkv import provenance
from mechkv.checking import check_paths
from mechkv.report import Section
from mechkv.runs import Piece, RunFolder
from mechkv.stats import proportion_interval

NAME = "check_study"


@dataclass(frozen=True)
class Config:
    """Settings of the study."""

    n_clean: int = 200
    n_bugged: int = 200
    n_prompt: int = 4
    n_tokens: int = 10
    dtypes: tuple[str, ...] = ("float64", "float32")
    seed: int = 0


PRESETS: dict[str, Config] = {"quick": Config(n_clean=22, n_bugged=32), "paper": Config()}


def run(config: Config, pool: ModelPool, folder: Path) -> Outcome:
    """Check every model; finished models are kept below `folder`."""
    return report(study(config, folder / "run"), config)


def study(config: Config, folder: Path | None = None) -> pd.DataFrame:
    """One row per model."""
    settings = {key: list(v) if isinstance(v, tuple) else v for key, v in vars(config).items()}
    settings |= {"kind": NAME, "kinds": list(KINDS), "families": list(FAMILIES)}
    kept = RunFolder(folder, settings | {"kernels": provenance.what_decides_kernels()})
    rows = []
    for index in range(config.n_clean + config.n_bugged):
        clean = index < config.n_clean
        piece = kept.piece(f"{index:04d}", lambda i=index, c=clean: Piece({}, _one(i, c, config)))  # type: ignore[misc]
        rows.append(dict(piece.values))
    return pd.DataFrame(rows)


def _one(index: int, clean: bool, config: Config) -> dict[str, Any]:
    families = list(FAMILIES)
    seed = 1000 * config.seed + index
    kind, family = "none", families[index % len(families)]
    if not clean:
        kind = KINDS[index % len(KINDS)]
        able = [name for name in families if possible(kind, name)]
        family = able[(index // len(KINDS)) % len(able)]
    layer = 1 + index % 2
    pair = bug(kind, family, config.n_prompt, layer) if not clean else None
    chunk = 1 + 2 * (index % 2)
    ours = pair.cached if pair else lambda m, t, n_prompt: cached(m, t, n_prompt, chunk=chunk)
    theirs = pair.recomputed if pair else recomputed
    tokens = torch.randint(1, 97, (config.n_tokens,), generator=torch.Generator().manual_seed(seed))
    found = check_paths(
        lambda dtype: random_model(family, dtype, seed),
        ours,
        theirs,
        tokens,
        n_prompt=config.n_prompt,
        dtypes=config.dtypes,
    )
    row = {"index": index, "family": family, "bug": kind, "verdict": found.verdict, "kind": found.kind}
    row |= {"layer": found.first_layer, "position": found.first_position, "convicted": found.convicted}
    top = found.rungs.iloc[0]
    row |= {"excess": float(top["max_abs"] / (top["bound"] * max(1.0, 2.0**-24 / top["unit_roundoff"])))}
    right = pair is None or (
        found.kind in pair.kinds and (found.first_layer, found.first_position) == (pair.layer, pair.position)
    )
    return row | {"right": bool(right)}


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per bug kind: models, found, evidence right."""
    rows = []
    for kind, part in frame.groupby("bug", sort=False):
        semantic = int((part["verdict"] == "semantic").sum())
        row = {"bug": kind, "models": len(part), "families": part["family"].nunique(), "semantic": semantic}
        row["evidence right"] = int(part["right"].sum()) if kind != "none" else None
        row["largest / smallest excess"] = f"{part['excess'].max():.1g} / {part['excess'].min():.1g}"
        rows.append(row)
    return pd.DataFrame(rows)


def report(frame: pd.DataFrame, config: Config) -> Outcome:
    """The table and what it says."""
    clean, bugged = frame[frame["bug"] == "none"], frame[frame["bug"] != "none"]
    alarms, found = int((clean["verdict"] == "semantic").sum()), int((bugged["verdict"] == "semantic").sum())
    right = int((bugged["right"] & (bugged["verdict"] == "semantic")).sum())
    upper = proportion_interval(alarms, len(clean)).high
    lower = proportion_interval(found, len(bugged)).low
    text = (
        f"{alarms} false alarms on {len(clean)} clean models of {clean['family'].nunique()} families (at most "
        f"{100 * upper:.1f} %, 95 %); {found} of {len(bugged)} bugs of {bugged['bug'].nunique()} kinds found (at least "
        f"{100 * lower:.1f} %); kind, first layer and first position right in {right} of {len(bugged)}. Ladder: "
        f"{', '.join(config.dtypes)}."
    )
    tables = {"check study": (summary(frame), "Verdicts of check on small random models, by injected bug.")}
    return Outcome(
        findings=[],
        sections=[Section(title="Rounding or a bug: how often check is right", text=text, figures={}, tables=tables)],
        method=[(f"{NAME}: {key}", str(value)) for key, value in vars(config).items()],
        limits=["The bugs are ours: a kind that nobody thought of is not in the table."],
        provenance=provenance.collect(),
    )
