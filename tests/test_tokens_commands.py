"""`mechkv tokens`, `mechkv precision` and the two experiments, from end to end on a tiny model in a folder."""

import json
import math
from dataclasses import replace

import pandas as pd
import pytest

from experiments import precision_control, token_divergence
from experiments.outcome import ModelPool
from mechkv import cli
from mechkv.claims import CLAIMS
from mechkv.task_score import task_score
from tests.tiny import tiny_hf, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    place = tmp_path_factory.mktemp("model")
    tiny_hf("llama-gqa", max_position_embeddings=512, num_hidden_layers=1).save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return str(place)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    return int(stop.value.code or 0)


def test_tokens_prints_rates_scores_and_the_certificate(folder, capsys, tmp_path) -> None:
    arguments = ("tokens", folder, "--dtype", "float32", "--n-prompts", "2", "--n-tokens", "3", "--shots", "1")
    out = ("--out", str(tmp_path / "o"))
    assert run(*arguments, *out, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["rates"]) == 6
    assert {row["estimate"] for row in document["rates"]} == {0.0}
    assert {row["draws"] for row in document["sampling_noise"]} == {"common", "independent", "noise"}
    assert document["flip_law"]["n_steps"] == 4
    assert list((tmp_path / "o" / "figures").glob("agreement.png"))
    assert run(*arguments, "--strategies", "top-k", "--top-k", "0") == 2
    assert "impossible strategy" in capsys.readouterr().err


def test_precision_measures_the_parts_that_were_asked_for(folder, capsys) -> None:
    parts = ("--parts", "ladder", "oracle", "--rungs", "float16", "float32")
    assert run("precision", folder, *parts, "--n-prompts", "2", "--steps", "2", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["dtype"] for row in document["ladder"]} == {"float16", "float32"}
    assert document["oracle"][0]["n_steps"] == 4
    assert not {"sites", "determinism"} & set(document)


def doubled(frame: pd.DataFrame) -> pd.DataFrame:
    """Every prompt twice, under another number."""
    return pd.concat([frame, frame.assign(prompt=frame["prompt"] + 4)], ignore_index=True)


def test_the_token_experiment_speaks_to_c1_and_c2(folder, tmp_path) -> None:
    config = replace(token_divergence.Config(), model=folder, n_prompts=4, n_tokens=4, longest_prompt=None)
    outcome = token_divergence.run(config, ModelPool("cpu"), tmp_path)
    verdicts = {finding.claim: finding.verdict for finding in outcome.findings}
    # nothing differs within four tokens, and cut texts arrive at no answer: neither is evidence against the paper
    assert verdicts == {"C1": "not testable here", "C2": "not testable here"}
    longer = replace(config, n_tokens=token_divergence.ENOUGH_TOKENS)
    four = token_divergence.TokenDivergence.load(tmp_path / "divergence")
    assert token_divergence.text_finding(four, longer, "x").verdict == "not testable here", "four prompts are too few"
    eight = replace(four, frame=doubled(four.frame), outcomes=doubled(four.outcomes))
    assert token_divergence.text_finding(eight, longer, "x").verdict == "not reproduced"
    assert token_divergence.text_finding(eight, config, "x").verdict == "not testable here", "four tokens are too few"
    for found, verdict in ((four, "partly"), (eight, "reproduced")):
        n = len(found.outcomes)
        everything = found.outcomes.assign(first_common=pd.array([1] * n, dtype="Int64"), n_differ=2)
        assert token_divergence.text_finding(replace(found, outcomes=everything), longer, "x").verdict == verdict
    assert {"rates", "luck", "score", "layercast"} <= set(outcome.sections[0].tables)


