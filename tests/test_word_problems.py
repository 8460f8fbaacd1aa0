"""The shipped word problems: every equation is true, a second solution agrees, and they are nobody else's."""

import ast
import operator
import os
import re
from fractions import Fraction
from pathlib import Path

import pytest

from mechkv.prompts import Problem, load_problems, word_problems

ROOT = Path(__file__).resolve().parents[1]
GSM8K = Path(os.environ.get("MECHKV_GSM8K", ROOT.parent / "shared/data/gsm8k/test.jsonl"))
needs_gsm8k = pytest.mark.skipif(not GSM8K.is_file(), reason="GSM8K's test file is not there (set MECHKV_GSM8K)")

# A second solution of every shipped problem, in order, by another route than the worked answer where there is one.
SECOND_SOLUTIONS = """
189/(24-3)
(312-58+46)*2/3
4*60-5*35+20
4*15*3/4+(6-4)*22-9
240+60-min(240//18,60//4)*(18+4)
20*14-2*75-15
(260-84)/(22-6)
2*24*45/30
(82-6-6)*4/5
18*25*80/100*(5+9)/2
(350+28)/14-9
20*(60+22)+15*(40+22)+(45-20-15)*22
-(-28*3//(4*6))*3
126/(17+19)*(19-17)
(7-2)*3*16-5
16+(16-17)+(16-14)+(16-19)+(16-12)
(85+40+85+40-4)*7
(210/10*2-14)/4
(40-15+7)*2
20*100-20*3*8-50*2*5
(12*11+5*(18-11)-17)*2
(3*168+126*(6+3))/126
25*(36/18)+4+4
64-10-25
100-(45*(100-20)/100+25-5)
21-(30-21)/(2-1)*1
3*(66/2+20)-20
2*(26+26-8)/4
85*(24-9)-(150-85)*9
96-7*12+9
(4+2*18+1*3+5)/(1+2)
(7+6+5+4+3+2+1-19)*45
(416-2*55)/6-28
(10*1000-250)//650
480*360/(30*30)/12*21
-6+3*(12-5)-2*4
-40-25+18-3*18
14*(3*2+(9-3)*1)-11
1500-5*4*35-5*3*25
40-(40*25-640)/(25-10)
7*(9*22-38)/2
25-(8*60+20-7*60-10)%25+18+7
(12*9*2/3-28)/2
5*26*4*3-400*(3-2)
2*15+(275-200)*8/100
24*150*85/100/20
160-14*10*900/1000
28/(240//55)*(240%55)
3000-(20+28)*50
(900-17*(12+31))//13
(240+5*8)/(12+8)
3*(24+24)/(3-1)
3-4-2*(-(14*60-9*60-15-60)//60)
90/6/3*10
((8*1000-500)/250-4)*6
150+2*150*140/100-30
14*6/(140/5)*35
60*(5*4-3*2.5)
(138+2+4)/3
(576+2*27)/(18+27)
2*(8+3)+3*5+(3-2)*3
150-12*12+4*(12-3)
800-5*24-4*(1+2+3+4)
54*4/3*5/3
(90-14*3-9*4)//2
(60-9*4)/3
5*240/3*2*300/(12*1000)
(16-1)*(4+2)
320-70*5+92/2
84*3+84/3*(5-3)-96
64*3/8*2/3
1200/60+8*(60-45)/60
5*(3+6)/(5-4)-6
(1200*1-1125)/(1+4)
120+(120-9)+(120-99)
5*(2*7+6*1)*30/100
168*10/(9+15)
45*(80+60)/420*2
2000/5-2000/200
(180-20)/2
(22+22+22+22+15+9)*3*4/16
50*6+30*8-2*(50*3/5+30-18)-35
60*(13-6)-40-270*60/90-25-150*60/75-40
(280*85/100-8+24+(24+16))/3
((13+3)*25*3/5-48)*3/4/2*5
16000//25-110-(380-130)*6//25
(60-6*4-6*4*2/3)*(60/5+10/4)-10
max(48+5*2*48,60+35*12)-min(48+5*2*48,60+35*12)
"""

# Numbers that a solution may use without reading them in the question: small counts, the calendar, place values.
COMMON_NUMBERS = {1, 2, 3, 4, 7, 12, 24, 60, 10, 100, 1000}
NUMBER_WORDS = {"five": 5, "eight": 8, "fifteen": 15, "twenty": 20}

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
EXTREMES = {"min": min, "max": max}


