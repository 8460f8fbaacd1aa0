import re
from dataclasses import replace

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from fake_profile import N_LAYERS, N_STEPS, fake_profile
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from mechkv import plots
from mechkv.errors import InputError

LABELS = {"float16": "float16", "float32": "float32, control"}


@pytest.fixture(scope="module")
def profile():
    return fake_profile()


@pytest.fixture(scope="module")
def figures(profile):
    return plots.drift_figures(profile)


def lines(axes, gid="line"):
    return {line.get_label(): line for line in axes.get_lines() if line.get_gid() == gid}


def zero_marks(axes):
    return [line for line in axes.get_lines() if line.get_gid() == "zeros"]


def without_zeros(profile):
    """The same profile, shifted off zero everywhere."""
    return replace(profile, frame=profile.frame.assign(rel_l2=profile.frame["rel_l2"] + 1e-9))


@pytest.mark.parametrize("site", ["resid_post", "mlp_out"])
@pytest.mark.parametrize("metric", ["rel_l2", "max_ulp", "signed_mean"])
def test_the_lines_are_the_estimates_of_the_summary(profile, site, metric):
    axes = plots.drift_by_layer(profile, site, metric).axes[0]
    summary = profile.summary(metric)
    other = profile.summary("rms")
    for dtype, label in LABELS.items():
        part = summary[(summary["site"] == site) & (summary["dtype"] == dtype)].sort_values("layer")
        x, y = lines(axes)[label].get_data()
        assert x.tolist() == list(range(N_LAYERS))
        np.testing.assert_array_equal(y, part["estimate"])
        wrong = other[(other["site"] == site) & (other["dtype"] == dtype)].sort_values("layer")
        assert not np.array_equal(y, wrong["estimate"])


def test_the_band_is_the_interval(profile):
    axes = plots.drift_by_layer(profile).axes[0]
    summary = profile.summary()
    part = summary[(summary["site"] == "resid_post") & (summary["dtype"] == "float16")].sort_values("layer")
    band = next(b for b in axes.collections if b.get_gid() == "band")
    vertices = band.get_paths()[0].vertices
    for layer in range(1, N_LAYERS):
        found = vertices[vertices[:, 0] == layer, 1]
        row = part.iloc[layer]
        assert (found.min(), found.max()) == pytest.approx((row["low"], row["high"]), rel=1e-12)


def test_three_prompts_have_no_band_and_the_caption_says_so():
    few = fake_profile(n_prompts=3)
    axes = plots.drift_by_layer(few).axes[0]
    assert not any(len(path.vertices) for band in axes.collections for path in band.get_paths())
    assert "No band: 3 prompts are too few" in plots.drift_captions(few)["drift_by_layer"]
    assert "No band" not in plots.drift_captions(fake_profile())["drift_by_layer"]


def test_the_floor_is_stated(profile):
    assert "floor: exactly 0 (16 repeats)" in lines(plots.drift_by_layer(profile).axes[0], "note")
    unmeasured = replace(profile, guards={})
    assert "floor: not measured" in lines(plots.drift_by_layer(unmeasured).axes[0], "note")


def test_the_heatmap_is_the_mean_over_prompts(profile):
    axes = plots.drift_heatmap(profile).axes[0]
    mesh = next(c for c in axes.collections if c.get_gid() == "drift")
    shown = np.ma.filled(mesh.get_array().reshape(N_LAYERS, N_STEPS + 1), 0.0)
    frame = profile.frame[(profile.frame["site"] == "resid_post") & (profile.frame["dtype"] == "float16")]
    expected = np.zeros((N_LAYERS, N_STEPS + 1))
    for _, row in frame.iterrows():
        expected[row["layer"], row["step"]] += row["rel_l2"] / 4
    np.testing.assert_allclose(shown, expected, rtol=1e-12)
    assert not np.allclose(shown, np.roll(expected, 1, axis=0), rtol=0.01)


def test_heatmap_cells_that_are_zero_or_undefined_are_hatched(profile):
    def cells(figure):
        named = {c.get_gid(): len(c.get_paths()) for c in figure.axes[0].collections}
        return {key: n for key, n in named.items() if key != "drift"}

    zeros = plots.step_by_layer(profile).to_numpy() == 0
    assert zeros[:, 0].all()
    assert cells(plots.drift_heatmap(profile)) == {"exactly 0 for every prompt": zeros.sum()}
    assert cells(plots.drift_heatmap(without_zeros(profile))) == {}
    broken = profile.frame.copy()
    broken.loc[broken.query("prompt == 2 and step == 5 and layer == 3").index, "rel_l2"] = np.nan
    found = cells(plots.drift_heatmap(replace(profile, frame=broken)))
    assert found == {"exactly 0 for every prompt": zeros.sum(), "undefined": 1}


