"""Which tokens does the next step process?

A policy looks at a finished step and returns the tokens of the next one; an empty list ends the run. `Forced` gives
the tokens it was made with (teacher forcing), `Greedy` the most likely one. Ties go to the lowest token id on both
paths, so equal logits give equal tokens.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor


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
