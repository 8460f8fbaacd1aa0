"""The oracle finds the nearer path where the truth is planted, ties where both are one, and says what its floor is."""

import math

import pandas as pd
import pytest
import torch

from mechkv.errors import InputError
from mechkv.forced_study import ForcedStudy
from mechkv.oracle import OracleConfig, OracleStudy, distances, oracle_rows, oracle_study
from mechkv.rebuilding import recast
from tests.planted import planted
from tests.tiny import tiny_bridge, tokens


def fabricated(cached: list[float], recomputed: list[float], floor: float = 0.0) -> OracleStudy:
    frame = pd.DataFrame({"dtype": "float16", "prompt": [i // 2 for i in range(len(cached))]})
    frame = frame.assign(step=[1 + i % 2 for i in range(len(cached))], cached_kl=cached, recomputed_kl=recomputed)
    frame = frame.assign(equal=False, floor_kl=floor)
    return OracleStudy(frame, pd.DataFrame(), OracleConfig(n_steps=2, floor_every=2), {}, {})


def test_the_path_without_planted_drift_is_the_nearer_one() -> None:
    model = tiny_bridge(dtype=torch.float32)
    truth, prompt, fed = recast(model, "float64"), tokens(9), tokens(5, seed=1).tolist()
    with planted(model, 0.3):
        rows, _ = oracle_rows(model, truth, prompt, fed, 0, floor_every=2)
    assert rows[0]["equal"]
    assert rows[0]["cached_kl"] == rows[0]["recomputed_kl"]
    for row in rows[1:]:
        assert row["recomputed_kl"] < 1e-9 < 1e-4 < row["cached_kl"]
    assert math.isnan(rows[1]["floor_kl"])
    assert 0 <= rows[2]["floor_kl"] < 1e-10


def test_ties_are_counted_apart_and_the_share_is_of_decided_steps() -> None:
    study = fabricated([1.0, 1.0, 2.0, 1.0], [2.0, 1.0 + 1e-6, 1.0, 3.0], floor=1e-5)
    assert study.nearer().tolist() == ["cached", "tie", "recomputed", "cached"]
    found = study.summary()
    assert found["n_decided"] == 3
    assert found["share_cached"] == pytest.approx(2 / 3)
    assert found["gap"] == pytest.approx((1 + 1e-6 - 1 + 2) / 4)
    assert (found["prompts_cached"], found["prompts_recomputed"]) == (2, 0)
    within = fabricated([1.0, 1.0, 2.0, 1.0], [1.0 + 1e-6, 1.0, 1.0, 3.0], floor=1e-5).sign_test()
    assert (within.wins, within.losses) == (1, 0), "a mean difference within the floor is a tie"
    mirrored = fabricated([2.0, 1.0 + 1e-6, 1.0, 3.0], [1.0, 1.0, 2.0, 1.0], floor=1e-5).summary()
    assert mirrored["share_cached"] == pytest.approx(1 / 3)
    assert mirrored["gap"] == pytest.approx(-found["gap"])


def test_distances_are_zero_for_the_oracle_itself_and_not_for_a_rounded_copy() -> None:
    z = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert distances(z, z, "x") == {"x_kl": 0.0, "x_rel_l2": 0.0}
    rounded = distances(z, z.to(torch.bfloat16), "x")
    assert 1e-8 < rounded["x_kl"] < 1e-3
    assert 1e-4 < rounded["x_rel_l2"] < 2.0**-8


def test_a_whole_study_resumes_and_names_its_oracle(tmp_path) -> None:
    model = tiny_bridge(dtype=torch.bfloat16)
    config = OracleConfig(n_steps=4, floor_every=2)
    study = oracle_study(model, [tokens(9, s) for s in range(2)], config, folder=tmp_path / "run")
    assert study.provenance["oracle"]["dtype"] == "float64"
    assert study.provenance["oracle"]["weights"].startswith("bfloat16")
    first = study.frame[study.frame["step"] == 0]
    assert (study.nearer()[first.index] == "tie").all()
    assert (study.frame["cached_kl"] > 0).all()
    again = oracle_study(model, [tokens(9, s) for s in range(2)], config, folder=tmp_path / "run")
    assert again.frame.equals(study.frame)
    loaded: ForcedStudy = OracleStudy.load(study.save(tmp_path / "saved"))
    assert loaded.frame.equals(study.frame)
    with pytest.raises(InputError, match="no oracle"):
        oracle_study(tiny_bridge(dtype=torch.float64), [tokens(9)])
