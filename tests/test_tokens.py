"""Tokens: texts as the tokenizer reads them, tensors as they are, everything else refused with the prompt's index."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from mechkv.errors import InputError
from mechkv.tokens import as_tokens

VOCABULARY = {"<bos>": 0, "<unk>": 1, "how": 2, "many": 3, "eggs": 4, "hens": 5}
LIMITS = {"vocab_size": 6, "max_positions": 8}


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(WordLevel(VOCABULARY, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<bos>", unk_token="<unk>")


def test_texts_and_tensors_become_token_tensors(tokenizer):
    given = torch.tensor([5, 4, 3])
    text, tensor = as_tokens(tokenizer, ["how many eggs", given], **LIMITS)
    assert text.tolist() == [0, 2, 3, 4]
    assert tensor.tolist() == [5, 4, 3]
    assert text.dtype == tensor.dtype == torch.int64
    tensor[0] = 0
    assert given.tolist() == [5, 4, 3]


def test_begin_of_text_is_added_by_default_only(tokenizer):
    (without,) = as_tokens(tokenizer, ["how many eggs"], add_special_tokens=False, **LIMITS)
    assert without.tolist() == [2, 3, 4]
    (once,) = as_tokens(tokenizer, ["<bos> how many"], add_special_tokens=False, **LIMITS)
    assert once.tolist() == [0, 2, 3]
    with pytest.raises(InputError, match=r"prompt 0: got two begin-of-text tokens \(id 0\).*add_special_tokens=False"):
        as_tokens(tokenizer, ["<bos> how many"], **LIMITS)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("", "got the text ''"),
        (" \n", "a text with words"),
        ("eggs " * 8, r"got 9 tokens and 0 to come; expected at most 8"),
        (torch.tensor([], dtype=torch.int64), "no tokens"),
        (torch.tensor([1, 6]), "got id 6 at position 1; expected ids from 0 to 5"),
        (torch.tensor([1, 2, -1]), "got id -1 at position 2"),
        (torch.tensor([1.0, 2.0]), "torch.float32"),
        (torch.tensor([1, 2], dtype=torch.int32), "torch.int32.*tokens.long"),
        (torch.tensor([True]), "torch.bool"),
        (torch.tensor([[1, 2]]), r"shape \[1, 2\]"),
        (torch.tensor(3), r"shape \[\]"),
        (torch.arange(9) % 6, "got 9 tokens"),
        ([1, 2], "got a list"),
        (None, "got a NoneType"),
    ],
)
def test_a_bad_prompt_is_named_by_its_index(tokenizer, bad, says):
    with pytest.raises(InputError, match=f"^prompt 2: .*{says}"):
        as_tokens(tokenizer, ["how many", torch.tensor([2, 3]), bad], **LIMITS)


def test_the_context_must_hold_the_new_tokens_too(tokenizer):
    prompts = [torch.arange(8) % 6]
    assert len(as_tokens(tokenizer, prompts, **LIMITS)[0]) == 8
    assert len(as_tokens(tokenizer, prompts, vocab_size=6, max_positions=None, n_new_tokens=99)[0]) == 8
    with pytest.raises(InputError, match="got 8 tokens and 1 to come"):
        as_tokens(tokenizer, prompts, n_new_tokens=1, **LIMITS)


def test_a_tokenizer_larger_than_the_model_is_refused(tokenizer):
    with pytest.raises(InputError, match="got id 4 at position 3; expected ids from 0 to 3"):
        as_tokens(tokenizer, ["how many eggs"], vocab_size=4, max_positions=8)


@pytest.mark.parametrize("prompts", ["how many", torch.tensor([1, 2]), []])
def test_prompts_are_a_list(tokenizer, prompts):
    with pytest.raises(InputError, match=r"^prompts: got"):
        as_tokens(tokenizer, prompts, **LIMITS)


def test_without_a_tokenizer_tokens_work_and_texts_do_not():
    assert as_tokens(None, [torch.tensor([1])], **LIMITS)[0].tolist() == [1]
    with pytest.raises(InputError, match=r"prompt 0: .*no tokenizer"):
        as_tokens(None, ["how many"], **LIMITS)
