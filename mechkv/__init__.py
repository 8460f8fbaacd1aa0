"""mechkv: where, why and how much do cached and cache-free decoding of one transformer differ?

`import mechkv` is quick: a name is imported from its module (and torch with it) when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mechkv.errors import GuardError, InputError, MechkvError, ModelError, NonFiniteError, StorageError

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
    "HeadAnalysis": "heads",
    "HeadConfig": "heads",
    "head_analysis": "heads",
    "materialise_kv_heads": "twins",
    "pad_head_dim": "twins",
    "window_off": "twins",
    "window_on": "twins",
    "permute_heads": "twins",
    "TwinStudy": "twin_study",
    "twin_study": "twin_study",
    "Patch": "interventions",
    "FactorialConfig": "factorial",
    "CausalFactorial": "factorial",
    "causal_factorial": "factorial",
    "SweepConfig": "patching",
    "PatchSweep": "patching",
    "patch_sweep": "patching",
    "localise_kv": "localise",
    "TrajectoryConfig": "trajectory",
    "teacher_forced": "trajectory",
    "free_running": "trajectory",
    "OnsetConfig": "onset",
    "DriftOnset": "onset",
    "drift_onset": "onset",
    "ReprojectionConfig": "reprojection",
    "Reprojection": "reprojection",
    "reprojection_check": "reprojection",
}
"""Public name -> the module it lives in."""

__all__ = [
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
    from mechkv.comparison import Difference, compare
    from mechkv.drift import DriftConfig, DriftProfile, drift_profile
    from mechkv.heads import HeadAnalysis, HeadConfig, head_analysis
    from mechkv.factorial import CausalFactorial, FactorialConfig, causal_factorial
    from mechkv.interventions import Patch
    from mechkv.localise import localise_kv
    from mechkv.models import from_hf, load_model, recast
    from mechkv.onset import DriftOnset, OnsetConfig, drift_onset
    from mechkv.patching import PatchSweep, SweepConfig, patch_sweep
    from mechkv.paths import decode, lockstep
    from mechkv.recording import RunRecord, record
    from mechkv.twin_study import TwinStudy, twin_study
    from mechkv.twins import materialise_kv_heads, pad_head_dim, permute_heads, window_off, window_on
    from mechkv.reprojection import Reprojection, ReprojectionConfig, reprojection_check
    from mechkv.trajectory import TrajectoryConfig, free_running, teacher_forced


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'mechkv' has no attribute {name!r}")
    return getattr(import_module(f"mechkv.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
