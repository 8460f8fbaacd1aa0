"""The rule, without models: every trap as numbers."""

import math

import pytest

from mechkv.signature import References, convict, profile_shape, when
from mechkv.verdict import EXIT_CODES, ROUNDOFF, SAFETY, RungEvidence, bounds, decide

G = (100.0,) * 10
"""Sensitivity: 100 logits per unit of relative rounding, as tiny models have."""


def rung(dtype, size=None, *, at=range(10), **more):
    if size is None:
        return RungEvidence(dtype, "missing", error="no kernel")
    values = tuple(size if i in at else 0.0 for i in range(10))
    return RungEvidence(dtype, more.pop("status", "ok"), values, **more)


def ladder(d64, d32, d16, db16):
    sizes = zip(("float64", "float32", "float16", "bfloat16"), (d64, d32, d16, db16), strict=True)
    return [rung(dtype, size) for dtype, size in sizes]


@pytest.mark.parametrize(
    ("sizes", "verdict"),
    [
        ((0.0, 0.0, 0.0, 0.0), "identical"),
        ((9e-16, 3e-6, 7e-3, 5e-2), "numerical"),
        ((1e-15, 3e-6, 0.0, 0.0), "numerical"),  # not monotone
        ((9e-16, 3e-6, 7e-3, 0.0), "numerical"),
        ((9e-7, 3e-6, 7e-3, 5e-2), "numerical"),  # float32 island
        ((None, 3e-6, 7e-3, 5e-2), "numerical"),  # no float64 path
        ((4.3, 4.3, 4.3, 4.3), "semantic"),
        ((2e-3, 2e-3, 7e-3, 5e-2), "semantic"),  # lossy store: looks like rounding in bfloat16
        ((None, 2e-3, 7e-3, 5e-2), "semantic"),
    ],
)
def test_ladders(sizes, verdict):
    found = decide(ladder(*sizes), G)
    assert found.verdict == verdict
    assert EXIT_CODES[found.verdict] == {"identical": 0, "numerical": 0, "semantic": 1}[verdict]


def test_the_bound_is_the_edge():
    edge = float(bounds(G, ROUNDOFF["float32"])[0])
    assert edge == SAFETY * 2.0**-24 * 100
    assert decide([rung("float32", edge)], G).verdict == "numerical"
    assert decide([rung("float32", edge * 1.001)], G).verdict == "semantic"


def test_first_bad_index_is_the_first():
    found = decide([rung("float64", 0.8, at=[6, 8, 9]), rung("float32", 0.8, at=[6, 8, 9])], G)
    assert found.bad == (6, 8, 9)


def test_nan_at_the_top_alone_is_an_artefact():
    top = rung("float64", math.nan, status="nonfinite", nonfinite=("cached",))
    found = decide([top, rung("float32", 3e-6), rung("float16", 7e-3)], G)
    assert found.verdict == "numerical"
    assert any("artefact" in note and "float64" in note for note in found.notes)
    broken = decide([top, rung("float32", 4.3), rung("float16", 4.3)], G)
    assert broken.verdict == "semantic"


def test_nan_everywhere_is_masking_and_in_float16_alone_overflow():
    def broken(dtype):
        return rung(dtype, math.nan, status="nonfinite", nonfinite=("cached", "recomputed"))

    everywhere = decide([broken("float32"), broken("float16")], G)
    assert everywhere.verdict == "nonfinite"
    assert "masking" in everywhere.reason
    narrow = decide([rung("float32", 3e-6), broken("float16"), rung("bfloat16", 5e-2)], G)
    assert narrow.verdict == "nonfinite"
    assert "overflow" in narrow.reason
    assert "masking" not in narrow.reason
    bug = decide([rung("float32", 4.3), broken("float16")], G)
    assert bug.verdict == "semantic"


def test_a_flipped_expert_is_no_bug_but_a_whole_wrong_rung_is_not_waved_through():
    few = decide([rung("float64", 1e-15), rung("float32", 3e-6), rung("float16", 3.0, at=[3, 4])], G)
    assert few.verdict == "numerical"
    assert any("discrete choice" in note for note in few.notes)
    most = decide([rung("float64", 1e-15), rung("float32", 3e-6), rung("float16", 3.0, at=range(1, 10))], G)
    assert most.verdict == "inconclusive"
    assert most.rung == "float16"


