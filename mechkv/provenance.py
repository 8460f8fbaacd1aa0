"""What was run on what? Everything that can change a bit of a result, read back from the running process.

Kernels differ by device, by library version, by CPU capability and thread count, and on CUDA by TF32, by
reduced-precision reductions, by the deterministic-algorithms switch and by the cuBLAS workspace: all of them are kept.
"""

import hashlib
import os
import platform
import sys
import weakref
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn
from transformer_lens.model_bridge import TransformerBridge

from mechkv.guards import every_module, every_parameter
from mechkv.models import info

_PACKAGES = ("mechkv", "torch", "transformers", "transformer-lens", "numpy", "scipy", "pandas")
_ENVIRONMENT = (
    "CUBLAS_WORKSPACE_CONFIG",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "MKL_CBWR",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "OPENBLAS_CORETYPE",
)
_HASHES: "weakref.WeakKeyDictionary[nn.Module, tuple[list[Any], str]]" = weakref.WeakKeyDictionary()
"""Model -> what its parameters were (changes in place, address, dtype, device of each) and their hash."""


def collect(model: TransformerBridge | None = None) -> dict[str, Any]:
    """Versions, machine, kernels' settings, command and, for a model, what was read back from it with the SHA-256 of
    its weights. Plain values, for JSON."""
    found: dict[str, Any] = {
        "versions": {name: _version(name) for name in _PACKAGES} | {"python": platform.python_version()},
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "interop_threads": torch.get_num_interop_threads(),
            "blas": _blas(),
        },
        "kernels": kernel_settings(),
        "command": [os.path.basename(sys.argv[0]), *sys.argv[1:]],
    }
    if model is not None:
        found["model"] = info(model).to_dict() | {"weights_sha256": weights_sha256(model)}
    return found


def kernel_settings() -> dict[str, Any]:
    """The switches that decide which kernels run."""
    settings: dict[str, Any] = {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": _matmul_precision(),
        "mkldnn": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
        "environment": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    }
    if torch.cuda.is_available():
        matmul = torch.backends.cuda.matmul
        settings["gpu"] = {
            "device": torch.cuda.get_device_name(),
            "capability": list(torch.cuda.get_device_capability()),
            "runtime": torch.version.cuda,
            "tf32_matmul": _told(lambda: matmul.allow_tf32),
            "tf32_cudnn": _told(lambda: torch.backends.cudnn.allow_tf32),
            "fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
            "bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
        }
    return settings


def _matmul_precision() -> Any:
    """What the older switch says, or the newer ones where the process uses those: torch refuses to mix them."""
    newer = {
        name: getattr(backend, "fp32_precision", None)
        for name, backend in {
            "all": torch.backends,
            "gpu": torch.backends.cuda.matmul,
            "mkldnn": getattr(torch.backends.mkldnn, "matmul", None),
        }.items()
    }
    return _told(torch.get_float32_matmul_precision, newer)


def _told(ask: Callable[[], Any], otherwise: Any = "set by fp32_precision") -> Any:
    try:
        return ask()
    except RuntimeError:
        return otherwise


def what_decides_kernels(model: TransformerBridge | None = None) -> dict[str, Any]:
    """Devices of the model (of a run that makes its own: none), torch version, threads, CPU capability and
    `kernel_settings`: part of the settings of every run that can go on later, so that one table never holds the bits of
    two kinds of kernels. Plain values, for JSON."""
    parameters = () if model is None else model.original_model.parameters()
    return {
        "devices": sorted({str(parameter.device) for parameter in parameters}),
        "torch": _version("torch"),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    } | kernel_settings()


def weights_sha256(model: TransformerBridge, *, again: bool = False) -> str:
    """SHA-256 over name, dtype, shape and bytes of every distinct parameter, in name order. Read once per model, after
    every change that torch counts or that moves them (not one through `.data[...]`), and `again`: a proof."""
    parameters = every_parameter(every_module(model.original_model))
    stamp = [(p._version, p.data_ptr(), p.dtype, p.device) for p in parameters]
    if again or model not in _HASHES or _HASHES[model][0] != stamp:
        digest = hashlib.sha256()
        for name, value in sorted(model.original_model.named_parameters()):
            plain = name.replace("._original_component", "")
            digest.update(f"{plain} {value.dtype} {list(value.shape)}".encode())
            flat = value.detach().reshape(-1).contiguous().cpu()
            digest.update(flat.view(torch.uint8).numpy().data)
        _HASHES[model] = (stamp, digest.hexdigest())
    return _HASHES[model][1]


@cache
def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _blas() -> str:
    for line in torch.__config__.show().splitlines():
        if "BLAS_INFO=" in line:
            return line.split("BLAS_INFO=")[1].split(",")[0]
    return "unknown"