def evaluate(expression: str) -> Fraction:
    """Exact value of an arithmetic expression; anything else is a ValueError."""

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return Fraction(str(node.value))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return Fraction(OPERATORS[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in EXTREMES:
            return EXTREMES[node.func.id](value(argument) for argument in node.args)
        raise ValueError(expression)

    return value(ast.parse(expression.strip(), mode="eval").body)


def equations(line: str) -> list[list[str]]:
    """The sides of every equation in a line of prose."""
    runs = re.findall(r"[-0-9.+*/() =]+", line)
    return [run.strip(" .").split("=") for run in runs if "=" in run]


def numbers(text: str) -> set[Fraction]:
    return {Fraction(digits.replace(",", "")) for digits in re.findall(r"[0-9][0-9,]*(?:\.[0-9]+)?", text)}


def faults(problem: Problem) -> list[str]:
    """What is wrong with a worked answer: false or missing equations, numbers from nowhere, a wrong last line."""
    *steps, last = problem.answer.split("\n")
    stated = {Fraction(n) for word, n in NUMBER_WORDS.items() if word in problem.question.lower()}
    known = numbers(problem.question) | stated | COMMON_NUMBERS
    found, result = [], None
    for step in steps:
        sides = equations(step)
        if not any(re.search(r"[0-9] *[-+*/]", side[0]) for side in sides):
            found.append(f"no equation: {step}")
        for side in sides:
            values = [evaluate(part) for part in side]
            if len(set(values)) != 1:
                found.append(f"false: {'='.join(side)}")
            if not numbers(side[0]) <= known:
                found.append(f"from nowhere: {numbers(side[0]) - known} in {side}")
            result = values[-1]
            known = known | numbers(side[-1]) | {result}
    if f"#### {result}" != last:
        found.append(f"last line {last} after the result {result}")
    return found


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def runs_of_words(text: str, length: int) -> set[tuple[str, ...]]:
    listed = words(text)
    return {tuple(listed[i : i + length]) for i in range(len(listed) - length + 1)}


def test_shipped_problems_have_the_promised_form():
    problems = word_problems()
    assert len(problems) == 88
    assert all(30 <= len(problem.question.split()) <= 110 for problem in problems)
    assert all(2 <= problem.answer.count("\n") <= 5 for problem in problems)
    assert all(problem.number == int(problem.number) for problem in problems)
    assert all((problem.question + problem.answer).isascii() for problem in problems)
    assert len({problem.id for problem in problems}) == len(problems)


@pytest.mark.parametrize("problem", word_problems(), ids=lambda problem: problem.id)
def test_every_equation_of_a_worked_answer_is_true(problem):
    assert faults(problem) == []


def test_a_wrong_worked_answer_is_found():
    problem = word_problems()[0]
    steps = "A firing yields 24 - 3 = 21 sound mugs.\nFor the order she fires the kiln 189 / 21 = 9 times.\n#### 9"
    assert problem.answer == steps
    for old, new, fault in [
        ("= 21", "= 22", "false"),
        ("#### 9", "#### 8", "last line"),
        ("24 - 3 = 21", "25 - 4 = 21", "from nowhere"),
        ("24 - 3 = 21", "21", "no equation"),
    ]:
        found = faults(Problem(problem.question, steps.replace(old, new)))
        assert len(found) >= 1
        assert any(fault in text for text in found)


def test_a_second_solution_gives_the_same_number():
    problems, solutions = word_problems(), SECOND_SOLUTIONS.split()
    assert [evaluate(solution) for solution in solutions] == [problem.number for problem in problems]


def test_second_solutions_tell_the_problems_apart():
    solutions = SECOND_SOLUTIONS.split()
    shifted = solutions[1:] + solutions[:1]
    agree = [evaluate(solution) == problem.number for solution, problem in zip(shifted, word_problems(), strict=True)]
    assert sum(agree) <= 2


def test_no_two_problems_share_a_run_of_eight_words():
    seen: dict[tuple[str, ...], str] = {}
    for problem in word_problems():
        for run in runs_of_words(problem.question, 8):
            assert seen.setdefault(run, problem.id) == problem.id


@needs_gsm8k
def test_shipped_problems_share_no_run_of_eight_words_with_gsm8k():
    theirs = set().union(*(runs_of_words(problem.question, 8) for problem in load_problems(GSM8K)))
    shared = [run for problem in word_problems() for run in runs_of_words(problem.question, 8) & theirs]
    assert shared == []
    own = load_problems(GSM8K)[0].question
    assert runs_of_words(own, 8) & theirs
