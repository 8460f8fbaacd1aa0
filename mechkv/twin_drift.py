"""Does a cause that is part of the architecture change the drift, when the function stays the same?

A model and its twins (`twins`) are profiled on the same tokens: the model's own cached path chooses them, every twin is
fed them. With p_l the relative L2 drift at `resid_post` of layer l, mean over decode steps of one prompt, three numbers
say what C4 is about:

    level         log10 p_last                          how much drift there is
    first_share   p_0 / p_last                          how much of it is there after the first block
    largest_rise  max_l (p_l - p_(l-1)) / sum of rises  1: one jump; about 1 / n_layers: uniform (p_(-1) = 0)

Every effect is twin minus model on the same prompt; intervals resample prompts. `relative` divides by the model's mean.

C4 in these terms, fixed before any run. Grouped queries make the first layer sharp: without them `first_share` falls.
A larger head dimension makes accumulation uniform: with padding `largest_rise` falls. A window makes it uniform:
without it `largest_rise` grows. A change of less than `SMALLEST_EFFECT` of the model's own value cannot be the
difference between "sharp" and "uniform".

Controls: the head order twin changes nothing but the order of one sum; step 0 is exactly zero in every profile. What a
twin cannot show: copied KV heads make the same rounding errors, since they run the same numbers through the same kernel
(`sharing` in `heads`, and `broadcast`, look at that), and padded zeros add no rounding errors of their own
(`synthetic` varies the number of terms).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechkv import provenance, result_folder, storage
from mechkv.comparison import metric_range
from mechkv.configs import check_kinds, chosen, require
from mechkv.drift import DriftConfig, DriftProfile, drift_profile
from mechkv.errors import InputError
from mechkv.models import info
from mechkv.rebuilding import recast
from mechkv.stats import cluster_bootstrap
from mechkv.twins import Twin, materialise_kv_heads, pad_head_dim, permute_heads, twin_info, window_off

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND = "twin_study"
MODEL = "model"
"""The name of the model itself among its twins."""
SMALLEST_EFFECT = 0.25
MEASURES: tuple[str, ...] = ("level", "first_share", "largest_rise")
PREDICTIONS: dict[str, tuple[str, int]] = {
    "kv_heads": ("first_share", -1),
    "head_dim": ("largest_rise", -1),
    "window": ("largest_rise", +1),
}
"""Cause -> (measure, sign of twin minus model) if C4 holds."""


@dataclass(frozen=True)
class TwinConfig:
    """What to measure.

    Attributes:
        n_steps: Decode steps after the prompt.
        n_repeats: Steps per prompt and twin that are done twice.
        seed: Chooses the repeated steps and the resamples.
    """

    n_steps: int = 16
    n_repeats: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_kinds(self)
        require(1 <= self.n_repeats <= self.n_steps, "n_repeats", got=self.n_repeats, expected=f"1..{self.n_steps}")


@dataclass(frozen=True)
class TwinStudy:
    """Paired drift profiles.

    Attributes:
        frame: A row per twin (`model`: the model itself), prompt, step and layer at `resid_post`: rel_l2, rms, max_ulp,
            bitwise_equal.
        twins: Twin -> what is known about it (`twins.Twin`).
        prompts: A row per prompt: n_prompt, n_tokens, tokens.
        config: The configuration.
        dtype: The dtype of all of them.
        guards: Per twin, how often each guard ran and passed.
        provenance: Versions, machine, kernels, and every model.
    """

    frame: pd.DataFrame
    twins: dict[str, Twin]
    prompts: pd.DataFrame
    config: TwinConfig
    dtype: str
    guards: dict[str, dict[str, int]]
    provenance: dict[str, Any]

    def profiles(self) -> pd.DataFrame:
        """Mean rel_l2 over steps >= 1 per twin and layer, with an interval over prompts."""
        decoded = self.frame[self.frame["step"] > 0]
        support = metric_range("rel_l2")
        return cluster_bootstrap(decoded, "rel_l2", by=["twin", "layer"], support=support, seed=self.config.seed)

    def measures(self) -> pd.DataFrame:
        """One row per twin and prompt: level, first_share, largest_rise (NaN without any drift at the last layer)."""
        decoded = self.frame[self.frame["step"] > 0]
        wide = decoded.groupby(["twin", "prompt", "layer"], observed=True)["rel_l2"].mean().unstack("layer")
        values = wide.to_numpy()
        last = np.where(values[:, -1] > 0, values[:, -1], np.nan)
        rises = np.diff(values, axis=1, prepend=0.0).clip(0)
        table = {
            "level": np.log10(last),
            "first_share": values[:, 0] / last,
            "largest_rise": rises.max(1) / np.where(np.isnan(last), np.nan, rises.sum(1)),
        }
        return pd.DataFrame(table, index=wide.index).reset_index()

    def effects(self) -> pd.DataFrame:
        """Twin minus model, paired by prompt, per twin and measure: the mean with its interval, the mean of the model,
        `relative` (and its bounds) over that mean, and how many prompts have no value."""
        wide = self.measures().set_index(["twin", "prompt"])
        rows = []
        for name in self.twins:
            difference = (wide.loc[name] - wide.loc[MODEL]).reset_index()
            for measure in MEASURES:
                defined = difference[difference[measure].notna()]
                row: dict[str, Any] = {"twin": name, "cause": self.twins[name].cause, "measure": measure}
                row["n_undefined"] = len(difference) - len(defined)
                if len(defined):
                    found = cluster_bootstrap(defined, measure, seed=self.config.seed).iloc[0]
                    row |= {key: found[key] for key in ("estimate", "low", "high", "n_clusters")}
                    base = row["model"] = float(wide.loc[MODEL][measure].mean())
                    if measure != "level" and (base > 0 or found["estimate"] == 0):
                        row |= {f"relative{end}": found[key] / (base or 1.0) for key, end in _ENDS.items()}
                rows.append(row)
        columns = ["twin", "cause", "measure", "model", "estimate", "low", "high", "n_clusters", "n_undefined"]
        return pd.DataFrame(rows).reindex(columns=[*columns, *(f"relative{end}" for end in _ENDS.values())])

    def identical(self, twin: str) -> bool:
        """Whether the drift of a twin has the very numbers of the model's at every prompt, step and layer."""
        keys = ["prompt", "step", "layer"]
        ours, theirs = (
            self.frame[self.frame["twin"] == name].sort_values(keys)["rel_l2"].to_numpy() for name in (twin, MODEL)
        )
        return bool(np.array_equal(ours, theirs))

    def verdicts(self) -> pd.DataFrame:
        """Cause by cause whether C4 holds: the predicted measure's relative effect, and the verdict on it (`judge`).

        A twin whose drift is `identical` shows that the cause changes no bit; on fewer drifting prompts than an
        interval needs that is not a verdict either. `n_undefined` counts prompts without drift at the last layer.
        """
        effects = self.effects().set_index(["twin", "measure"])
        rows = []
        for name, twin in self.twins.items():
            if twin.cause not in PREDICTIONS:
                continue
            measure, sign = PREDICTIONS[twin.cause]
            row = effects.loc[(name, measure)]
            verdict = judge(row["relative"], row["relative_low"], row["relative_high"], sign)
            rows.append(
                {"twin": name, "cause": twin.cause, "measure": measure, "predicted": "falls" if sign < 0 else "grows"}
                | {key: row[key] for key in ("model", "relative", "relative_low", "relative_high", "n_clusters")}
                | {"identical": self.identical(name), "n_undefined": row["n_undefined"], "verdict": verdict}
            )
        return pd.DataFrame(rows)

    def plot(self) -> "dict[str, Figure]":
        """The figures by name (see `plots_heads`)."""
        from mechkv import plots_heads

        return {"profile_by_twin": plots_heads.profile_by_twin(self)}

    def save(self, folder: Path | str) -> Path:
        """Write tables (parquet) and the rest (JSON); sealed last."""
        with result_folder.sealed_folder(folder, KIND) as place:
            storage.write_frame(place / "frame.parquet", self.frame)
            storage.write_frame(place / "prompts.parquet", self.prompts)
            meta = {"config": asdict(self.config), "dtype": self.dtype, "guards": self.guards}
            meta |= {
                "twins": {name: twin.to_dict() for name, twin in self.twins.items()},
                "provenance": self.provenance,
            }
            storage.write_json(place / "twins.json", meta)
        return Path(folder)

    @classmethod
    def load(cls, folder: Path | str) -> "TwinStudy":
        """Read what `save` wrote.

        Raises:
            StorageError: Missing, altered, truncated, or another kind of result.
        """
        result_folder.open_folder(Path(folder), KIND)
        meta = storage.read_json(Path(folder) / "twins.json")
        return cls(
            storage.read_frame(Path(folder) / "frame.parquet"),
            {name: Twin(**twin) for name, twin in meta["twins"].items()},
            storage.read_frame(Path(folder) / "prompts.parquet"),
            TwinConfig(**meta["config"]),
            *(meta[key] for key in ("dtype", "guards", "provenance")),
        )


