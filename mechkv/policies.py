"""Which tokens does the next step process?

A policy looks at a finished step and returns the tokens of the next one; an empty list ends the run. `Forced` gives
the tokens it was made with (teacher forcing), `Greedy` the most likely one, `Sampled` what a `Strategy` draws. Ties go
to the lowest token id on both paths, so equal logits give equal tokens.

Common random numbers. A draw depends on seed, prompt and position alone: at the same position both paths use the same
uniform u (the token is the first whose cumulative probability, summed by token id, exceeds u) or the same Gumbel noise
g (the token is the argmax of ln p + g). So a difference of the tokens is a difference of the logits, never luck. With
a `stream` of its own a path draws for itself instead: that is how large a naive divergence rate is without any drift.
Probabilities are float64 softmax of logits / temperature; top-k keeps the k largest (ties: lowest id), then top-p the
smallest set of the most likely tokens whose probability reaches p; what is left is renormalised.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from mechkv.configs import check_kinds
from mechkv.errors import InputError
from mechkv.stats import torch_rng

Coupling = Literal["uniform", "gumbel"]


@runtime_checkable
class TokenPolicy(Protocol):
    """Chooses the tokens of the next step."""

    def next_tokens(self, logits: Float[Tensor, "d_vocab"], n_tokens: int) -> list[int]:
        """Tokens to process next, given the last logits and the tokens processed so far; empty ends the run."""
        ...


class Forced:
    """Teacher forcing: `tokens` (the prompt included) in order, `chunk` of them a step (None: all there are).

    `tokens` may grow while the run is under way: that is how one path follows another (`paths.lockstep`).
    """

    def __init__(self, tokens: Sequence[int], chunk: int | None = 1) -> None:
        self.tokens, self.chunk = tokens, chunk

    def next_tokens(self, logits: Float[Tensor, "d_vocab"], n_tokens: int) -> list[int]:
        """The next given tokens."""
        stop = None if self.chunk is None else n_tokens + self.chunk
        return list(self.tokens[n_tokens:stop])


class Greedy:
    """The most likely token; the run ends after one of `stop`."""

    def __init__(self, stop: Sequence[int] = ()) -> None:
        self._stop = frozenset(stop)
        self._ended = False

    def next_tokens(self, logits: Float[Tensor, "d_vocab"], n_tokens: int) -> list[int]:
        """The argmax, or nothing once a stop token was chosen."""
        if self._ended:
            return []
        token = int(logits.argmax())
        self._ended = token in self._stop
        return [token]


class Noted:
    """Another policy whose choices are appended to a list, for a second path to follow."""

    def __init__(self, policy: TokenPolicy, chosen: list[int]) -> None:
        self._policy, self._chosen = policy, chosen

    def next_tokens(self, logits: Float[Tensor, "d_vocab"], n_tokens: int) -> list[int]:
        """What the other policy chooses."""
        new = self._policy.next_tokens(logits, n_tokens)
        self._chosen.extend(new)
        return new


@dataclass(frozen=True)
class Strategy:
    """How a token is chosen from logits: greedily (`temperature` None), or drawn.

    Attributes:
        temperature: Divides the logits; None takes the most likely token.
        top_k: Draw among this many of the most likely tokens.
        top_p: Draw among the most likely tokens that together reach this probability.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        check_kinds(self)
        if self.temperature is None:
            wrong = self.top_k is not None or self.top_p is not None
        else:
            wrong = not (math.isfinite(self.temperature) and self.temperature > 0)
        wrong = wrong or (self.top_k is not None and self.top_k < 1)
        wrong = wrong or (self.top_p is not None and not 0 < self.top_p <= 1)
        if wrong:
            raise InputError(
                "impossible strategy",
                got=f"temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}",
                expected="temperature > 0, top_k >= 1, 0 < top_p <= 1; greedy takes none of them",
                remedy="For greedy decoding use Strategy(), for top-k Strategy(temperature=1.0, top_k=50).",
            )

    @property
    def name(self) -> str:
        """`greedy`, `temperature 0.8`, `top-k 50`, `top-p 0.9` and combinations; temperature 1 is not named beside
        another."""
        if self.temperature is None:
            return "greedy"
        parts = [] if self.top_k is None else [f"top-k {self.top_k}"]
        parts += [] if self.top_p is None else [f"top-p {self.top_p:g}"]
        if not parts or self.temperature != 1.0:
            parts.append(f"temperature {self.temperature:g}")
        return ", ".join(parts)

    def log_probabilities(self, logits: Float[Tensor, "d_vocab"]) -> Float[Tensor, "d_vocab"]:
        """Float64 log-probabilities that a draw uses; -inf for tokens that are cut off."""
        z = logits.detach().cpu().double() / (1.0 if self.temperature is None else self.temperature)
        if self.top_k is not None and self.top_k < len(z):
            order = torch.sort(z, descending=True, stable=True).indices
            z = z.index_fill(0, order[self.top_k :], -math.inf)
        if self.top_p is not None and self.top_p < 1:
            p, order = torch.sort(torch.softmax(z, 0), descending=True, stable=True)
            reached_before = p.cumsum(0) - p >= self.top_p
            z = z.index_fill(0, order[reached_before], -math.inf)
        return torch.log_softmax(z, 0)

    def choose(self, logits: Float[Tensor, "d_vocab"], generator: torch.Generator, coupling: Coupling) -> int:
        """The token; `generator` gives the uniform (one number) or the Gumbel noise (one a token)."""
        if self.temperature is None:
            z = logits.detach().cpu()
            return int((z == z.max()).nonzero()[0])
        log_p = self.log_probabilities(logits)
        if coupling == "gumbel":
            noise = torch.rand(log_p.shape, generator=generator, dtype=torch.float64)
            return int((log_p - torch.log(-torch.log(noise))).argmax())
        cumulative = log_p.exp().cumsum(0)
        u = torch.rand((), generator=generator, dtype=torch.float64)
        return int(torch.searchsorted(cumulative / cumulative[-1], u, right=True))


class Sampled:
    """What a `Strategy` chooses, with draws that depend on seed, prompt and position; ends after one of `stop`.

    Args:
        strategy: Greedy, temperature, top-k, top-p.
        seed: Of the draws.
        prompt: Names the prompt in the draws.
        stop: Tokens after which the run ends.
        coupling: One uniform a token, or Gumbel noise.
        stream: Empty for common random numbers; a name (such as the path's) for draws of its own.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        seed: int = 0,
        prompt: int | str = 0,
        stop: Sequence[int] = (),
        coupling: Coupling = "uniform",
        stream: str = "",
    ) -> None:
        if coupling not in ("uniform", "gumbel"):
            raise InputError("unknown coupling", got=repr(coupling), expected="uniform or gumbel", remedy="Name one.")
        self.strategy, self.stop = strategy, frozenset(stop)
        self._seed, self._labels, self._coupling = seed, ("token", prompt, stream), coupling
        self._ended = False

    def choose(self, logits: Float[Tensor, "d_vocab"], n_tokens: int) -> int:
        """The token for position `n_tokens`: a function of the logits, the labels and the position, nothing else."""
        generator = torch_rng(self._seed, *self._labels, n_tokens)
        return self.strategy.choose(logits, generator, self._coupling)

    def next_tokens(self, logits: Float[Tensor, "d_vocab"], n_tokens: int) -> list[int]:
        """The chosen token, or nothing once a stop token was chosen."""
        if self._ended:
            return []
        token = self.choose(logits, n_tokens)
        self._ended = token in self.stop
        return [token]
