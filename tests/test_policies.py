"""Token policies: forced tokens in chunks, greedy with ties to the lowest id, and choices noted for a second path."""

import pytest
import torch

from mechkv.paths import decode
from mechkv.policies import Forced, Greedy, Noted, TokenPolicy
from tests.helpers import FED, N_PROMPT


def test_forced_tokens_come_in_order_and_end():
    policy = Forced([3, 1, 4, 1, 5])
    assert [policy.next_tokens(torch.zeros(9), n) for n in (2, 3, 4, 5)] == [[4], [1], [5], []]
    assert Forced([3, 1, 4, 1, 5], chunk=2).next_tokens(torch.zeros(9), 2) == [4, 1]
    assert Forced([3, 1, 4, 1, 5], chunk=2).next_tokens(torch.zeros(9), 4) == [5]
    assert Forced([3, 1, 4, 1, 5], chunk=None).next_tokens(torch.zeros(9), 2) == [4, 1, 5]


def test_forced_tokens_may_grow_meanwhile():
    tokens = [3, 1]
    policy = Forced(tokens, chunk=None)
    assert policy.next_tokens(torch.zeros(9), 2) == []
    tokens += [7, 8]
    assert policy.next_tokens(torch.zeros(9), 2) == [7, 8]


def test_greedy_takes_the_largest_and_of_equals_the_first():
    assert Greedy().next_tokens(torch.tensor([0.0, 2.0, 1.0, 2.0]), 4) == [1]
    assert Greedy().next_tokens(torch.tensor([0.0, 2.0, 1.0, 2.5]), 4) == [3]


def test_greedy_ends_after_a_stop_token_was_processed(shared_bridge):
    model = shared_bridge()
    free = list(decode(model, FED[:N_PROMPT], path="cached", policy=Greedy(), n_steps=6))
    chosen = [int(step.tokens[-1]) for step in free[1:]]
    stop = chosen[2]
    first = chosen.index(stop)
    ended = list(decode(model, FED[:N_PROMPT], path="cached", policy=Greedy(stop=[stop]), n_steps=6))
    assert len(ended) == first + 2
    assert int(ended[-1].tokens[-1]) == stop
    assert len(free) == 7


def test_noted_choices_are_those_of_the_policy():
    notes = [9]
    policy = Noted(Forced([1, 2, 3]), notes)
    assert policy.next_tokens(torch.zeros(4), 1) == [2]
    assert policy.next_tokens(torch.zeros(4), 3) == []
    assert notes == [9, 2]


@pytest.mark.parametrize("policy", [Forced([1]), Greedy(), Noted(Greedy(), [])])
def test_all_are_token_policies(policy):
    assert isinstance(policy, TokenPolicy)
    assert not isinstance(object(), TokenPolicy)
