"""Errors: every message says what was got, what was expected and what to do about it.

They subclass `ValueError` or `RuntimeError` as well, so that code which does not know mechkv catches the usual kind.
"""


class MechkvError(Exception):
    """Base of every error that mechkv raises on purpose."""

    def __init__(self, what: str, *, got: object, expected: object, remedy: str) -> None:
        self.what, self.got, self.expected, self.remedy = what, got, expected, remedy
        super().__init__(f"{what}: got {got}; expected {expected}. {remedy}")


class InputError(MechkvError, ValueError):
    """Something the caller passed cannot be used."""


class ModelError(MechkvError, RuntimeError):
    """A model could not be loaded, or is not what was asked for."""


class GuardError(MechkvError, RuntimeError):
    """A guard failed: a number computed now would not mean what it seems to mean."""


class CacheError(GuardError):
    """The KV cache is not written, not read, or old rows of it change: cached decoding is another function."""


class NonFiniteError(MechkvError, ArithmeticError):
    """NaN or infinity where the numerical story needs finite values; names the first layer and site."""


class StorageError(MechkvError, OSError):
    """A file or folder of results is missing, altered, truncated, foreign, or does not fit on the disk."""

    def __str__(self) -> str:
        return str(self.args[0])
