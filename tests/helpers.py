"""What several test files need: a drift number of our own, interventions made from a function, whole runs as lists."""

from collections.abc import Callable

import torch

from mechkv.paths import At, Step, decode
from mechkv.policies import Forced
from tests.plain import N_PROMPT, N_STEPS
from tests.tiny import tokens

F64_FLOOR = (
    1e-6  # measured 0 .. 9e-16 here; float32 islands in eager "float64" may round apart elsewhere (1e-7 .. 1e-6)
)
F32_FLOOR = 1e-5  # measured 2e-7 .. 9e-7
FLOORS = {torch.float64: F64_FLOOR, torch.float32: F32_FLOOR}
PLANTED = 1e-2  # a wrong position or a lost row: measured 0.08 .. 1.6

FED = tokens(N_PROMPT + N_STEPS)


def relative_l2(a: torch.Tensor, b: torch.Tensor) -> float:
    """norm(a - b) / norm(b) in float64."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm())


def run(model, path: str, *, n_prompt: int = N_PROMPT, fed: torch.Tensor = FED, **options) -> list[Step]:
    """All steps of a teacher-forced run over `fed`."""
    policy = Forced(fed.tolist())
    n_steps = options.pop("n_steps", len(fed) - n_prompt)
    return list(decode(model, fed[:n_prompt], path=path, policy=policy, n_steps=n_steps, **options))


def logits(steps: list[Step]) -> torch.Tensor:
    """`[step, d_vocab]`."""
    return torch.stack([step.logits for step in steps])


class Change:
    """An intervention from a function of (value, at); counts how often it was asked."""

    def __init__(self, sites: str | tuple[str, ...], change: Callable[[torch.Tensor, At], torch.Tensor | None]) -> None:
        self.sites = (sites,) if isinstance(sites, str) else sites
        self.change, self.asked = change, 0

    def __call__(self, value: torch.Tensor, at: At) -> torch.Tensor | None:
        self.asked += 1
        return self.change(value, at)


def n_hooks(model) -> int:
    """Hooks on all hook points of a bridge, TransformerLens' own list and torch's."""
    points = {id(point): point for point in model.hook_dict.values()}.values()
    return sum(len(point.fwd_hooks) + len(point._forward_hooks) for point in points)
