"""The command line: `mechkv COMMAND ...`, one file a command in `mechkv.commands`.

A command is a dataclass whose fields are its arguments and whose `run` returns the exit code; it imports what is heavy
inside `run`, so that `--help` is quick. `--json` prints one JSON document on standard output and nothing else there;
progress and messages go to standard error.

Exit codes: 0 done; 2 the input or the model cannot be used; 3 not finite; 4 a guard refused; 5 results cannot be
written or read; 70 anything that nobody foresaw, with its traceback. `check` has its own meaning for 1 (see there),
so a crash must not exit with it.
"""

import os
import sys
import traceback
from importlib import import_module

from mechkv.errors import GuardError, InputError, MechkvError, ModelError, NonFiniteError, StorageError

COMMANDS: dict[str, str] = {
    "check": "Check",
    "drift": "Drift",
    "heads": "Heads",
    "models": "Models",
    "patch": "Patch",
    "precision": "Precision",
    "tokens": "Tokens",
}
"""Command (a module of `mechkv.commands`) -> its dataclass."""

EXIT_CODES: dict[type[MechkvError], int] = {
    InputError: 2,
    ModelError: 2,
    NonFiniteError: 3,
    GuardError: 4,
    StorageError: 5,
}
UNFORESEEN = 70


def main(argv: list[str] | None = None) -> None:
    """Parse, run, exit."""
    import tyro

    commands = {name: getattr(import_module(f"mechkv.commands.{name}"), kind) for name, kind in COMMANDS.items()}
    command = tyro.extras.subcommand_cli_from_dict(
        commands,
        prog="mechkv",
        description="Cached and cache-free decoding of one transformer: where, why and how much do they differ?",
        args=argv,
        config=(tyro.conf.AvoidSubcommands,),
    )
    try:
        with _Crash():
            code = command.run()
            sys.stdout.flush()
    except MechkvError as error:
        print(f"mechkv: {error}", file=sys.stderr)
        code = next(value for kind, value in EXIT_CODES.items() if isinstance(error, kind))
    except KeyboardInterrupt:
        print("mechkv: interrupted; finished pieces are kept in --out, run the same command to go on", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    raise SystemExit(code)


class _Crash:
    """Lets pass what `main` knows; shows the rest and exits with `UNFORESEEN`, for 1 is a verdict of `check`."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, MechkvError | BrokenPipeError):
            traceback.print_exception(error)
            raise SystemExit(UNFORESEEN)
