"""Which dimension does the drift scale with? Sweeps over sums, one attention layer, and tiny models.

Three experiments, from the mechanism up:

- `sum_sweep`: two orders of summation (`reduction`) of the same n terms, in a stated accumulator. Drift: RMS difference
  over RMS sum. Theory: n^1/2 where one order is sequential, (log n)^1/2 where both are pairwise.
- `layer_sweep`: one attention layer whose cached path (one row a step, on the keys that its window leaves) adds in one
  order and whose recomputed path (all rows) in another, emulated; or, with `kernels="torch"`, the machine's own kernels
  on one row and on all rows. Drift: relative L2 of the last token's `k` (rows of K that it sees), `scores` and `z`
  (head outputs), each with the same inputs on both paths; and of `layer`, the head outputs with all drift inherited.
- `model_sweep`: tiny random Llama or Mistral models on both paths (`paths.lockstep`), relative L2 at `resid_post`.

One axis varies at a time about a base point: `d_head`, `n_kv`, `context`, `window`. `Sweep.exponents` fits the power of
every line by least squares on logarithms, with the seed as the cluster (`stats.loglog_slope`).

Controls: the same order on both sides gives exactly 0; a float64 accumulator gives the floor; lines of summation theory
(`reduction.summation_line`) are drawn beside the data, not fitted to them, for `n_terms`: d_model terms in a K row,
d_head in a score, as many as there are keys (the window, or the context) in a head's output. `n_kv` is in none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import torch
from einops import repeat
from jaxtyping import Float
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from mechkv import result_folder, storage
from mechkv.comparison import compare
from mechkv.errors import InputError
from mechkv.models import from_hf, to_dtype
from mechkv.paths import lockstep
from mechkv.policies import Forced
from mechkv.reduction import OWN, ordered_matmul, ordered_sum
from mechkv.stats import loglog_slope, torch_rng

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND = "sweep"
Terms = Literal["signed", "positive"]
_INIT_STD = 0.12


@dataclass(frozen=True)
class LayerShape:
    """The base point of a sweep.

    Attributes:
        d_model: Width of the residual stream: terms in the projections.
        n_heads: Query heads.
        n_kv: KV heads.
        d_head: Dimensions of a head: terms in a score.
        context: Tokens.
        window: Keys a row sees; None: all.
    """

    d_model: int = 64
    n_heads: int = 4
    n_kv: int = 2
    d_head: int = 32
    context: int = 64
    window: int | None = None

    @property
    def n_keys(self) -> int:
        """Keys that the last row sees: terms in a head's output."""
        return self.context if self.window is None else min(self.window, self.context)

    def __post_init__(self) -> None:
        small = [f.name for f in fields(self) if (v := getattr(self, f.name)) is not None and v < 1]
        if small or self.n_heads % self.n_kv:
            raise InputError(
                "an attention layer that cannot be",
                got=f"{', '.join(small) or 'n_heads'} of {self}",
                expected="sizes of 1 or more, n_heads a multiple of n_kv",
                remedy="Change the base point or the values of the axis.",
            )


