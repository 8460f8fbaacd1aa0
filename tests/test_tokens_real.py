"""SmolLM2 with its real weights: float32 on both paths writes the same text, and LayerCast is the float32 model."""

import pytest
import torch

import mechkv
from mechkv.divergence import TokenDivergenceConfig, token_divergence
from mechkv.paths import decode
from mechkv.policies import Forced, Strategy
from mechkv.precision_policy import SITES, lifted
from mechkv.prompts import format_prompt, word_problems
from mechkv.rebuilding import recast

pytestmark = pytest.mark.real


def prompts(n: int) -> list[str]:
    return sorted((format_prompt(problem) for problem in word_problems()), key=len)[:n]


def test_float32_on_both_paths_writes_the_same_text_under_every_strategy() -> None:
    model = mechkv.load_model("smollm2-135m", dtype="float32")
    found = token_divergence(model, prompts(3), TokenDivergenceConfig(n_tokens=8))
    assert not found.frame["differs"].any()
    assert (found.outcomes["n_differ"] == 0).all()
    assert not found.frame["flip"].any()
    assert found.frame["kl"].max() > 0  # the paths do differ, in the last bits
    noise = found.sampling_noise().set_index(["strategy", "draws"])["prompts_differ"]
    assert noise["temperature 1", "noise"] == 1


def test_blocks_are_full_passes_in_bfloat16_and_greedy_and_sampled_texts_agree_with_plain_decodes() -> None:
    model = mechkv.load_model("smollm2-135m", dtype="bfloat16")
    config = TokenDivergenceConfig(n_tokens=4, strategies=(Strategy(),), recompute="block")
    found = token_divergence(model, prompts(1), config)
    assert found.guards["block_is_full_pass"] == 1


def test_all_sites_lifted_are_bitwise_the_float32_model() -> None:
    half = mechkv.load_model("smollm2-135m", dtype="bfloat16")
    tokens = torch.tensor(half.tokenizer(prompts(1)[0])["input_ids"])

    def logits(model, path):
        steps = decode(model, tokens[:-3], path=path, policy=Forced(tokens.tolist()), n_steps=3)
        return torch.stack([step.logits for step in steps])

    exact = {path: logits(recast(half, "float32"), path) for path in ("cached", "recomputed")}
    with lifted(half, SITES):
        for path, values in exact.items():
            assert torch.equal(logits(half, path), values)