def test_the_score_verdict_needs_discordant_pairs_and_follows_the_tests() -> None:
    def frame(b: int, c: int, condition: str, n: int = 30) -> pd.DataFrame:
        cached = [True] * b + [False] * (n - b)
        recomputed = [False] * b + [True] * c + [False] * (n - b - c)
        rows = pd.DataFrame({"cached": cached, "recomputed": recomputed, "condition": condition, "cut": False})
        return rows.assign(problem=[str(i) for i in range(n)])

    def verdict(*counts: tuple[int, int], n: int = 30) -> str:
        frames = [frame(b, c, f"c{i}", n) for i, (b, c) in enumerate(counts)]
        return token_divergence.score_finding(task_score(pd.concat(frames)), "x").verdict

    assert verdict((0, 0)) == "not testable here"
    assert verdict((2, 1), (1, 2)) == "not testable here", "three discordant pairs cannot be significant"
    assert verdict((8, 7), (7, 8), n=600) == "not reproduced", "an advantage of 5 points is outside the intervals"
    assert verdict((8, 7), (7, 8), n=60) == "not testable here"
    assert verdict((0, 9), (1, 2)) == "not reproduced", "the cached path is worse"
    assert verdict((9, 0), (1, 2)) == "partly"
    assert verdict(*[(5, 1)] * 8, (1, 2)) == "reproduced"
    assert verdict(*[(1, 5)] * 8, (2, 1)) == "not reproduced"


def test_the_precision_experiment_speaks_to_c2_c3_and_c6(folder, tmp_path) -> None:
    config = precision_control.Config(
        model=folder, n_prompts=4, n_steps=3, policies=("none", "LayerCast"), threads=(), rungs=("float16", "float32")
    )
    outcome = precision_control.run(config, ModelPool("cpu"), tmp_path)
    findings = {finding.claim: finding for finding in outcome.findings}
    assert set(findings) == {"C2", "C3"} <= set(CLAIMS)
    assert "0 of 12 float32 steps flip" in findings["C3"].ours
    assert {"kl_by_precision", "nearer_path", "precision_by_site"} <= set(outcome.sections[0].figures)
    ladder = precision_control.PrecisionLadder.load(tmp_path / "ladder")
    zero = ladder.frame["dtype"].eq("float16")
    for kl, verdict in ((6.4e7 * 1e-12, "reproduced"), (1e3 * 1e-12, "partly"), (0.0, "not testable here")):
        drift = (1e-12 + 0 * ladder.frame["kl"]).where(~zero, kl)
        rung = replace(ladder, frame=ladder.frame.assign(kl=drift, flip=0))
        assert precision_control.precision_finding(rung, "x").verdict == verdict
        assert "nan" not in precision_control.precision_finding(rung, "x").ours
    few = replace(rung, frame=rung.frame.assign(kl=1e-12).query("prompt < 3"))
    assert precision_control.precision_finding(few, "x").verdict == "not testable here", "no interval"
    flips = replace(rung, frame=rung.frame.assign(flip=1))
    assert precision_control.precision_finding(flips, "x").verdict == "not reproduced"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.55, 0.9, "reproduced"),
        (0.3, 0.55, "not reproduced"),
        (0.05, 0.95, "not testable here"),
        (math.nan, math.nan, "not testable here"),
    ],
)
def test_the_oracle_verdict_needs_an_interval_that_decides(low, high, verdict) -> None:
    class Study:
        def summary(self) -> dict:
            names = ("cached", "recomputed", "floor", "n_steps", "prompts_cached", "prompts_recomputed", "p_value")
            return dict.fromkeys(names, 0) | {"share_cached": 0.5, "share_low": low, "share_high": high, "n_decided": 9}

    assert precision_control.oracle_finding(Study(), "x").verdict == verdict  # type: ignore[arg-type]


def test_determinism_needs_a_divergence_and_a_second_process() -> None:
    frame = pd.DataFrame({"process": [0, 1, 0, 1], "threads": 1, "path": ["cached"] * 2 + ["recomputed"] * 2})
    frame = frame.assign(prompt=0, step=0, equal=True, max_abs=0.0, drift_kl=1.0)
    same = precision_control.Determinism(frame, {})
    assert precision_control.determinism_finding(same, "x").verdict == "reproduced"
    other = precision_control.Determinism(frame.assign(equal=[True, False, True, True]), {})
    assert precision_control.determinism_finding(other, "x").verdict == "not reproduced"
    still = precision_control.Determinism(frame.assign(drift_kl=0.0), {})
    assert precision_control.determinism_finding(still, "x").verdict == "not testable here"
    threads = precision_control.Determinism(frame.assign(threads=[1, 2, 1, 2]), {})
    assert precision_control.determinism_finding(threads, "x").verdict == "not testable here", "no like process"