@dataclass(frozen=True)
class Sweep:
    """Results of one or more sweeps.

    Attributes:
        frame: A row per line and point: `sweep`, `axis`, `x`, `seed`, `stage`, `n_terms` (of the one sum that the stage
            is, or that the axis changes; undefined where there is none), `how` (orders or kernels), `dtype`,
            `accumulator`, `drift`.
        settings: What was swept.
    """

    frame: pd.DataFrame
    settings: dict[str, Any]

    def __add__(self, other: "Sweep") -> "Sweep":
        joined = pd.concat([self.frame, other.frame], ignore_index=True)
        return Sweep(joined, self.settings | other.settings)

    def exponents(self) -> pd.DataFrame:
        """The fitted power of every line with its 95 % interval; points without drift are counted, not fitted, and a
        line of which most points have none, or fewer than 3 points, 2 seeds or 2 values of x are left, has no power."""
        keys = ["sweep", "axis", "stage", "how", "dtype", "accumulator"]
        rows = []
        for key, part in self.frame.groupby(keys, sort=False):
            used = part[part["drift"] > 0]
            row = dict(zip(keys, key, strict=True)) | {"n": len(used), "n_zero": len(part) - len(used)}
            enough = len(used) >= max(3, len(part) / 2)
            if enough and used["x"].nunique() >= 2 and used["seed"].nunique() >= 2:
                law = loglog_slope(used["x"], used["drift"], cluster=used["seed"])
                row |= dict(zip(("exponent", "low", "high"), law.exponent, strict=True)) | {"prefactor": law.prefactor}
            rows.append(row)
        return pd.DataFrame(rows).reindex(columns=[*keys, "n", "n_zero", "exponent", "low", "high", "prefactor"])

    def plot(self) -> "dict[str, Figure]":
        """One figure per sweep and axis (see `plots_heads`)."""
        from mechkv import plots_heads

        return plots_heads.sweep_figures(self)

    def save(self, folder: Path | str) -> Path:
        """Write the table (parquet) and the settings (JSON); sealed last."""
        with result_folder.sealed_folder(folder, KIND) as place:
            storage.write_frame(place / "frame.parquet", self.frame)
            storage.write_json(place / "settings.json", self.settings)
        return Path(folder)

    @classmethod
    def load(cls, folder: Path | str) -> "Sweep":
        """Read what `save` wrote.

        Raises:
            StorageError: Missing, altered, truncated, or another kind of result.
        """
        result_folder.open_folder(Path(folder), KIND)
        return cls(
            storage.read_frame(Path(folder) / "frame.parquet"), storage.read_json(Path(folder) / "settings.json")
        )


def sum_sweep(
    lengths: Sequence[int] = (16, 32, 64, 128, 256, 512, 1024),
    orders: Sequence[tuple[str, str]] = (
        ("sequential", "pairwise"),
        ("sequential", "split:4"),
        ("sequential", "split:8"),
        ("pairwise", "blocked:32"),
    ),
    accumulators: Sequence[str] = ("float16", "bfloat16", "float32"),
    *,
    terms: Terms = "signed",
    n_sums: int = 1000,
    seeds: Sequence[int] = (0, 1, 2, 3),
) -> Sweep:
    """Drift between two orders of summation, by number of terms.

    Args:
        lengths: Values of n.
        orders: Pairs of orders.
        accumulators: Dtypes of products and additions.
        terms: `signed`: products of two normal variables, as in a score; `positive`: their absolute values.
        n_sums: Sums per seed, over which the RMS is taken.
        seeds: One point a seed.
    """
    rows = []
    for seed in seeds:
        for n in lengths:
            generator = torch_rng(seed, "sum sweep", n)
            factors = torch.randn(2, n_sums, n, generator=generator)
            for name in accumulators:
                products = (factors[0].to(to_dtype(name)) * factors[1].to(to_dtype(name))).to(to_dtype(name))
                products = products.abs() if terms == "positive" else products
                sums = {order: ordered_sum(products, order).double() for order in {o for pair in orders for o in pair}}
                size = products.double().sum(-1).square().mean().sqrt()
                for a, b in orders:
                    drift = float((sums[a] - sums[b]).square().mean().sqrt() / size)
                    place = {"sweep": f"sum, {terms} terms", "axis": "n", "x": n, "seed": seed, "stage": "sum"}
                    place["n_terms"] = n
                    rows.append(place | {"how": f"{a} | {b}", "dtype": name, "accumulator": name, "drift": drift})
    return Sweep(pd.DataFrame(rows), {f"sum, {terms} terms": {"n_sums": n_sums, "seeds": list(seeds)}})


