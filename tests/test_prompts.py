"""Prompts: answers are read by the written rule, bad files are refused by line, prompts are spelt as promised."""

import hashlib
import json
import os
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from mechkv.errors import InputError
from mechkv.prompts import (
    Problem,
    chat_prompt,
    final_number,
    format_prompt,
    load_problems,
    sample,
    word_problems,
)

ROOT = Path(__file__).resolve().parents[1]
GSM8K = Path(os.environ.get("MECHKV_GSM8K", ROOT.parent / "shared/data/gsm8k/test.jsonl"))
needs_gsm8k = pytest.mark.skipif(not GSM8K.is_file(), reason="GSM8K's test file is not there (set MECHKV_GSM8K)")


def test_ids_come_from_the_question_alone():
    problem = word_problems()[0]
    assert problem.id == hashlib.sha256(problem.question.encode()).hexdigest()[:12]
    assert Problem(problem.question, "1 + 1 = 2\n#### 2").id == problem.id
    assert Problem(problem.question + " ", problem.answer).id != problem.id


# GSM8K


@needs_gsm8k
def test_gsm8k_loads_and_every_number_is_read():
    problems = load_problems(GSM8K)
    assert len(problems) == 1319
    for problem in problems:
        independent = re.search(r"#### (-?[0-9,]+)$", problem.answer)
        assert independent is not None
        expected = int(independent[1].replace(",", ""))
        assert problem.number == final_number(problem.answer) == expected


@needs_gsm8k
def test_the_last_number_rule_reads_gsm8k_without_markers_too():
    problems = load_problems(GSM8K)
    unmarked = [final_number(problem.answer.replace("#### ", "So the answer is $") + ".") for problem in problems]
    assert unmarked == [problem.number for problem in problems]
    worked_only = [final_number(problem.answer.split("####")[0]) for problem in problems]
    assert worked_only != [problem.number for problem in problems]


# final_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16 - 3 = 13\n#### 13", "13"),
        ("#### 2,125", "2125"),
        ("####-7", "-7"),
        ("#### $1,450,000.50 in all", "1450000.50"),
        ("#### **18**", "18"),
        ("#### 5\nThen 6 more.\n#### 7", "5"),
        ("#### Step 2: add\nso 11\n#### 12 eggs", "12"),
        ("#### unknown, perhaps 3 or 4", "4"),
        ("She pays 12 dollars.", "12"),
        ("It is $20.", "20"),
        ("It is 20% of it", "20"),
        ("Ratio .75", "0.75"),
        ("2.50 each", "2.50"),
        ("a drop of -4 degrees", "-4"),
        ("a loss of -$35", "-35"),
        ("a loss of $-35", "-35"),
        ("a height of \N{MINUS SIGN}101", "-101"),
        ("that is 16-3", "3"),
        ("that is (16)-3", "3"),
        ("first 1,234,567 then", "1234567"),
        ("the list 1,2,3", "3"),
        ("half is 3/4", "4"),
        ("12 of H2O", "12"),
        ("\\boxed{18}", "18"),
        ("... 5", "5"),
        ("...5", "5"),
        ("version 1.2.3", "3"),
        ("9 eggs.\n\nQuestion: If 3 hens lay 4 eggs?\nAnswer: #### 12", "9"),
        ("Question: what is 6 * 7?\nAnswer: 42", "42"),
    ],
)
def test_final_number_follows_its_rule(text, number):
    assert final_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "no number", "twelve", "####", "H2O", "\nQuestion: 5 + 5?"])
def test_final_number_finds_none_where_there_is_none(text):
    assert final_number(text) is None


# Files


GOOD = {"question": "What is 1 + 1?", "answer": "1 + 1 = 2\n#### 2"}
OTHER = {"question": "What is 2 + 2?", "answer": "2 + 2 = 4\n#### 4"}


