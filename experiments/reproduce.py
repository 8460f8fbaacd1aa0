"""The main job: every experiment of a preset, one folder of results, one report.

    python -m experiments.reproduce --preset quick

writes `results/<name>/` with `manifest.json` (what was run on what), one folder of tables per experiment, `figures/`
(PNG and PDF), `tables/` (CSV), `claims.json` and `report.html`, and ends by printing the path of the report. Killed at
any moment and started again with the same settings, it goes on and ends with the same tables, bit for bit.
"""

import shlex
import sys
import time
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import tyro

from mechkv.errors import InputError, MechkvError

EXPERIMENTS: tuple[str, ...] = (
    "layer_drift",
    "kv_vs_residual",
    "token_divergence",
    "precision_control",
    "head_dimension",
    "check_study",
)
"""Modules of `experiments`, in the order they run and appear in the report."""

TITLE = "Cached and cache-free decoding of one transformer"
QUESTION = (
    "A transformer decoded with its KV cache and the same transformer recomputed without it should agree. Where, why "
    "and how much do they not? The claims are those of arXiv 2604.15409; the effect itself was described in Hugging "
    "Face transformers issue 25420 (2023)."
)
CONTEXT = (
    "Known from elsewhere: samples that diverge across hardware set-ups on MATH500 number 96.6 / 73.0 / 2.2 % in BF16, "
    "FP16 and FP32 (LayerCast, arXiv 2506.09501); flips on 0.3 to 1.3 % of steps (MarginGate, arXiv 2605.30218); keys "
    "and values as exact functions of the residual stream (KV-Direct, arXiv 2603.19664)."
)


@dataclass(frozen=True)
class Reproduce:
    """Run the experiments of a preset and write the report."""

    preset: str = "quick"
    """quick: minutes on a laptop; full: up to an hour an experiment there; paper: the paper's size, for a GPU."""
    name: str | None = None
    """Folder below results/; by default the preset's name."""
    out: Path = Path("results")
    """Where results go."""
    model: str | None = None
    """Another model than the preset's."""
    dtype: str | None = None
    """Another dtype than the preset's."""
    prompts: Path | None = None
    """Problems in GSM8K's JSONL format instead of ours."""
    n_prompts: int | None = None
    """Another number of problems than the preset's."""
    device: str = "auto"
    """Where to run."""
    only: tuple[str, ...] = ()
    """Experiments to run; by default all."""


def main(settings: Reproduce) -> Path:
    """Run, write, return the path of the report.

    Raises:
        InputError: Unknown preset or experiment.
        StorageError: The folder holds the results of another run.
    """
    from experiments.outcome import ModelPool
    from mechkv import provenance
    from mechkv.claims import ClaimsTable
    from mechkv.report import claims_json
    from mechkv.runs import RunFolder
    from mechkv.storage import write_json

    chosen = _chosen(settings)
    configs = {name: _config(module, settings) for name, module in chosen.items()}
    folder = settings.out / (settings.name or settings.preset)
    RunFolder(folder, {"preset": settings.preset, "experiments": {n: _plain(c) for n, c in configs.items()}})
    pool = ModelPool(settings.device)
    outcomes = {}
    for number, (name, module) in enumerate(chosen.items(), start=1):
        print(f"[{number}/{len(chosen)}] {name}", file=sys.stderr)
        start = time.perf_counter()
        outcomes[name] = module.run(configs[name], pool, folder / name)
        print(f"[{number}/{len(chosen)}] {name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    manifest = provenance.collect() | {
        "preset": settings.preset,
        "settings": {name: _plain(config) for name, config in configs.items()},
        "models": {name: _models(outcome.provenance) for name, outcome in outcomes.items()},
    }
    write_json(folder / "manifest.json", manifest)
    claims = ClaimsTable([finding for outcome in outcomes.values() for finding in outcome.findings])
    claims_json(claims, folder / "claims.json")
    return _write_report(folder, outcomes, claims, manifest, settings)


def _models(where: dict[str, Any]) -> dict[str, Any]:
    """Models by name or dtype, whether a result was measured on several or on one."""
    return where.get("models") or ({where["model"]["dtype"]: where["model"]} if "model" in where else {})


def _chosen(settings: Reproduce) -> dict[str, Any]:
    unknown = [name for name in settings.only if name not in EXPERIMENTS]
    if unknown:
        raise InputError(
            "unknown experiment", got=unknown, expected=f"some of {', '.join(EXPERIMENTS)}", remedy="Name those."
        )
    modules = {name: import_module(f"experiments.{name}") for name in settings.only or EXPERIMENTS}
    known = {preset for module in modules.values() for preset in module.PRESETS}
    if settings.preset not in known:
        raise InputError("unknown preset", got=settings.preset, expected=f"one of {sorted(known)}", remedy="Name one.")
    return {name: module for name, module in modules.items() if settings.preset in module.PRESETS}


def _config(module: Any, settings: Reproduce) -> Any:
    """The preset's config with what the command line overrides."""
    config = module.PRESETS[settings.preset]
    given = {name: getattr(settings, name) for name in ("model", "dtype", "prompts", "n_prompts")}
    has = {field.name for field in fields(config)}
    return replace(config, **{key: value for key, value in given.items() if value is not None and key in has})


def _plain(config: Any) -> dict[str, Any]:
    simple = (str, int, float, bool, type(None))
    return {key: value if isinstance(value, simple) else str(value) for key, value in vars(config).items()}


def _command(settings: Reproduce) -> str:
    """The command that makes this report again: what differs from the defaults."""
    parts = ["python", "-m", "experiments.reproduce", "--preset", settings.preset]
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.name != "preset" and value != field.default:
            parts += [f"--{field.name}", *([str(item) for item in value] if isinstance(value, tuple) else [str(value)])]
    return shlex.join(parts)


def _write_report(
    folder: Path, outcomes: dict[str, Any], claims: Any, manifest: dict[str, Any], settings: Reproduce
) -> Path:
    from mechkv import figure_style
    from mechkv.report import Report, write_csv, write_html

    for name, outcome in outcomes.items():
        for section in outcome.sections:
            for figure_name, (figure, _) in section.figures.items():
                figure_style.save(figure, folder / "figures" / f"{name}-{figure_name}")
            for table_name, (table, _) in section.tables.items():
                write_csv(table, folder / "tables" / f"{name}-{table_name.replace(' ', '_')}.csv")
    report = Report(
        title=TITLE,
        question=f"{QUESTION} {CONTEXT}",
        method=[row for outcome in outcomes.values() for row in outcome.method],
        claims=claims,
        sections=[section for outcome in outcomes.values() for section in outcome.sections],
        limits=list(dict.fromkeys(limit for outcome in outcomes.values() for limit in outcome.limits)),
        provenance=manifest,
        command=_command(settings),
    )
    path = folder / "report.html"
    write_html(report, path)
    return path


if __name__ == "__main__":
    try:
        print(main(tyro.cli(Reproduce)))
    except MechkvError as error:
        print(f"reproduce: {error}", file=sys.stderr)
        raise SystemExit(2) from error
