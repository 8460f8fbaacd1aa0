"""Which part of a 16-bit model has to be computed in float32 for the two paths to agree?

A policy lifts some of five sites of a model to float32; the weights stay as they are, in 16 bit:

- `projections`: Q, K, V, output and MLP matrices, and what lies between those of the MLP;
- `kv_storage`: K and V as the cache holds them;
- `attention`: scores, softmax and the weighted sum;
- `residual`: the embedding's output and the sums of the residual stream;
- `unembedding`: the last matrix and the logits.

Rule: a lifted site computes in float32 from what it is given and hands on float32; a site that is not lifted rounds
what it is given to the model's dtype first. So a lift has an effect only where its result is not rounded right away:
`kv_storage` alone changes nothing, bit for bit, because the projections wrote 16 bits (a control). All five together
are LayerCast (arXiv 2506.09501): 16-bit weights, float32 arithmetic.

Modules are patched for the length of a `with` block and are as before afterwards, whatever happens in it. Supported:
families with separate q, k, v, o and MLP matrices and rotary positions (Llama, Mistral, Qwen, Gemma); others are
refused (OLMo-2 as well: it rotates in float32 of its own accord).
Controls: no lift gives the bits of the plain model; all lifts give those of the model recast to float32 (exactly for
Llama-like families; Gemma also rounds its embedding scale).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import linear as multiply
from transformer_lens.model_bridge import TransformerBridge

from mechkv import provenance
from mechkv.configs import check_kinds, chosen
from mechkv.errors import InputError
from mechkv.forced_study import (
    Condition,
    ForcedStudy,
    continuations,
    prompt_table,
    run_conditions,
    run_settings,
    token_lists,
)
from mechkv.models import DTYPES, admit, info
from mechkv.runs import RunFolder
from mechkv.stats import cluster_bootstrap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SITES = ("kv_storage", "attention", "projections", "residual", "unembedding")
POLICIES: dict[str, tuple[str, ...]] = {
    "none": (),
    **{f"{site} only": (site,) for site in SITES},
    **{f"all but {site}": tuple(other for other in SITES if other != site) for site in SITES},
    "LayerCast": SITES,
}
"""Name -> lifted sites: none, each on its own, all but one, all."""


@dataclass(frozen=True)
class SiteConfig:
    """Which policies, and how long."""

    policies: tuple[str, ...] = tuple(POLICIES)
    n_steps: int = 24

    def __post_init__(self) -> None:
        check_kinds(self)
        unknown = [name for name in self.policies if name not in POLICIES]
        if unknown or not self.policies or self.n_steps < 1:
            raise InputError(
                "policies", got=self.policies, expected=f"some of {tuple(POLICIES)}", remedy="And at least one step."
            )


@dataclass(frozen=True)
class SitePrecision(ForcedStudy):
    """The same tokens under several policies; `frame` has a row per policy, prompt and step (see `ForcedStudy`)."""

    KIND: ClassVar[str] = "site_precision"
    CONFIG: ClassVar[type] = SiteConfig

    def summary(self, seed: int = 0) -> pd.DataFrame:
        """Per policy: mean KL and mean max |dz| between the paths with their 95 % intervals over prompts, flips, the
        share of steps with equal logits, and mean KL relative to no lift."""
        rows = []
        for policy, part in self.decoded.groupby("policy", sort=False, observed=True):
            kl, dz = (cluster_bootstrap(part, name, support=(0.0, torch.inf), seed=seed).iloc[0] for name in _METRICS)
            row = {"policy": policy, "kl_mean": kl["estimate"], "kl_low": kl["low"], "kl_high": kl["high"]}
            row |= {"max_abs_dz": dz["estimate"], "dz_low": dz["low"], "dz_high": dz["high"]}
            row |= {"kl_median": part["kl"].median(), "flips": int(part["flip"].sum()), "n_steps": len(part)}
            rows.append(row | {"equal": float((part["max_abs_dz"] == 0).mean())})
        table = pd.DataFrame(rows)
        base = table.loc[table["policy"] == "none", "kl_mean"]
        return table.assign(
            relative=table["kl_mean"] / base.iloc[0] if len(base) and base.iloc[0] > 0 else float("nan")
        )

    def plot(self) -> "dict[str, Figure]":
        """The figures by name (see `plots_precision`)."""
        from mechkv import plots_precision

        return {"precision_by_site": plots_precision.precision_by_site(self)}


_METRICS = ("kl", "max_abs_dz")


def precision_by_site(
    model: TransformerBridge,
    prompts: Sequence[str | Tensor],
    config: SiteConfig | None = None,
    *,
    folder: Path | str | None = None,
    progress: bool | None = None,
) -> SitePrecision:
    """The same tokens (the plain cached path's greedy choice) under every policy, on both paths."""
    config = chosen(config, SiteConfig)
    admit(model)
    tokens = token_lists(model, prompts, config.n_steps)
    run = RunFolder(folder, run_settings("site_precision", model, tokens, asdict(config)))
    fed = continuations(run, model, tokens, config.n_steps)
    conditions: dict[str, Condition] = {name: _condition(model, name) for name in config.policies}
    frame, guards, models = run_conditions(run, conditions, tokens, fed, column="policy", progress=progress)
    return SitePrecision(frame, prompt_table(tokens, fed), config, guards, provenance.collect() | {"models": models})


def _condition(model: TransformerBridge, name: str) -> Condition:
    return lambda: lifted(model, POLICIES[name])


@contextmanager
def lifted(model: TransformerBridge, sites: Sequence[str]) -> Iterator[TransformerBridge]:
    """`model` with `sites` in float32 inside the `with` block; as before after it, also after an error.

    Raises:
        InputError: An unknown site, a model that is not in a 16-bit dtype, or a family that is not supported.
    """
    unknown = [site for site in sites if site not in SITES]
    if unknown:
        raise InputError(
            "unknown site", got=unknown, expected=f"some of {SITES}", remedy="See mechkv.precision_policy."
        )
    low = DTYPES[info(model).dtype]
    if low not in (torch.float16, torch.bfloat16):
        raise InputError("nothing to lift", got=f"a {low} model", expected="float16 or bfloat16", remedy="Load it so.")
    with ExitStack() as undo:
        if sites:
            _patch(model, frozenset(sites), low, undo)
        yield model


def _patch(model: TransformerBridge, sites: frozenset[str], low: torch.dtype, undo: ExitStack) -> None:
    def kept(site: str) -> torch.dtype:
        return torch.float32 if site in sites else low

    inner, stream = kept("projections"), kept("residual")
    for index, block in enumerate(model.blocks):
        attention, mlp = block.attn, block.mlp
        parts = {f"attn.{name}": getattr(attention, name, None) for name in ("q", "k", "v", "o")}
        parts |= {f"mlp.{name}": getattr(mlp, name, None) for name in ("gate", "in", "out")}
        matrices = {name: getattr(part, "original_component", None) for name, part in parts.items()}
        supported = all(isinstance(matrix, nn.Linear) for matrix in matrices.values())
        if not supported or not hasattr(attention, "hook_rot_q") or not hasattr(attention, "_update_kv_cache"):
            raise InputError(
                f"block {index} cannot be lifted site by site",
                got=f"{type(attention).__name__} with {sorted(n for n, m in matrices.items() if m is not None)}",
                expected="separate q, k, v, o, gate, in, out matrices and rotary positions",
                remedy="Llama, Mistral, Qwen and Gemma families are supported.",
            )
        for name, matrix in matrices.items():
            to_stream = name in ("attn.o", "mlp.out")
            result = low if to_stream and "residual" not in sites else None
            _set(matrix, "forward", _projection(matrix, inner, result), undo)  # type: ignore[arg-type]
        _hide_weight(parts["attn.o"], undo)
        _set(attention.hook_rot_q, "forward", _rounded(attention.hook_rot_q.forward, kept("attention")), undo)
        expected = low if not sites & {"projections", "residual"} else None
        update = _stored(attention._update_kv_cache, kept("kv_storage"), kept("attention"), expected)
        _set(attention, "_update_kv_cache", update, undo)
    _set(model.embed, "forward", _rounded(model.embed.forward, stream), undo)
    head = model.unembed.original_component
    _set(head, "forward", _projection(head, kept("unembedding"), None), undo)


def _set(owner: Any, name: str, value: Any, undo: ExitStack) -> None:
    """Shadow a method on one object until `undo` closes."""
    before = owner.__dict__.get(name)
    object.__setattr__(owner, name, value)

    def restore() -> None:
        if before is None:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, before)

    undo.callback(restore)


