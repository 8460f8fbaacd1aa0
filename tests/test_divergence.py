"""Both clocks on tiny models: what is predicted from a plain decode of each path, and from drift that was planted."""

import numpy as np
import pandas as pd
import pytest
import torch

from mechkv.divergence import STRATEGIES, TokenDivergence, TokenDivergenceConfig, token_divergence
from mechkv.divergence_measure import measure_prompt
from mechkv.errors import InputError
from mechkv.paths import decode
from mechkv.policies import Sampled, Strategy
from tests.planted import planted
from tests.tiny import tiny_bridge, tokens

N = 12
TOP_P = Strategy(temperature=1.0, top_p=0.9)


@pytest.fixture(scope="module")
def model():
    return tiny_bridge("llama-gqa", dtype=torch.float32)


def written(model, given, path, strategy, stop=(), **draws) -> list[int]:
    """What a plain free-running decode of one path writes."""
    policy, chosen = Sampled(strategy, stop=stop, **draws), []
    judge = Sampled(strategy, **draws)
    for step in decode(model, given, path=path, policy=policy, n_steps=N - 1):
        chosen.append(judge.choose(step.logits, len(step.tokens)))
        if chosen[-1] in stop:
            break
    return chosen


def test_float32_with_common_random_numbers_differs_nowhere() -> None:
    for family in ("llama-gqa", "gemma3"):
        found = token_divergence(
            tiny_bridge(family), [tokens(9, seed) for seed in range(2)], TokenDivergenceConfig(n_tokens=N)
        )
        assert not found.frame["differs"].any()
        assert (found.outcomes["n_differ"] == 0).all()
        assert found.outcomes["first_common"].isna().all()
        # the same run with draws of its own differs for every sampled prompt: that is luck alone
        noise = found.sampling_noise().set_index(["strategy", "draws"])["prompts_differ"]
        assert noise["top-p 0.9", "common"] == 0
        assert noise["top-p 0.9", "noise"] == 1
        assert noise["greedy", "noise"] == 0


@pytest.mark.parametrize("strategy", [Strategy(), TOP_P], ids=lambda s: s.name)
def test_both_texts_are_those_of_two_plain_decodes(model, strategy) -> None:
    differed = 0
    for label in range(3):
        prompt = tokens(9, seed=label)
        with planted(model, 0.4):
            found = measure_prompt(model, prompt, strategy, n_tokens=N, seed=1, label=label)
            plain = {
                path: written(model, prompt, path, strategy, seed=1, prompt=label) for path in ("cached", "recomputed")
            }
        assert found.cached.tokens == plain["cached"]
        assert found.recomputed.tokens == plain["recomputed"]
        pairs = list(zip(plain["cached"], plain["recomputed"], strict=True))
        first = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        assert found.first["common"] == first
        assert len(found.cached.top1_prob) == len(found.recomputed.top1_prob) == N
        differed += first is not None
    assert differed  # the planted drift is large enough for the case to occur


def test_independent_draws_give_the_first_divergence_of_two_such_decodes(model) -> None:
    prompt = tokens(9, seed=4)
    found = measure_prompt(model, prompt, TOP_P, n_tokens=N, label=4)
    ours = written(model, prompt, "cached", TOP_P, prompt=4)
    theirs = written(model, prompt, "recomputed", TOP_P, prompt=4, stream="independent")
    assert found.first["independent"] == next(i for i, (x, y) in enumerate(zip(ours, theirs, strict=True)) if x != y)


def test_a_stop_token_ends_each_path_where_it_wrote_it(model) -> None:
    prompt = tokens(9, seed=0)
    stop = (written(model, prompt, "cached", Strategy())[4],)
    with planted(model, 0.4):
        found = measure_prompt(model, prompt, Strategy(), n_tokens=N, stop=stop)
        for text, path in ((found.cached, "cached"), (found.recomputed, "recomputed")):
            assert text.tokens == written(model, prompt, path, Strategy(), stop=stop)
            assert text.ended == (text.tokens[-1] in stop)
    assert any(text.ended for text in (found.cached, found.recomputed))


def test_three_rates_stand_together_and_grow_with_the_planted_drift(model) -> None:
    prompts, config = [tokens(9, s) for s in range(4)], TokenDivergenceConfig(n_tokens=N, strategies=(Strategy(),))
    sums = []
    for size in (0.0, 1.0):
        with planted(model, size):
            rates = token_divergence(model, prompts, config).rates()
        assert rates["clock"].tolist() == ["free-running", "free-running", "teacher-forced"]
        assert rates["of"].tolist() == [4, 4 * N, 4 * (N - 1)]
        assert ((rates["low"] <= rates["estimate"]) & (rates["estimate"] <= rates["high"])).all()
        steps = token_divergence(model, prompts, config).steps_summary().set_index("metric")
        assert (steps["low"] >= 0).all()
        assert (steps.loc[["flip", "tie_a", "tv", "top5_overlap", "certified"], "high"] <= 1).all()
        sums.append(rates["estimate"].to_numpy())
    assert (sums[0] == 0).all()
    assert (sums[1] > 0).all()
    assert sums[1][0] > sums[1][2]


def test_survival_counts_agreeing_texts_as_censored() -> None:
    first = pd.array([2, pd.NA, 2, pd.NA], dtype="Int64")
    outcomes = pd.DataFrame({"strategy": "greedy", "prompt": range(4), "n_compared": [8, 8, 8, 2]})
    outcomes = outcomes.assign(first_common=first, n_aligned=8, n_differ=[6, 0, 6, 0])
    empty = pd.DataFrame()
    result = TokenDivergence(empty, outcomes, empty, TokenDivergenceConfig(), {}, {})
    curve = result.survival().set_index("time")
    # two of four agree through token 2 and no further (index 2 is token 3); one is censored at token 2
    assert curve.loc[3.0, "at_risk"] == 3
    assert curve.loc[3.0, "survival"] == pytest.approx(1 / 3)


def test_results_resume_save_and_load(model, tmp_path) -> None:
    prompts = [tokens(9, seed) for seed in range(2)]
    config = TokenDivergenceConfig(n_tokens=4, strategies=(Strategy(), TOP_P), n_repeats=1)
    first = token_divergence(model, prompts, config, folder=tmp_path / "run")
    with planted(model, 5.0):  # would change every number, were anything computed again
        again = token_divergence(model, prompts, config, folder=tmp_path / "run")
    pd.testing.assert_frame_equal(first.frame, again.frame)
    loaded = TokenDivergence.load(first.save(tmp_path / "result"))
    pd.testing.assert_frame_equal(loaded.outcomes, first.outcomes)
    assert loaded.config == config
    assert np.array_equal(loaded.generations["tokens"][0], first.generations["tokens"][0])


@pytest.mark.parametrize("wrong", [{"n_tokens": 1}, {"n_repeats": 0}, {"strategies": ()}])
def test_impossible_configurations_are_refused(wrong) -> None:
    with pytest.raises(InputError):
        TokenDivergenceConfig(**wrong)
    with pytest.raises(InputError, match="each once"):
        TokenDivergenceConfig(strategies=(STRATEGIES[0], STRATEGIES[0]))
