"""Which text is decoded, and which number does it arrive at? Word problems, prompts made of them, answers read back.

Conventions
    A problem is a question and a worked answer whose last line is `#### N` (GSM8K's own JSONL format: one object with
    `question` and `answer` a line). Its number and its id follow from these two texts, so nothing can contradict them.
    A number is a `Decimal`: `2,125`, `2125` and `2125.00` are the same answer, and no rounding enters the score.
    A chat prompt is a `ChatText`: its template has put the special tokens in, so no analysis adds any to it.
Controls
    The shipped problems were invented for this package; the tests evaluate every equation in their answers, solve each
    one a second time, and check that no run of words is shared with GSM8K.

Turning prompts into token tensors needs torch and lives in `mechkv.tokens`; this module imports without it.
"""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from mechkv.errors import InputError

TEMPLATES = {
    "question": "Question: {question}\nAnswer:",
    "stepwise": "Question: {question}\nThink step by step. End with a line that holds '#### ' and the number.\nAnswer:",
    "bare": "{question}",
}

# A minus counts as a sign unless it follows a letter, a digit, '%' or a closing bracket ('16-3' is 16 and 3).
# Digits that follow a letter belong to a word ('H2O').
_NUMBER = (
    r"(?P<sign>(?<![0-9A-Za-z%)\]}])[-\u2212])?\$?(?P<inner>(?<=\$)[-\u2212])?(?<![0-9A-Za-z_])"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<!\.)\.[0-9]+)"
)
_ANY_NUMBER = re.compile(_NUMBER)
_MARKED_NUMBER = re.compile(r"####[ \t*]*" + _NUMBER)
_GOLD_NUMBER = re.compile(r"(?:^|\n)####[ \t]*" + _NUMBER + r"\s*\Z")
_NEXT_QUESTION = re.compile(r"\n[ \t]*Question:")


@dataclass(frozen=True)
class Problem:
    """A question and its worked answer, whose last line is `#### N`."""

    question: str
    answer: str

    def __post_init__(self) -> None:
        for name, text in (("question", self.question), ("answer", self.answer)):
            if not text.strip():
                raise InputError(name, got="no text", expected="some text", remedy=f"Fill in the {name}.")
            if any("\ud800" <= char <= "\udfff" for char in text):
                raise InputError(
                    name,
                    got="half of a surrogate pair",
                    expected="valid Unicode",
                    remedy="Save the text as UTF-8 again.",
                )
        if _GOLD_NUMBER.search(self.answer) is None:
            raise InputError(
                "answer",
                got=f"an answer that ends in {self.answer.rstrip()[-40:]!r}",
                expected="a last line '#### N' with a number N",
                remedy="Add that line; GSM8K's files have it.",
            )

    @cached_property
    def number(self) -> Decimal:
        """The number N of the answer's last line."""
        match = _GOLD_NUMBER.search(self.answer)
        assert match is not None  # __post_init__ refuses the rest
        return _decimal(match)

    @cached_property
    def id(self) -> str:
        """The first 12 hexadecimal digits of the question's SHA-256: the same in every file, order and version."""
        return hashlib.sha256(self.question.encode()).hexdigest()[:12]


class ChatText(str):
    """A text that holds its special tokens already, as `chat_prompt` makes it: every analysis tokenises it with
    `add_special_tokens=False`. What is made of it by `+` or a format is an ordinary text again; wrap that anew."""


def word_problems() -> list[Problem]:
    """The word problems shipped with the package, in their fixed order."""
    file = resources.files("mechkv").joinpath("data/word_problems.jsonl")
    return _parse(file.read_bytes(), "word_problems.jsonl")


