"""When is a folder of results whole, and whose is it?

Conventions
    A result is a folder with an index, `mechkv.json`, written last (`seal`): kind, format version, facts, and size and
    SHA-256 of every file. A folder without it is unfinished. Files that the index does not list are nobody's business.
    `sealed_folder` writes aside and takes the place of an earlier result of its kind, and of nothing else.
Controls
    `open_folder` checks the index (its own digest), kind, format, presence and size of every file, and the SHA-256 of
    files up to `HASHED_AT_OPEN` bytes; `verify=True` reads and checks the large ones as well.
"""

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mechkv.errors import StorageError
from mechkv.plain_json import to_json
from mechkv.storage import damaged, explained, read_json, sha256, sync_folder, write_json

INDEX = "mechkv.json"
FORMAT = 1
HASHED_AT_OPEN = 64 * 2**20
"""Files up to this many bytes are hashed whenever a folder is opened."""

_PART = ".part"
_Pathlike = str | os.PathLike[str]


def seal(folder: _Pathlike, kind: str, facts: Mapping[str, Any] | None = None) -> None:
    """Write the index of a finished result folder: size and SHA-256 of every file in it.

    Args:
        folder: Holds all files of the result.
        kind: What it is, such as `record`; `open_folder` asks for it.
        facts: Plain values that come back from `open_folder`.
    """
    root = Path(folder)
    files = {
        file.relative_to(root).as_posix(): {"bytes": file.stat().st_size, "sha256": sha256(file)}
        for file in sorted(root.rglob("*"))
        if file.is_file() and file.name != INDEX and not file.name.startswith(".")
    }
    index = {"format": FORMAT, "kind": kind, "facts": dict(facts or {}), "files": files}
    write_json(root / INDEX, index | {"digest": _digest(index)})


@contextmanager
def sealed_folder(folder: _Pathlike, kind: str, facts: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """A new folder that is sealed and appears when all is written; it takes the place of an earlier result of its kind.

    Raises:
        StorageError: `folder` holds anything else.
    """
    with new_folder(folder, replaces=kind) as part:
        yield part
        seal(part, kind, facts)


@contextmanager
def new_folder(folder: _Pathlike, *, replaces: str | None = None) -> Iterator[Path]:
    """A folder that appears under its name only when it is complete; given as a temporary folder beside it.

    Raises:
        StorageError: `folder` exists and is not empty, nor a sealed result of the kind `replaces`.
    """
    target = Path(folder).absolute()
    old = refuse_taken(target, replaces)
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}{_PART}")
    try:
        with explained(target, None):
            part.mkdir(parents=True)
        yield part
        with explained(target, None):
            _take_the_place(part, target) if old else os.replace(part, target)
            sync_folder(target.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def refuse_taken(folder: _Pathlike, replaces: str | None = None) -> bool:
    """Whether an earlier result of the kind `replaces` is there. Long runs ask before they begin.

    Raises:
        StorageError: `folder` holds anything else.
    """
    target = Path(folder)
    taken = target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir())))
    old = taken and replaces is not None and _holds(target, replaces)
    if taken and not old:
        raise StorageError(
            f"{target} is taken",
            got="a folder with files in it" if target.is_dir() and not target.is_symlink() else "a file or link",
            expected="a new or empty folder",
            remedy="Save to another folder, or remove this one yourself.",
        )
    return old


def _take_the_place(part: Path, target: Path) -> None:
    """`part` under the name `target`; whatever stops it, the old folder has its name again."""
    old = part.with_name(f"{part.name}.old")
    os.replace(target, old)
    try:
        os.replace(part, target)
    finally:
        if not target.exists():
            os.replace(old, target)
    shutil.rmtree(old, ignore_errors=True)


def _holds(folder: Path, kind: str) -> bool:
    """Whether this is a whole result of that kind, as it was written, and nothing else."""
    if folder.is_symlink():
        return False
    try:
        known = {INDEX, *open_folder(folder, kind, verify=True).files}
    except StorageError:
        return False
    homes = {parent.as_posix() for name in known for parent in Path(name).parents}
    found = {entry.relative_to(folder).as_posix(): entry for entry in folder.rglob("*")}
    return all(
        ((name in known and entry.is_file()) or (name in homes and entry.is_dir())) and not entry.is_symlink()
        for name, entry in found.items()
    )


@dataclass(frozen=True)
class ResultFolder:
    """An opened and checked result folder."""

    path: Path
    kind: str
    facts: dict[str, Any]
    files: tuple[str, ...]

    def file(self, name: str) -> Path:
        """The path of a listed file."""
        if name not in self.files:
            raise StorageError(
                f"{self.path} has no {name}",
                got=f"a {self.kind} of {', '.join(self.files)}",
                expected=name,
                remedy="The folder was written by another version or for another purpose.",
            )
        return self.path / name

    def __truediv__(self, name: str) -> Path:
        return self.file(name)


def open_folder(path: _Pathlike, kind: str, *, verify: bool = False) -> ResultFolder:
    """Open a result folder and check that it is whole.

    Args:
        path: The folder.
        kind: What it must be.
        verify: Check the SHA-256 of large files too (reads all of them).

    Raises:
        StorageError: Missing, unfinished, of another kind or format, or a file missing, truncated or altered.
    """
    root = Path(path)
    if not (root / INDEX).is_file():
        raise StorageError(
            f"{root} is not a finished result",
            got="a folder without an index" if root.is_dir() else "no such folder",
            expected=f"a folder with {INDEX}, which is written last",
            remedy="Check the path; if the run was killed, start it again with the same settings and it goes on.",
        )
    index = read_json(root / INDEX)
    if not isinstance(index, dict) or not {"format", "kind", "facts", "files", "digest"} <= set(index):
        raise damaged(root / INDEX, "an index of something else")
    if index["format"] != FORMAT:
        raise StorageError(
            f"{root} has another format",
            got=f"format {index['format']}",
            expected=f"format {FORMAT}",
            remedy="Read it with the version of mechkv that wrote it, or run it again.",
        )
    if index.pop("digest") != _digest(index):
        raise damaged(root / INDEX, "contents that do not match their own digest")
    if index["kind"] != kind:
        raise StorageError(
            f"{root} holds another kind of result",
            got=repr(index["kind"]),
            expected=repr(kind),
            remedy="This is the results folder of another run: give the right one, or write to a new one.",
        )
    for name, expected in index["files"].items():
        check_file(root / name, expected["bytes"], expected["sha256"], verify=verify)
    return ResultFolder(root, kind, index["facts"], tuple(index["files"]))


def check_file(path: Path, n_bytes: int, digest: str, *, verify: bool = False) -> None:
    """The file is there with this size and, up to `HASHED_AT_OPEN` bytes or with `verify`, this SHA-256."""
    if not path.is_file():
        raise StorageError(
            f"{path} is missing", got="no file", expected=f"{n_bytes} bytes", remedy="Copy the whole folder again."
        )
    size = path.stat().st_size
    if size != n_bytes:
        raise damaged(path, f"{size} bytes", f"{n_bytes} bytes")
    if (verify or size <= HASHED_AT_OPEN) and (found := sha256(path)) != digest:
        raise damaged(path, f"SHA-256 {found[:12]}...", f"{digest[:12]}...")


def _digest(index: Mapping[str, Any]) -> str:
    return hashlib.sha256(to_json(index)).hexdigest()
