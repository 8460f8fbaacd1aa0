"""Which tokens are decoded? Prompts, given as texts or as token tensors, become checked token tensors.

Conventions
    One int64 tensor of shape [pos] a prompt: batch size is 1 on both paths, so there is no padding.
    Texts are tokenised as the given tokenizer does by default. That of a bridge is TransformerLens' own copy, which
    puts a begin-of-text token first wherever there is one, even where the model's own tokenizer leaves it out
    (SmolLM2): for other tokens pass tensors. A `ChatText`, made by `prompts.chat_prompt`, holds its special tokens and
    gets none on top, as `apply_chat_template` has it. Tensors are taken as they are (a copy, on their own device).
Controls
    Nothing is cut, padded or cast: a prompt that cannot be used is an `InputError` that names its index.
"""

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from mechkv.errors import InputError
from mechkv.prompts import ChatText


def as_tokens(
    tokenizer: Any,
    prompts: Iterable[object],
    *,
    vocab_size: int,
    max_positions: int | None,
    n_new_tokens: int = 0,
    add_special_tokens: bool = True,
) -> list[Int[Tensor, "_pos"]]:
    """Token tensors for a list of prompts, each a text or an int64 tensor [pos].

    Refused: an empty list or prompt, ids outside `vocab_size`, another dtype or shape, a doubled begin-of-text token,
    and prompts that with `n_new_tokens` to come are longer than `max_positions` (None: the model has no limit).
    `tokenizer` may be None where all prompts are tensors. A `ChatText` never gets special tokens, whatever
    `add_special_tokens` says for the other texts.
    """
    if isinstance(prompts, (str, Tensor)):
        raise InputError(
            "prompts",
            got=f"a single {type(prompts).__name__}",
            expected="a list of texts or token tensors",
            remedy="Put it into a list: [prompt].",
        )
    if not isinstance(prompts, Iterable):
        raise InputError(
            "prompts",
            got=type(prompts).__name__,
            expected="a list of texts or token tensors",
            remedy="Give at least one: ['The capital of France is'].",
        )
    result = []
    for index, prompt in enumerate(prompts):
        where = f"prompt {index}"
        if isinstance(prompt, str):
            tokens = _tokenised(tokenizer, prompt, where, add_special_tokens and not isinstance(prompt, ChatText))
        elif isinstance(prompt, Tensor):
            tokens = _checked(prompt, where)
        else:
            raise InputError(
                where,
                got=f"a {type(prompt).__name__}",
                expected="a text or a token tensor",
                remedy="For a list of ids use torch.tensor(ids); for a problem use format_prompt(problem).",
            )
        _check_ids(tokens, where, vocab_size)
        _check_length(tokens, where, max_positions, n_new_tokens)
        result.append(tokens)
    if not result:
        raise InputError("prompts", got="an empty list", expected="at least one prompt", remedy="Pass some prompts.")
    return result


def _tokenised(tokenizer: Any, text: str, where: str, add_special_tokens: bool) -> Int[Tensor, " pos"]:
    if tokenizer is None:
        raise InputError(
            where,
            got="a text, but the model has no tokenizer",
            expected="token tensors where there is no tokenizer",
            remedy="Pass tokens, or give the model a tokenizer.",
        )
    if not text.strip():
        raise InputError(where, got=f"the text {text!r}", expected="a text with words", remedy="Leave it out.")
    ids = list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
    if not ids:
        raise InputError(
            where, got=f"no tokens for {text[:40]!r}", expected="at least one", remedy="Check text and tokenizer."
        )
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is not None and ids[:2] == [bos, bos]:
        raise InputError(
            where,
            got=f"two begin-of-text tokens (id {bos}) at the start",
            expected="one at most",
            remedy="The text holds one already: make it with chat_prompt, wrap it in mechkv.prompts.ChatText(text), or "
            "pass tokens, made with add_special_tokens=False.",
        )
    return torch.tensor(ids, dtype=torch.int64)


def _checked(tokens: Tensor, where: str) -> Int[Tensor, " pos"]:
    if tokens.ndim != 1:
        raise InputError(
            where,
            got=f"a tensor of shape {list(tokens.shape)}",
            expected="shape [pos], one prompt without a batch axis",
            remedy="Split a batch into its rows, without padding: list(tokens).",
        )
    if tokens.dtype != torch.int64:
        raise InputError(
            where,
            got=f"a tensor of {tokens.dtype}",
            expected="token ids in torch.int64",
            remedy="Convert it yourself if these are ids: tokens.long().",
        )
    if tokens.is_meta:
        raise InputError(
            where, got="a tensor on the meta device, which holds no ids", expected="ids on a device that computes",
            remedy="Make them anew: torch.tensor(ids).",
        )  # fmt: skip
    if tokens.numel() == 0:
        raise InputError(where, got="no tokens", expected="at least one", remedy="Leave this prompt out.")
    return tokens.detach().clone()


def _check_ids(tokens: Int[Tensor, " pos"], where: str, vocab_size: int) -> None:
    outside = ((tokens < 0) | (tokens >= vocab_size)).nonzero()
    if len(outside):
        position = int(outside[0])
        raise InputError(
            where,
            got=f"id {int(tokens[position])} at position {position}",
            expected=f"ids from 0 to {vocab_size - 1}",
            remedy="Use the tokenizer that belongs to the model.",
        )


def _check_length(tokens: Int[Tensor, " pos"], where: str, max_positions: int | None, n_new_tokens: int) -> None:
    if max_positions is not None and len(tokens) + n_new_tokens > max_positions:
        raise InputError(
            where,
            got=f"{len(tokens)} tokens and {n_new_tokens} to come",
            expected=f"at most {max_positions} positions, the model's context",
            remedy="Shorten the prompt or decode fewer tokens.",
        )
