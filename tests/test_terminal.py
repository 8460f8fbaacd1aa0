"""Numbers on a terminal: where there are too few prompts for an interval that is said, and no `nan` is printed."""

import json
import math
import re

import pandas as pd
import pytest

from mechkv import cli, terminal
from mechkv.stats import MIN_CLUSTERS
from tests.tiny import tiny_hf, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    place = tmp_path_factory.mktemp("model")
    tiny_hf("llama-gqa", max_position_embeddings=512).save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return str(place)


def run(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    assert not stop.value.code
    return capsys.readouterr().out


def test_an_interval_or_the_reason_why_there_is_none():
    assert terminal.interval(0.5, 2.0, MIN_CLUSTERS, ".1f") == "95 % over prompts [0.5, 2.0]"
    assert terminal.interval(math.nan, math.nan, 3, ".1f") == "too few prompts for an interval (3; it takes 4)"
    assert terminal.interval(math.nan, math.nan, MIN_CLUSTERS, ".1f") == "no interval"
    assert (terminal.number(math.nan, ".2f"), terminal.number(0.5, ".2f")) == ("-", "0.50")
    assert terminal.interval(math.nan, math.nan, 0, ".1f") == "undefined in every prompt"
    shown = terminal.table(pd.DataFrame({"a": [math.nan, 1.5], "b": pd.array([pd.NA, 2], dtype="Int64")}))
    assert shown.split() == ["a", "b", "-", "-", "1.5", "2"]


def test_a_table_says_why_its_bounds_are_missing():
    bounds = pd.DataFrame({"estimate": [1.0], "low": [math.nan], "high": [math.nan]})
    assert terminal.table(bounds, 2).endswith("(too few prompts for an interval (2; it takes 4): bounds are -)")
    for other in (
        terminal.table(bounds, 4),
        terminal.table(bounds.fillna(1.0), 2),
        terminal.table(bounds[["high"]], 2),
    ):
        assert "too few" not in other


SMALL = {
    "drift": ("--steps", "1", "--dtype", "float32"),
    "patch": ("--steps", "1", "--dtype", "float32"),
    "tokens": ("--n-tokens", "2", "--dtype", "float32"),
    "precision": ("--steps", "1", "--rungs", "float16", "float32"),
    "heads": ("--steps", "1", "--dtype", "float32"),
}


@pytest.mark.parametrize("command", SMALL)
def test_two_prompts_are_too_few(command, folder, capsys):
    arguments = (command, folder, *SMALL[command], "--n-prompts", "2")
    text = run(capsys, *arguments)
    assert "too few prompts for" in text
    assert not re.search(r"\bnan\b|<NA>", text, re.IGNORECASE)
    json.loads(run(capsys, *arguments, "--json"), parse_constant=pytest.fail)


def test_four_prompts_are_enough(folder, capsys):
    """The twin."""
    text = run(capsys, "drift", folder, *SMALL["drift"], "--n-prompts", "4")
    assert re.search(r"95 % over prompts \[\d", text)
    assert "too few" not in text
