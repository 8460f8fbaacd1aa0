"""How do the paths differ on given text, under several conditions (dtypes, precision policies) of one model?

Every condition is fed the same tokens, prompt by prompt, on both paths (teacher-forced, one clock): a row per
condition, prompt and step with the metrics of the two next-token distributions (`distributions`). Step 0 is the null
control.

A condition is a context that gives a model: it is entered only when some prompt is not finished yet, so that a resumed
run loads nothing it does not need, and one model at a time is in memory.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pandas as pd
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm
from transformer_lens.model_bridge import TransformerBridge

from mechkv import guards, provenance, result_folder, storage
from mechkv.comparison import compare_logits
from mechkv.guards import GuardLog
from mechkv.models import info
from mechkv.paths import PathRunner, Step, decode, lockstep
from mechkv.policies import Forced, Greedy, Noted
from mechkv.runs import Piece, RunFolder
from mechkv.stats import rng
from mechkv.tokens import as_tokens

Study = TypeVar("Study", bound="ForcedStudy")
Condition = Callable[[], AbstractContextManager[TransformerBridge]]
Measure = Callable[[TransformerBridge, Tensor, Sequence[int], int], tuple[list[dict[str, Any]], GuardLog]]


@dataclass(frozen=True)
class ForcedStudy:
    """A table over conditions, with what is needed to read it.

    Attributes:
        frame: One row per condition, prompt and step.
        prompts: One row per prompt: its number of tokens and all tokens fed.
        config: The configuration.
        guards: Per condition, how often each guard ran and passed.
        provenance: Versions, machine, kernels, models.
    """

    frame: pd.DataFrame
    prompts: pd.DataFrame
    config: Any
    guards: dict[str, dict[str, int]]
    provenance: dict[str, Any]

    KIND: ClassVar[str]
    CONFIG: ClassVar[type]

    @property
    def decoded(self) -> pd.DataFrame:
        """The rows of decode steps: step 0 does the same work on both paths and is left out of every summary."""
        return self.frame[self.frame["step"] > 0]

    def save(self, folder: Path | str) -> Path:
        """Write the tables (parquet) and the rest (JSON) to a folder; sealed last."""
        with result_folder.sealed_folder(folder, self.KIND) as place:
            storage.write_frame(place / "frame.parquet", self.frame)
            storage.write_frame(place / "prompts.parquet", self.prompts)
            meta = {"config": asdict(self.config), "guards": self.guards, "provenance": self.provenance}
            storage.write_json(place / "study.json", meta)
        return Path(folder)

    @classmethod
    def load(cls: type[Study], folder: Path | str) -> Study:
        """Read what `save` wrote.

        Raises:
            StorageError: Missing, altered, truncated, or another kind of result.
        """
        place = Path(folder)
        result_folder.open_folder(place, cls.KIND)
        meta = storage.read_json(place / "study.json")
        plain = {key: tuple(v) if isinstance(v, list) else v for key, v in meta["config"].items()}
        tables = {name: storage.read_frame(place / f"{name}.parquet") for name in ("frame", "prompts")}
        return cls(**tables, config=cls.CONFIG(**plain), guards=meta["guards"], provenance=meta["provenance"])


def forced_rows(
    model: TransformerBridge, prompt: Int[Tensor, "pos"], continuation: Sequence[int], label: int, *, n_repeats: int = 1
) -> tuple[list[dict[str, Any]], GuardLog]:
    """Both paths on given tokens: a row of logit metrics a step. A sample of steps is done twice."""
    log, rows = GuardLog(), []
    repeated = set(rng(0, "repeat", label).permutation(len(continuation) + 1)[:n_repeats].tolist())
    policy = Forced([*prompt.tolist(), *continuation])
    for cached, recomputed in lockstep(model, prompt, policy=policy, n_steps=len(continuation), log=log):
        if cached.index in repeated:
            check_repeats(model, (cached, recomputed), log)
        row = {"step": cached.index, "position": len(cached.tokens) - 1, "token": int(cached.tokens[-1])}
        rows.append(row | compare_logits(cached.logits, recomputed.logits).to_dict())
    return rows, log


def check_repeats(model: TransformerBridge, steps: Sequence[Step], log: GuardLog) -> None:
    """Do steps again, from the state each had: the same bits, or a `GuardError`."""
    for step in steps:
        with PathRunner(model, step.path, log=log) as runner:
            guards.check_repeat(step, runner.step(step.tokens, step.kv_before, step.index, step.n_new), log)


def greedy_continuation(model: TransformerBridge, prompt: Int[Tensor, "pos"], n_tokens: int) -> list[int]:
    """The cached path's greedy choice of `n_tokens` tokens."""
    chosen: list[int] = []
    for step in decode(model, prompt, path="cached", policy=Noted(Greedy(), chosen), n_steps=n_tokens - 1):
        last = step
    return [*chosen, int(last.logits.argmax())]


