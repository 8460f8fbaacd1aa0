"""What happened at every step of one path? The run that keeps everything.

`record` feeds given tokens to one path (teacher forcing) and keeps, for every step, the logits and the LAST row of each
recorded site: step 0 processes the prompt and its row is the prompt's last token, step t processes one token more.

    steps = len(tokens) - n_prompt + 1,        position of step t's row = n_prompt - 1 + t

Conventions
    `activations[site][layer]` is `[step, ...]` with the axes of the site (`sites.AXES`) less `pos`; values that the
    rest of the model sees, after interventions, in the dtype the model gives. `pattern` is `[step, n_heads, key]` and
    its key axis is the absolute position, `len(tokens)` wide in every layer: keys that a step does not see, later ones
    and those that left a window, are exact zeros, so both paths and all layers line up (attention scores hold -inf).
    The KV state after the last step is always kept, ragged over layers where windows differ; `keep_states=True` keeps
    the one after every step. Rows move to `device` as they come.
Size
    `estimate_bytes` is exact and known before the first pass of the run. The family's own business (the dtype of
    its KV cache, once per model; shape and dtype of `rot_q`, `rot_k`, `pattern` and full hook names) is asked of the
    model by one pass of one token.
Controls
    The guards of the decode loop, counted in `.guards`. A run written to a folder is continued only if settings and
    weights are the same and its last step, done again from the stored state, gives the stored bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechkv import guards, provenance, record_folder
from mechkv.cache import KVState
from mechkv.errors import InputError
from mechkv.guards import GuardLog
from mechkv.models import ModelInfo, admit, info, to_device
from mechkv.paths import Intervention, Path, PathRunner, Step, decode
from mechkv.policies import Forced
from mechkv.record_rows import Buffer, Row, count_bytes, own_state, plan_rows
from mechkv.sites import CACHE_SITES, supported

DEFAULT_SITES = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
DEFAULT_LIMIT = 4 * 2**30
SHARD_STEPS = 32

Progress = Callable[[int, int, int], None]
"""Called with (steps done, steps in all, bytes that the whole run keeps), first before any pass."""


@dataclass(frozen=True)
class RunRecord:
    """Everything that one path gave.

    Attributes:
        path: `cached` or `recomputed`.
        tokens: `[pos]`, all tokens of the run.
        n_prompt: Tokens processed by step 0.
        values: `logits` -> one tensor; site or hook name -> one tensor per layer (one in all for a hook name); each
            `[step, ...]`. After `load` they are read from the disk when touched, so keep what you use in a loop.
        cache_keys: Per layer `[n_kv, pos, d_head]`, after rotation, the state after the last step.
        cache_values: Likewise.
        states: The KV state after every step, if they were kept.
        guards: How often each guard ran.
        info: What was loaded.
        provenance: What was run on what.
    """

    path: Path
    tokens: Int[Tensor, " n_tokens"]
    n_prompt: int
    values: Mapping[str, Sequence[Tensor]]
    cache_keys: Sequence[Shaped[Tensor, "n_kv _pos d_head"]]
    cache_values: Sequence[Shaped[Tensor, "n_kv _pos d_head"]]
    states: Sequence[KVState] | None
    guards: Mapping[str, int]
    info: ModelInfo
    provenance: Mapping[str, Any]

    @property
    def n_steps(self) -> int:
        """Steps done, step 0 included."""
        return len(self.tokens) - self.n_prompt + 1

    @property
    def positions(self) -> Int[Tensor, " step"]:
        """Absolute position of each step's row."""
        return torch.arange(self.n_prompt - 1, len(self.tokens))

    @cached_property
    def logits(self) -> Shaped[Tensor, "step d_vocab"]:
        """`[step, d_vocab]`, in the model's dtype."""
        return self.values["logits"][0]

    @cached_property
    def activations(self) -> dict[str, Sequence[Tensor]]:
        """Site -> per layer `[step, ...]`."""
        return {name: layers for name, layers in self.values.items() if name != "logits"}

    @property
    def state(self) -> KVState:
        """The KV state after the last step."""
        return KVState(tuple(self.cache_keys), tuple(self.cache_values), len(self.tokens), self.n_prompt)

    @property
    def cache_first_position(self) -> tuple[int, ...]:
        """Per layer the absolute position of the first row that the cache still holds."""
        return tuple(self.state.first_position(layer) for layer in range(len(self.cache_keys)))

    @property
    def cache_provenance(self) -> list[list[str]]:
        """Per layer `prefill` or `decode` for each row of the cache."""
        return [self.state.provenance(layer) for layer in range(len(self.cache_keys))]

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensors kept: what `estimate_bytes` foretold."""
        tensors = [tensor for layers in self.values.values() for tensor in layers]
        for state in [self.state, *(list(self.states)[:-1] if self.states is not None else [])]:
            tensors += [*state.keys, *state.values]
        return sum(tensor.nbytes for tensor in tensors)

    def save(self, folder: str | PathLike[str]) -> None:
        """Write it to a new folder, which appears when it is complete.

        Raises:
            StorageError: The folder is taken, or the disk is full (nothing is left behind).
        """
        record_folder.save(
            folder, self._facts(), self.values, self.state, list(self.states) if self.states is not None else None
        )

    @classmethod
    def load(cls, folder: str | PathLike[str], *, verify: bool = False) -> "RunRecord":
        """Read it back, mapped into memory.

        Args:
            folder: Where it was saved or recorded to.
            verify: Check the SHA-256 of large files too.

        Raises:
            StorageError: Missing, unfinished, truncated, altered, or something else.
        """
        stored = record_folder.load(folder, verify=verify)
        facts = stored.facts
        known = {**facts["info"], "windows": tuple(facts["info"]["windows"])}
        return cls(
            path=facts["path"],
            tokens=torch.tensor(facts["tokens"]),
            n_prompt=facts["n_prompt"],
            values=stored.values,
            cache_keys=stored.cache_keys,
            cache_values=stored.cache_values,
            states=stored.states,
            guards=facts["guards"],
            info=ModelInfo(**known),
            provenance=facts["provenance"],
        )

    def _facts(self) -> dict[str, Any]:
        sites = list(self.activations)
        return _facts(self.path, self.tokens, self.n_prompt, sites, self.guards, self.info, self.provenance)


def record(
    model: TransformerBridge,
    tokens: Int[Tensor, " pos"],
    *,
    n_prompt: int,
    path: Path,
    sites: Sequence[str] | None = None,
    interventions: Sequence[Intervention] = (),
    keep_states: bool = False,
    device: str | torch.device = "cpu",
    limit_bytes: int | None = DEFAULT_LIMIT,
    folder: str | PathLike[str] | None = None,
    shard_steps: int = SHARD_STEPS,
    progress: Progress | None = None,
) -> RunRecord:
    """Walk one path over all of `tokens` and keep everything.

    Args:
        model: The bridge.
        tokens: `[pos]`, int64, on the device of the model's embedding; the first `n_prompt` are step 0.
        n_prompt: Length of the prompt, 1 to `len(tokens)`.
        path: Which path to walk.
        sites: Sites or TransformerLens hook names; by default those of `DEFAULT_SITES` that the family has. Logits and
            the final KV state are kept in any case.
        interventions: Applied during every pass.
        keep_states: Keep the KV state after every step: size grows with steps times tokens.
        device: Where to keep it (not with `folder`).
        limit_bytes: Refuse a run that keeps more; None for no limit.
        folder: Write there as it goes and return the record mapped from there. Called again after a kill, the run goes
            on after its last complete shard. Interventions can hold state that is not on the disk: with them, a run is
            written but not continued.
        shard_steps: Steps a file, for `folder`.
        progress: See `Progress`.

    Raises:
        InputError: Tokens, lengths, sites or size that cannot be used; nothing was run.
        StorageError: The folder holds something else, or the disk is full.
        GuardError, NonFiniteError: From the decode loop.
    """
    _check_tokens(model, tokens, n_prompt)
    names = _names(model, sites)
    if shard_steps < 1:
        raise InputError("shard_steps", got=shard_steps, expected="1 or more", remedy=f"The default is {SHARD_STEPS}.")
    rows = plan_rows(model, names, len(tokens))
    n_bytes = count_bytes(model, rows, len(tokens), n_prompt, keep_states)
    _check_size(n_bytes, limit_bytes)
    run = Run(model, tokens, n_prompt, path, names, rows, tuple(interventions), keep_states, n_bytes, progress)
    if folder is None:
        return _in_memory(run, to_device(device))
    PathRunner(model, path, sites=names, interventions=interventions)  # refuses what it cannot run, before writing
    settings = run.facts(GuardLog()) | {
        "keep_states": keep_states,
        "shard_steps": shard_steps,
        "interventions": [f"{type(one).__name__} at {', '.join(one.sites)}" for one in interventions],
    }
    for name in ("guards", "provenance"):
        del settings[name]
    settings |= {"weights_sha256": provenance.weights_sha256(model), "kernels": provenance.what_decides_kernels(model)}
    record_folder.continue_run(folder, settings, run, shard_steps)
    return RunRecord.load(folder)


def estimate_bytes(
    model: TransformerBridge,
    n_tokens: int,
    n_prompt: int,
    *,
    sites: Sequence[str] | None = None,
    keep_states: bool = False,
) -> int:
    """Bytes that `record` will keep, on either path, exactly: logits, sites, KV state (all of them if kept)."""
    if not 1 <= n_prompt <= n_tokens:
        raise _bad_prompt_length(n_prompt, n_tokens)
    return count_bytes(model, plan_rows(model, _names(model, sites), n_tokens), n_tokens, n_prompt, keep_states)


def _names(model: TransformerBridge, sites: Sequence[str] | None) -> list[str]:
    if isinstance(sites, str):
        raise InputError("sites", got=repr(sites), expected="a sequence of names", remedy=f"Write ({sites!r},).")
    chosen = supported(model, DEFAULT_SITES) if sites is None else sites
    return [name for name in dict.fromkeys(chosen) if name not in (*CACHE_SITES, "logits")]


# --- running ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A checked run: what `record_folder` needs to do and redo steps of it."""

    model: TransformerBridge
    tokens: Tensor
    n_prompt: int
    path: Path
    names: list[str]
    rows: list[Row]
    interventions: tuple[Intervention, ...]
    keep_states: bool
    n_bytes: int
    progress: Progress | None

    @property
    def n_steps(self) -> int:
        """Steps in all, step 0 included."""
        return len(self.tokens) - self.n_prompt + 1

    def steps(self, log: GuardLog, first_step: int = 0, state: KVState | None = None) -> Iterator[Step]:
        """The decode loop over the given tokens, from `first_step` on."""
        return decode(
            self.model,
            self.tokens[: self.n_prompt + first_step],
            path=self.path,
            policy=Forced(self.tokens.tolist()),
            n_steps=self.n_steps - 1,
            sites=self.names,
            rows="last",
            interventions=self.interventions,
            log=log,
            state=state,
            first_step=first_step,
        )

    def buffer(self, first: int, stop: int, device: torch.device) -> Buffer:
        """Room for some steps of this run."""
        return Buffer(info(self.model), self.rows, self.keep_states, first, stop, device)

    def layer_devices(self) -> list[torch.device]:
        """Where each layer's KV cache lives."""
        return [_layer_device(self.model, layer) for layer in range(info(self.model).n_layers)]

    def report(self, done: int) -> None:
        """Tell the caller how far it is."""
        if self.progress is not None:
            self.progress(done, self.n_steps, self.n_bytes)

    def facts(self, log: GuardLog) -> dict[str, Any]:
        """What is written beside the tensors."""
        return _facts(
            self.path, self.tokens, self.n_prompt, self.names, log, info(self.model), provenance.collect(self.model)
        )


