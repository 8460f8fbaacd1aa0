"""Which values are JSON? Plain ones, finite, numpy scalars, arrays and tables included; the rest is refused by name."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from mechkv.errors import InputError


def to_json(value: Any, nan_as_null: bool = False) -> bytes:
    """Sorted keys, two-space indent, newline at the end; see `storage.write_json`."""
    plain = _plain(value, "value", nan_as_null)
    return (json.dumps(plain, sort_keys=True, indent=2, allow_nan=False, ensure_ascii=False) + "\n").encode()


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table in JSON's own types, every number as it is (pandas' `to_json` keeps ten decimals, and a
    float32 drift is smaller than that); null for what is missing or infinite."""
    rows = frame.astype(object).where(frame.notna(), None).to_dict(orient="records")
    return _plain(rows, "table", nan_as_null=True)


def refuse_constant(name: str) -> None:
    """For `json.loads(parse_constant=...)`: NaN and infinity are no JSON."""
    raise ValueError(f"{name} is not JSON")


def _plain(value: Any, where: str, nan_as_null: bool) -> Any:
    """`value` in JSON's own types, or an `InputError` that says where it is not."""
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        if nan_as_null:
            return None
        raise _not_json(where, str(value), "Leave it out, or write it as null with nan_as_null=True.")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise _not_json(where, f"the key {key!r}", "Keys are strings: str(key).")
        return {key: _plain(item, f"{where}[{key!r}]", nan_as_null) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]", nan_as_null) for index, item in enumerate(value)]
    raise _not_json(where, f"a {type(value).__name__}", "Turn it into numbers, strings, lists and dicts first.")


def _not_json(where: str, got: str, remedy: str) -> InputError:
    return InputError(f"{where} cannot be written as JSON", got=got, expected="finite plain values", remedy=remedy)