def test_sixteen_bits_alone_do_not_clear_anyone():
    assert decide([rung("bfloat16", 2e-3)], G).verdict == "inconclusive"
    assert decide([rung("bfloat16", 0.0)], G).verdict == "identical"
    assert decide([rung("bfloat16", 30.0)], G).verdict == "semantic"


def test_without_weights_the_ladder_says_how_the_difference_scales():
    assert decide(ladder(9e-16, 3e-6, 7e-3, 5e-2), None).verdict == "numerical"
    assert decide(ladder(9e-7, 3e-6, 7e-3, 5e-2), None).verdict == "numerical"
    assert decide(ladder(4.3, 4.3, 4.3, 4.3), None).verdict == "semantic"
    assert decide(ladder(2e-3, 2e-3, 7e-3, 5e-2), None).verdict == "semantic"
    assert decide([rung("float32", 3e-6)], None).verdict == "inconclusive"
    assert decide([rung("float64", 1e-7), rung("float32", 1e-6)], None).verdict == "inconclusive"


def test_chance_is_irreproducible_unless_the_bug_stands_out():
    noisy = {"repeat": {"cached": 0.5, "recomputed": 0.0}, "again": {"cached": 0.4}}
    assert decide([rung("float32", 0.6, **noisy)], G).verdict == "irreproducible"
    assert decide([rung("float32", 6.0, **noisy)], G).verdict == "semantic"


def test_state_is_a_bug_and_not_chance():
    state = {"repeat": {"cached": 2.0, "recomputed": 0.0}, "again": {"cached": 0.0}}
    found = decide([rung("float32", 3e-6, **state)], G)
    assert found.verdict == "semantic"
    assert "state" in found.reason


def test_nothing_could_be_run():
    assert decide([rung("float64"), rung("float32")], G).verdict == "inconclusive"


def test_who_is_convicted():
    seen = References(later_token={"cached": 0.0, "recomputed": 2.0}, limit=1e-4)
    assert convict(seen)[0] == "recomputed"
    steps = References(stepwise={"cached": 2.0, "recomputed": 1e-6}, limit=1e-4)
    assert convict(steps)[0] == "cached"
    other = References(stepwise={"cached": 1e-6, "recomputed": 2.0}, limit=1e-4)
    assert convict(other)[0] is None
    assert convict(References(limit=1e-4))[1].startswith("the pair alone cannot tell")


def test_when_in_words():
    positions = range(3, 12)
    assert when([0, 1], positions, 4, 1).startswith("from the prompt")
    assert when([1, 2], positions, 4, 1).startswith("only on decode steps")
    assert when([1, 2], positions, 4, 3).startswith("only in chunks")
    assert when([4, 5], positions, 4, 1) == "onset at position 7 (length 8)"


def test_shapes_over_the_layers():
    import pandas as pd

    profile = pd.DataFrame({"layer": [-1, 0, 1, 2], "max_abs": [0.0, 1e-7, 2e-7, 4e-7], "bound": [1e-6] * 4})
    assert profile_shape(profile, None) == "smooth growth"
    assert profile_shape(profile, -1) == "embedding"
    assert profile_shape(profile, 0) == "block 0, flat"
    assert profile_shape(profile, 2) == "jump at layer 2"
    windows = (True, False, True)
    assert profile_shape(profile, 0, windows) == "block 0, flat"
    assert profile_shape(profile, 0, windows, (0, 2)) == "only window layers (0, 2)"
    assert profile_shape(profile, 0, windows, (0, 1)) == "2 of 3 layers wrong by themselves: 0, 1"
    assert profile_shape(profile, 0, windows, (0, 1, 2)).startswith("block 0, flat")
    assert profile_shape(profile, 0, windows, (0,)).startswith("jump at layer 0")
    assert profile_shape(profile.assign(bound=3e-7), None).startswith("beyond the bound of layer 2")
    assert profile_shape(profile.assign(max_abs=0.0), None) == "zero everywhere"
