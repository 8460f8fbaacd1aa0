"""What is checked of every configuration, so that a slip is named where it is made and not where it hurts."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

from mechkv.errors import InputError

C = TypeVar("C")


def chosen(config: C | None, kind: type[C]) -> C:
    """The configuration, or the default one for None.

    Raises:
        InputError: It is of another kind.
    """
    if config is None:
        return kind()
    if not isinstance(config, kind):
        raise InputError(
            "config",
            got=type(config).__name__,
            expected=f"a {kind.__name__}",
            remedy=f"Write {kind.__name__}(...), or leave it out for the defaults.",
        )
    return config


def check_kinds(config: Any) -> None:
    """Whole numbers are whole and tuples are tuples, in a dataclass of settings; for `__post_init__`.

    Raises:
        InputError: Names the field.
    """
    hints = get_type_hints(type(config))
    for field in fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        if hint is int and type(value) is not int:
            raise InputError(field.name, got=repr(value), expected="a whole number", remedy="Pass an int.")
        if getattr(hint, "__origin__", None) is tuple and not isinstance(value, tuple):
            many = isinstance(value, Sequence) and not isinstance(value, str)
            remedy = f"Write tuple({value!r})." if many else f"Write ({value!r},)."
            raise InputError(field.name, got=repr(value), expected="a tuple", remedy=remedy)


def require(condition: bool, what: str, *, got: object, expected: object, remedy: str = "See the docstring.") -> None:
    """An `InputError` unless the condition holds."""
    if not condition:
        raise InputError(what, got=got, expected=expected, remedy=remedy)
