import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from fake_profile import fake_profile, fake_report

from mechkv import plots
from mechkv.claims import CLAIMS, ClaimsTable, Finding
from mechkv.errors import InputError, StorageError
from mechkv.report import (
    Section,
    claims_json,
    escape_latex,
    format_number,
    format_value,
    write_csv,
    write_html,
    write_latex,
)

HOSTILE = "<script>alert('x')</script><img src=http://evil.example/x.png>\"&"


class Page(HTMLParser):
    """Tags with their attributes, and the visible text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(text)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def report():
    return fake_report()


@pytest.fixture(scope="module")
def text(report, tmp_path_factory):
    return write_html(report, tmp_path_factory.mktemp("report") / "report.html").read_text()


def loads(page, text):
    """What a browser would fetch."""
    found = [attrs.get(key) for _, attrs in page.tags for key in ("src", "srcset", "data", "poster", "background")]
    found += [attrs.get("href") for attrs in page.all("link")]
    found += re.findall(r"url\(([^)]*)\)|@import\s+(\S+)", text)
    return [target for target in found if target and not str(target).startswith("data:")]


def test_the_file_needs_nothing_else(text):
    page = Page(text)
    assert loads(page, text) == []
    assert page.all("script") == []
    assert page.all("link") == []
    assert any("default-src 'none'" in attrs.get("content", "") for attrs in page.all("meta"))
    planted = text + '<img src="https://example.org/x.png">'
    assert loads(Page(planted), planted) == ["https://example.org/x.png"]


def test_every_claim_is_there_with_numbers_controls_and_verdict(text):
    page = Page(text)
    for claim in CLAIMS.values():
        assert claim.id in page.text
        assert claim.says in page.text
        assert claim.number in page.text
    assert "8.2e3 [7.9e3, 8.5e3]" in page.text
    assert "self against self: 0" in page.text
    assert "1 reproduced, 1 partly, 4 not measured." in page.text
    rows = [row for row in text.split("<tr>") if 'class="verdict' in row]
    assert len(rows) == 6
    assert ["not measured" in row for row in rows] == [True, True, False, True, True, False]


def test_question_method_limits_provenance_and_command_are_there(text, report):
    page = Page(text)
    for name, value in report.method:
        assert f"{name} {format_value(value)}" in page.text
    for words in (*report.limits, report.command, "versions.torch 2.13.0", "machine.cuda —", "And by how much?"):
        assert words in page.text
    assert text.index("<details>") < text.index("versions.torch")
    assert page.all("details") == [{}]


def test_figures_are_inside_with_alternative_texts_and_captions(text):
    images = Page(text).all("img")
    captions = plots.drift_captions(fake_profile())
    assert len(images) == len(captions) == 5
    for image, caption in zip(images, captions.values(), strict=False):
        assert image["src"].startswith("data:image/png;base64,iVBOR")
        assert len(image["alt"]) > 40
        assert caption in Page(text).text


def test_tables_say_what_their_headers_head(text):
    page = Page(text)
    assert page.all("html") == [{"lang": "en"}]
    assert page.all("th")
    assert all(attrs.get("scope") in ("row", "col") for attrs in page.all("th"))
    assert all("alt" in attrs for attrs in page.all("img"))


def test_contrast_of_texts_is_at_least_that_of_wcag_aa(text):
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    def contrast(a, b):
        high, low = sorted((luminance(a), luminance(b)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    schemes = re.findall(r":root \{(.*?)\}", text, re.S)[:2]
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--(\w+): (#\w{6})", scheme))
        for name in ("text", "soft", "link", "good", "part", "bad"):
            assert contrast(colours[name], colours["page"]) >= 4.5
        assert contrast(colours["line"], colours["page"]) < 4.5


def test_hostile_text_is_text(tmp_path):
    profile = fake_profile(source=HOSTILE)
    finding = Finding("C1", "partly", HOSTILE, HOSTILE, HOSTILE, HOSTILE, note=HOSTILE)
    table = pd.DataFrame({HOSTILE: [HOSTILE]})
    parts = dict.fromkeys(("title", "question", "command"), HOSTILE)
    figures = {HOSTILE: (plots.equal_share(profile), plots.drift_captions(profile)["equal_share"])}
    report = fake_report(
        profile,
        **parts,
        method=[(HOSTILE, HOSTILE)],
        claims=ClaimsTable([finding]),
        sections=[Section(HOSTILE, HOSTILE, figures, {HOSTILE: (table, HOSTILE)})],
        limits=[HOSTILE],
        provenance={HOSTILE: {HOSTILE: HOSTILE}},
    )
    text = write_html(report, tmp_path / "r.html").read_text()
    page = Page(text)
    assert "<script" not in text
    assert loads(page, text) == []
    assert len(page.all("img")) == 1
    assert page.text.count("<script>alert('x')</script>") >= 12


def test_the_same_report_gives_the_same_bytes(tmp_path):
    def one(metric="rel_l2"):
        figure = plots.drift_by_layer(fake_profile(n_steps=2), metric=metric)
        return fake_report(sections=[Section("S", "text", {"f": (figure, "caption")})])

    report = one()
    first = write_html(report, tmp_path / "a.html").read_bytes()
    assert write_html(report, tmp_path / "b.html").read_bytes() == first
    assert write_html(one(), tmp_path / "c.html").read_bytes() == first
    assert write_html(one("rms"), tmp_path / "d.html").read_bytes() != first
    assert write_html(replace(report, limits=["Another."]), tmp_path / "e.html").read_bytes() != first
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.html" for name in "abcde"]


def test_undefined_numbers_are_dashes_and_never_nan(tmp_path):
    table = pd.DataFrame({"a": [np.nan, 1.0], "b": pd.array([pd.NA, 3], dtype="Int64"), "c": [None, "x"]})
    finding = Finding("C2", "partly", "rate", "none", "tiny", "e", value=0.25, low=float("nan"), high=float("nan"))
    report = fake_report(claims=ClaimsTable([finding]), sections=[Section("T", tables={"t": (table, "c")})])
    page = Page(write_html(report, tmp_path / "r.html").read_text())
    assert not re.search(r"\bnan\b|NaN|<NA>|None", page.text)
    assert "— — — 1.0 3 x" in page.text
    assert "rate 0.25 tiny" in page.text


def test_a_picture_file_is_taken_if_it_is_png(report, tmp_path):
    png, pdf = plots.save(plots.equal_share(fake_profile()), tmp_path / "f")
    with_file = replace(report, sections=[Section("S", figures={"f": (png, "caption")})])
    text = write_html(with_file, tmp_path / "r.html").read_text()
    assert len(Page(text).all("img")) == 1
    with pytest.raises(InputError, match="not PNG"):
        write_html(replace(report, sections=[Section("S", figures={"f": (pdf, "c")})]), tmp_path / "x.html")
    with pytest.raises(StorageError, match="cannot be read"):
        write_html(replace(report, sections=[Section("S", figures={"f": ("missing.png", "c")})]), tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize("missing", ["title", "question", "method", "limits", "command"])
def test_a_report_without_its_essentials_is_refused(missing):
    with pytest.raises(InputError, match=missing):
        fake_report(sections=[], **{missing: [] if missing in ("method", "limits") else ""})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.7e-3, "1.7e-3"),
        (9.94e-3, "9.9e-3"),
        (9.96e-3, "0.010"),
        (0.01, "0.010"),
        (0.53, "0.53"),
        (7.83, "7.8"),
        (99.6, "100"),
        (153.7, "154"),
        (1234.0, "1.2e3"),
        (-2.5e-9, "-2.5e-9"),
        (0.0, "0"),
        (-0.0, "0"),
        (1234, "1234"),
        (np.int64(7), "7"),
        (np.float32(0.5), "0.50"),
        (None, "—"),
        (float("nan"), "—"),
        (np.float32("nan"), "—"),
        (pd.NA, "—"),
        (float("-inf"), "-∞"),
    ],
)
def test_numbers_read(value, expected):
    assert format_number(value) == expected


def test_intervals_need_both_bounds():
    assert format_number(1.7e-3, 1.2e-3, 2.4e-3) == "1.7e-3 [1.2e-3, 2.4e-3]"
    assert format_number(0.5, 0.0, float("inf")) == "0.50 [0, ∞]"
    assert format_number(1.7e-3, 1.2e-3, float("nan")) == "1.7e-3"
    assert format_number(float("nan"), 0.1, 0.2) == "—"


def test_values_read():
    assert format_value(True) == "yes"
    assert format_value(np.False_) == "no"
    assert format_value(("a", 2, None)) == "a, 2, —"
    assert format_value([]) == "—"
    assert format_value({"a": 1}) == "a: 1"


def unescaped(text):
    """Characters that LaTeX would act on, outside commands that `write_latex` makes itself."""
    body = re.sub(r"\\(?:textbackslash|textasciitilde|textasciicircum|textless|textgreater)\{\}|\$\\infty\$", "", text)
    return re.findall(r"(?<!\\)[%$#_{}~^]", body)


def test_latex_is_escaped_and_balanced(tmp_path):
    wild = r"50 % of a_b & c#1 {x} ~ ^ \input{y} <z> $5"
    frame = pd.DataFrame({"na_me & %": [wild, "plain"], "n": [1.7e-3, np.nan], "k": [12, 3]})
    text = write_latex(frame, tmp_path / "t.tex", caption=wild, label="tab:drift").read_text()
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1
    assert r"\begin{tabular}{lrr}" in text
    assert r"\label{tab:drift}" in text
    assert r"50 \% of a\_b \& c\#1 \{x\} \textasciitilde{}" in text
    assert "\\input" not in text
    assert re.findall(r"\\begin\{(\w+)\}", text) == re.findall(r"\\end\{(\w+)\}", text)[::-1]
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len(rows) == 3
    for row in rows:
        assert len(re.findall(r"(?<!\\)&", row)) == 2
        assert unescaped(row.removesuffix(r"\\")) == []
    assert unescaped(wild) != []
    assert "plain & --- & 3" in text
    assert "1.7e-3 & 12" in text


def test_latex_refuses_what_it_cannot_take(tmp_path):
    frame = pd.DataFrame({"a": [1]})
    with pytest.raises(InputError, match="label"):
        write_latex(frame, tmp_path / "t.tex", "c", "tab:{x}")
    with pytest.raises(InputError, match="0 columns"):
        write_latex(pd.DataFrame(), tmp_path / "t.tex", "c", "tab:x")
    assert escape_latex("a\n\nb") == "a b"


def test_csv_comes_back_as_it_was(tmp_path):
    frame = fake_profile(n_steps=2).frame
    back = pd.read_csv(write_csv(frame, tmp_path / "f.csv"), float_precision="round_trip")
    pd.testing.assert_frame_equal(back, frame, check_dtype=False)
    lists = pd.DataFrame({"tokens": [np.arange(2000)], "x": [np.nan]})
    text = write_csv(lists, tmp_path / "l.csv").read_text()
    assert "..." not in text
    assert json.loads(pd.read_csv(tmp_path / "l.csv")["tokens"][0]) == list(range(2000))
    assert "nan" not in text


def test_claims_json_has_every_claim(report, tmp_path):
    path = claims_json(report.claims, tmp_path / "claims.json")
    data = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert [row["claim"] for row in data["claims"]] == list(CLAIMS)
    assert [row["verdict"] for row in data["claims"]].count("not measured") == 4
    assert next(row for row in data["claims"] if row["claim"] == "C3")["value"] == 8192.0
    undefined = ClaimsTable([Finding("C3", "partly", "x", "y", "z", "e", value=1.0, low=float("nan"))])
    rows = json.loads(claims_json(undefined, path).read_text())["claims"]
    assert next(row for row in rows if row["claim"] == "C3")["low"] is None
