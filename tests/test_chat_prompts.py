"""A chat prompt is fed as its template wrote it, in every analysis: no special token on top, none missing."""

import pandas as pd
import pytest
import torch

import mechkv
from mechkv.divergence import TokenDivergenceConfig
from mechkv.drift import DriftConfig
from mechkv.errors import InputError
from mechkv.factorial import FactorialConfig
from mechkv.heads import HeadConfig
from mechkv.oracle import OracleConfig, oracle_study
from mechkv.prompts import ChatText, chat_prompt
from mechkv.tokens import as_tokens
from tests.tiny import tiny_hf, tiny_tokenizer

TURNS = "{% for m in messages %}w1 {{ m['content'] }}{% endfor %}{% if add_generation_prompt %} w2{% endif %}"
QUESTION = "w7 w8 w9"
CHAT = [1, 7, 8, 9, 2]
BOS = 98


def model(template: str):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return mechkv.from_hf(tiny_hf(), tokenizer)


@pytest.fixture(scope="module")
def with_bos():
    return model("{{ bos_token }} " + TURNS)


@pytest.mark.parametrize(("template", "ids"), [("{{ bos_token }} " + TURNS, [BOS, *CHAT]), (TURNS, CHAT)])
def test_the_tokens_are_those_of_the_template(template, ids):
    bridge = model(template)
    prompt = chat_prompt(bridge.tokenizer, QUESTION)
    found = mechkv.drift_profile(bridge, [prompt], DriftConfig(n_steps=1), control=None).prompts
    assert found["tokens"][0][: found["n_prompt"][0]].tolist() == ids
    turn = [{"role": "user", "content": QUESTION}]
    assert bridge.tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"] == ids


def test_other_texts_still_get_their_special_tokens(with_bos):
    prompt = chat_prompt(with_bos.tokenizer, QUESTION)
    limits = {"vocab_size": 101, "max_positions": None}
    chat, plain = as_tokens(with_bos.tokenizer, [prompt, QUESTION], **limits)
    assert (chat.tolist(), plain.tolist()) == ([BOS, *CHAT], [BOS, 7, 8, 9])


def test_a_chat_prompt_that_became_an_ordinary_text_is_refused_with_the_way_out(with_bos):
    joined = chat_prompt(with_bos.tokenizer, QUESTION) + " w3"
    config = DriftConfig(n_steps=1)
    with pytest.raises(InputError, match=r"two begin-of-text tokens.*ChatText\(text\)"):
        mechkv.drift_profile(with_bos, [joined], config, control=None)
    found = mechkv.drift_profile(with_bos, [ChatText(joined)], config, control=None).prompts
    assert found["tokens"][0][: found["n_prompt"][0]].tolist() == [BOS, *CHAT, 3]


@pytest.mark.parametrize(
    "analyse",
    [
        lambda m, p: mechkv.causal_factorial(m, p, FactorialConfig(n_steps=2)).frame,
        lambda m, p: mechkv.token_divergence(m, p, TokenDivergenceConfig(n_tokens=2)).frame,
        lambda m, p: mechkv.head_analysis(m, p, HeadConfig(n_steps=2), control=None).frame,
        lambda m, p: oracle_study(m, p, OracleConfig(n_steps=2, floor_every=2)).frame,
        lambda m, p: mechkv.check(m, prompts=p, dtypes=("float32",), n_steps=2).frame,
    ],
    ids=["factorial", "tokens", "heads", "oracle", "check"],
)
def test_every_analysis_feeds_the_same_tokens(analyse, with_bos):
    chat = analyse(with_bos, [chat_prompt(with_bos.tokenizer, QUESTION)])
    pd.testing.assert_frame_equal(chat, analyse(with_bos, [torch.tensor([BOS, *CHAT])]))
    assert not chat.equals(analyse(with_bos, [torch.tensor(CHAT)]))