def load_problems(path: str | os.PathLike[str]) -> list[Problem]:
    """Read problems from a file in GSM8K's JSONL format.

    A byte order mark, Windows line ends, blank lines and further keys are accepted. Anything else that is not a
    problem, and a question that occurs twice, is an `InputError` that names the line.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(
            f"problems file {os.fspath(path)!r}",
            got=error.strerror or type(error).__name__,
            expected="a readable file",
            remedy="Check the path; word_problems() needs no file.",
        ) from error
    return _parse(data, Path(path).name)


def final_number(text: str) -> Decimal | None:
    """The number that a worked answer arrives at, or None where it names none.

    Pass what was generated, without the prompt. The rule, in this order:

    1. A line after the first that begins with `Question:` and everything behind it is dropped: there a few-shot
       continuation has gone on to a question of its own.
    2. The first `####` that a number follows directly (blanks and `*` between them are skipped) decides.
    3. Without such a marker the last number in the text decides, whatever stands around it.

    A number is written with the digits 0-9: commas only between groups of three (`1,234,567`), then an optional
    decimal part (`.50` alone is a number too). A `$` before it, a unit or `%` after it (20% is 20) and a full stop at
    the end are not part of it. A minus, ASCII or U+2212, directly before the number or its `$` (or between the two)
    makes it negative, unless it follows a letter, digit, `%` or closing bracket: `16-3` is 16 and 3. Digits right after
    a letter or `_` are part of a word. Fractions, powers and sums are not evaluated (`3/4` is 3 and 4), and words are
    not read (`twelve`).
    """
    later = _NEXT_QUESTION.search(text)
    text = text[: later.start()] if later else text
    marked = _MARKED_NUMBER.search(text)
    if marked:
        return _decimal(marked)
    found = list(_ANY_NUMBER.finditer(text))
    return _decimal(found[-1]) if found else None


def format_prompt(problem: Problem | str, *, shots: Sequence[Problem] = (), template: str = "question") -> str:
    """The prompt for a problem or question, behind worked examples where `shots` are given.

    `template` is one of `TEMPLATES`. Prompt and answer of a shot are joined by a blank, shots by an empty line.

    Raises:
        InputError: No text, another template, or a shot that is no problem or is the one asked.
    """
    if template not in TEMPLATES:
        raise InputError(
            "prompt template", got=repr(template), expected=f"one of {sorted(TEMPLATES)}", remedy="Choose one of these."
        )
    question = _asked(problem.question if isinstance(problem, Problem) else problem)
    stranger = next((shot for shot in shots if not isinstance(shot, Problem)), None)
    if stranger is not None:
        raise InputError(
            "worked examples (shots)",
            got=f"a {type(stranger).__name__}",
            expected="problems with their answers",
            remedy="Make one: Problem(question, answer).",
        )
    if any(shot.question.strip() == question.strip() for shot in shots):
        raise InputError(
            "worked examples (shots)",
            got=f"the question asked, {question[:40]!r}, with its answer",
            expected="other problems only",
            remedy="Take the shots from problems that are not asked.",
        )
    wording = TEMPLATES[template]
    blocks = [f"{wording.format(question=shot.question)} {shot.answer}" for shot in shots]
    return "\n\n".join([*blocks, wording.format(question=question)])


def chat_prompt(tokenizer: Any, question: str) -> ChatText:
    """The question as one user turn in the tokenizer's own chat format, ready for the model's reply.

    Every analysis takes the result as it is, and feeds the tokens of `apply_chat_template`: the template has put the
    special tokens in, so none is added (see `ChatText`). To tokenise it yourself, pass `add_special_tokens=False`.

    Raises:
        InputError: No text, or a tokenizer without a chat template that takes a single user turn.
    """
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    _asked(question)
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"chat format of tokenizer {name!r}",
            got="no chat template",
            expected="a tokenizer with a chat template",
            remedy="Use format_prompt (base models have no chat format), or set tokenizer.chat_template.",
        )
    turn = [{"role": "user", "content": question}]
    from jinja2 import TemplateError  # only here: the command line's help needs no template engine

    try:
        return ChatText(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
    except (TemplateError, ValueError) as error:
        raise InputError(
            f"chat format of tokenizer {name!r}",
            got=f"{type(error).__name__}: {error}",
            expected="a template that takes a single user turn",
            remedy="Use format_prompt, or set another tokenizer.chat_template.",
        ) from error


def sample(problems: Sequence[Problem], n: int, seed: int | None = None) -> list[Problem]:
    """`n` of the problems: the first `n` without a seed, else a choice that depends on seed and ids alone.

    With a seed, problems are ordered by the SHA-256 of seed and id. So the choice is the same on every platform and for
    every order of the file, and a larger `n` keeps what a smaller one chose.
    """
    if type(n) is not int or not 1 <= n <= len(problems):
        raise InputError(
            "number of problems to take",
            got=n,
            expected=f"1 to {len(problems)}, which is what there is",
            remedy="Ask for fewer, or load more problems.",
        )
    if seed is None:
        return list(problems[:n])
    return sorted(problems, key=lambda problem: hashlib.sha256(f"{seed}:{problem.id}".encode()).digest())[:n]


def _asked(question: object) -> str:
    if not isinstance(question, str):
        raise InputError(
            "question", got=f"a {type(question).__name__}", expected="a text or a Problem",
            remedy="Pass the question's text, or one of word_problems().",
        )  # fmt: skip
    if not question.strip():
        raise InputError("question", got="no text", expected="some text", remedy="Leave this prompt out.")
    return question


def _decimal(match: re.Match[str]) -> Decimal:
    value = Decimal(match["digits"].replace(",", ""))
    return -value if match["sign"] or match["inner"] else value


def _parse(data: bytes, source: str) -> list[Problem]:
    lines: dict[str, int] = {}
    problems: list[Problem] = []
    # Split at line feeds only: JSON strings may hold other characters that str.splitlines takes for line ends.
    for number, line in enumerate(_decode(data, source).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{source}, line {number}"
        problem = _problem(line, where)
        if problem.id in lines:
            raise InputError(
                where,
                got=f"the question of line {lines[problem.id]} again",
                expected="every question once (intervals resample problems)",
                remedy="Delete one of the two lines.",
            )
        lines[problem.id] = number
        problems.append(problem)
    if not problems:
        raise InputError(
            source, got="no problem", expected="at least one line", remedy="Check that the file is complete."
        )
    return problems


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{source}, line {line}",
            got=f"the byte {data[error.start]:#04x}, which is not UTF-8",
            expected="UTF-8 text",
            remedy="Save the file as UTF-8.",
        ) from error


def _problem(line: str, where: str) -> Problem:
    expected = 'one JSON object with the texts "question" and "answer"'
    remedy = "Write one object a line, as GSM8K's files do."
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(where, got=f"{line.strip()[:60]!r} ({error})", expected=expected, remedy=remedy) from error
    if not isinstance(item, dict):
        raise InputError(where, got=f"a JSON {type(item).__name__}", expected=expected, remedy=remedy)
    for key in ("question", "answer"):
        if not isinstance(item.get(key), str):
            got = f'"{key}" of type {type(item[key]).__name__}' if key in item else f"the keys {sorted(item)}"
            raise InputError(where, got=got, expected=expected, remedy=remedy)
    try:
        return Problem(item["question"], item["answer"])
    except InputError as error:
        raise InputError(
            f"{where}: {error.what}", got=error.got, expected=error.expected, remedy=error.remedy
        ) from error
