"""`mechkv check`: rounding or a bug, for a model or for any two functions."""

import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro


@dataclass(frozen=True)
class Check:
    """Say whether cached and recomputed decoding of a model differ by rounding or by a bug.

    Exit codes: 0 identical or numerical, 1 semantic, 3 nonfinite, 4 irreproducible or inconclusive, 2 usage,
    5 the report cannot be written, 70 a crash (in the functions given, for one).
    """

    model: tyro.conf.Positional[str | None] = None
    """A packaged model (see `mechkv models`), a .gguf file, a local folder or a hub id."""
    paths: str | None = None
    """module:object with your own functions instead: an object (or, without a name, the module) with the attributes
    build, cached, recomputed, tokens and n_prompt, and optionally dtypes, modules and stepwise, as for check_paths."""
    dtype: tuple[Literal["float64", "float32", "float16", "bfloat16"], ...] = ()
    """Rungs of the ladder; by default all four."""
    steps: int = 12
    """Tokens after every prompt."""
    chunk: int = 4
    """Tokens a call in the chunked variant; 0 leaves it out."""
    batched: bool = False
    """Add a row alone against the row in a batch."""
    left_padded: bool = False
    """Add a left-padded row against the row alone."""
    device: str = "auto"
    """Where to run: auto, cpu, cuda, cuda:1, mps, ..."""
    out: Path | None = None
    """Folder for the report: tables and JSON."""
    json: bool = False
    """Print the report as one JSON document."""

    def run(self) -> int:
        """Check and print."""
        from mechkv.checking import DTYPES, check
        from mechkv.errors import InputError

        if (self.model is None) == (self.paths is None):
            raise InputError(
                "what to check",
                got="both a model and --paths" if self.model else "neither a model nor --paths",
                expected="one of the two",
                remedy="mechkv check MODEL, or mechkv check --paths module:object.",
            )
        if self.out is not None:
            _prepare_folder(self.out)
        if self.paths is not None:
            report = _check_object(self.paths, self.dtype)
        else:
            report = check(
                self.model,
                dtypes=self.dtype or DTYPES,
                n_steps=self.steps,
                chunk=self.chunk,
                batched=self.batched,
                left_padded=self.left_padded,
                device=self.device,
            )
        print(json.dumps(report.to_dict(), indent=1) if self.json else report)
        if self.out is not None:
            report.save(self.out)
        return report.exit_code


_NEEDED = ("build", "cached", "recomputed", "tokens", "n_prompt")


def _check_object(where: str, dtypes: tuple[str, ...]) -> Any:
    """`check_paths` on what `module:object` names."""
    from mechkv.checking import DTYPES, check_paths
    from mechkv.errors import InputError

    module_name, _, name = where.partition(":")
    sys.path.insert(0, "")  # the folder the command is run in, as `python -m` does
    try:
        holder = getattr(importlib.import_module(module_name), name) if name else importlib.import_module(module_name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:  # the latter two: no name, or a path
        raise InputError(
            "cannot find the paths",
            got=f"{where!r}: {error}",
            expected="module:object, importable from this folder",
            remedy="Check the spelling, or run the command where the module lies.",
        ) from error
    finally:
        sys.path.remove("")
    missing = [key for key in _NEEDED if not hasattr(holder, key)]
    if missing:
        raise InputError(
            f"{where} is not a pair of paths",
            got=f"an object without {', '.join(missing)}",
            expected=f"the attributes {', '.join(_NEEDED)}",
            remedy="See mechkv.check_paths for what each of them is.",
        )
    optional = {key: getattr(holder, key) for key in ("modules", "stepwise") if hasattr(holder, key)}
    return check_paths(
        holder.build,
        holder.cached,
        holder.recomputed,
        holder.tokens,
        n_prompt=holder.n_prompt,
        dtypes=dtypes or getattr(holder, "dtypes", DTYPES),
        name=where,
        **optional,
    )


def _prepare_folder(folder: Path | str) -> None:
    """Refuse a folder that a report cannot be saved to, before anything is run.

    Raises:
        StorageError: It cannot be written, or holds files that are not a report's.
    """
    from mechkv import result_folder, storage
    from mechkv.checking import TABLES
    from mechkv.errors import StorageError

    place = Path(folder)
    ours = {"check.json", result_folder.INDEX, *(f"{name}.parquet" for name in TABLES)}
    foreign = sorted(file.name for file in place.iterdir() if file.name not in ours) if place.is_dir() else []
    if foreign:
        raise StorageError(
            f"{place} cannot be used for a report",
            got=f"a folder with other files in it, such as {foreign[0]}",
            expected="a new or empty folder, or that of an earlier report",
            remedy="Give another folder.",
        )
    trial = place / ".trial"
    storage.write_bytes(trial, b"")
    trial.unlink()