def token_lists(model: TransformerBridge, prompts: Sequence[str | Tensor], n_new: int) -> list[Int[Tensor, "_pos"]]:
    """Checked token tensors on the model's device, with room for `n_new` more tokens."""
    device = guards.input_device(model)
    limit = getattr(model.cfg, "n_ctx", None)
    found = as_tokens(model.tokenizer, prompts, vocab_size=info(model).d_vocab, max_positions=limit, n_new_tokens=n_new)
    return [t.to(device) if isinstance(prompt, str) else t for t, prompt in zip(found, prompts, strict=True)]


def run_settings(
    kind: str, model: TransformerBridge, tokens: Sequence[Tensor], config: dict[str, Any]
) -> dict[str, Any]:
    """What makes two runs the same run."""
    return {
        "kind": kind,
        "config": {key: list(v) if isinstance(v, tuple) else v for key, v in config.items()},
        "model": provenance.weights_sha256(model),
        "dtype": info(model).dtype,
        "prompts": hashlib.sha256(repr([t.tolist() for t in tokens]).encode()).hexdigest(),
        "n_prompts": len(tokens),
        "kernels": provenance.what_decides_kernels(model),
    }


def continuations(run: RunFolder, model: TransformerBridge, tokens: Sequence[Tensor], n_steps: int) -> list[list[int]]:
    """The tokens that every condition is fed after each prompt: the cached path's greedy choice on `model`."""

    def compute(prompt: Tensor) -> Piece:
        return Piece({}, {"tokens": greedy_continuation(model, prompt, n_steps)})

    return [run.piece(f"tokens-{i:04d}", lambda p=t: compute(p)).values["tokens"] for i, t in enumerate(tokens)]  # type: ignore[misc]


def run_conditions(
    run: RunFolder,
    conditions: Mapping[str, Condition],
    tokens: Sequence[Tensor],
    fed: Sequence[Sequence[int]],
    *,
    column: str,
    measure: Measure = forced_rows,
    progress: bool | None = None,
) -> tuple[pd.DataFrame, dict[str, dict[str, int]], dict[str, dict[str, Any]]]:
    """Every condition on every prompt: the table, the guards, and what each condition's model was."""
    frames, counts, models = [], {}, {}
    bar = tqdm(
        total=len(conditions) * len(tokens),
        desc=column,
        unit="prompt",
        disable=None if progress is None else not progress,
    )
    for name, condition in conditions.items():
        pieces: list[Piece] = []
        names = [f"{name.replace(' ', '-')}-{prompt:04d}" for prompt in range(len(tokens))]
        if all(run.has(piece) for piece in names):
            pieces = [run.piece(piece, _never) for piece in names]
            bar.update(len(names))
        else:
            with condition() as model:
                for prompt, piece in enumerate(names):
                    compute = _compute(model, tokens[prompt], fed[prompt], prompt, measure)
                    pieces.append(run.piece(piece, compute))
                    bar.update()
        total = GuardLog()
        for prompt, found in enumerate(pieces):
            frames.append(found.frames["rows"].assign(**{column: name, "prompt": prompt}))
            total.update(found.values["guards"])
        counts[name], models[name] = dict(total), pieces[0].values["model"]
    bar.close()
    table = pd.concat(frames, ignore_index=True)
    head = [column, "prompt"]
    return table[head + [name for name in table.columns if name not in head]], counts, models


def _compute(
    model: TransformerBridge, tokens: Tensor, fed: Sequence[int], prompt: int, measure: Measure
) -> Callable[[], Piece]:
    def compute() -> Piece:
        rows, log = measure(model, tokens.to(guards.input_device(model)), fed, prompt)
        known = provenance.collect(model)["model"]
        return Piece({"rows": pd.DataFrame(rows)}, {"guards": dict(log), "model": known})

    return compute


def _never() -> Piece:
    raise AssertionError("a finished piece is not computed again")


def prompt_table(tokens: Sequence[Tensor], fed: Sequence[Sequence[int]]) -> pd.DataFrame:
    """One row per prompt: its number of tokens and all tokens fed."""
    return pd.DataFrame(
        {
            "prompt": range(len(tokens)),
            "n_prompt": [len(t) for t in tokens],
            "tokens": [np.asarray([*t.tolist(), *c], dtype=np.int64) for t, c in zip(tokens, fed, strict=True)],
        }
    )
