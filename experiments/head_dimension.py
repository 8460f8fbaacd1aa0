"""Do grouped queries, head dimension and windows shape the drift, when the function is held fixed?

C4 compares three models and attributes what differs to their architecture. Here one model is compared with twins of
itself that compute the same function (`mechkv.twins`), one cause at a time, on the same tokens; the heads of the model
as it is are looked at (`mechkv.heads`), shared and independent KV errors are planted (`mechkv.broadcast`), and the
mechanism is swept on sums, one attention layer and tiny models (`mechkv.synthetic`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.outcome import ModelPool, Outcome, problem_texts
from mechkv import provenance
from mechkv.broadcast import Broadcast, BroadcastConfig, broadcast
from mechkv.claims import Finding
from mechkv.heads import HeadAnalysis, HeadConfig, head_analysis
from mechkv.models import info
from mechkv.report import Section
from mechkv.runs import Piece, RunFolder
from mechkv.synthetic import LayerShape, Sweep, layer_sweep, model_sweep, sum_sweep
from mechkv.twin_drift import PREDICTIONS, TwinConfig, TwinStudy, standard_twins, twin_study

NAME = "head_dimension"
_ORDERS = ("sequential", "split:4")
"""Orders of the cached and of the recomputed path in a layer; more pairs are compared on plain sums."""
CAUSES = {"kv_heads": "grouped queries", "head_dim": "head dimension", "window": "sliding window"}


@dataclass(frozen=True)
class Config:
    """Settings of this experiment.

    Attributes:
        model: The model whose twins are made.
        window_model: A model with windows, for that cause; None: it is listed as not testable.
        dtype: Dtype of both. The quick preset takes float32: there nearly every step drifts on a CPU, while in half
            precision a few lengths do, and a few steps would find hardly any drift to compare.
        n_prompts: Prompts of twin study and head analysis.
        n_steps: Decode steps.
        d_head: Head dimension of the padded twin; None: doubled.
        lengths: Terms of the sums that are swept.
        d_heads: Head dimensions of the sweeps.
        contexts: Context lengths of the sweeps.
        windows: Windows of the sweeps, in a context as long as the longest.
        accumulators: Dtypes in which sums are emulated; a layer has each as the dtype of its data too, with sums in
            that dtype, in float32, and in the machine's own kernels.
        seeds: Seeds of the sweeps.
        tiny_models: Sweep tiny random models as well, over the same axes (under a minute).
    """

    model: str = "smollm2-135m"
    window_model: str | None = None
    dtype: str = "float32"
    n_prompts: int = 4
    n_steps: int = 4
    d_head: int | None = None
    lengths: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    d_heads: tuple[int, ...] = (16, 32, 64, 128, 256)
    contexts: tuple[int, ...] = (32, 64, 128, 256)
    windows: tuple[int, ...] = (16, 32, 64, 128)
    accumulators: tuple[str, ...] = ("float16", "bfloat16", "float32")
    seeds: tuple[int, ...] = (0, 1, 2)
    tiny_models: bool = False
    prompts: Path | None = None
    seed: int = 0


PRESETS: dict[str, Config] = {
    "quick": Config(),
    "full": Config(window_model="gemma3-270m", n_prompts=8, n_steps=8, seeds=(0, 1, 2, 3, 4), tiny_models=True),
    "paper": Config(
        window_model="gemma3-270m",
        dtype="bfloat16",
        n_prompts=600,
        n_steps=32,
        lengths=(16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
        windows=(16, 32, 64, 128, 256, 512),
        seeds=(0, 1, 2, 3, 4),
        tiny_models=True,
    ),
}


def run(config: Config, pool: ModelPool, folder: Path) -> Outcome:
    """Measure, draw, judge; everything is kept below `folder`."""
    texts = problem_texts(config.n_prompts, config.prompts)
    findings: list[Finding] = []
    sections: list[Section] = []
    where: dict[str, Any] = {}
    for source in dict.fromkeys(filter(None, (config.model, config.window_model))):
        model = pool.get(source, config.dtype)
        longest = max(len(model.tokenizer(text)["input_ids"]) for text in texts) + config.n_steps
        settings = TwinConfig(n_steps=config.n_steps, seed=config.seed)
        twins = standard_twins(model, longest, config.d_head)
        study = twin_study(model, twins, texts, settings, folder=folder / source / "twin_run")
        study.save(folder / source / "twins")
        analysis = head_analysis(
            model, texts, HeadConfig(n_steps=config.n_steps, seed=config.seed), folder=folder / source / "head_run"
        )
        analysis.save(folder / source / "heads")
        shared = None
        if info(model).n_kv < info(model).n_heads:
            shared = broadcast(model, texts, BroadcastConfig(dtype=config.dtype, seed=config.seed))
        place = f"{source}, {config.dtype}, {len(texts)} prompts x {config.n_steps} decode steps"
        findings += twin_findings(study, shared, place)
        sections += [twin_section(study, shared, place), head_section(analysis, place)]
        where = where or study.provenance
    sweep = _sweeps(config, folder / "sweeps")
    sections.append(sweep_section(sweep, config))
    if not any("sliding window" in finding.ours for finding in findings):
        why = f"sliding window: {config.model} has none, or the texts do not fit into it"
        findings.append(Finding("C4", "not testable here", why, "", config.model, NAME))
    return Outcome(
        findings=findings,
        sections=sections,
        method=[(f"{NAME}: {key}", str(value)) for key, value in vars(config).items()],
        limits=[
            "Copied KV heads make the same rounding errors, because the same numbers go through the same kernel: the "
            "twin tests grouping as such, planted independent errors test the sharing of one error.",
            "Padded dimensions are zero and add no rounding errors of their own: the twin tests the width that kernels "
            "see, the sweeps test the number of terms.",
        ],
        provenance=where,
    )


def twin_findings(study: TwinStudy, shared: Broadcast | None, place: str) -> list[Finding]:
    """C4 cause by cause, by the rule that `mechkv.twin_drift` fixes."""
    effects = study.effects().set_index(["cause", "measure"])
    findings = []
    for row in study.verdicts().itertuples():
        measure, _ = PREDICTIONS[row.cause]
        text = f"{CAUSES[row.cause]}: without the cause" if row.cause != "head_dim" else "head dimension: with twice it"
        if row.identical:
            ours = f"{text} the drift is bit for bit the same at every layer and step"
        else:
            ours = f"{text} {measure} changes by {100 * row.relative:+.0f} % (paper: {row.predicted})"
        controls = "; ".join(_control(effects, measure))
        if row.cause == "kv_heads" and shared is not None:
            last = shared.ratios().iloc[-1]
            controls += (
                f"; errors shared by a group of {shared.group_size} against independent ones: response x "
                f"{last['estimate']:.2f} [{last['low']:.2f}, {last['high']:.2f}] (1: no amplification)"
            )
        twin = study.twins[row.twin]
        findings.append(
            Finding(
                claim="C4",
                verdict=row.verdict,
                ours=ours,
                value=None if pd.isna(row.relative) else float(row.relative),
                low=None if pd.isna(row.relative_low) else float(row.relative_low),
                high=None if pd.isna(row.relative_high) else float(row.relative_high),
                controls=controls,
                model=place,
                source=NAME,
                note=f"{twin.change}; same function (float64 logits differ by {twin.float64_rel_l2:.0e}). Effect "
                "relative to the model's own value, paired by prompt.",
            )
        )
    return findings


def _control(effects: pd.DataFrame, measure: str) -> list[str]:
    if ("order", measure) not in effects.index:
        return ["no head-order control"]
    row = effects.loc[("order", measure)]
    if pd.isna(row["relative"]):
        return ["no drift in the head-order control"]
    return [
        f"heads merely reordered: {100 * row['relative']:+.0f} % [{100 * row['relative_low']:.0f}, "
        f"{100 * row['relative_high']:.0f}]"
    ]


def twin_section(study: TwinStudy, shared: Broadcast | None, place: str) -> Section:
    """Profiles, effects and verdicts of the twins."""
    proofs = pd.DataFrame([{"twin": name, **twin.to_dict()} for name, twin in study.twins.items()])
    tables = {
        "verdicts": (study.verdicts(), f"C4 cause by cause, {place}."),
        "effects": (study.effects(), f"Twin minus model, paired by prompt, 95 % over prompts, {place}."),
        "proofs": (proofs, "Each twin computes the same function: relative L2 of float64 logits on random tokens."),
    }
    if shared is not None:
        caption = f"Response to KV errors shared by a group of {shared.group_size} over that to independent ones."
        tables["shared errors"] = (shared.ratios(), f"{caption} 95 % over prompts, {place}.")
    figures = study.plot()
    caption = f"Relative L2 drift by layer of the model and its twins on the same tokens. {place}; bands: 95 %."
    return Section(
        title=f"Architecture with the function held fixed: {place.split(',')[0]}",
        text="Twins compute the same function in another shape, so what differs between their profiles is what the "
        f"shape does to rounding. Names: {', '.join(f'{n}: {t.change}' for n, t in study.twins.items())}.",
        figures={f"{name}_{_slug(place)}": (figure, caption) for name, figure in figures.items()},
        tables=tables,
    )


def head_section(analysis: HeadAnalysis, place: str) -> Section:
    """Heads, frequencies, attention rows, sharing."""
    captions = {
        "head_heatmap": "Relative L2 drift of head outputs (z), mean over steps and prompts; white lines part groups.",
        "pattern_drift": "Total variation of attention rows between the paths, mean over heads.",
        "drift_by_dimension": "Relative drift by dimension of a head (K before and after rotation), all layers.",
        "drift_by_frequency": "Relative drift of K by rotary frequency, before and after rotation.",
    }
    figures = {
        f"{name}_{_slug(place)}": (figure, f"{captions[name]} {place}; bands: 95 % over prompts.")
        for name, figure in analysis.plot().items()
    }
    sharing, concentration = analysis.sharing(), analysis.concentration()
    return Section(
        title=f"Heads, dimensions, rotary frequencies: {place.split(',')[0]}",
        text=_words(concentration, analysis.dtype),
        figures=figures,
        tables={
            "concentration": (concentration, f"Share of heads and dimensions with half of the squared drift, {place}."),
            "sharing": (sharing, f"Do heads of a group drift together? Mean and 95 % over prompts, {place}."),
            "kinds": (analysis.summary(by=("kind",)), f"Relative L2 drift by kind of layer, {place}."),
        },
    )


def _words(concentration: pd.DataFrame, dtype: str) -> str:
    parts = []
    for row in concentration[concentration["dtype"] == dtype].itertuples():
        if row.site in ("z", "rot_k"):
            parts.append(
                f"{row.site}: {row.n_half:.0f} of {row.n_units:.0f} {row.unit}s hold half of the squared drift "
                f"(of the signal: {100 * row.signal_share:.1f} %), prompts agree on {100 * row.agreement:.0f} % "
                f"of them (by chance {100 * row.chance:.0f} %)"
            )
    return "; ".join(parts) + "." if parts else "No drift at any head."


def _sweeps(config: Config, folder: Path) -> Sweep:
    """The sweeps, each kept once it is done."""
    swept = ("lengths", "d_heads", "contexts", "windows", "accumulators", "seeds")
    settings: dict[str, Any] = {name: list(getattr(config, name)) for name in swept}
    settings |= {"tiny_models": config.tiny_models, "kernels": provenance.what_decides_kernels()}
    run = RunFolder(folder, settings)
    seeds, windowed = config.seeds, LayerShape(context=max(config.windows))
    jobs: dict[str, Callable[[], Sweep]] = {
        "signed": lambda: sum_sweep(config.lengths, accumulators=config.accumulators, seeds=seeds),
        "positive": lambda: sum_sweep(config.lengths, accumulators=config.accumulators, terms="positive", seeds=seeds),
        "d_head": lambda: _layer(config, "d_head", config.d_heads),
        "context": lambda: _layer(config, "context", config.contexts),
        "window": lambda: _layer(config, "window", config.windows, windowed),
        "n_kv": lambda: _layer(config, "n_kv", (1, 2, 4, 8), LayerShape(n_heads=8)),
    }
    if config.tiny_models:
        tiny: dict[str, Any] = {"seeds": seeds, "dtypes": ("float32",), "n_steps": 6}
        jobs["model, d_head"] = partial(model_sweep, "d_head", config.d_heads, **tiny)
        jobs["model, n_kv"] = partial(model_sweep, "n_kv", (1, 2, 4), **tiny)
        jobs["model, context"] = partial(model_sweep, "context", config.contexts, **tiny)
        jobs["model, window"] = partial(model_sweep, "window", config.windows, windowed, **tiny)
    total = Sweep(pd.DataFrame(), {})
    for name, job in jobs.items():

        def compute(job=job) -> Piece:
            found = job()
            return Piece({"frame": found.frame}, {"settings": found.settings})

        piece = run.piece(name, compute)
        total = total + Sweep(piece.frames["frame"], piece.values["settings"])
    return total


def _layer(config: Config, axis: Any, values: Sequence[int], base: LayerShape | None = None) -> Sweep:
    """Emulated sums beside the machine's own kernels, on the same layers."""
    total = Sweep(pd.DataFrame(), {})
    for dtype in config.accumulators:
        sums = tuple(dict.fromkeys((dtype, "float32")))
        total += layer_sweep(axis, values, base, orders=[_ORDERS], dtype=dtype, accumulators=sums, seeds=config.seeds)
    for dtype in config.accumulators:
        total += layer_sweep(axis, values, base, kernels="torch", dtype=dtype, seeds=config.seeds)
    return total


def sweep_section(sweep: Sweep, config: Config) -> Section:
    """Exponents and figures of the sweeps."""
    caption = (
        f"Points: seeds {list(config.seeds)}; lines: means; thin lines: summation theory, not fitted. Orders stand for "
        "(cached | recomputed); `one row | all rows`: this machine's own kernels; zeros in the order of the legend."
    )
    return Section(
        title="Which dimension does the drift scale with?",
        text="Emulated orders of summation show what a difference of order alone does, on any machine. Theory "
        "foretells an exponent of 1/2 in the number of terms where one order is sequential, nearly 0 where none is. A "
        "score has d_head terms, a head's output as many as there are keys (the window, where it is shorter than the "
        "context), a projection d_model; no sum has n_kv. `k`, `scores` and `z` have the same inputs on both "
        "paths; `layer` is z with the drift of all of them.",
        figures={name: (figure, caption) for name, figure in sweep.plot().items()},
        tables={"exponents": (sweep.exponents(), "Fitted powers with 95 % intervals, seeds as clusters.")},
    )


def _slug(place: str) -> str:
    return place.split(",")[0].replace("-", "_")
