"""What is checked of every configuration, so that a slip is named where it is made and not where it hurts."""

from collections.abc import Sequence
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

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
    """Every field of a dataclass of settings is of the kind that it is annotated with; for `__post_init__`.

    Raises:
        InputError: Names the field.
    """
    hints = get_type_hints(type(config))
    for field in fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        if not _fits(value, hint):
            raise InputError(field.name, got=repr(value), expected=_words(hint), remedy=_remedy(value, hint))


def _fits(value: Any, hint: Any) -> bool:
    kind = get_origin(hint)
    if kind is Literal:
        return value in get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if kind is tuple:
        return isinstance(value, tuple) and all(_fits(item, get_args(hint)[0]) for item in value)
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint if hint in (int, bool, str) else kind is not None or isinstance(value, hint)


def _words(hint: Any) -> str:
    if hint is int:
        return "a whole number"
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    return "a tuple" if get_origin(hint) is tuple else str(getattr(hint, "__name__", hint))


def _remedy(value: Any, hint: Any) -> str:
    if get_origin(hint) is not tuple or isinstance(value, tuple):
        return "Pass an int." if hint is int else "Pass that."
    many = isinstance(value, Sequence) and not isinstance(value, str)
    return f"Write tuple({value!r})." if many else f"Write ({value!r},)."


def require(condition: bool, what: str, *, got: object, expected: object, remedy: str = "See the docstring.") -> None:
    """An `InputError` unless the condition holds."""
    if not condition:
        raise InputError(what, got=got, expected=expected, remedy=remedy)
