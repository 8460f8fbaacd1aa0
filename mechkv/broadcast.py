"""Is one rounding error worse because all query heads of a group read it?

A KV row is read by every query head of its group, so its rounding error reaches all of them at once. If their outputs
moved together, the errors of r heads would add up to r times one of them; if not, to sqrt(r) times, as r independent
errors do. On the twin with one KV head for every query head (`twins.materialise_kv_heads`) both can be had:

    shared        one error for every KV head of the original, given to all of its copies: what grouped queries do
    independent   an error of the same size for every copy: what the same model without groups would have

    K' = K (1 + u n),  V' = V (1 + u n),  n normal, u the unit roundoff of the dtype under study

in every layer and row of the KV state before one cached step. Response: relative L2 of `resid_post` against the same
step from the unchanged state. The ratio shared / independent is between 1 (no amplification) and sqrt(r) (the heads
of a group move together); it can be below 1 where they cancel.

Controls: the run is in float32, whose own rounding is 2^-13 of the errors planted; the step from the unchanged state
done twice gives the same bits; `r` = 1 is refused.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechkv import guards, provenance
from mechkv.cache import KVState
from mechkv.comparison import UNIT_ROUNDOFF, compare_rows
from mechkv.configs import check_kinds, chosen, require
from mechkv.errors import InputError
from mechkv.guards import GuardLog, input_device
from mechkv.models import admit, info, to_dtype
from mechkv.paths import PathRunner
from mechkv.rebuilding import recast
from mechkv.stats import cluster_bootstrap, torch_rng
from mechkv.tokens import as_tokens
from mechkv.twins import materialise_kv_heads

ARMS = ("shared", "independent")


@dataclass(frozen=True)
class BroadcastConfig:
    """What to measure.

    Attributes:
        dtype: Whose unit roundoff the planted errors have.
        n_draws: Errors per prompt and arm.
        seed: Draws them.
    """

    dtype: str = "float16"
    n_draws: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        check_kinds(self)
        require(self.n_draws >= 1, "n_draws", got=self.n_draws, expected="1 or more")


@dataclass(frozen=True)
class Broadcast:
    """Responses to shared and independent errors.

    Attributes:
        frame: A row per prompt, draw, arm and layer: `rel_l2` of `resid_post`.
        group_size: Query heads per KV head of the original.
        config: The configuration.
        guards: How often each guard ran and passed.
        provenance: Versions, machine, and the model.
    """

    frame: pd.DataFrame
    group_size: int
    config: BroadcastConfig
    guards: dict[str, int]
    provenance: dict[str, Any]

    def ratios(self) -> pd.DataFrame:
        """RMS response to shared errors over that to independent ones, per layer, mean over prompts with interval."""
        square = self.frame.assign(square=self.frame["rel_l2"] ** 2)
        wide = square.groupby(["prompt", "layer", "arm"])["square"].mean().unstack("arm")
        ratio = np.sqrt(wide["shared"] / wide["independent"]).rename("ratio").reset_index()
        return cluster_bootstrap(ratio, "ratio", by=["layer"], support=(0, np.inf), seed=self.config.seed)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"group_size": self.group_size, "config": asdict(self.config), "guards": self.guards}


def broadcast(
    model: TransformerBridge, prompts: Sequence[str | Tensor], config: BroadcastConfig | None = None
) -> Broadcast:
    """Plant shared and independent errors in the KV state of the materialised twin.

    Args:
        model: A bridge with fewer KV heads than query heads.
        prompts: Texts or `[pos]` token tensors of at least 2 tokens; the last token is the step.
        config: What to measure.

    Raises:
        InputError: The model has no groups.
        GuardError: The twin does not compute the same function.
    """
    config = chosen(config, BroadcastConfig)
    known = info(admit(model))
    size = known.n_heads // known.n_kv
    if size == 1:
        raise InputError(
            "no groups", got=f"{known.n_kv} KV heads", expected="fewer than query heads", remedy="Leave this out."
        )
    twin = materialise_kv_heads(model if known.dtype == "float32" else recast(model, "float32"))
    limit = getattr(model.cfg, "n_ctx", None)
    token_lists = as_tokens(model.tokenizer, prompts, vocab_size=known.d_vocab, max_positions=limit)
    device = input_device(model)
    log, frames = GuardLog(), []
    for number, tokens in enumerate(token_lists):
        frames.append(_one_prompt(twin, tokens.to(device), known.n_kv, config, number, log).assign(prompt=number))
    where = provenance.collect(twin)
    return Broadcast(pd.concat(frames, ignore_index=True), size, config, dict(log), where)


def _one_prompt(
    twin: TransformerBridge,
    tokens: Int[Tensor, "pos"],
    n_kv: int,
    config: BroadcastConfig,
    number: int,
    log: GuardLog,
) -> pd.DataFrame:
    if len(tokens) < 2:
        raise InputError("prompt too short", got=len(tokens), expected="2 tokens", remedy="The last one is the step.")
    frames = []
    with PathRunner(twin, "cached", sites=("resid_post",), log=log) as runner:
        state = runner.step(tokens[:-1], KVState.empty(len(tokens) - 1), 0).kv
        plain = runner.step(tokens, state, 1)
        guards.check_repeat(plain, runner.step(tokens, state, 1), log)
        reference = torch.stack(plain.activations["resid_post"])
        for draw in range(config.n_draws):
            for arm in ARMS:
                changed = _perturbed(state, n_kv, arm, config, (number, draw))
                response = torch.stack(runner.step(tokens, changed, 1).activations["resid_post"])
                found = compare_rows(response, reference)["rel_l2"]
                frames.append(pd.DataFrame({"draw": draw, "arm": arm, "layer": np.arange(len(found)), "rel_l2": found}))
    return pd.concat(frames, ignore_index=True)


def _perturbed(state: KVState, n_kv: int, arm: str, config: BroadcastConfig, labels: tuple[int, int]) -> KVState:
    generator = torch_rng(config.seed, "broadcast", arm, *labels)
    size = UNIT_ROUNDOFF[to_dtype(config.dtype)]

    def noisy(rows: Tensor) -> Tensor:
        n_copies, pos, d_head = rows.shape
        drawn = n_kv if arm == "shared" else n_copies
        noise = torch.randn(drawn, pos, d_head, generator=generator).repeat_interleave(n_copies // drawn, 0)
        return rows * (1 + size * noise.to(rows))

    return KVState(
        tuple(noisy(rows) for rows in state.keys),
        tuple(noisy(rows) for rows in state.values),
        state.n_tokens,
        state.n_prompt,
    )
