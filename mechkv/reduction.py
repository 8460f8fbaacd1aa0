"""How does a sum depend on the order in which it is added up, and how does that scale with its length?

    sequential      ((t_1 + t_2) + t_3) + ...                      error at most (n - 1) u sum|t|, typically sqrt(n) u
    pairwise        (t_1 + t_2) + (t_3 + t_4) + ...                at most ceil(log2 n) u
    blocked:b       sequential within blocks of b, then over the blocks
    split:s         s contiguous parts, each sequential, then over the parts (the split-K of matrix kernels)

with u the unit roundoff of the **accumulator** (Higham 2002, chapter 4). Real kernels are of these kinds and choose by
shape, so a product with one row and one with many rows may add in two different orders; here the two orders are chosen,
on any machine. Every product and every addition is rounded to the accumulator's dtype, and the sum at the end to the
dtype of the data: float16 data with a float32 accumulator is what most hardware does.

Conventions: terms are `[..., n]`, added over the last axis. `SumOrder.parse("split:4")` names an order.

Controls: an order against itself gives exactly the same bits; all orders agree with float64 within their bounds; sums
of integers that every partial sum holds exactly are the same in every order.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mechkv.comparison import UNIT_ROUNDOFF
from mechkv.errors import InputError

Kind = Literal["sequential", "pairwise", "blocked", "split"]
Law = Literal["worst case", "random walk", "pairwise"]
ORDERS: tuple[str, ...] = ("sequential", "pairwise", "blocked:32", "split:2", "split:4", "split:8")
"""Orders of every kind."""
OWN = "kernel's own"
"""Stands for the accumulator of a machine's kernels, which is not stated."""


@dataclass(frozen=True)
class SumOrder:
    """One order of summation; `size` is the block length or the number of parts."""

    kind: Kind
    size: int = 0

    @classmethod
    def parse(cls, text: str) -> "SumOrder":
        """`sequential`, `pairwise`, `blocked:32`, `split:4`, ...

        Raises:
            InputError: Anything else.
        """
        kind, _, size = text.partition(":")
        sized = kind in ("blocked", "split")
        if kind not in ("sequential", "pairwise", "blocked", "split") or sized != (size.isdigit() and int(size) > 1):
            raise InputError(
                "unknown order of summation",
                got=repr(text),
                expected="sequential, pairwise, blocked:N or split:N with N of 2 or more",
                remedy="Name one of these.",
            )
        return cls(kind, int(size) if sized else 0)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{self.kind}:{self.size}" if self.size else self.kind


def ordered_sum(terms: Float[Tensor, "... n"], order: SumOrder | str) -> Float[Tensor, "..."]:
    """The sum over the last axis in this order; every addition is rounded to the dtype of `terms`."""
    chosen = SumOrder.parse(order) if isinstance(order, str) else order
    n = terms.shape[-1]
    if chosen.kind == "sequential":
        return _sequential(terms)
    if chosen.kind == "pairwise":
        return _pairwise(terms)
    length = chosen.size if chosen.kind == "blocked" else math.ceil(n / chosen.size)
    parts = [_sequential(part) for part in terms.split(length, dim=-1)]
    return _sequential(torch.stack(parts, dim=-1))


def ordered_matmul(
    a: Float[Tensor, "... m k"], b: Float[Tensor, "... k n"], order: SumOrder | str, accumulator: torch.dtype
) -> Float[Tensor, "... m n"]:
    """a @ b with products and sums in `accumulator`, in this order; the result in the dtype of `a`."""
    wide_a, wide_b = a.to(accumulator), b.to(accumulator)
    products = wide_a.unsqueeze(-2) * wide_b.transpose(-1, -2).unsqueeze(-3)
    return ordered_sum(products, order).to(a.dtype)


def _sequential(terms: Tensor) -> Tensor:
    total = terms[..., 0]
    for i in range(1, terms.shape[-1]):
        total = total + terms[..., i]
    return total


def _pairwise(terms: Tensor) -> Tensor:
    while (n := terms.shape[-1]) > 1:
        paired = terms[..., 0 : n - 1 : 2] + terms[..., 1::2]
        terms = torch.cat([paired, terms[..., -1:]], dim=-1) if n % 2 else paired
    return terms[..., 0]


def summation_line(law: Law, n: int | float, accumulator: torch.dtype) -> float:
    """The lines of summation theory: (n - 1) u, sqrt(n) u, ceil(log2 n) u, relative to the sum of absolute values."""
    u = UNIT_ROUNDOFF[accumulator]
    return {"worst case": (n - 1) * u, "random walk": math.sqrt(n) * u, "pairwise": math.ceil(math.log2(n)) * u}[law]