_ENDS = {"estimate": "", "low": "_low", "high": "_high"}


def judge(relative: float, low: float, high: float, sign: int) -> str:
    """What a relative effect with its interval says about a prediction of that sign.

    `reproduced`: the interval excludes 0 on the predicted side and the estimate is at least `SMALLEST_EFFECT`;
    `partly`: it excludes 0 there, and the effect is smaller; `not reproduced`: an effect of that size on that side is
    outside the interval; `not testable here`: the interval holds both, or there is none.
    """
    if not np.isfinite([relative, low, high]).all():
        return "not testable here"
    toward, near, far = (sign * relative, *sorted((sign * low, sign * high)))
    if near > 0:
        return "reproduced" if toward >= SMALLEST_EFFECT else "partly"
    return "not reproduced" if far < SMALLEST_EFFECT else "not testable here"


def twin_study(
    model: TransformerBridge,
    twins: Mapping[str, TransformerBridge],
    prompts: Sequence[str | Tensor],
    config: TwinConfig | None = None,
    *,
    folder: Path | str | None = None,
    progress: bool | None = None,
) -> TwinStudy:
    """Profile a model and its twins on the same tokens.

    Args:
        model: An admitted bridge.
        twins: Name -> twin made from `model` by `mechkv.twins` (others are refused: they have no proof).
        prompts: Texts or `[pos]` token tensors.
        config: What to measure.
        folder: Keep every finished prompt there, and go on from what is there.
        progress: Show a progress bar; by default when standard error is a terminal.

    Raises:
        InputError: No twin, a model that is none, another dtype, or a text longer than a twin's proof holds.
        GuardError, NonFiniteError, StorageError: See `drift_profile`.
    """
    config = chosen(config, TwinConfig)
    known = {name: twin_info(twin) for name, twin in twins.items()}
    dtype = info(model).dtype
    wrong = [name for name, twin in twins.items() if info(twin).dtype != dtype or name == MODEL]
    if not twins or wrong:
        raise InputError(
            "twins that cannot be compared",
            got=", ".join(wrong) or "none",
            expected=f"one or more in {dtype}, none named {MODEL!r}",
            remedy="Make them from the very model.",
        )
    place = None if folder is None else Path(folder)
    profiles: dict[str, DriftProfile] = {}
    settings = DriftConfig(
        n_steps=config.n_steps, sites=("resid_post",), split_every=0, n_repeats=config.n_repeats, seed=config.seed
    )
    fed: list[list[int]] | None = None
    texts: Sequence[str | Tensor] = prompts
    base = recast(model, dtype)  # a copy in fresh memory, as the twins are: see `twin_proof.reference_logits`
    for name, bridge in {MODEL: base, **twins}.items():
        profiles[name] = drift_profile(
            bridge,
            texts,
            settings,
            control=None,
            continuations=fed,
            folder=None if place is None else place / name,
            progress=progress,
        )
        if fed is None:
            rows = profiles[name].prompts
            fed = [tokens[n:].tolist() for tokens, n in zip(rows["tokens"], rows["n_prompt"], strict=True)]
            _check_lengths(int(rows["n_tokens"].max()), known)
    return _assemble(profiles, {MODEL: base, **twins}, known, config, dtype)


