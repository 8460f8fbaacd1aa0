"""How much do the paths differ, layer by layer, over several prompts, beside the same tokens in float32?

`drift_profile` measures every prompt (see `drift_measure` for the equations and controls), in the model's dtype and, as
the control, with the same weights in float32 on the same tokens. `DriftProfile` holds the tidy tables and what is read
off them: per-layer intervals over prompts, onset, amplification.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from torch import Tensor
from tqdm.auto import tqdm
from transformer_lens.model_bridge import TransformerBridge

from mechkv import provenance, result_folder, storage
from mechkv.comparison import metric_floor, metric_range
from mechkv.configs import chosen
from mechkv.drift_measure import METRICS, DriftConfig, PromptDrift, profile_prompt
from mechkv.errors import InputError
from mechkv.guards import input_device
from mechkv.models import admit, info
from mechkv.rebuilding import recast
from mechkv.runs import Piece, RunFolder
from mechkv.sites import CACHE_SITES
from mechkv.stats import cluster_bootstrap
from mechkv.tokens import as_tokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["METRICS", "DriftConfig", "DriftProfile", "drift_profile"]

KIND = "drift_profile"
_TABLES = ("frame", "steps", "split", "prompts")


@dataclass(frozen=True)
class DriftProfile:
    """Drift of cached against recomputed decoding.

    Attributes:
        frame: One row per dtype, prompt, step, site, layer and provenance of K/V rows; `position` is that of the newest
            token, `n_rows` how many K/V rows and `n` how many elements are compared, then one column per metric
            (`comparison`). `layer` counts from 0; `logits` stand at layer `n_layers`.
        steps: One row per dtype, prompt and step: the token fed, and the metrics of the two logit vectors.
        split: One row per dtype, prompt, sampled step and layer: injected, propagated and total error at the block's
            output, relative to the L2 norm of the recomputed output.
        prompts: One row per prompt: n_prompt, n_tokens and the token ids.
        config: The configuration.
        dtype: The dtype under study; other dtypes in the frames are controls.
        guards: Per dtype, how often each guard ran and passed.
        provenance: Versions, machine, kernels, and the model of every dtype.
    """

    frame: pd.DataFrame
    steps: pd.DataFrame
    split: pd.DataFrame
    prompts: pd.DataFrame
    config: DriftConfig
    dtype: str
    guards: dict[str, dict[str, int]]
    provenance: dict[str, Any]

    def summary(self, metric: str = "rel_l2", seed: int = 0) -> pd.DataFrame:
        """Mean of `metric` over steps >= 1 per dtype, site, provenance and layer, with a 95 % interval that resamples
        prompts, beside the share of steps that are bitwise equal and the round-off of the evaluation (`floor`:
        `comparison.metric_floor`; the paths' own floor, a step against itself, is exactly 0 or there is no profile).
        Rows whose metric is undefined are counted, not averaged (`n_undefined`)."""
        if metric not in METRICS:
            raise InputError(
                "unknown metric", got=repr(metric), expected=f"one of {', '.join(METRICS)}", remedy="Name one."
            )
        keys = ["dtype", "site", "provenance", "layer"]
        decoded = self.frame[self.frame["step"] > 0]
        decoded = decoded.assign(floor=_floor(decoded, metric))
        defined = decoded[decoded[metric].notna()]
        table = cluster_bootstrap(defined, metric, by=keys, support=metric_range(metric), seed=seed)
        rest = decoded.groupby(keys, sort=False, observed=True).agg(
            bitwise_equal=("bitwise_equal", "mean"),
            floor=("floor", "mean"),
            n_undefined=(metric, lambda values: int(values.isna().sum())),
        )
        return table.merge(rest.reset_index(), on=keys).assign(metric=metric)

    def onset(self) -> pd.DataFrame:
        """Per dtype and prompt the first step at which any activation or K/V row differs (old rows too: the recomputed
        path computes them anew), and the first layer and site at that step in the order of computation; missing where
        the paths never differ. `kv_step` is the first step with a differing K/V row."""
        order = {site: i for i, site in enumerate(("resid_pre", *CACHE_SITES, "attn_out", "resid_mid", "mlp_out"))}
        rows = []
        for (dtype, prompt), part in self.frame.groupby(["dtype", "prompt"], sort=False, observed=True):
            changed = part[~part["bitwise_equal"]]
            row = {"dtype": dtype, "prompt": prompt, "step": pd.NA, "layer": pd.NA, "site": pd.NA, "kv_step": pd.NA}
            if len(changed):
                first = changed[changed["step"] == changed["step"].min()]
                rank = first["layer"] * 10 + first["site"].map(order).fillna(9)
                place = first.loc[rank.idxmin()]
                kv = changed[changed["site"].isin(CACHE_SITES)]["step"]
                row |= {"step": int(place["step"]), "layer": int(place["layer"]), "site": place["site"]}
                row["kv_step"] = int(kv.min()) if len(kv) else pd.NA
            rows.append(row)
        return pd.DataFrame(rows).astype({"step": "Int64", "layer": "Int64", "kv_step": "Int64"})

    def amplification(self, site: str = "resid_post") -> pd.DataFrame:
        """rel_l2 at layer l+1 / rel_l2 at layer l, per dtype, prompt, step and layer l where both are above zero."""
        part = self.frame[(self.frame["site"] == site) & (self.frame["step"] > 0)]
        wide = part.set_index(["dtype", "prompt", "step", "layer"])["rel_l2"].unstack("layer")
        ratio = wide.shift(-1, axis=1) / wide.where(wide > 0)
        long = ratio.stack().rename("amplification").reset_index()
        return long[long["amplification"] > 0].reset_index(drop=True)

    def split_summary(self, seed: int = 0) -> pd.DataFrame:
        """Mean over sampled steps and prompts of the injected, propagated and total error (`part`), per dtype and
        layer, with a 95 % interval that resamples prompts."""
        long = self.split.melt(["dtype", "prompt", "step", "layer"], var_name="part", value_name="error")
        return cluster_bootstrap(long, "error", by=["dtype", "part", "layer"], support=(0.0, math.inf), seed=seed)

    def plot(self) -> "dict[str, Figure]":
        """The figures of this profile by name (see `plots`)."""
        from mechkv import plots

        return plots.drift_figures(self)

    def save(self, folder: Path | str) -> Path:
        """Write the tables (parquet) and the rest (JSON) to a folder; sealed last, so half a result never loads."""
        facts = {"config": asdict(self.config), "dtype": self.dtype, "guards": self.guards}
        with result_folder.sealed_folder(folder, KIND, facts | {"provenance": self.provenance}) as place:
            for name in _TABLES:
                storage.write_frame(place / f"{name}.parquet", getattr(self, name))
        return Path(folder)

    @classmethod
    def load(cls, folder: Path | str) -> "DriftProfile":
        """Read what `save` wrote.

        Raises:
            StorageError: Missing, altered, truncated, or another kind of result.
        """
        place = result_folder.open_folder(Path(folder), KIND)
        facts = place.facts
        config = DriftConfig(**facts["config"] | {"sites": tuple(facts["config"]["sites"])})
        tables = {name: storage.read_frame(place.file(f"{name}.parquet")) for name in _TABLES}
        return cls(**tables, config=config, **{key: facts[key] for key in ("dtype", "guards", "provenance")})


def drift_profile(
    model: TransformerBridge,
    prompts: Sequence[str | Tensor],
    config: DriftConfig | None = None,
    *,
    control: Literal["float32"] | TransformerBridge | None = "float32",
    continuations: Sequence[Sequence[int]] | None = None,
    folder: Path | str | None = None,
    progress: bool | None = None,
) -> DriftProfile:
    """Profile the drift between the two paths.

    Args:
        model: A bridge from `load_model`, `from_hf` or TransformerLens.
        prompts: Texts or `[pos]` token tensors.
        config: What to measure.
        control: `float32`: the same weights in float32 (made here; nothing is added when the model is float32 or
            float64 already). A bridge: that model. None: no control.
        continuations: Tokens to feed after every prompt; by default the cached path's greedy choice, which the control
            is then fed as well.
        folder: Keep every finished prompt there, and go on from what is there.
        progress: Show a progress bar; by default when standard error is a terminal.

    Raises:
        InputError: Prompts or configuration that cannot be used.
        GuardError, NonFiniteError: A number would not mean what it seems to mean.
        StorageError: The folder belongs to another run.
    """
    config = chosen(config, DriftConfig)
    admit(model)
    if not (control is None or isinstance(control, str)):
        admit(control)
    token_lists = _tokens(model, prompts, config, continuations)
    settings = _settings(model, token_lists, config, control, continuations)
    run = RunFolder(folder, settings)
    main = info(model).dtype
    pieces: dict[tuple[str, int], Piece] = {}
    models = {main: model}
    lengths = [len(given) for given in continuations] if continuations is not None else config.n_steps
    n_steps = np.broadcast_to(lengths, len(token_lists)) + 1
    with _bar(n_steps, f"drift, {main}", progress) as bar:
        for prompt, tokens in enumerate(token_lists):
            given = None if continuations is None else continuations[prompt]
            pieces[main, prompt] = _piece(run, model, main, prompt, tokens, config, given, bar)
            bar.update(int(n_steps[: prompt + 1].sum()) - bar.n)  # steps of a prompt kept from an earlier run
    other = _control_dtype(control, main)
    if other is not None:
        twin = recast(model, other) if isinstance(control, str) else admit(control)  # type: ignore[arg-type]
        models[other] = twin
        with _bar(n_steps, f"drift, {other} control", progress) as bar:
            for prompt, tokens in enumerate(token_lists):
                fed = pieces[main, prompt].values["tokens"][len(tokens) :]
                pieces[other, prompt] = _piece(run, twin, other, prompt, tokens, config, fed, bar)
                bar.update(int(n_steps[: prompt + 1].sum()) - bar.n)
    return _assemble(pieces, models, config, main)


def _floor(rows: pd.DataFrame, metric: str) -> pd.Series:
    """Round-off of the evaluation, row by row; 0 for what is counted."""
    if metric in ("max_ulp", "equal_fraction", "bitwise_equal", "nonfinite"):
        return pd.Series(0.0, index=rows.index)
    size = {"signed_mean": "rms", "cosine_distance": "rel_l2"}.get(metric, metric)
    return metric_floor(metric, rows["n"], rows[size])


def _tokens(
    model: TransformerBridge,
    prompts: Sequence[str | Tensor],
    config: DriftConfig,
    continuations: Sequence[Sequence[int]] | None,
) -> list[Tensor]:
    if continuations is not None and (
        len(continuations) != len(prompts) or not all(isinstance(c, Sequence) and c for c in continuations)
    ):
        kinds = ", ".join(sorted({type(c).__name__ for c in continuations}))
        raise InputError(
            "continuations do not fit the prompts",
            got=f"{len(continuations)} continuations ({kinds}) for {len(prompts)} prompts",
            expected="a list of at least one token id for every prompt",
            remedy="Leave them out to feed the cached path's greedy tokens.",
        )
    n_new = config.n_steps if continuations is None else max(len(c) for c in continuations)
    device = input_device(model)
    found = as_tokens(
        model.tokenizer,
        prompts,
        vocab_size=info(model).d_vocab,
        max_positions=getattr(model.cfg, "n_ctx", None),
        n_new_tokens=n_new,
    )
    return [
        tokens.to(device) if isinstance(prompt, str) else tokens for tokens, prompt in zip(found, prompts, strict=True)
    ]


def _settings(
    model: TransformerBridge, token_lists: list[Tensor], config: DriftConfig, control: Any, continuations: Any
) -> dict[str, Any]:
    """What makes two runs the same run."""
    digest = hashlib.sha256(repr([t.tolist() for t in token_lists]).encode())
    digest.update(repr(None if continuations is None else [list(c) for c in continuations]).encode())
    return {
        "kind": KIND,
        "config": {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(config).items()},
        "model": provenance.weights_sha256(model),
        "dtype": info(model).dtype,
        "prompts": digest.hexdigest(),
        "n_prompts": len(token_lists),
        "control": control if control is None or isinstance(control, str) else provenance.weights_sha256(control),
        "kernels": provenance.what_decides_kernels(model),
    }


def _control_dtype(control: Any, main: str) -> str | None:
    if control is None:
        return None
    if isinstance(control, str):
        if control != "float32":
            raise InputError(
                "unknown control", got=control, expected="'float32', a bridge or None", remedy="Leave it out."
            )
        return None if main in ("float32", "float64") else control
    found = info(control).dtype
    if found == main:
        raise InputError(
            "the control has the dtype under study", got=found, expected="another dtype", remedy="Pass control=None."
        )
    return found


def _piece(
    run: RunFolder,
    model: TransformerBridge,
    dtype: str,
    prompt: int,
    tokens: Tensor,
    config: DriftConfig,
    continuation: Sequence[int] | None,
    bar: tqdm,
) -> Piece:
    def compute() -> Piece:
        found: PromptDrift = profile_prompt(
            model, tokens, config, continuation=continuation, label=prompt, progress=bar.update
        )
        frames = {"frame": found.frame, "steps": found.steps, "split": found.split}
        frames = {name: frame.assign(dtype=dtype, prompt=prompt) for name, frame in frames.items()}
        values = {"tokens": found.tokens.tolist(), "n_prompt": found.n_prompt, "guards": found.guards}
        return Piece(frames, values)

    return run.piece(f"{dtype}-{prompt:04d}", compute)


def _assemble(
    pieces: dict[tuple[str, int], Piece], models: dict[str, TransformerBridge], config: DriftConfig, main: str
) -> DriftProfile:
    def table(name: str) -> pd.DataFrame:
        joined = pd.concat([piece.frames[name] for piece in pieces.values()], ignore_index=True)
        head = ["dtype", "prompt"]
        return joined[head + [column for column in joined.columns if column not in head]]

    guards: dict[str, dict[str, int]] = {dtype: {} for dtype in models}
    for (dtype, _), piece in pieces.items():
        for guard, count in piece.values["guards"].items():
            guards[dtype][guard] = guards[dtype].get(guard, 0) + count
    first = [(prompt, piece.values) for (dtype, prompt), piece in pieces.items() if dtype == main]
    prompts = pd.DataFrame(
        {
            "prompt": [prompt for prompt, _ in first],
            "n_prompt": [values["n_prompt"] for _, values in first],
            "n_tokens": [len(values["tokens"]) for _, values in first],
            "tokens": [np.asarray(values["tokens"], dtype=np.int64) for _, values in first],
        }
    )
    where = provenance.collect() | {
        "models": {dtype: provenance.collect(model)["model"] for dtype, model in models.items()}
    }
    return DriftProfile(table("frame"), table("steps"), table("split"), prompts, config, main, guards, where)


def _bar(n_steps: np.ndarray, what: str, progress: bool | None) -> tqdm:
    """Counts the steps of all prompts."""
    return tqdm(total=int(n_steps.sum()), desc=what, unit="step", disable=None if progress is None else not progress)
