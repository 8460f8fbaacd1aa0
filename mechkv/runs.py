"""A run that can be killed at any moment: finished pieces are kept, and the next start goes on from them.

A `RunFolder` belongs to one set of settings (model, weights, prompts, configuration); another set is refused, so pieces
of different runs never mix. A piece is one unit of work (a prompt in one dtype); it exists once its marker does, which
is written last. Without a folder nothing is kept and every piece is computed.
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
        found = read_json(path)
        different = [name for name in {*found, *settings} if found.get(name) != settings.get(name)]
        if different:
            name = sorted(different)[0]
            raise StorageError(
                f"{self.folder} holds the results of another run",
                got=f"{name} = {_short(found.get(name))}",
                expected=f"{name} = {_short(settings.get(name))}",
                remedy="Give another folder, or delete this one.",
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


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