def _layer_device(model: TransformerBridge, layer: int) -> torch.device:
    return next(model.blocks[layer].parameters()).device


def _facts(
    path: Path,
    tokens: Tensor,
    n_prompt: int,
    sites: list[str],
    counts: Mapping[str, int],
    known: ModelInfo,
    origin: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "path": path,
        "tokens": tokens.tolist(),
        "n_prompt": n_prompt,
        "sites": sites,
        "guards": dict(counts),
        "info": known.to_dict(),
        "provenance": dict(origin),
    }


def _in_memory(run: Run, device: torch.device) -> RunRecord:
    log, buffer = GuardLog(), run.buffer(0, run.n_steps, device)
    run.report(0)
    for step in run.steps(log):
        buffer.put(step)
        last = step.kv
        run.report(step.index + 1)
    states = [buffer.states[index] for index in range(run.n_steps)] if run.keep_states else None
    final = states[-1] if states else own_state(last, device)
    values: dict[str, list[Tensor]] = {}
    for name, tensor in buffer.tensors.items():
        values.setdefault(name.rsplit("/", 1)[0], []).append(tensor)
    return RunRecord(
        path=run.path,
        tokens=run.tokens.detach().cpu().clone(),
        n_prompt=run.n_prompt,
        values=values,
        cache_keys=final.keys,
        cache_values=final.values,
        states=states,
        guards=dict(log),
        info=info(run.model),
        provenance=provenance.collect(run.model),
    )


