"""A handful of the study: no false alarm, every bug found with the evidence that it must leave."""

from experiments.check_study import Config, study, summary
from experiments.injected_bugs import KINDS


def test_a_few_models():
    frame = study(Config(n_clean=3, n_bugged=len(KINDS), dtypes=("float32",)))
    clean, bugged = frame[frame["bug"] == "none"], frame[frame["bug"] != "none"]
    assert set(clean["verdict"]) <= {"identical", "numerical"}
    assert set(bugged["verdict"]) == {"semantic"}
    assert set(bugged["bug"]) == set(KINDS)
    assert bugged["right"].mean() >= 0.9
    table = summary(frame).set_index("bug")
    assert table.loc["none", "semantic"] == 0
