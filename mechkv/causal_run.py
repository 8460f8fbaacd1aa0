"""How is a causal experiment run over prompts, resumed, saved and loaded? The part that they share.

Every experiment is a function of one prompt that returns tidy frames; `run_prompts` checks the model and the prompts,
keeps finished prompts in a `RunFolder`, proves that the weights are bit for bit as they were, and joins the frames.
`CausalResult` is what they all return: frames, configuration, guards and provenance.

`Walks` lets several experiments on the same prompts share one walk of the two paths: the recomputed path does a full
pass a step, which costs far more than any patched step.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pandas as pd
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm
from transformer_lens.model_bridge import TransformerBridge

from mechkv import provenance, result_folder, storage
from mechkv.errors import InputError
from mechkv.guards import GuardLog, input_device
from mechkv.interventions import check_untouched
from mechkv.models import admit, info
from mechkv.policies import Greedy
from mechkv.runs import Piece, RunFolder
from mechkv.sources import Pair, pairs
from mechkv.tokens import as_tokens

Frames = dict[str, pd.DataFrame]
Measure = Callable[[int, Int[Tensor, "pos"], GuardLog], Frames]
"""(number of the prompt, its tokens, guards) -> frames by name."""

WALKED = ("resid_post",)
"""Sites recorded while both paths are walked."""

R = TypeVar("R", bound="CausalResult")


@dataclass(frozen=True)
class CausalResult:
    """Tidy frames of one experiment on one model; every frame has a `prompt` column.

    Attributes:
        frame: The main table.
        config: The configuration.
        dtype: The model's dtype.
        guards: How often each guard ran and passed.
        provenance: Versions, machine, kernels, model.
        prompts: One row per prompt: tokens in the prompt, and their SHA-256.
    """

    frame: pd.DataFrame
    config: Any
    dtype: str
    guards: dict[str, int]
    provenance: dict[str, Any]
    prompts: pd.DataFrame

    KIND: ClassVar[str] = "causal"
    TABLES: ClassVar[tuple[str, ...]] = ("frame",)
    CONFIG: ClassVar[type] = dict

    def save(self, folder: Path | str) -> Path:
        """Write the tables (parquet) and the rest (JSON) to a folder, sealed last."""
        with result_folder.sealed_folder(folder, self.KIND) as place:
            for name in (*self.TABLES, "prompts"):
                storage.write_frame(place / f"{name}.parquet", getattr(self, name))
            meta = {"config": _plain(self.config), "dtype": self.dtype, "guards": self.guards}
            storage.write_json(place / "result.json", meta | {"provenance": self.provenance})
        return Path(folder)

    @classmethod
    def load(cls: type[R], folder: Path | str) -> R:
        """Read what `save` wrote.

        Raises:
            StorageError: Missing, altered, truncated, or another kind of result.
        """
        place = result_folder.open_folder(Path(folder), cls.KIND).path
        meta = storage.read_json(place / "result.json")
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in meta["config"].items()}
        tables = {name: storage.read_frame(place / f"{name}.parquet") for name in (*cls.TABLES, "prompts")}
        rest = {key: meta[key] for key in ("dtype", "guards", "provenance")}
        return cls(**tables, config=cls.CONFIG(**given), **rest)


class Walks:
    """Both paths on the same greedy tokens, walked once per prompt and shared by experiments.

    What was walked stays in memory, about two KV states a step, for the last `limit` prompts (None: all).
    """

    def __init__(self, model: TransformerBridge, limit: int | None = None) -> None:
        self.model, self.limit = model, limit
        self._kept: dict[tuple[int, ...], tuple[list[Pair], GuardLog]] = {}

    def walk(self, prompt: Int[Tensor, "pos"], n_steps: int, log: GuardLog) -> list[Pair]:
        """Steps 0 to `n_steps`, teacher-forced on the cached path's greedy tokens; a longer earlier walk is used."""
        key = tuple(prompt.tolist())
        if key not in self._kept or len(self._kept[key][0]) <= n_steps:
            own = GuardLog()
            self._kept[key] = list(_walk(self.model, prompt, n_steps, own)), own
        found, guards = self._kept[key] = self._kept.pop(key)
        while self.limit is not None and len(self._kept) > self.limit:
            del self._kept[next(iter(self._kept))]
        log.update(guards)
        return found[: n_steps + 1]


