"""How do results get on the disk and back? The one place that writes and reads them.

Conventions
    JSON for settings and summaries, parquet for tables, safetensors for tensors; no pickle. Every write goes to a
    temporary file in the same folder, is flushed to the disk and then takes the final name: a file under its own name
    is complete, and a failed write leaves what was there before. Names that begin with a dot are temporary.
    Folders of results, sealed and checked: `result_folder`.
Controls
    Tensors are mapped into memory and read when touched; writing to one never reaches the file.
    NaN and infinity are not JSON: they are refused, or written as null if the caller says so.
"""

import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mechkv.errors import InputError, StorageError
from mechkv.plain_json import refuse_constant, to_json

_PART = ".part"
_Pathlike = str | os.PathLike[str]


# --- writing ---------------------------------------------------------------------------------------------------------


def write_json(path: _Pathlike, value: Any, *, nan_as_null: bool = False) -> None:
    """Write plain values as JSON: sorted keys, two-space indent, newline at the end.

    Args:
        path: The file.
        value: Dicts with string keys, lists, tuples, strings, numbers, booleans, None; numpy scalars and arrays too.
        nan_as_null: Write NaN and infinity as null instead of refusing them.

    Raises:
        InputError: A value that JSON cannot say.
        StorageError: It cannot be written.
    """
    write_bytes(path, to_json(value, nan_as_null))


def write_text(path: _Pathlike, text: str) -> None:
    """Write a text file (UTF-8) in one go."""
    write_bytes(path, text.encode())


def write_bytes(path: _Pathlike, data: bytes) -> None:
    """Write a file in one go."""
    target = Path(path)
    with _replacing(target, len(data)) as part:
        part.write_bytes(data)


def write_frame(path: _Pathlike, frame: pd.DataFrame) -> None:
    """Write a table as parquet. The index must be the default one, since it is not written."""
    if not isinstance(frame.index, pd.RangeIndex) or (frame.index.start, frame.index.step) != (0, 1):
        raise InputError(
            "a table with an index of its own",
            got=f"{type(frame.index).__name__} {list(frame.index.names)}",
            expected="rows numbered from 0",
            remedy="Call frame.reset_index() to make the index a column, or reset_index(drop=True) to drop it.",
        )
    target = Path(path)
    with _replacing(target, int(frame.memory_usage(deep=True).sum())) as part:
        frame.to_parquet(part, index=False)


def write_tensors(path: _Pathlike, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors as safetensors, each with its own bytes (no sharing), in the dtype it has.

    Args:
        path: The file.
        tensors: Name -> tensor on any device.
        metadata: Text to keep beside them.
    """
    own: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in tensors.items():
        plain = value.detach().cpu().contiguous()
        storage = plain.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != plain.nbytes:
            plain = plain.clone()
        seen.add(plain.untyped_storage().data_ptr())
        own[name] = plain
    target = Path(path)
    with _replacing(target, sum(value.nbytes for value in own.values())) as part:
        mode = part.stat().st_mode  # save_file replaces the file by one that only its owner can read
        save_file(own, part, metadata=dict(metadata or {}))
        os.chmod(part, mode)


def check_space(folder: _Pathlike, n_bytes: int) -> None:
    """Refuse to begin what cannot end: `n_bytes` must be free where `folder` is or will be.

    Raises:
        StorageError: Less is free.
    """
    where = Path(folder).absolute()
    while not where.exists():
        where = where.parent
    free = shutil.disk_usage(where).free
    if free < n_bytes:
        raise _disk_full(Path(folder), n_bytes, free)


# --- reading ---------------------------------------------------------------------------------------------------------


class TensorFile(Mapping[str, Tensor]):
    """Tensors of a safetensors file by name, mapped into memory and read when touched."""

    def __init__(self, path: Path) -> None:
        with explained(path, None):
            self._file = safe_open(path, framework="pt")
        self.metadata: dict[str, str] = self._file.metadata() or {}
        self._names = tuple(self._file.keys())
        self._path = path

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(f"{name} is not in {self._path.name}")
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_json(path: _Pathlike) -> Any:
    """What `write_json` wrote."""
    target = Path(path)
    with explained(target, None):
        data = target.read_bytes()
    try:
        return json.loads(data, parse_constant=refuse_constant)
    except (UnicodeDecodeError, ValueError) as error:
        raise damaged(target, f"no JSON ({error})") from error


def read_frame(path: _Pathlike) -> pd.DataFrame:
    """What `write_frame` wrote."""
    target = Path(path)
    with explained(target, None):
        return pd.read_parquet(target)


def read_tensors(path: _Pathlike) -> TensorFile:
    """What `write_tensors` wrote: a mapping whose tensors are read when touched, and `.metadata`."""
    return TensorFile(Path(path))


def sha256(path: _Pathlike) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with explained(Path(path), None), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- the common part -------------------------------------------------------------------------------------------------


@contextmanager
def _replacing(target: Path, n_bytes: int) -> Iterator[Path]:
    """A temporary file that takes the place of `target` when the block ends well, and vanishes when it does not."""
    part = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}{_PART}")
    try:
        with explained(target, n_bytes):
            target.parent.mkdir(parents=True, exist_ok=True)
            check_space(target.parent, n_bytes)
            part.touch()
            yield part
            with open(part, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(part, target)
            sync_folder(target.parent)
    finally:
        with suppress(OSError):  # below a file there is nothing to remove; the error above says so
            part.unlink()


def sync_folder(folder: Path) -> None:
    """The names in a folder reach the disk, where the system can say so."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def explained(path: Path, n_bytes: int | None) -> Iterator[None]:
    """Errors of the system and of the file formats as `StorageError`s."""
    try:
        yield
    except StorageError:
        raise
    except (OSError, SafetensorError, pyarrow.ArrowException) as error:
        text = str(error)
        full = (errno.ENOSPC, errno.EDQUOT)
        if getattr(error, "errno", None) in full or any(f"os error {code}" in text for code in full):
            raise _disk_full(path, n_bytes, None) from error
        if isinstance(error, FileNotFoundError) or (isinstance(error, OSError) and error.errno is not None):
            raise StorageError(
                f"{path} cannot be used",
                got=error.strerror or "No such file or directory",
                expected="a place that can be read and written",
                remedy="Check the path and its permissions.",
            ) from error
        raise damaged(path, text.splitlines()[0] if text else type(error).__name__) from error


def _disk_full(path: Path, n_bytes: int | None, free: int | None) -> StorageError:
    needed = "more than there is" if n_bytes is None else f"{n_bytes:,} bytes"
    return StorageError(
        f"the disk of {path} is full",
        got="no space left" if free is None else f"{free:,} bytes free",
        expected=f"{needed} free for this write",
        remedy="Free some space or write elsewhere; what was there before is untouched, and a run that was writing as "
        "it went goes on from its last complete file.",
    )


def damaged(path: Path, got: str, expected: str = "the file as it was written") -> StorageError:
    """The error for a file that is not what was written."""
    return StorageError(
        f"{path} is truncated, altered or not one of ours",
        got=got,
        expected=expected,
        remedy="Copy it again from where it was made, or run again.",
    )
