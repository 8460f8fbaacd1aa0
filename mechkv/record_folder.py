"""How does a recorded run lie on the disk, and how does a killed one go on?

    settings.json            what was asked for, and of which weights; written first
    steps-000000.safetensors logits and rows of the steps from 0 on, `{site}/{layer}` -> [step, ...]; one file or more
    cache.safetensors        the KV state after the last step
    mechkv.json              the index (`result_folder.seal`), with the facts; written last

While it runs, `.progress.json` names the complete step files with their SHA-256 and counts the guards, and
`.state-*.safetensors` is the KV state BEFORE the newest complete step (the cached path needs it). The progress file is
the point of commitment: what it does not name is written again.

Controls. Going on needs equal settings, weights and files, and the newest complete step is done again from the stored
state: unless it gives the stored bits at every site, the run stops with an error, since bits of two machines (or two
thread counts) must not end up in one table.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from mechkv import result_folder, storage
from mechkv.cache import KVState
from mechkv.errors import StorageError
from mechkv.guards import GuardLog
from mechkv.paths import Step
from mechkv.runs import differences
from mechkv.storage import TensorFile

if TYPE_CHECKING:
    from mechkv.recording import Run

KIND = "record"
SETTINGS = "settings.json"
CACHE = "cache.safetensors"
PROGRESS = ".progress.json"
_CPU = torch.device("cpu")


class Stacked(Sequence[Tensor]):
    """Tensors, one per layer, whose first axis may be spread over several files; read when touched."""

    def __init__(self, files: Sequence[TensorFile], names: Sequence[str]) -> None:
        self._files, self._names = files, names

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            return [self[one] for one in range(len(self))[index]]
        parts = [file[self._names[index]] for file in self._files]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def __len__(self) -> int:
        return len(self._names)


class States(Sequence[KVState]):
    """The KV state after every step, read when touched."""

    def __init__(self, files: Sequence[TensorFile], n_steps: int, n_prompt: int) -> None:
        self._where = {name: file for file in files for name in file if name.startswith("state/")}
        self._n_steps, self._n_prompt = n_steps, n_prompt

    @overload
    def __getitem__(self, index: int) -> KVState: ...
    @overload
    def __getitem__(self, index: slice) -> list[KVState]: ...
    def __getitem__(self, index: int | slice) -> KVState | list[KVState]:
        steps = range(self._n_steps)[index]
        if isinstance(steps, range):
            return [self[one] for one in steps]
        prefix = f"state/{steps}/"
        found = {name.removeprefix(prefix): file[name] for name, file in self._where.items() if name.startswith(prefix)}
        return _to_state(found, self._n_prompt + steps, self._n_prompt)

    def __len__(self) -> int:
        return self._n_steps


@dataclass(frozen=True)
class StoredRun:
    """A run read from its folder."""

    facts: dict[str, Any]
    values: dict[str, Stacked]
    cache_keys: Sequence[Tensor]
    cache_values: Sequence[Tensor]
    states: States | None


def save(
    folder: str | PathLike[str],
    facts: Mapping[str, Any],
    values: Mapping[str, Sequence[Tensor]],
    final: KVState,
    states: Sequence[KVState] | None,
) -> None:
    """Write a finished run to a new folder, as one step file."""
    tensors = {f"{name}/{layer}": value for name, layers in values.items() for layer, value in enumerate(layers)}
    for index, state in enumerate(states or ()):
        tensors |= _from_state(state, f"state/{index}/")
    with result_folder.new_folder(folder) as part:
        storage.write_tensors(part / _steps_name(0), tensors)
        _finish(part, facts, [_steps_name(0)], final, states is not None)


def load(folder: str | PathLike[str], *, verify: bool = False) -> StoredRun:
    """Open a finished run."""
    opened = result_folder.open_folder(folder, KIND, verify=verify)
    facts = opened.facts
    files = [storage.read_tensors(opened.file(name)) for name in facts["steps_files"]]
    cache = storage.read_tensors(opened.file(CACHE))
    names: dict[str, list[str]] = {site: [] for site in ("logits", *facts["sites"])}
    for name in sorted((n for n in files[0] if not n.startswith("state/")), key=_layer):
        names[name.rsplit("/", 1)[0]].append(name)
    n_steps = len(facts["tokens"]) - facts["n_prompt"] + 1
    return StoredRun(
        facts=facts,
        values={site: Stacked(files, layers) for site, layers in names.items()},
        cache_keys=Stacked([cache], sorted((n for n in cache if n.startswith("k/")), key=_layer)),
        cache_values=Stacked([cache], sorted((n for n in cache if n.startswith("v/")), key=_layer)),
        states=States(files, n_steps, facts["n_prompt"]) if facts["has_states"] else None,
    )


def continue_run(folder: str | PathLike[str], settings: Mapping[str, Any], run: "Run", shard_steps: int) -> None:
    """Do the steps of `run` that the folder lacks, and seal it; nothing to do if it is sealed already.

    Raises:
        StorageError: The folder holds something else, its files were altered, or the run does not give the same bits
            here; the disk is full.
    """
    root = Path(folder)
    progress = _begin(root, settings, run)
    if (root / result_folder.INDEX).exists():
        result_folder.open_folder(root, KIND)
        run.report(run.n_steps)
        return
    done = progress["shards"][-1]["stop"] if progress["shards"] else 0
    first_step = max(done - 1, 0)
    log = GuardLog()
    buffer = run.buffer(done, min(done + shard_steps, run.n_steps), _CPU)
    run.report(done)
    for step in run.steps(log, first_step, _state_before(root, progress, run, first_step)):
        last = step
        if step.index < done:
            _check_same_bits(root, progress, run, step)
            log.clear()
            log.update(progress["guards"])
            continue
        buffer.put(step)
        run.report(step.index + 1)
        if step.index + 1 == buffer.stop:
            _commit(root, progress, buffer, step, log)
            buffer = run.buffer(buffer.stop, min(buffer.stop + shard_steps, run.n_steps), _CPU)
    _finish(root, run.facts(log), [shard["name"] for shard in progress["shards"]], last.kv, run.keep_states)
    for leftover in [root / PROGRESS, *root.glob(".state-*")]:
        leftover.unlink(missing_ok=True)


def _begin(root: Path, settings: Mapping[str, Any], run: "Run") -> dict[str, Any]:
    """Check that the folder is this run's, or make it so; what was done already."""
    fresh: dict[str, Any] = {"shards": [], "guards": {}, "state": None}
    if not (root / SETTINGS).exists():
        if root.exists() and (not root.is_dir() or any(not file.name.startswith(".") for file in root.iterdir())):
            raise StorageError(
                f"{root} holds something else",
                got="files without the settings of a run written as it goes",
                expected="a new or empty folder, or this run's own",
                remedy="Record to another folder; a saved run is read with RunRecord.load.",
            )
        storage.check_space(root, run.n_bytes)
        for leftover in [*root.glob(".progress*"), *root.glob(".state-*")]:
            leftover.unlink()
        storage.write_json(root / SETTINGS, settings)
        return fresh
    found, ours = storage.read_json(root / SETTINGS), _as_read(settings)
    found = found if isinstance(found, dict) else {}
    differing = differences(found, ours)
    if differing:
        raise StorageError(
            f"{root} is the results folder of another run",
            got=f"another value of {', '.join(differing)}",
            expected="the same settings and weights, and what decides kernels",
            remedy="Record to another folder, or call with the settings of this one (settings.json).",
        )
    begun = (root / PROGRESS).exists() or (root / result_folder.INDEX).exists()
    if begun and settings["interventions"]:
        raise StorageError(
            f"{root} holds a run with interventions",
            got="; ".join(settings["interventions"]),
            expected="no interventions in a run that is continued, since what they hold is not on the disk",
            remedy="Record to another folder; a finished run is read with RunRecord.load.",
        )
    progress = storage.read_json(root / PROGRESS) if (root / PROGRESS).exists() else fresh
    for file in [*progress["shards"], *([progress["state"]] if progress["state"] else [])]:
        result_folder.check_file(root / file["name"], file["bytes"], file["sha256"], verify=True)
    return progress