def test_exact_zeros_of_a_line_are_marked_in_the_strip(profile):
    figure = plots.drift_by_layer(profile, "resid_pre")
    axes = figure.axes[0]
    marks = zero_marks(axes)
    assert [mark.get_xdata().tolist() for mark in marks] == [[0], [0]]
    heights = {mark.get_ydata()[0] for mark in marks}
    assert len(heights) == 2
    assert all(0 < height < 0.2 for height in heights)
    figure.canvas.draw()
    assert axes.get_yticklabels()[0].get_text() == "0"
    axes = plots.drift_by_layer(without_zeros(profile), "resid_pre").axes[0]
    assert zero_marks(axes) == []
    assert "0" not in [label.get_text() for label in axes.get_yticklabels()]


def test_nothing_drawn_lies_in_the_strip_of_zeros(profile):
    axes = plots.drift_by_layer(profile, "resid_pre").axes[0]
    border = next(line for line in axes.get_lines() if line.get_gid() == "strip").get_ydata()[0]
    for line in lines(axes).values():
        positive = line.get_ydata()[line.get_ydata() > 0]
        assert (positive > border).all()
    assert axes.get_ylim()[0] < border


def test_a_profile_without_any_drift_is_drawn_as_zeros(profile):
    frame = profile.frame.assign(rel_l2=0.0, bitwise_equal=True)
    same = replace(profile, frame=frame, split=profile.split.assign(injected=0.0, propagated=0.0, drift=0.0))
    plots.drift_heatmap(same)
    for draw, n_lines in ((plots.drift_by_layer, 2), (plots.kv_drift, 6), (plots.split_by_layer, 3)):
        marks = zero_marks(draw(same).axes[0])
        assert [len(mark.get_xdata()) for mark in marks] == [N_LAYERS] * n_lines


def test_kv_drift_shows_every_provenance_of_keys_and_values(profile):
    figure = plots.kv_drift(profile)
    summary = profile.summary()
    for axes, site in zip(figure.axes, ("cache_k", "cache_v"), strict=True):
        for dtype in ("float16", "float32"):
            for provenance in ("prefill", "decode", "new"):
                rows = summary.query(f"site == '{site}' and dtype == '{dtype}' and provenance == '{provenance}'")
                y = lines(axes)[f"{dtype}, {provenance} rows"].get_ydata()
                np.testing.assert_array_equal(y, rows.sort_values("layer")["estimate"])
        prefill = [mark for mark in zero_marks(axes) if len(mark.get_xdata()) == N_LAYERS]
        assert len(prefill) == 2
    keys, values = (lines(axes)["float16, new rows"].get_ydata() for axes in figure.axes)
    assert not np.array_equal(keys, values)
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()


def test_the_split_is_the_mean_over_prompts_and_sampled_steps(profile):
    axes = plots.split_by_layer(profile).axes[0]
    mean = (
        profile.split[profile.split["dtype"] == "float16"].groupby("layer")[["injected", "propagated", "drift"]].mean()
    )
    for label, column in (("injected", "injected"), ("propagated", "propagated"), ("total, float16", "drift")):
        np.testing.assert_allclose(lines(axes)[label].get_ydata(), mean[column], rtol=1e-12)
    control = plots.split_by_layer(profile, "float32").axes[0]
    assert lines(control)["injected"].get_ydata()[0] < mean["injected"][0] / 1000


def test_a_profile_without_the_split_has_no_such_figure(profile, figures):
    bare = replace(profile, split=profile.split.iloc[:0])
    assert set(figures) - set(plots.drift_figures(bare)) == {"split_by_layer"}
    with pytest.raises(InputError, match="without the injected"):
        plots.split_by_layer(bare)


def test_equal_share_is_that_of_the_frame(profile):
    axes = plots.equal_share(profile).axes[0]
    frame = profile.frame.query("site == 'resid_post' and dtype == 'float16' and step > 0")
    share = frame.groupby("layer")["bitwise_equal"].mean()
    y = lines(axes)["float16"].get_ydata()
    np.testing.assert_allclose(y, share)
    assert 0.5 < y[0] < 1
    assert (y[1:] == 0).all()


def test_every_figure_has_a_caption_with_its_conditions(profile, figures):
    captions = plots.drift_captions(profile)
    assert set(captions) == set(figures)
    for caption in captions.values():
        assert "tiny/llama, float16, 4 prompts, 11 decode steps" in caption
        assert not re.search(r"[{}]|\(\(|nan", caption)


def test_wrong_names_are_refused(profile):
    for call in (
        lambda: plots.drift_by_layer(profile, "resid_middle"),
        lambda: plots.drift_by_layer(profile, "cache_k"),
        lambda: plots.drift_by_layer(profile, metric="nonfinite"),
        lambda: plots.drift_heatmap(profile, metric="signed_mean"),
        lambda: plots.drift_heatmap(profile, dtype="bfloat16"),
        lambda: plots.dtype_look("int8"),
        lambda: plots.zero_aware_log_axis(Figure().add_subplot(), [-1.0]),
    ):
        with pytest.raises(InputError):
            call()