def layer_sweep(
    axis: Literal["d_head", "n_kv", "context", "window"],
    values: Sequence[int],
    base: LayerShape | None = None,
    *,
    kernels: Literal["emulated", "torch"] = "emulated",
    orders: Sequence[tuple[str, str]] = (("sequential", "split:4"), ("sequential", "pairwise")),
    dtype: str = "float16",
    accumulators: Sequence[str] = ("float16", "float32"),
    seeds: Sequence[int] = (0, 1, 2, 3),
) -> Sweep:
    """Drift of one attention layer's last row, by one axis of its shape.

    Args:
        axis: What varies.
        values: Its values.
        base: The rest of the shape.
        kernels: `emulated`: each pair of `orders` and each accumulator; `torch`: this machine's kernels.
        orders: (cached path, recomputed path).
        dtype: Dtype of weights and activations.
        accumulators: Dtypes of products and additions, emulated.
        seeds: One point a seed.
    """
    base = base or LayerShape()
    points = [(o, a) for o in orders for a in accumulators] if kernels == "emulated" else [(("", ""), dtype)]
    rows: list[dict[str, Any]] = []
    for value in values:
        shape = replace(base, **{axis: value})
        for seed in seeds:
            layer = _Layer(shape, seed, to_dtype(dtype))
            for (a, b), accumulator in points:
                place = {"sweep": "layer", "axis": axis, "x": value, "seed": seed, "dtype": dtype}
                place |= {"how": f"{a} | {b}", "accumulator": accumulator}
                if kernels == "torch":
                    place |= {"how": "one row | all rows", "accumulator": OWN}
                for stage, drift in layer.drifts(a, b, accumulator):
                    rows.append(place | {"stage": stage, "n_terms": layer.n_terms.get(stage, np.nan), "drift": drift})
    return Sweep(pd.DataFrame(rows), {f"layer, {kernels}, {axis}": {"base": vars(base), "seeds": list(seeds)}})


class _Layer:
    """One attention layer with random weights, run on either path. Without an order: on the machine's kernels."""

    def __init__(self, shape: LayerShape, seed: int, dtype: torch.dtype) -> None:
        self.shape = shape
        self.held = shape.n_keys
        self.n_terms = {"k": shape.d_model, "scores": shape.d_head, "z": self.held}
        generator = torch_rng(seed, "layer sweep", *(getattr(shape, f.name) or 0 for f in fields(shape)))

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator)

        self.x = normal(shape.context, shape.d_model).to(dtype)
        width = {"q": shape.n_heads * shape.d_head, "k": shape.n_kv * shape.d_head, "v": shape.n_kv * shape.d_head}
        self.weights = {name: (normal(shape.d_model, n) / shape.d_model**0.5).to(dtype) for name, n in width.items()}

    def drifts(self, order_one: str, order_all: str, accumulator: str) -> Iterator[tuple[str, float | None]]:
        """Every stage and its drift: the sums one by one on the recomputed path's inputs, then all of them."""
        ours = self.run(order_one, accumulator, "one")
        theirs = self.run(order_all, accumulator, "all")
        last, keys = slice(-1, None), slice(-self.held, None)
        q, k, v = theirs["q"][:, last], theirs["k"][:, keys], theirs["v"][:, keys]
        z = _times(theirs["pattern"][:, last, keys], v, order_one, accumulator)
        scores = self._scores(q, k, order_one, accumulator)
        yield "k", compare(ours["k"], k).rel_l2
        yield "scores", compare(scores, theirs["scores"][:, last, keys]).rel_l2
        yield "z", compare(z, theirs["z"][:, last]).rel_l2
        yield "layer", compare(ours["z"], theirs["z"][:, last]).rel_l2

    def run(self, order: str, accumulator: str, path: str) -> dict[str, Float[Tensor, "n_heads ..."]]:
        """`q`, `k`, `v` (a KV head for every query head), `scores`, `pattern`, `z`: rows of the last token and of the
        keys it sees. The machine's kernels have all rows and keys on the path `all`, with a mask, as a model has."""
        full = path == "all" and not order
        rows = {"q": self.x if full else self.x[-1:], "k": self.x if full else self.x[-self.held :]}
        q, k, v = (self._project(name, rows.get(name, rows["k"]), order, accumulator, path) for name in ("q", "k", "v"))
        scores = self._scores(q, k, order, accumulator)
        if full:
            behind = torch.arange(len(self.x))[:, None] - torch.arange(len(self.x))
            scores = scores.masked_fill((behind < 0) | (behind >= self.held), -torch.inf)
        wide = torch.promote_types(scores.dtype, torch.float32)
        pattern = torch.softmax(scores.to(wide), dim=-1).to(scores.dtype)
        z = _times(pattern, v, order, accumulator)
        return {"q": q, "k": k, "v": v, "scores": scores, "pattern": pattern, "z": z}

    def _project(self, name: str, rows: Tensor, order: str, accumulator: str, path: str) -> Tensor:
        weight, shape = self.weights[name], self.shape
        if order or path == "all":
            out = _times(rows, weight, order, accumulator)
        else:
            out = torch.cat([row[None] @ weight for row in rows])
        copies = 1 if name == "q" else shape.n_heads // shape.n_kv
        return repeat(out, "t (g d) -> (g r) t d", d=shape.d_head, r=copies)

    def _scores(self, q: Tensor, k: Tensor, order: str, accumulator: str) -> Tensor:
        return _times(q, k.transpose(-1, -2), order, accumulator) * self.shape.d_head**-0.5