def _state_before(root: Path, progress: Mapping[str, Any], run: "Run", first_step: int) -> KVState | None:
    """The KV state before `first_step`, on the model's devices; None at step 0."""
    if first_step == 0:
        return None
    n_tokens = run.n_prompt + first_step - 1
    if run.path == "recomputed":
        return KVState((), (), n_tokens, run.n_prompt)
    stored = _to_state(storage.read_tensors(root / progress["state"]["name"]), n_tokens, run.n_prompt)
    devices = run.layer_devices()
    keys, values = (
        tuple(rows.to(device, copy=True) for rows, device in zip(part, devices, strict=True))
        for part in (stored.keys, stored.values)
    )
    return KVState(keys, values, n_tokens, run.n_prompt)


def _check_same_bits(root: Path, progress: Mapping[str, Any], run: "Run", step: Step) -> None:
    """The newest complete step, done again, gives what was stored."""
    again = run.buffer(step.index, step.index + 1, _CPU)
    again.put(step)
    stored = storage.read_tensors(root / progress["shards"][-1]["name"])
    different = [name for name, value in again.tensors.items() if not torch.equal(value[0], stored[name][-1])]
    if different:
        raise StorageError(
            f"{root} cannot be continued here",
            got=f"other bits than those stored when step {step.index} is done again, first in {different[0]}",
            expected="the same bits: same machine, thread count, library versions and kernel settings",
            remedy="Continue it where it began, or start again in another folder.",
        )