def test_looks_differ_in_colour_dash_marker_and_mostly_in_grey():
    for looks in (plots.DTYPE_LOOKS.values(), plots.SERIES_LOOKS):
        for part in zip(*looks, strict=True):
            assert len(set(map(str, part))) == len(looks)
    grey = [np.dot(to_rgb(plots.dtype_look(d).colour), (0.299, 0.587, 0.114)) for d in ("float16", "float32")]
    assert abs(grey[0] - grey[1]) > 0.2


def test_widths_and_fonts_are_those_of_a_column(figures):
    assert {name: f.get_figwidth() for name, f in figures.items()} == dict.fromkeys(figures, 3.35) | {"kv_drift": 6.9}
    for figure in figures.values():
        figure.canvas.draw()
        width = figure.bbox.width
        for legend in figure.legends:
            box = legend.get_window_extent()
            assert box.x0 >= 0
            assert box.x1 <= width
            assert box.y0 >= 0
        sizes = {text.get_fontsize() for text in figure.findobj(matplotlib.text.Text) if text.get_text()}
        assert min(sizes) >= 5  # exponents of tick labels
        assert max(sizes) <= 8


def test_no_state_is_left_behind_and_no_backend_chosen(profile, monkeypatch):
    def chosen(*_, **__):
        pytest.fail("a backend was chosen")

    monkeypatch.setattr(plt, "switch_backend", chosen)
    before = {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}
    plots.png(plots.drift_heatmap(profile))
    plots.equal_share(profile)
    assert plt.get_fignums() == []
    assert {key: matplotlib.rcParams[key] for key in before} == before


def test_files_are_the_same_bytes_again_whatever_the_caller_set(profile, tmp_path):
    first = plots.save(plots.drift_by_layer(profile), tmp_path / "a.v1")
    assert [path.name for path in first] == ["a.v1.png", "a.v1.pdf"]
    with matplotlib.rc_context({"axes.grid": True, "font.size": 20, "pdf.fonttype": 3}):
        again = plots.save(plots.drift_by_layer(profile), tmp_path / "b")
    for one, two in zip(first, again, strict=True):
        assert one.read_bytes() == two.read_bytes()
    assert plots.png(plots.drift_by_layer(profile, "mlp_out")) != first[0].read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.v1.pdf", "a.v1.png", "b.pdf", "b.png"]


def test_drawing_a_figure_does_not_move_it(profile):
    figure = plots.drift_heatmap(profile)  # without `settle` the colour bar moves
    first = plots.png(figure)
    figure.canvas.draw()
    assert plots.png(figure) == first


def test_a_notebook_shows_a_figure_that_pyplot_does_not_know(profile):
    data, size = plots.equal_share(profile)._repr_png_()
    assert data.startswith(b"\x89PNG")
    assert size["width"] == pytest.approx(3.35 * 128, abs=1)
    assert not hasattr(Figure(), "_repr_png_")


def test_files_are_fine_enough_and_embed_truetype_without_a_date(profile, tmp_path):
    png, pdf = plots.save(plots.drift_heatmap(profile), tmp_path / "f")
    assert int.from_bytes(png.read_bytes()[16:20], "big") >= 200 * 3.35
    data = pdf.read_bytes()
    assert b"/CIDFontType2" in data or b"/TrueType" in data
    assert b"/Type3" not in data
    assert b"CreationDate" not in data


def test_a_failed_save_leaves_what_was_there(profile, tmp_path):
    path = plots.save(plots.equal_share(profile), tmp_path / "f")[0]
    before = path.read_bytes()
    figure = plots.drift_by_layer(profile)
    figure.axes[0].set_xlabel("$\\nosuchcommand$")
    with pytest.raises(ValueError, match="nosuchcommand"):
        plots.save(figure, tmp_path / "f")
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_a_single_layer_is_drawn():
    axes = plots.drift_by_layer(fake_profile(n_layers=1, n_steps=3)).axes[0]
    assert len(lines(axes)["float16"].get_xdata()) == 1


def test_drift_of_prompts_of_different_lengths_is_averaged_over_those_there(profile):
    shorter = profile.frame[~((profile.frame["prompt"] == 0) & (profile.frame["step"] == N_STEPS))]
    table = plots.step_by_layer(replace(profile, frame=shorter))
    expected = shorter.query("site == 'resid_post' and dtype == 'float16' and step == @N_STEPS and layer == 2")
    assert len(expected) == 3
    assert table.loc[2, N_STEPS] == pytest.approx(expected["rel_l2"].mean())
    assert isinstance(table, pd.DataFrame)
