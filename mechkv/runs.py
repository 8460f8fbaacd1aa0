"""A run that can be killed at any moment: finished pieces are kept, and the next start goes on from them.

A `RunFolder` belongs to one set of settings (model, weights, prompts, configuration, what decides kernels); another set
is refused, so pieces of different runs never mix. A piece is one unit of work (a prompt in one dtype); it exists once
its marker does, which is written last. Without a folder nothing is kept and every piece is computed.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from mechkv.errors import StorageError
from mechkv.storage import read_frame, read_json, write_frame, write_json

_SETTINGS = "run.json"
_MARKER = "piece.json"


@dataclass(frozen=True)
class Piece:
    """What one unit of work gave: tidy frames by name, and plain values for JSON."""

    frames: Mapping[str, pd.DataFrame]
    values: Mapping[str, Any] = field(default_factory=dict)


class RunFolder:
    """Finished pieces of one run below `folder` (None: keep nothing)."""

    def __init__(self, folder: Path | str | None, settings: Mapping[str, Any]) -> None:
        self.folder = None if folder is None else Path(folder)
        if self.folder is None:
            return
        path = self.folder / _SETTINGS
        if not path.exists():
            if self.folder.is_dir() and any(self.folder.iterdir()):
                raise StorageError(
                    f"{self.folder} cannot be used for this run",
                    got="a folder with other files in it",
                    expected="an empty or new folder, or one of this very run",
                    remedy="Give another folder.",
                )
            write_json(path, dict(settings))
            return
        differing = differences(read_json(path), settings)
        if differing:
            raise StorageError(
                f"{self.folder} holds the results of another run",
                got=", ".join(f"{name} = {_short(there)}" for name, (there, _) in differing.items()),
                expected=", ".join(f"{name} = {_short(here)}" for name, (_, here) in differing.items()),
                remedy="Give another folder, or delete this one."
                if not all(name.startswith("kernels") for name in differing)
                else "Go on where the run began, with the same libraries and threads, or give another folder.",
            )

    def piece(self, name: str, compute: Callable[[], Piece]) -> Piece:
        """The kept piece of that name, or the one that `compute` gives, which is then kept.

        A piece is read back as it was written, so a resumed run gives the tables of an uninterrupted one.
        """
        if self.folder is None:
            return compute()
        place = self.folder / "pieces" / name
        if not (place / _MARKER).exists():
            shutil.rmtree(place, ignore_errors=True)
            fresh = compute()
            for key, frame in fresh.frames.items():
                write_frame(place / f"{key}.parquet", frame)
            write_json(place / _MARKER, {"frames": list(fresh.frames), "values": dict(fresh.values)})
        marker = read_json(place / _MARKER)
        frames = {key: read_frame(place / f"{key}.parquet") for key in marker["frames"]}
        return Piece(frames, marker["values"])

    def has(self, name: str) -> bool:
        """Whether a piece is finished."""
        return self.folder is not None and (self.folder / "pieces" / name / _MARKER).exists()


def differences(found: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Where two settings are not equal: dotted name -> (found, wanted), sorted; None for what is missing."""
    differing: dict[str, tuple[Any, Any]] = {}
    for name in sorted({*found, *settings}):
        there, here = found.get(name), settings.get(name)
        if isinstance(there, Mapping) and isinstance(here, Mapping):
            differing |= {f"{name}.{inner}": pair for inner, pair in differences(there, here).items()}
        elif there != here:
            differing[name] = (there, here)
    return differing


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
