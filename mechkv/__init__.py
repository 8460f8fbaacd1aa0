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
    "recast": "rebuilding",
    "record": "recording",
    "RunRecord": "recording",
    "compare": "comparison",
    "Difference": "comparison",
    "decode": "paths",
    "lockstep": "paths",
    "DriftConfig": "drift",
    "DriftProfile": "drift",
    "drift_profile": "drift",
    "Patch": "interventions",
    "FactorialConfig": "factorial",
    "CausalFactorial": "factorial",
    "causal_factorial": "factorial",
    "SweepConfig": "patching",
    "PatchSweep": "patching",
    "patch_sweep": "patching",
    "localise_kv": "kv_difference",
    "TrajectoryConfig": "trajectory",
    "teacher_forced": "trajectory",
    "free_running": "trajectory",
    "OnsetConfig": "onset",
    "DriftOnset": "onset",
    "drift_onset": "onset",
    "ReprojectionConfig": "reprojection",
    "Reprojection": "reprojection",
    "reprojection_check": "reprojection",
    "Strategy": "policies",
    "TokenDivergence": "divergence",
    "TokenDivergenceConfig": "divergence",
    "token_divergence": "divergence",
    "LadderConfig": "precision",
    "PrecisionLadder": "precision",
    "precision_ladder": "precision",
    "precision_by_site": "precision_policy",
    "oracle_study": "oracle",
    "HeadAnalysis": "heads",
    "HeadConfig": "heads",
    "head_analysis": "heads",
    "materialise_kv_heads": "twins",
    "pad_head_dim": "twins",
    "window_off": "twins",
    "window_on": "twins",
    "permute_heads": "twins",
    "TwinStudy": "twin_drift",
    "twin_study": "twin_drift",
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
    from mechkv.divergence import TokenDivergence, TokenDivergenceConfig, token_divergence
    from mechkv.drift import DriftConfig, DriftProfile, drift_profile
    from mechkv.factorial import CausalFactorial, FactorialConfig, causal_factorial
    from mechkv.heads import HeadAnalysis, HeadConfig, head_analysis
    from mechkv.interventions import Patch
    from mechkv.kv_difference import localise_kv
    from mechkv.models import from_hf, load_model
    from mechkv.onset import DriftOnset, OnsetConfig, drift_onset
    from mechkv.oracle import oracle_study
    from mechkv.patching import PatchSweep, SweepConfig, patch_sweep
    from mechkv.paths import decode, lockstep
    from mechkv.policies import Strategy
    from mechkv.precision import LadderConfig, PrecisionLadder, precision_ladder
    from mechkv.precision_policy import precision_by_site
    from mechkv.rebuilding import recast
    from mechkv.recording import RunRecord, record
    from mechkv.reprojection import Reprojection, ReprojectionConfig, reprojection_check
    from mechkv.trajectory import TrajectoryConfig, free_running, teacher_forced
    from mechkv.twin_drift import TwinStudy, twin_study
    from mechkv.twins import materialise_kv_heads, pad_head_dim, permute_heads, window_off, window_on


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'mechkv' has no attribute {name!r}")
    return getattr(import_module(f"mechkv.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