def standard_twins(model: TransformerBridge, n_tokens: int, d_head: int | None = None) -> dict[str, TransformerBridge]:
    """The twins that a model has: `mha` (one KV head a query head), `padded` (head dimension doubled, or `d_head`),
    `no window` where texts of `n_tokens` fit into the window, and the control, `reordered`."""
    known = info(model)
    found: dict[str, TransformerBridge] = {}
    if known.n_kv < known.n_heads:
        found["mha"] = materialise_kv_heads(model)
    found["padded"] = pad_head_dim(model, d_head or 2 * known.d_head)
    windows = [window for window in known.windows if window is not None]
    if windows and n_tokens <= min(windows):
        found["no window"] = window_off(model)
    if known.n_heads > 1:
        found["reordered"] = permute_heads(model)
    return found


def _check_lengths(longest: int, twins: Mapping[str, Twin]) -> None:
    for name, twin in twins.items():
        if twin.max_tokens is not None and longest > twin.max_tokens:
            raise InputError(
                f"the texts are too long for {name!r}",
                got=f"{longest} tokens",
                expected=f"at most {twin.max_tokens}: beyond that it computes another function",
                remedy="Shorten the prompts, decode less, or leave this twin out.",
            )


def _assemble(
    profiles: Mapping[str, DriftProfile],
    models: Mapping[str, TransformerBridge],
    twins: dict[str, Twin],
    config: TwinConfig,
    dtype: str,
) -> TwinStudy:
    columns = ["prompt", "step", "layer", "rel_l2", "rms", "max_ulp", "bitwise_equal"]
    frames = []
    for name, profile in profiles.items():
        part = profile.frame[profile.frame["site"] == "resid_post"][columns]
        part.insert(0, "twin", name)
        frames.append(part)
    where = provenance.collect() | {"models": {name: provenance.collect(m)["model"] for name, m in models.items()}}
    return TwinStudy(
        frame=pd.concat(frames, ignore_index=True),
        twins=twins,
        prompts=profiles[MODEL].prompts,
        config=config,
        dtype=dtype,
        guards={name: profile.guards[dtype] for name, profile in profiles.items()},
        provenance=where,
    )
