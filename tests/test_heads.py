"""A planted error shows in exactly its group, dimension and pair; the numbers read off are those of the tables."""

import functools
import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import mechkv
from mechkv.errors import InputError, StorageError
from mechkv.head_measure import HeadLayout, _group_rows, head_layout, head_sites, reduce_pairs
from mechkv.heads import HeadAnalysis, HeadConfig, fewest_for_half, head_analysis
from mechkv.paths import decode
from mechkv.policies import Forced
from mechkv.sites import CACHE_SITES
from tests.tiny import WINDOW, tiny_bridge, tiny_hf, tiny_tokenizer, tokens

LAYER, HEAD, PAIR = 1, 1, 4


class Planted:
    """Adds to some dimensions of one head's newest row, in one layer."""

    def __init__(self, site, dims, size=0.05):
        self.sites, self._dims, self._size = (site,), dims, size

    def __call__(self, value, at):
        if at.layer != LAYER or at.step == 0:
            return None
        changed = value.clone()
        rows = changed[HEAD, -1] if self.sites[0] in CACHE_SITES else changed[-1, HEAD]
        rows[self._dims] += self._size
        return changed


def planted(model, site, dims, n=14):
    """The analysis of the cached path with a planted error against the cached path without."""
    text = tokens(n, seed=2)
    kw = {"path": "cached", "policy": Forced(text.tolist()), "n_steps": 1, "sites": head_sites(model)}
    bad = decode(model, text[:-1], interventions=[Planted(site, dims)], **kw)
    return reduce_pairs(zip(bad, decode(model, text[:-1], **kw), strict=True), head_layout(model))


@functools.cache
def wide(family):
    """One float64 bridge a family for all planted errors."""
    return tiny_bridge(family, dtype=torch.float64)