def _commit(root: Path, progress: dict[str, Any], buffer: Any, step: Step, log: GuardLog) -> None:
    """Write the finished steps, then the state before the newest, then the progress file that makes them count."""
    tensors = dict(buffer.tensors)
    for index, state in buffer.states.items():
        tensors |= _from_state(state, f"state/{index}/")
    name = _steps_name(buffer.first)
    storage.write_tensors(root / name, tensors)
    progress["state"] = None
    if step.kv_before.keys:
        state_name = f".state-{buffer.stop:06d}.safetensors"
        storage.write_tensors(root / state_name, _from_state(step.kv_before, ""))
        progress["state"] = _described(root, state_name)
    progress["shards"].append({"stop": buffer.stop} | _described(root, name))
    progress["guards"] = dict(log)
    storage.write_json(root / PROGRESS, progress)
    for old in root.glob(".state-*.safetensors"):
        if progress["state"] is None or old.name != progress["state"]["name"]:
            old.unlink()


def _finish(root: Path, facts: Mapping[str, Any], steps: list[str], final: KVState, has_states: bool) -> None:
    storage.write_tensors(root / CACHE, _from_state(final, ""))
    result_folder.seal(root, KIND, {**facts, "steps_files": steps, "has_states": has_states})


def _described(root: Path, name: str) -> dict[str, Any]:
    return {"name": name, "bytes": os.path.getsize(root / name), "sha256": storage.sha256(root / name)}


def _steps_name(first: int) -> str:
    return f"steps-{first:06d}.safetensors"


def _layer(name: str) -> int:
    return int(name.rsplit("/", 1)[1])


def _from_state(state: KVState, prefix: str) -> dict[str, Tensor]:
    keys = {f"{prefix}k/{layer}": rows for layer, rows in enumerate(state.keys)}
    return keys | {f"{prefix}v/{layer}": rows for layer, rows in enumerate(state.values)}


def _to_state(tensors: Mapping[str, Tensor], n_tokens: int, n_prompt: int) -> KVState:
    layers = range(len(tensors) // 2)
    keys, values = (tuple(tensors[f"{kind}/{layer}"] for layer in layers) for kind in ("k", "v"))
    return KVState(keys, values, n_tokens, n_prompt)


def _as_read(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back: lists for tuples."""
    return {key: _listed(value) for key, value in settings.items()}


def _listed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value