# --- refusals --------------------------------------------------------------------------------------------------------


def _check_tokens(model: TransformerBridge, tokens: Tensor, n_prompt: int) -> None:
    admit(model)
    n_tokens = len(tokens) if isinstance(tokens, Tensor) and tokens.ndim else 0
    guards.token_limits(model).check(tokens, n_tokens)
    if type(n_prompt) is not int or not 1 <= n_prompt <= len(tokens):
        raise _bad_prompt_length(n_prompt, len(tokens))


def _bad_prompt_length(n_prompt: int, n_tokens: int) -> InputError:
    return InputError(
        "n_prompt does not fit the tokens",
        got=f"n_prompt={n_prompt} with {n_tokens} tokens",
        expected=f"1 to {n_tokens}",
        remedy="tokens holds the prompt and all tokens after it; n_prompt is the prompt's share.",
    )


def _check_size(n_bytes: int, limit: int | None) -> None:
    if limit is not None and n_bytes > limit:
        raise InputError(
            "this run keeps too much",
            got=f"{n_bytes / 1e9:.3g} GB ({n_bytes:,} bytes)",
            expected=f"at most limit_bytes, {limit / 1e9:.3g} GB",
            remedy="Record fewer sites or tokens, leave out keep_states, or raise limit_bytes; mechkv.decode walks a "
            "path without keeping anything.",
        )