class _Opaque(nn.Module):
    """A matrix without a `weight` of its own: the attention bridge rounds its input to the dtype of that weight."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside
        self.train(inside.training)

    def forward(self, value: Tensor) -> Tensor:
        return self.inside(value)


def _hide_weight(part: Any, undo: ExitStack) -> None:
    inside = part._modules["_original_component"]
    part._modules["_original_component"] = _Opaque(inside)
    undo.callback(part._modules.__setitem__, "_original_component", inside)


def _projection(matrix: nn.Linear, dtype: torch.dtype, result: torch.dtype | None) -> Callable[[Tensor], Tensor]:
    """The matrix product in `dtype`, from a value rounded to it; rounded to `result` where that is given."""

    def forward(value: Tensor) -> Tensor:
        bias = None if matrix.bias is None else matrix.bias.to(dtype)
        product = multiply(value.to(dtype), matrix.weight.to(dtype), bias)
        return product if result is None else product.to(result)

    return forward


def _rounded(original: Callable[..., Tensor], dtype: torch.dtype) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: original(*args, **kwargs).to(dtype)


def _stored(
    original: Callable[..., tuple[Tensor, Tensor]], store: torch.dtype, compute: torch.dtype, expected: Any
) -> Callable[..., tuple[Tensor, Tensor]]:
    """K and V are written in `store` and read in `compute`; a family that makes other than `expected` is refused."""

    def update(k: Tensor, v: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if expected is not None and k.dtype != expected:
            raise InputError(
                "this family leaves the model's dtype by itself",
                got=f"K in {k.dtype} after rotation",
                expected=str(expected),
                remedy="OLMo-2 rotates in float32: its sites cannot be told apart like this.",
            )
        keys, values = original(k.to(store), v.to(store), **kwargs)
        return keys.to(compute), values.to(compute)

    return update
