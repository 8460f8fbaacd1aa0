"""Sampling with common random numbers: the distribution is right, and equal logits give equal tokens."""

import math

import pytest
import torch

from mechkv.errors import InputError
from mechkv.policies import Sampled, Strategy

STRATEGIES = [
    Strategy(),
    Strategy(temperature=0.7),
    Strategy(temperature=1.0, top_k=5),
    Strategy(temperature=1.0, top_p=0.8),
    Strategy(temperature=1.3, top_k=20, top_p=0.6),
]


def logits(seed: int, n: int = 60, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@pytest.mark.parametrize("coupling", ["uniform", "gumbel"])
def test_identical_logits_never_give_different_tokens(strategy: Strategy, coupling) -> None:
    one, other = (Sampled(strategy, seed=3, prompt=7, coupling=coupling) for _ in range(2))
    for position in range(200):
        z = logits(position)
        assert one.choose(z, position) == other.choose(z.clone(), position)


@pytest.mark.parametrize("coupling", ["uniform", "gumbel"])
def test_own_streams_differ_although_the_logits_are_identical(coupling) -> None:
    strategy = Strategy(temperature=1.0)
    one, other = (Sampled(strategy, stream=name, coupling=coupling) for name in ("", "independent"))
    assert sum(one.choose(logits(i), i) != other.choose(logits(i), i) for i in range(100)) > 50


def test_draws_depend_on_seed_prompt_and_position_and_on_nothing_else() -> None:
    z, strategy = torch.zeros(1000), Strategy(temperature=1.0)
    base = [Sampled(strategy, seed=1, prompt=2).choose(z, position) for position in range(20)]
    backwards = Sampled(strategy, seed=1, prompt=2)
    assert [backwards.choose(z, position) for position in reversed(range(20))][::-1] == base
    for changed in (Sampled(strategy, seed=2, prompt=2), Sampled(strategy, seed=1, prompt=3)):
        assert [changed.choose(z, position) for position in range(20)] != base
    assert len(set(base)) > 15


@pytest.mark.parametrize("coupling", ["uniform", "gumbel"])
def test_frequencies_are_those_of_the_softmax(coupling) -> None:
    z = torch.tensor([0.0, 1.0, -0.5, 2.0])
    policy = Sampled(Strategy(temperature=1.5), coupling=coupling)
    n = 2000
    counts = torch.bincount(torch.tensor([policy.choose(z, position) for position in range(n)]), minlength=4)
    p = torch.softmax(z.double() / 1.5, 0)
    chi2 = float(((counts - n * p) ** 2 / (n * p)).sum())
    assert chi2 < 16.27  # 99.9 % of chi-squared with 3 degrees of freedom


def test_a_small_shift_of_the_logits_rarely_changes_the_token_and_a_large_one_often() -> None:
    policy = Sampled(Strategy(temperature=1.0))
    changed = {}
    for size in (1e-6, 1.0):
        shifted = [logits(i) + size * logits(1000 + i, scale=1.0) for i in range(200)]
        changed[size] = sum(policy.choose(logits(i), i) != policy.choose(shifted[i], i) for i in range(200))
    assert changed[1e-6] == 0
    assert changed[1.0] > 20


def test_top_k_and_top_p_keep_what_they_say() -> None:
    z = torch.tensor([1.0, 3.0, 2.0, 3.0, 0.0])
    kept = Strategy(temperature=1.0, top_k=1).log_probabilities(z)
    assert torch.isfinite(kept).nonzero().flatten().tolist() == [1]  # tie of tokens 1 and 3: lowest id
    p = torch.softmax(z.double(), 0)
    just_below, just_above = float(2 * p[1]) - 1e-9, float(2 * p[1]) + 1e-9
    two = Strategy(temperature=1.0, top_p=just_below).log_probabilities(z)
    three = Strategy(temperature=1.0, top_p=just_above).log_probabilities(z)
    assert torch.isfinite(two).nonzero().flatten().tolist() == [1, 3]
    assert torch.isfinite(three).nonzero().flatten().tolist() == [1, 2, 3]
    assert two.exp().sum() == pytest.approx(1.0, abs=1e-12)


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    policy = Sampled(Strategy())
    assert policy.choose(torch.tensor([0.0, 5.0, 5.0]), 0) == 1
    assert policy.choose(torch.tensor([0.0, 4.9, 5.0]), 0) == 2


def test_a_run_ends_after_a_stop_token_and_not_before() -> None:
    policy = Sampled(Strategy(), stop=[2])
    assert policy.next_tokens(torch.tensor([0.0, 5.0, 1.0]), 4) == [1]
    assert policy.next_tokens(torch.tensor([0.0, 1.0, 5.0]), 5) == [2]
    assert policy.next_tokens(torch.tensor([0.0, 5.0, 1.0]), 6) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": 3},
        {"temperature": 0.0},
        {"temperature": math.nan},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "top_k": 0},
        {"temperature": 1.0, "top_p": 1.5},
    ],
)
def test_contradictory_strategies_are_refused(wrong: dict) -> None:
    with pytest.raises(InputError, match="impossible strategy"):
        Strategy(**wrong)