def _times(a: Tensor, b: Tensor, order: str, accumulator: str) -> Tensor:
    return ordered_matmul(a, b, order, to_dtype(accumulator)) if order else a @ b


def model_sweep(
    axis: Literal["d_head", "n_kv", "context", "window"],
    values: Sequence[int],
    base: LayerShape | None = None,
    *,
    dtypes: Sequence[str] = ("float16", "float32"),
    n_layers: int = 3,
    n_steps: int = 8,
    seeds: Sequence[int] = (0, 1, 2, 3),
) -> Sweep:
    """Drift of tiny random models on both paths: after the first and the last block, RMS over steps, by one axis.

    Args:
        axis: What varies. `context` counts prompt and decode steps.
        values: Its values.
        base: The rest of the shape; `d_model` stays, so heads of another width project from and to the same stream.
        dtypes: Dtypes of the models.
        n_layers: Their depth.
        n_steps: Decode steps at the end of the context.
        seeds: One model and one text a seed.
    """
    base = base or LayerShape()
    rows: list[dict[str, Any]] = []
    for value in values:
        shape = replace(base, **{axis: value})
        n_terms = {"d_head": shape.d_head, "n_kv": np.nan}.get(axis, shape.n_keys)
        for seed in seeds:
            for dtype in dtypes:
                place = {"sweep": "model", "axis": axis, "x": value, "seed": seed, "how": "cached | recomputed"}
                place |= {"dtype": dtype, "accumulator": OWN}
                drifts = np.sqrt(np.mean(np.square(list(_model_drift(shape, seed, dtype, n_layers, n_steps))), axis=0))
                rows += [
                    place | {"stage": stage, "n_terms": n_terms, "drift": float(drift)}
                    for stage, drift in zip(("first block", "last block"), drifts, strict=True)
                ]
    settings = {"base": vars(base), "seeds": list(seeds), "n_layers": n_layers, "n_steps": n_steps}
    return Sweep(pd.DataFrame(rows), {f"model, {axis}": settings})


def random_model(shape: LayerShape, seed: int, dtype: str, n_layers: int = 3, d_vocab: int = 101):
    """A tiny random Llama (Mistral where there is a window) of this shape, as an admitted bridge."""
    settings: dict[str, Any] = {
        "hidden_size": shape.d_model,
        "intermediate_size": 2 * shape.d_model,
        "num_hidden_layers": n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv,
        "head_dim": shape.d_head,
        "vocab_size": d_vocab,
        "max_position_embeddings": max(2 * shape.context, 128),
    }
    make: type[LlamaConfig | MistralConfig] = LlamaConfig if shape.window is None else MistralConfig
    config = make(**settings if shape.window is None else settings | {"sliding_window": shape.window})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch_rng(seed, "random model", shape.d_model, shape.d_head, shape.n_heads, shape.n_kv)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=_INIT_STD, generator=generator)
        parameter.data = parameter.data.to(to_dtype(dtype))
    return from_hf(model.eval())


def _model_drift(
    shape: LayerShape, seed: int, dtype: str, n_layers: int, n_steps: int
) -> Iterator[tuple[float, float]]:
    if shape.context <= n_steps:
        raise InputError(
            "context too short", got=shape.context, expected=f"more than {n_steps} decode steps", remedy="Lengthen it."
        )
    model = random_model(shape, seed, dtype, n_layers)
    text = torch.randint(0, 101, (shape.context,), generator=torch_rng(seed, "text", shape.context))
    prompt = text[: shape.context - n_steps]
    walk = lockstep(model, prompt, policy=Forced(text.tolist()), n_steps=n_steps, sites=("resid_post",))
    for cached, recomputed in walk:
        if cached.index:
            ours, theirs = cached.activations["resid_post"], recomputed.activations["resid_post"]
            yield tuple(compare(ours[i], theirs[i]).rel_l2 or 0.0 for i in (0, -1))  # type: ignore[misc]