def test_bom_crlf_blank_lines_and_further_keys_are_accepted(tmp_path):
    third = {"question": "Line\u2028separator: 3 + 3?", "answer": "#### 6", "source": "mine"}
    lines = [json.dumps(GOOD), "", json.dumps(OTHER), "   ", json.dumps(third, ensure_ascii=False)]
    path = tmp_path / "problems.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    problems = load_problems(path)
    assert [problem.number for problem in problems] == [2, 4, 6]
    assert problems[0].question == GOOD["question"]
    assert problems[2].question == third["question"]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{not json}", "one JSON object"),
        ("[1, 2]", "a JSON list"),
        ('{"question": "q?"}', r"the keys \['question'\]"),
        ('{"question": 3, "answer": "#### 3"}', '"question" of type int'),
        ('{"question": "  ", "answer": "#### 3"}', "question: got no text"),
        ('{"question": "q?", "answer": "it is 3"}', "a last line '#### N'"),
        ('{"question": "q?", "answer": "#### 3\\nand more"}', "a last line '#### N'"),
        ('{"question": "q?", "answer": "#### 3 or 4"}', "a last line '#### N'"),
        ('{"question": "q\\ud800?", "answer": "#### 3"}', "surrogate"),
        (json.dumps(GOOD), "the question of line 1 again"),
        ("[" * 100_000, "one JSON object"),
    ],
)
def test_a_bad_line_is_named(tmp_path, bad, says):
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join([json.dumps(GOOD), "", bad, json.dumps(OTHER)]))
    with pytest.raises(InputError, match=rf"problems\.jsonl, line 3.*{says}"):
        load_problems(path)


def test_a_file_that_cannot_be_used_is_refused(tmp_path):
    path = tmp_path / "problems.jsonl"
    with pytest.raises(InputError, match="No such file"):
        load_problems(path)
    with pytest.raises(InputError, match="readable file"):
        load_problems(tmp_path)
    path.write_text("\n\n")
    with pytest.raises(InputError, match="got no problem"):
        load_problems(path)
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe")
    with pytest.raises(InputError, match=r"line 2: got the byte 0xff"):
        load_problems(path)


def test_shipped_file_is_package_data():
    assert (ROOT / "mechkv/data/word_problems.jsonl").is_file()
    assert load_problems(ROOT / "mechkv/data/word_problems.jsonl") == word_problems()


# Prompts


def test_format_prompt_spells_the_templates():
    problem, shot = Problem(**GOOD), Problem(**OTHER)
    assert format_prompt(problem) == "Question: What is 1 + 1?\nAnswer:"
    assert format_prompt("What is {x}?", template="bare") == "What is {x}?"
    assert format_prompt(problem, template="stepwise").startswith("Question: What is 1 + 1?\nThink")
    with_shot = "Question: What is 2 + 2?\nAnswer: 2 + 2 = 4\n#### 4\n\nQuestion: What is 1 + 1?\nAnswer:"
    assert format_prompt(problem, shots=[shot]) == with_shot


def test_format_prompt_refuses_what_would_mislead():
    problem = Problem(**GOOD)
    with pytest.raises(InputError, match="with its answer"):
        format_prompt(problem, shots=[problem])
    with pytest.raises(InputError, match=r"one of .*'bare'"):
        format_prompt(problem, template="Question")
    with pytest.raises(InputError, match="no text"):
        format_prompt(" ")


def test_sample_is_stable_nested_and_free_of_order():
    problems = word_problems()
    assert sample(problems, 3) == problems[:3]
    chosen = sample(problems, 10, seed=1)
    assert len({problem.id for problem in chosen}) == 10
    assert sample(problems[::-1], 10, seed=1) == chosen
    assert sample(problems, 4, seed=1) == chosen[:4]
    assert sample(problems, 10, seed=2) != chosen
    assert chosen != problems[:10]


@pytest.mark.parametrize("n", [0, -1, 89, True])
def test_sample_refuses_what_is_not_there(n):
    with pytest.raises(InputError, match="1 to 88"):
        sample(word_problems(), n, seed=0)


def test_prompts_import_without_torch():
    code = "import sys, mechkv.prompts as p; p.word_problems(); sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


class ChatTokenizer:
    name_or_path = "toy"

    def __init__(self, chat_template):
        self.chat_template = chat_template

    def apply_chat_template(self, turns, *, tokenize, add_generation_prompt):
        import jinja2

        assert not tokenize
        return jinja2.Template(self.chat_template).render(messages=turns, add_generation_prompt=add_generation_prompt)


def test_chat_prompt_uses_the_template_and_opens_the_reply():
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template = turns + "{% if add_generation_prompt %}<reply>{% endif %}"
    assert chat_prompt(ChatTokenizer(template), "How many?") == "<user>How many?<reply>"
    with pytest.raises(InputError, match=r"'toy': got no chat template.*format_prompt"):
        chat_prompt(ChatTokenizer(None), "How many?")
    with pytest.raises(InputError, match="takes a single user turn"):
        chat_prompt(ChatTokenizer("{{ messages.x.y }}"), "How many?")
    with pytest.raises(InputError, match="no text"):
        chat_prompt(ChatTokenizer(template), "")
