"""SmolLM2 with its real weights: float32 on both paths writes the same text, and LayerCast is the float32 model."""

from dataclasses import replace

import pytest
import torch

import mechkv
from experiments import token_divergence as token_divergence_study
from mechkv.divergence import TokenDivergenceConfig, token_divergence
from mechkv.errors import InputError
from mechkv.paths import decode
from mechkv.policies import Forced
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


@pytest.mark.parametrize("preset", list(token_divergence_study.PRESETS))
def test_every_preset_finds_the_problems_it_asks_for(preset) -> None:
    config = token_divergence_study.PRESETS[preset]
    tokenizer = mechkv.load_model("smollm2-135m", dtype="float32").tokenizer
    found = token_divergence_study.chosen(config, tokenizer)
    short = config.longest_prompt is None or config.longest_prompt >= 139  # the longest of the package's problems
    assert len(found) == min(config.n_prompts, 88) if short else len(found) >= min(config.n_prompts, 10)
    with pytest.raises(InputError, match="no problem is short enough"):
        token_divergence_study.chosen(replace(config, longest_prompt=5), tokenizer)


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
