"""Is the drift in a few heads, dimensions or rotary frequencies, and do the heads of a group share it?

`head_analysis` measures every prompt (see `head_measure` for what is measured and its controls), in the model's dtype
and with the same weights in float32 on the same tokens. `HeadAnalysis` holds the tidy tables and reads off them:

    concentration   the fewest heads (or dimensions) that hold half of the squared drift, beside the fewest that hold
                    half of the squared signal, and how far prompts agree on which they are
    by_dimension    sqrt(sum of squared drift / sum of squares) per dimension of a head, and (by_frequency) rotary pair
    sharing         cosine of head-output drift within and between groups, and the correlation over steps of the
                    logarithm of its size

All intervals resample prompts.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from torch import Tensor
from tqdm.auto import tqdm
from transformer_lens.model_bridge import TransformerBridge

from mechkv import provenance, result_folder, storage
from mechkv.comparison import metric_range
from mechkv.configs import check_kinds, chosen
from mechkv.errors import InputError
from mechkv.guards import input_device
from mechkv.head_measure import HEAD_SITES, QUERY_SITES, HeadLayout, head_layout, head_sites, measure_heads
from mechkv.models import admit, info
from mechkv.rebuilding import recast
from mechkv.runs import Piece, RunFolder
from mechkv.stats import cluster_bootstrap
from mechkv.tokens import as_tokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["HEAD_SITES", "QUERY_SITES", "HeadAnalysis", "HeadConfig", "HeadLayout", "head_analysis", "head_layout"]

KIND = "head_analysis"
_TABLES = ("heads", "patterns", "groups", "dims", "prompts")


@dataclass(frozen=True)
class HeadConfig:
    """What to measure.

    Attributes:
        n_steps: Decode steps after the prompt.
        n_repeats: Steps per prompt that are done twice, on both paths.
        seed: Chooses the repeated steps and the resamples.
    """

    n_steps: int = 16
    n_repeats: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_kinds(self)
        if self.n_steps < 1 or not 1 <= self.n_repeats <= self.n_steps:
            raise InputError(
                "impossible steps",
                got=f"n_steps={self.n_steps}, n_repeats={self.n_repeats}",
                expected="1 <= n_repeats <= n_steps",
                remedy="Step 0 cannot drift, and an analysis without its floor means nothing.",
            )


@dataclass(frozen=True)
class HeadAnalysis:
    """Drift by head, dimension, rotary pair and group.

    Attributes:
        heads: A row per dtype, prompt, step, site, layer and head: metrics of the newest row, `share` of the layer's
            squared drift at that site.
        patterns: A row per dtype, prompt, step, layer and query head: total variation of the attention row and the
            parts of it at the first key held, at the token itself and at rows that decoding wrote; entropy on both
            paths; `outside`: mass on keys that only one path holds.
        groups: A row per dtype, prompt, step >= 1 and layer: mean cosine of head-output drift within groups, between
            them, and within them one step apart.
        dims: A row per dtype, prompt, site, layer, head and dimension: squared drift and squared value of the
            recomputed path, summed over steps >= 1; `pair` and `frequency` (radians a token) of the rotation.
        prompts: A row per prompt: n_prompt, n_tokens, tokens.
        config: The configuration.
        dtype: The dtype under study; another one is the control.
        layout: Heads, groups, kinds of layers, rotary frequencies.
        guards: Per dtype, how often each guard ran and passed.
        provenance: Versions, machine, kernels, and the model of every dtype.
    """

    heads: pd.DataFrame
    patterns: pd.DataFrame
    groups: pd.DataFrame
    dims: pd.DataFrame
    prompts: pd.DataFrame
    config: HeadConfig
    dtype: str
    layout: HeadLayout
    guards: dict[str, dict[str, int]]
    provenance: dict[str, Any]

    @property
    def frame(self) -> pd.DataFrame:
        """The drift by head, as `heads`."""
        return self.heads

    def summary(self, metric: str = "rel_l2", by: Sequence[str] = ("layer", "group", "head")) -> pd.DataFrame:
        """Mean of `metric` over steps >= 1 per dtype, site and `by`, with an interval over prompts, beside the share of
        bitwise equal rows. `by` may name `kind`, `layer`, `group`, `head`."""
        keys = ["dtype", "site", *by]
        decoded = self.heads[self.heads["step"] > 0]
        defined, support = decoded[decoded[metric].notna()], metric_range(metric)
        table = cluster_bootstrap(defined, metric, by=keys, support=support, seed=self.config.seed)
        return table.merge(decoded.groupby(keys, observed=True)["bitwise_equal"].mean().reset_index(), on=keys)

    def attention(self, metric: str = "tv", by: Sequence[str] = ("kind",)) -> pd.DataFrame:
        """Mean of a column of `patterns` over steps >= 1, per dtype and `by`, with an interval over prompts."""
        rows = self.patterns[self.patterns["step"] > 0]
        rows = rows.assign(entropy_drift=rows["entropy_cached"] - rows["entropy_recomputed"])
        return cluster_bootstrap(rows, metric, by=["dtype", *by], support=metric_range(metric), seed=self.config.seed)

    def by_frequency(self, by: Sequence[str] = ("kind",)) -> pd.DataFrame:
        """Relative drift of K per rotary pair, before (`k`) and after rotation (`rot_k`), over the heads of a kind."""
        part = self.dims[self.dims["site"].isin(("k", "rot_k")) & (self.dims["pair"] >= 0)]
        return self._relative(part, [*by, "pair", "frequency"])

    def by_dimension(self, by: Sequence[str] = ()) -> pd.DataFrame:
        """Relative drift per dimension of a head, at every site; over all layers and heads that `by` does not name."""
        return self._relative(self.dims, [*by, "dim"])

    def concentration(self) -> pd.DataFrame:
        """How few heads, and how few dimensions of heads, hold half of the squared drift; per dtype, site and unit.

        `share` is that number over all units, with an interval over prompts; `signal_share` the same for the squared
        values themselves; `agreement` the mean overlap of two prompts' sets over the smaller one, `chance` its value
        for random sets of those sizes.
        """
        rows = []
        for (dtype, site), part in self.dims.groupby(["dtype", "site"], observed=True):
            for unit, keys in (("head", ["layer", "head"]), ("dimension", ["layer", "head", "dim"])):
                rows += _concentrated(part, dtype, site, unit, keys)
        frame = pd.DataFrame(rows)
        keys = ["dtype", "site", "unit"]
        table = cluster_bootstrap(frame, "share", by=keys, support=(0, 1), seed=self.config.seed)
        rest = frame.groupby(keys, observed=True)[["n_half", "n_units", "signal_share", "agreement", "chance"]].mean()
        return table.merge(rest.reset_index(), on=keys)

    def sharing(self) -> pd.DataFrame:
        """Do heads of a group drift together? Per dtype and measure a mean with its interval over prompts.

        Measures: `within`, `between`, `within_shifted` (cosines; see `head_measure`), `within - between` and `within -
        shifted` paired by step and layer; `size: within`, `size: between` and `size: within - between`, correlations
        over steps of log10 of the size of a head's drift.
        """
        frames = []
        if len(self.groups):
            cosines = self.groups.assign(
                **{
                    "within - between": self.groups["within"] - self.groups["between"],
                    "within - shifted": self.groups["within"] - self.groups["within_shifted"],
                }
            )
            names = ["within", "between", "within_shifted", "within - between", "within - shifted"]
            frames.append(cosines.melt(["dtype", "prompt", "step", "layer"], names, "measure", "value"))
        frames.append(_size_correlations(self.heads, self.layout.group_size))
        frame = pd.concat(frames, ignore_index=True).dropna(subset="value")
        if frame.empty:
            return pd.DataFrame(columns=["dtype", "measure", "estimate", "low", "high", "n_clusters", "n_rows"])
        return cluster_bootstrap(frame, "value", by=["dtype", "measure"], support=(-2, 2), seed=self.config.seed)

    def plot(self) -> "dict[str, Figure]":
        """The figures by name (see `plots_heads`)."""
        from mechkv import plots_heads

        return plots_heads.head_figures(self)

    def save(self, folder: Path | str) -> Path:
        """Write tables (parquet) and the rest (JSON); sealed last, so half a result never loads."""
        with result_folder.sealed_folder(folder, KIND) as place:
            for name in _TABLES:
                storage.write_frame(place / f"{name}.parquet", getattr(self, name))
            meta = {"config": asdict(self.config), "dtype": self.dtype, "layout": asdict(self.layout)}
            storage.write_json(place / "heads.json", meta | {"guards": self.guards, "provenance": self.provenance})
        return Path(folder)

    @classmethod
    def load(cls, folder: Path | str) -> "HeadAnalysis":
        """Read what `save` wrote.

        Raises:
            StorageError: Missing, altered, truncated, or another kind of result.
        """
        meta = storage.read_json(result_folder.open_folder(Path(folder), KIND).file("heads.json"))
        raw = meta["layout"]
        layout = HeadLayout(
            **raw | {"kinds": tuple(raw["kinds"]), "frequencies": tuple(tuple(f) for f in raw["frequencies"])}
        )
        tables = {name: storage.read_frame(Path(folder) / f"{name}.parquet") for name in _TABLES}
        rest = {key: meta[key] for key in ("dtype", "guards", "provenance")}
        return cls(**tables, config=HeadConfig(**meta["config"]), layout=layout, **rest)

    def _relative(self, part: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
        sums = part.groupby(["dtype", "prompt", "site", *keys], observed=True)[["square", "reference"]].sum()
        sums = sums[sums["reference"] > 0].reset_index()
        sums["drift"] = np.sqrt(sums["square"] / sums["reference"])
        return cluster_bootstrap(sums, "drift", by=["dtype", "site", *keys], support=(0, np.inf), seed=self.config.seed)


def head_analysis(
    model: TransformerBridge,
    prompts: Sequence[str | Tensor],
    config: HeadConfig | None = None,
    *,
    control: Literal["float32"] | None = "float32",
    folder: Path | str | None = None,
    progress: bool | None = None,
) -> HeadAnalysis:
    """Analyse the drift of heads.

    Args:
        model: A bridge from `load_model`, `from_hf`, a twin, or TransformerLens.
        prompts: Texts or `[pos]` token tensors.
        config: What to measure.
        control: `float32`: the same weights in float32 on the same tokens; nothing is added for a float32 or float64
            model. None: no control.
        folder: Keep every finished prompt there, and go on from what is there.
        progress: Show a progress bar; by default when standard error is a terminal.

    Raises:
        InputError: Prompts, a configuration or a family that cannot be used.
        GuardError, NonFiniteError: A number would not mean what it seems to mean.
        StorageError: The folder belongs to another run.
    """
    config = chosen(config, HeadConfig)
    head_sites(admit(model))
    device = input_device(model)
    limit = getattr(model.cfg, "n_ctx", None)
    known = info(model)
    found = as_tokens(
        model.tokenizer, prompts, vocab_size=known.d_vocab, max_positions=limit, n_new_tokens=config.n_steps
    )
    token_lists = [tokens.to(device) for tokens in found]
    run = RunFolder(folder, _settings(model, token_lists, config, control))
    pieces: dict[tuple[str, int], Piece] = {}
    models = {known.dtype: model}
    hidden = None if progress is None else not progress
    for prompt in tqdm(range(len(token_lists)), desc=f"heads, {known.dtype}", unit="prompt", disable=hidden):
        pieces[known.dtype, prompt] = _piece(run, model, prompt, token_lists[prompt], config, None)
    if control is not None and known.dtype not in ("float32", "float64"):
        models["float32"] = recast(model, "float32")
        for prompt in tqdm(range(len(token_lists)), desc="heads, float32 control", unit="prompt", disable=hidden):
            fed = pieces[known.dtype, prompt].values["tokens"][len(token_lists[prompt]) :]
            pieces["float32", prompt] = _piece(run, models["float32"], prompt, token_lists[prompt], config, fed)
    return _assemble(pieces, models, config, known.dtype)


def _settings(model: TransformerBridge, tokens: list[Tensor], config: HeadConfig, control: Any) -> dict[str, Any]:
    return {
        "kind": KIND,
        "config": asdict(config),
        "model": provenance.weights_sha256(model),
        "dtype": info(model).dtype,
        "prompts": hashlib.sha256(repr([t.tolist() for t in tokens]).encode()).hexdigest(),
        "control": control,
        "kernels": provenance.what_decides_kernels(model),
    }


def _piece(
    run: RunFolder,
    model: TransformerBridge,
    prompt: int,
    tokens: Tensor,
    config: HeadConfig,
    continuation: Sequence[int] | None,
) -> Piece:
    dtype = info(model).dtype

    def compute() -> Piece:
        found = measure_heads(
            model,
            tokens,
            n_steps=config.n_steps,
            continuation=continuation,
            n_repeats=config.n_repeats,
            seed=config.seed,
            label=prompt,
        )
        frames = {name: getattr(found, name) for name in _TABLES if name != "prompts"}
        frames = {name: frame.assign(dtype=dtype, prompt=prompt) for name, frame in frames.items()}
        return Piece(frames, {"tokens": found.tokens.tolist(), "n_prompt": len(tokens), "guards": found.guards})

    return run.piece(f"{dtype}-{prompt:04d}", compute)


def _assemble(
    pieces: dict[tuple[str, int], Piece], models: dict[str, TransformerBridge], config: HeadConfig, main: str
) -> HeadAnalysis:
    tables = {
        name: pd.concat([piece.frames[name] for piece in pieces.values()], ignore_index=True)
        for name in _TABLES
        if name != "prompts"
    }
    guards: dict[str, dict[str, int]] = {dtype: {} for dtype in models}
    for (dtype, _), piece in pieces.items():
        for guard, count in piece.values["guards"].items():
            guards[dtype][guard] = guards[dtype].get(guard, 0) + count
    rows = [
        {
            "prompt": prompt,
            "n_prompt": piece.values["n_prompt"],
            "n_tokens": len(piece.values["tokens"]),
            "tokens": np.asarray(piece.values["tokens"], dtype=np.int64),
        }
        for (dtype, prompt), piece in pieces.items()
        if dtype == main
    ]
    where = provenance.collect() | {
        "models": {dtype: provenance.collect(model)["model"] for dtype, model in models.items()}
    }
    layout = head_layout(models[main])
    return HeadAnalysis(
        **tables,
        prompts=pd.DataFrame(rows),
        config=config,
        dtype=main,
        layout=layout,
        guards=guards,
        provenance=where,
    )


def fewest_for_half(values: np.ndarray) -> np.ndarray:
    """Indices of the fewest entries whose sum is at least half of the total, largest first; none if all are zero."""
    if not values.sum() > 0:
        return np.array([], dtype=int)
    order = np.argsort(-values, kind="stable")
    reached = np.searchsorted(np.cumsum(values[order]), values.sum() / 2 * (1 - 1e-12))
    return order[: reached + 1]


def _concentrated(part: pd.DataFrame, dtype: Any, site: Any, unit: str, keys: list[str]) -> list[dict[str, Any]]:
    """One row a prompt that drifts at all."""
    wide = {
        name: part.groupby(["prompt", *keys], observed=True)[name].sum().unstack("prompt").to_numpy()
        for name in ("square", "reference")
    }
    sets = {i: set(fewest_for_half(column).tolist()) for i, column in enumerate(wide["square"].T)}
    sets = {i: chosen for i, chosen in sets.items() if chosen}
    n_units = len(wide["square"])
    couples = [(sets[i], sets[j]) for i, j in combinations(sets, 2)]
    agreement = np.mean([len(a & b) / min(len(a), len(b)) for a, b in couples]) if couples else np.nan
    chance = np.mean([max(len(a), len(b)) / n_units for a, b in couples]) if couples else np.nan
    prompts = sorted(part["prompt"].unique())
    return [
        {
            "dtype": dtype,
            "site": site,
            "unit": unit,
            "prompt": prompts[i],
            "n_half": len(chosen),
            "n_units": n_units,
            "share": len(chosen) / n_units,
            "signal_share": len(fewest_for_half(wide["reference"][:, i])) / n_units,
            "agreement": agreement,
            "chance": chance,
        }
        for i, chosen in sets.items()
    ]


def _size_correlations(heads: pd.DataFrame, group_size: int) -> pd.DataFrame:
    """Correlation over steps of log10 RMS of head-output drift, per dtype, prompt and layer, within and between groups.
    Steps at which any head of the layer does not drift are left out; fewer than 4 steps give no value."""
    part = heads[(heads["site"] == "z") & (heads["step"] > 0)]
    rows = []
    for (dtype, prompt, layer), own in part.groupby(["dtype", "prompt", "layer"], observed=True):
        sizes = own.pivot(index="step", columns="head", values="rms").to_numpy()
        sizes = sizes[(sizes > 0).all(1)]
        if len(sizes) < 4 or sizes.shape[1] < 2:
            continue
        correlation = np.corrcoef(np.log10(sizes), rowvar=False)
        group = np.arange(sizes.shape[1]) // group_size
        same = (group[:, None] == group[None, :]) & ~np.eye(len(group), dtype=bool)
        different = group[:, None] != group[None, :]
        means = {
            name: correlation[mask].mean() if mask.any() else np.nan
            for name, mask in (("size: within", same), ("size: between", different))
        }
        means["size: within - between"] = means["size: within"] - means["size: between"]
        rows += [
            {"dtype": dtype, "prompt": prompt, "step": 0, "layer": layer, "measure": name, "value": value}
            for name, value in means.items()
        ]
    return pd.DataFrame(rows, columns=["dtype", "prompt", "step", "layer", "measure", "value"])
