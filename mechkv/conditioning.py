"""How far may rounding alone move these logits? Measured, by perturbing the weights as rounding would.

Equation. Rounding the inner products of a matrix with fan-in n has the effect of perturbing each weight by at most
lambda sqrt(n) u (Higham and Mary 2019). So, with every weight w of fan-in n replaced by w (1 + s sqrt(n) u), s = +-1,
    G(p) = max over probes of  max |logits'(p) - logits(p)| / u       sensitivity of position p, in logits per u
in the most precise rung that runs. Norms, biases and other vectors count as n = 1.

Conventions. The fan-in of a matrix is taken to be the smaller of its two dimensions, since unknown code may hold it
either way round: never more than the true one, so that the bound is rather too narrow than too wide. The weights are
all floating tensors (torch or numpy) within reach of the object that `build` returned: modules, attributes, closures,
dicts, lists. They are perturbed in place, shared (tied) tensors once, and restored.

Controls: the same probes give a bound for every layer (`localise`), and clean models stay below a tenth of the bound.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MAX_DEPTH = 6
"""How deep attributes and containers are searched."""
N_PROBES = 2


def modules_in(thing: Any) -> list[nn.Module]:
    """Torch models within reach of `thing`, outermost first."""
    return [found for found in _walk(thing, set(), 0) if isinstance(found, nn.Module)]


def weights_in(thing: Any) -> list[Tensor | np.ndarray]:
    """Distinct floating-point arrays within reach of `thing`."""
    found: dict[int, Tensor | np.ndarray] = {}
    for item in _walk(thing, set(), 0):
        if isinstance(item, nn.Module):
            held: list[Any] = [p for p in item.parameters() if p.is_floating_point()]
            held += [value for module in item.modules() for value in _plain(vars(module))]
        else:
            held = [item]
        for value in held:
            if value.size if isinstance(value, np.ndarray) else value.numel():
                place = value.ctypes.data if isinstance(value, np.ndarray) else value.data_ptr()
                found.setdefault(place, value)
    return list(found.values())


@contextmanager
def perturbed(weights: list[Tensor | np.ndarray], unit_roundoff: float, seed: int) -> Iterator[None]:
    """Every weight w is w (1 +- sqrt(fan-in) u) for the length of a `with` block; the bits of before come back."""
    generator = torch.Generator().manual_seed(seed)
    # A numpy array is changed through a tensor that shares its memory.
    shared = [torch.from_numpy(weight) if isinstance(weight, np.ndarray) else weight.data for weight in weights]
    kept = [weight.clone() for weight in shared]
    try:
        for weight in shared:
            fan_in = min(weight.shape[-2:]) if weight.ndim > 1 else 1
            sign = torch.randint(0, 2, tuple(weight.shape), generator=generator, dtype=torch.int8) * 2 - 1
            weight.addcmul_(weight, sign.to(weight), value=math.sqrt(fan_in) * unit_roundoff)
        yield
    finally:
        for weight, before in zip(shared, kept, strict=True):
            weight.copy_(before)


def floating_dtypes(weights: list[Tensor | np.ndarray]) -> set[str]:
    """Names of the dtypes of matrices among the weights."""
    return {str(weight.dtype).removeprefix("torch.") for weight in weights if weight.ndim > 1}


def _plain(values: dict[str, Any]) -> list[Tensor | np.ndarray]:
    """Floating arrays that a module holds as ordinary attributes (a list of weights, say)."""
    keep = {name: value for name, value in values.items() if not name.startswith("_")}
    return [item for item in _walk(keep, set(), MAX_DEPTH - 2) if not isinstance(item, nn.Module)]


def _walk(thing: Any, seen: set[int], depth: int) -> Iterator[Any]:
    """Modules and floating arrays below `thing`; what is inside a module is left to the module."""
    if id(thing) in seen or depth > MAX_DEPTH:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        if thing.is_floating_point():
            yield thing
    elif isinstance(thing, np.ndarray):
        if np.issubdtype(thing.dtype, np.floating):
            yield thing
    elif isinstance(thing, nn.Module):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from _walk(value, seen, depth + 1)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            yield from _walk(value, seen, depth + 1)
    elif not isinstance(thing, (type, ModuleType)):
        for value in _attributes(thing):
            yield from _walk(value, seen, depth + 1)


def _attributes(thing: Any) -> Iterator[Any]:
    """What an object, a closure, a bound method or a partial function holds."""
    yield from getattr(thing, "__dict__", {}).values()
    for name in getattr(type(thing), "__slots__", ()):
        yield getattr(thing, name, None)
    if isinstance(thing, FunctionType):
        for cell in thing.__closure__ or ():
            with suppress(ValueError):  # a cell that is not filled yet
                yield cell.cell_contents
    elif isinstance(thing, MethodType):
        yield thing.__self__
    elif isinstance(thing, partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