def changed_heads(found, site, layer=LAYER):
    rows = found["heads"].query("step == 1 and layer == @layer and site == @site and not bitwise_equal")
    return sorted(rows["head"])


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_an_error_in_one_kv_head_shows_in_its_group_alone(family) -> None:
    found = planted(wide(family), "cache_v", [3])
    assert changed_heads(found, "v") == [HEAD]
    assert changed_heads(found, "z") == [2, 3], "query heads 2 and 3 read KV head 1"
    assert changed_heads(found, "q") == changed_heads(found, "rot_k") == []
    assert changed_heads(found, "z", layer=LAYER - 1) == []
    assert changed_heads(found, "z", layer=LAYER + 1) == [0, 1, 2, 3], "afterwards it is everywhere"
    heads = found["heads"].query("step == 1 and layer == @LAYER and site == 'z'")
    assert heads.groupby("group")["share"].sum().tolist() == pytest.approx([0, 1])
    dims = found["dims"].query("layer == @LAYER and square > 0")
    assert set(dims.query("site == 'v'")["dim"]) == {3}
    assert set(dims.query("site == 'z'")["dim"]) == {3}, "the attention row mixes keys, not dimensions"


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_an_error_in_one_rotary_pair_shows_in_that_pair_alone(family) -> None:
    model = wide(family)
    layout = head_layout(model)
    found = planted(model, "cache_k", [PAIR, PAIR + layout.d_head // 2])
    dims = found["dims"].query("layer == @LAYER and square > 0")
    after = dims.query("site == 'rot_k'")
    assert set(after["pair"]) == {PAIR}
    assert set(after["dim"]) == {PAIR, PAIR + 6}
    assert set(after["head"]) == {HEAD}
    assert after["frequency"].iloc[0] == pytest.approx(layout.frequencies[LAYER][PAIR])
    assert dims.query("site == 'k'").empty, "nothing is planted before rotation"


def test_dimensions_are_told_apart_before_and_after_rotation(analysis) -> None:
    for site, dims, expected in (("cache_v", [3], {"v": [3], "z": [3]}), ("k", [PAIR], {"k": [4], "rot_k": [4, 10]})):
        found = planted(wide("llama-gqa"), site, dims)["dims"].query("layer == @LAYER")
        table = replace(analysis, dims=found.assign(dtype="float64", prompt=0)).by_dimension()
        shown = table[table["estimate"] > 0].groupby("site")["dim"].apply(list).to_dict()
        assert {name: shown.get(name) for name in expected} == expected
        assert len(table) == 5 * 12


def test_before_rotation_one_dimension_becomes_a_pair_after() -> None:
    found = planted(wide("llama-gqa"), "k", [PAIR])
    dims = found["dims"].query("layer == @LAYER and square > 0")
    assert set(dims.query("site == 'k'")["dim"]) == {PAIR}
    assert set(dims.query("site == 'rot_k'")["dim"]) == {PAIR, PAIR + 6}
    squares = dims.groupby("site")["square"].sum()
    assert squares["rot_k"] == pytest.approx(squares["k"], rel=1e-6), "a rotation keeps lengths"


def test_layouts() -> None:
    layout = head_layout(tiny_bridge("llama-gqa"))
    assert layout.frequencies[0] == pytest.approx([10000 ** (-i / 6) for i in range(6)], rel=1e-5)
    assert layout.pairs(0).tolist() == [0, 1, 2, 3, 4, 5] * 2
    gemma = head_layout(tiny_bridge("gemma3"))
    assert gemma.kinds == ("window", "full", "window")
    assert gemma.frequencies[0] != gemma.frequencies[1], "window and full layers rotate with another base"
    assert head_layout(tiny_bridge("gpt2")).pairs(0).tolist() == [-1] * 12
    neox = head_layout(tiny_bridge("gpt-neox"))
    assert (neox.pairs(0) >= 0).sum() == 2 * len(neox.frequencies[0]) < 12
    assert HeadLayout(4, 2, 4, ("full",), ((1.0, 0.1),), "neighbours").pairs(0).tolist() == [0, 0, 1, 1]


def test_cosines_within_and_between_groups() -> None:
    layout = HeadLayout(4, 2, 3, ("full",), ((),), "halves")
    x, y, zero = torch.tensor([1.0, 0, 0]), torch.tensor([0, 2.0, 0]), torch.zeros(3)

    row = _group_rows(1, torch.stack([x, 3 * x, y, y])[None].double(), None, layout).iloc[0]
    assert (row["within"], row["between"]) == pytest.approx((1, 0))
    earlier = torch.stack([-x, -x, x, x])[None].double()
    row = _group_rows(1, torch.stack([x, x, y, y])[None].double(), earlier, layout).iloc[0]
    assert row["within_shifted"] == pytest.approx(-0.5)
    row = _group_rows(1, torch.stack([x, zero, y, -y])[None].double(), None, layout).iloc[0]
    assert row["within"] == pytest.approx(-1), "a head without drift is in no pair"
    assert row["n_drifting"] == 3
    assert math.isnan(_group_rows(1, torch.zeros(1, 4, 3).double(), None, layout).iloc[0]["within"])


def test_fewest_for_half() -> None:
    assert fewest_for_half(np.array([1.0, 8, 1, 2])).tolist() == [1]
    assert fewest_for_half(np.array([1.0, 1, 1, 1])).tolist() == [0, 1]
    assert fewest_for_half(np.array([0.0, 0])).tolist() == []


@pytest.fixture(scope="module")
def analysis() -> HeadAnalysis:
    prompts = [tokens(17 + i, seed=i) for i in range(4)]
    return head_analysis(tiny_bridge("gemma3"), prompts, HeadConfig(n_steps=5))


def test_the_null_control_and_the_windows(analysis) -> None:
    assert analysis.heads.query("step == 0")["bitwise_equal"].all()
    assert not analysis.heads.query("step > 0")["bitwise_equal"].all()
    patterns = analysis.patterns.query("step == 5 and prompt == 0")
    assert set(patterns.query("kind == 'window'")["n_keys"]) == {WINDOW}, "keys that both paths hold"
    assert set(patterns.query("kind == 'full'")["n_keys"]) == {22}
    assert (analysis.patterns["outside"] == 0).all()
    assert (patterns.query("kind == 'window'")["first_key"] == 22 - WINDOW).all()
    assert (patterns["mass_decode"] > 0).all()
    assert (analysis.patterns["tv"] >= analysis.patterns["tv_decode"] - 1e-18).all()
    assert analysis.guards["float32"]["repeatable"] == 8


def test_dimensions_add_up_to_heads(analysis) -> None:
    heads = analysis.heads.query("step > 0")
    from_heads = (heads["rms"] ** 2 * 12).groupby([heads["site"], heads["layer"], heads["head"]]).sum()
    from_dims = analysis.dims.groupby(["site", "layer", "head"])["square"].sum()
    pd.testing.assert_series_equal(from_heads, from_dims, check_names=False, rtol=1e-9)


def test_what_is_read_off(analysis) -> None:
    table = analysis.summary(by=("kind",))
    assert set(table["kind"]) == {"window", "full"}
    one = table.query("site == 'z' and kind == 'full'").iloc[0]
    rows = analysis.heads.query("site == 'z' and layer == 1 and step > 0")
    assert one["estimate"] == pytest.approx(rows["rel_l2"].mean())
    frequencies = analysis.by_frequency()
    assert len(frequencies) == 2 * 2 * 6
    pair = analysis.dims.query("site == 'rot_k' and kind == 'full' and pair == 2").groupby("prompt")
    expected = np.sqrt(pair["square"].sum() / pair["reference"].sum()).mean()
    got = frequencies.query("site == 'rot_k' and kind == 'full' and pair == 2")["estimate"].iloc[0]
    assert got == pytest.approx(expected)
    dimension = analysis.dims.query("site == 'rot_k' and dim == 7").groupby("prompt")
    expected = np.sqrt(dimension["square"].sum() / dimension["reference"].sum()).mean()
    got = analysis.by_dimension().query("site == 'rot_k' and dim == 7")["estimate"].tolist()
    assert got == pytest.approx([expected]), "one value over all layers and heads"
    concentration = analysis.concentration().set_index(["site", "unit"])
    assert concentration.loc[("z", "head"), "n_units"] == 12
    assert concentration.loc[("rot_k", "dimension"), "n_units"] == 3 * 2 * 12
    assert (concentration["n_half"] <= concentration["n_units"] / 2 + 1).all()
    assert {"within", "between", "within - between"} <= set(analysis.sharing()["measure"])
    assert analysis.attention("entropy_drift", by=("layer",))["estimate"].abs().max() < 1e-4
    assert set(analysis.plot()) == {"head_heatmap", "pattern_drift", "drift_by_dimension", "drift_by_frequency"}


def test_all_drift_in_one_head(analysis) -> None:
    dims = analysis.dims.assign(square=(analysis.dims["head"] == 1) * (analysis.dims["layer"] == 2) * 1.0)
    table = replace(analysis, dims=dims).concentration().set_index(["site", "unit"])
    assert table.loc[("z", "head"), "n_half"] == 1
    assert table.loc[("z", "head"), "agreement"] == 1
    assert table.loc[("z", "head"), "chance"] == pytest.approx(1 / 12)
    assert table.loc[("z", "dimension"), "n_half"] == 6


def test_saved_and_loaded(analysis, tmp_path) -> None:
    analysis.save(tmp_path / "a")
    again = HeadAnalysis.load(tmp_path / "a")
    pd.testing.assert_frame_equal(again.heads, analysis.heads)
    assert (again.layout, again.config, again.guards) == (analysis.layout, analysis.config, analysis.guards)
    (tmp_path / "a" / "dims.parquet").write_bytes(b"x")
    with pytest.raises(StorageError):
        HeadAnalysis.load(tmp_path / "a")


def test_float32_control_and_resuming(tmp_path) -> None:
    model = tiny_bridge("llama-gqa", dtype=torch.bfloat16, num_hidden_layers=1)
    texts = ["w1 w5 w9 w2 w7 w3", "w4 w8 w15 w16 w23"]
    found = head_analysis(model, texts, HeadConfig(n_steps=2), folder=tmp_path)
    assert set(found.heads["dtype"]) == {"bfloat16", "float32"}
    again = head_analysis(model, texts, HeadConfig(n_steps=2), folder=tmp_path)
    pd.testing.assert_frame_equal(found.heads, again.heads)
    with pytest.raises(StorageError, match="another run"):
        head_analysis(model, texts, HeadConfig(n_steps=3), folder=tmp_path)
    with pytest.raises(InputError):
        HeadConfig(n_steps=0)


def test_command_line(tmp_path, capsys, monkeypatch) -> None:
    from mechkv import plots
    from mechkv.cli import main

    saved: list = []
    monkeypatch.setattr(plots, "save", lambda figure, place: saved.append(place))  # drawn in test_plots

    tiny_hf("llama-gqa", num_hidden_layers=1).save_pretrained(tmp_path / "m")
    tiny_tokenizer().save_pretrained(tmp_path / "m")
    problems = tmp_path / "p.jsonl"
    lines = [{"question": f"w{i} w{i + 7} w3 w{2 * i}", "answer": "w1\n#### 1"} for i in range(1, 3)]
    problems.write_text("\n".join(json.dumps(line) for line in lines))
    arguments = ["heads", str(tmp_path / "m"), "--prompts", str(problems), "--n-prompts", "2", "--steps", "1"]
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--dtype", "float32", "--twins", "--json", "--out", str(tmp_path / "out")])
    assert stop.value.code == 0
    tables = json.loads(capsys.readouterr().out)
    assert {row["cause"] for row in tables["verdicts"]} == {"kv_heads", "head_dim"}
    assert {(row["site"], row["dim"]) for row in tables["by_dimension"]} == {
        (site, dim) for site in ("q", "z", "k", "rot_k", "v") for dim in range(12)
    }
    assert {row["site"] for row in tables["by_frequency"]} == {"k", "rot_k"}
    assert {place.parent for place in saved} == {tmp_path / "out" / "figures"}
    names = ["head_heatmap", "pattern_drift", "drift_by_dimension", "drift_by_frequency", "profile_by_twin"]
    assert [place.name for place in saved] == names
    assert HeadAnalysis.load(tmp_path / "out" / "heads").dtype == "float32"
    assert mechkv.TwinStudy.load(tmp_path / "out" / "twins").twins["mha"].float64_rel_l2 < 1e-6


def test_long_tables_are_shortened_to_the_largest() -> None:
    from mechkv.commands.heads import _shortened

    rows = [{"dtype": "float16", "site": site, "dim": i, "estimate": (i * 7) % 40} for site in "kv" for i in range(40)]
    text = _shortened("by_dimension", pd.DataFrame(rows), 4)
    assert text.startswith("by_dimension, the 3 largest of each dtype and site; all 80 rows with --json")
    shown = [line.split()[1:] for line in text.splitlines()[2:]]
    assert shown == [[site, *row] for site in "kv" for row in (["11", "37"], ["17", "39"], ["34", "38"])]
    assert _shortened("t", pd.DataFrame(rows[:40]), 4).count("\n") == 41, "a short one is whole"
