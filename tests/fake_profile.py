"""A made-up drift profile with the shape of a real one: drift grows with the layer as a power law, step 0 and the K/V
rows of the prompt are exactly zero, float32 is 2^13 below float16."""

from typing import Any

import numpy as np
import pandas as pd

from mechkv import plots
from mechkv.claims import ClaimsTable, Finding
from mechkv.drift import DriftConfig, DriftProfile
from mechkv.drift_measure import DEFAULT_SITES
from mechkv.report import Report, Section

SIZES = {"float16": 2.0**-11, "float32": 2.0**-24}
N_LAYERS, N_STEPS, N_PROMPTS = 7, 11, 4


def _metrics(rel: float) -> dict[str, float | bool | int]:
    return {
        "max_abs": 3 * rel,
        "rel_l2": rel,
        "rel_linf": 1.5 * rel,
        "cosine_distance": rel**2 / 2,
        "signed_mean": -rel / 10,
        "rms": rel / 2,
        "max_ulp": float(np.ceil(rel * 2**11)),
        "equal_fraction": 1.0 if rel == 0 else 0.3,
        "bitwise_equal": rel == 0,
        "nonfinite": 0,
    }


def _step_rows(rng: np.random.Generator, size: float, step: int, n_layers: int) -> list[dict]:
    rows = []
    luck = rng.lognormal(0, 0.4)
    for layer in range(n_layers):
        rel = 0.0 if step == 0 or (layer == 0 and step % 3) else size * (layer + 1) ** 0.8 * luck
        head = {"step": step, "position": 13 + step, "layer": layer, "n_rows": 1, "n": 64}
        for i, site in enumerate(DEFAULT_SITES):
            zero = site == "resid_pre" and layer == 0
            rows.append(
                head | {"site": site, "provenance": "activation"} | _metrics(0.0 if zero else rel * (1 + i / 9))
            )
        for site in ("cache_k", "cache_v"):
            for provenance, n in (("prefill", 13), ("decode", step - 1), ("new", 1)):
                if n < 1 or (step == 0 and provenance != "prefill"):
                    continue
                value = {"prefill": 0.0, "decode": rel / 3, "new": rel}[provenance] * (1 if site == "cache_k" else 1.4)
                rows.append(head | {"site": site, "provenance": provenance, "n_rows": n} | _metrics(value))
    last = {"step": step, "position": 13 + step, "layer": n_layers, "n_rows": 1, "n": 64, "site": "logits"}
    return [*rows, last | {"provenance": "activation"} | _metrics(0.0 if step == 0 else size * 9 * luck)]


def fake_profile(
    n_prompts: int = N_PROMPTS, n_layers: int = N_LAYERS, n_steps: int = N_STEPS, source: str = "tiny/llama"
) -> DriftProfile:
    frames, steps, splits = [], [], []
    for dtype, size in SIZES.items():
        for prompt in range(n_prompts):
            rng = np.random.default_rng(prompt)
            rows = [row for step in range(n_steps + 1) for row in _step_rows(rng, size, step, n_layers)]
            frames.append(pd.DataFrame(rows).assign(dtype=dtype, prompt=prompt))
            steps.append(pd.DataFrame({"step": range(n_steps + 1), "token": 5, "dtype": dtype, "prompt": prompt}))
            for step in range(1, n_steps + 1, 4):
                layer = np.arange(n_layers)
                injected = size * rng.lognormal(0, 0.3, n_layers)
                propagated = size * layer**0.8 * rng.lognormal(0, 0.3)
                splits.append(
                    pd.DataFrame({"step": step, "layer": layer, "injected": injected, "propagated": propagated}).assign(
                        drift=np.hypot(injected, propagated), dtype=dtype, prompt=prompt
                    )
                )
    prompts = pd.DataFrame({"prompt": range(n_prompts), "n_prompt": 13, "n_tokens": 13 + n_steps})
    return DriftProfile(
        frame=pd.concat(frames, ignore_index=True),
        steps=pd.concat(steps, ignore_index=True),
        split=pd.concat(splits, ignore_index=True),
        prompts=prompts.assign(tokens=[np.arange(13 + n_steps)] * n_prompts),
        config=DriftConfig(n_steps=n_steps, split_every=4),
        dtype="float16",
        guards={dtype: {"repeatable": 2 * n_prompts, "null_control": n_prompts} for dtype in SIZES},
        provenance={"models": {dtype: {"source": source, "dtype": dtype} for dtype in SIZES}},
    )


def fake_report(profile: DriftProfile | None = None, **changes: Any) -> Report:
    """A report on the made-up profile, with two claims measured."""
    where = "tiny/llama, float16, 4 prompts, 11 steps"
    ratio = {"value": 8192.0, "low": 7900.0, "high": 8500.0}
    findings = [
        Finding("C3", "partly", "drift ratio float16 / float32", "self against self: 0", where, "layer_drift", **ratio),
        Finding("C6", "reproduced", "all steps bitwise repeatable", "16 of 16 repeats", where, "layer_drift"),
    ]
    parts: dict[str, Any] = {
        "title": "Layer drift of tiny/llama",
        "question": "Where do the two paths differ?\n\nAnd by how much?",
        "method": [
            ("n_steps", 11),
            ("sites", ("resid_pre", "mlp_out")),
            ("seed", 0),
            ("dtypes", ["float16", "float32"]),
        ],
        "claims": ClaimsTable(findings),
        "limits": ["A small model says nothing about a large one.", "One machine."],
        "provenance": {"versions": {"torch": "2.13.0"}, "machine": {"threads": 2, "cuda": None}},
        "command": "python -m experiments.reproduce --preset quick",
    }
    if "sections" not in changes:
        parts["sections"] = [drift_section(profile or fake_profile())]
    return Report(**parts | changes)


def drift_section(profile: DriftProfile) -> Section:
    captions = plots.drift_captions(profile)
    table = profile.summary().query("site == 'resid_post' and dtype == 'float16'")
    return Section(
        "Drift by layer",
        "Drift grows with depth.\n\nStep 0 is exactly zero.",
        {name: (figure, captions[name]) for name, figure in plots.drift_figures(profile).items()},
        {"summary": (table[["layer", "estimate", "low", "high", "n_rows"]], "Relative L2 drift at resid_post.")},
    )
