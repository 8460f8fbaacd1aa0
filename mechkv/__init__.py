"""mechkv: where, why and how much do cached and cache-free decoding of one transformer differ?

`import mechkv` is quick: a name is imported from its module (and torch with it) when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mechkv.errors import CacheError, GuardError, InputError, MechkvError, ModelError, NonFiniteError, StorageError

__version__ = "0.1.0"

_WHERE = {
    "load_model": "models",
    "from_hf": "models",
    "recast": "models",
    "record": "recording",
    "RunRecord": "recording",
    "compare": "comparison",
    "Difference": "comparison",
    "decode": "paths",
    "lockstep": "paths",
    "DriftConfig": "drift",
    "DriftProfile": "drift",
    "drift_profile": "drift",
    "CheckReport": "checking",
    "check": "checking",
    "check_paths": "checking",
}
"""Public name -> the module it lives in."""

__all__ = [
    "CacheError",
    "GuardError",
    "InputError",
    "MechkvError",
    "ModelError",
    "NonFiniteError",
    "StorageError",
    "__version__",
    *_WHERE,
]

if TYPE_CHECKING:
    from mechkv.checking import CheckReport, check, check_paths
    from mechkv.comparison import Difference, compare
    from mechkv.drift import DriftConfig, DriftProfile, drift_profile
    from mechkv.models import from_hf, load_model, recast
    from mechkv.paths import decode, lockstep
    from mechkv.recording import RunRecord, record


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'mechkv' has no attribute {name!r}")
    return getattr(import_module(f"mechkv.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