def walk(walks: Walks | None, model: TransformerBridge, prompt: Tensor, n_steps: int, log: GuardLog) -> Iterable[Pair]:
    """From `walks` if given, else a walk of its own that keeps nothing."""
    if walks is None:
        return _walk(model, prompt, n_steps, log)
    if walks.model is not model:
        raise InputError("walks of another model", got="Walks", expected="those of this model", remedy="Make new ones.")
    return walks.walk(prompt, n_steps, log)


def _walk(model: TransformerBridge, prompt: Tensor, n_steps: int, log: GuardLog) -> Iterable[Pair]:
    return pairs(model, prompt, policy=Greedy(), n_steps=n_steps, sites=WALKED, log=log)


def run_prompts(
    kind: type[R],
    model: TransformerBridge,
    prompts: Sequence[str | Tensor],
    config: Any,
    measure: Measure,
    *,
    n_steps: int,
    folder: Path | str | None = None,
    progress: bool | None = None,
    fed: list[Tensor] | None = None,
) -> R:
    """Measure every prompt and join what was found; `fed` receives the token tensors of all prompts.

    Raises:
        InputError: Prompts that cannot be used.
        GuardError, NonFiniteError: A number would not mean what it seems to mean.
        StorageError: The folder belongs to another run.
    """
    admit(model)
    known = info(model)
    found = as_tokens(
        model.tokenizer,
        prompts,
        vocab_size=known.d_vocab,
        max_positions=getattr(model.cfg, "n_ctx", None),
        n_new_tokens=n_steps,
    )
    tokens = [t.to(input_device(model)) if isinstance(p, str) else t for t, p in zip(found, prompts, strict=True)]
    if fed is not None:
        fed[:] = tokens
    before = provenance.weights_sha256(model)
    digests = [hashlib.sha256(repr(t.tolist()).encode()).hexdigest() for t in tokens]
    settings = {"kind": kind.KIND, "config": _plain(config), "model": before, "dtype": known.dtype, "prompts": digests}
    settings["kernels"] = provenance.what_decides_kernels(model)
    run, pieces = RunFolder(folder, settings), []
    bar = tqdm(
        tokens, desc=f"{kind.KIND}, {known.dtype}", unit="prompt", disable=None if progress is None else not progress
    )
    for number, prompt in enumerate(bar):
        pieces.append(run.piece(f"{number:04d}", partial(_piece, measure, number, prompt)))
    log: GuardLog = GuardLog()
    for piece in pieces:
        log.update(piece.values["guards"])
    check_untouched(before, provenance.weights_sha256(model, again=True), "the weights", log)
    return kind(
        **{name: pd.concat([piece.frames[name] for piece in pieces], ignore_index=True) for name in kind.TABLES},
        config=config,
        dtype=known.dtype,
        guards=dict(log),
        provenance=provenance.collect(model),
        prompts=pd.DataFrame({"prompt": range(len(tokens)), "n_prompt": [len(t) for t in tokens], "sha256": digests}),
    )


def _piece(measure: Measure, number: int, prompt: Tensor) -> Piece:
    log = GuardLog()
    frames = measure(number, prompt, log)
    named = {name: frame.assign(prompt=number) for name, frame in frames.items()}
    ordered = {name: frame[["prompt", *(c for c in frame if c != "prompt")]] for name, frame in named.items()}
    return Piece(ordered, {"guards": dict(log)})


def _plain(config: Any) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(config).items()}
