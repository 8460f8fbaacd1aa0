"""What was asked, how was it measured, what came out? One HTML file, and tables for a paper.

Conventions
    `write_html` writes one file that needs nothing else: figures and style are inside it, it runs no script, and its
    content policy forbids loading anything. The same report gives the same bytes: there is no time of writing in it.
    Every text is escaped. A number is written by `format_number`, in every table alike: `1.7e-3 [1.2e-3, 2.4e-3]`, and
    an undefined one as a dash. CSV and JSON keep full precision instead, an undefined value being empty or null.
Controls
    Every claim of the paper is in the table, measured or not, with its controls beside the number.
"""

import base64
import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from mechkv import figure_style, storage
from mechkv.claims import CLAIMS, VERDICTS, ClaimsTable
from mechkv.errors import InputError, StorageError

UNDEFINED = "—"
"""How an undefined number is written."""

PAPER = "arXiv 2604.15409v1"
_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Section:
    """One part of the results.

    Attributes:
        title: Its heading.
        text: Plain text; an empty line begins a new paragraph.
        figures: Name -> (a figure or the path of a PNG file, caption). A caption states model, dtype, prompts, steps
            and what the band is.
        tables: Name -> (table, caption). The index of a table is not shown.
    """

    title: str
    text: str = ""
    figures: Mapping[str, tuple[Figure | Path | str, str]] = field(default_factory=dict)
    tables: Mapping[str, tuple[pd.DataFrame, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """Everything that a report says.

    Attributes:
        title: Its title.
        question: What was asked; plain text.
        method: Every setting as (name, value).
        claims: The claims of the paper, and what was found.
        sections: The results.
        limits: What the results do not say.
        provenance: What was run on what (nested plain values).
        command: What makes this report again.
    """

    title: str
    question: str
    method: Sequence[tuple[str, Any]]
    claims: ClaimsTable
    sections: Sequence[Section]
    limits: Sequence[str]
    provenance: Mapping[str, Any]
    command: str

    def __post_init__(self) -> None:
        missing = [name for name in ("title", "question", "method", "limits", "command") if not getattr(self, name)]
        if missing:
            raise InputError(
                "a report without its essentials",
                got=f"nothing for {', '.join(missing)}",
                expected="title, question, method, limits and command",
                remedy="State them: a number without method and limits cannot be judged.",
            )


# --- numbers ---------------------------------------------------------------------------------------------------------


def format_number(value: Any, low: Any = None, high: Any = None, digits: int = 2) -> str:
    """A number with `digits` significant digits, and its interval where both bounds are given.

    Whole numbers of type int are written in full, others plainly from 0.01 to 1000 and as `1.7e-3` beyond. None, NaN
    and `pandas.NA` are `UNDEFINED`; a bound may be infinite.
    """
    text = _one_number(value, digits)
    bounds = [_one_number(bound, digits) for bound in (low, high)]
    return text if UNDEFINED in (text, *bounds) else f"{text} [{', '.join(bounds)}]"


def _one_number(value: Any, digits: int) -> str:
    if _undefined(value):
        return UNDEFINED
    if isinstance(value, (int, np.integer)):
        return str(value)
    number = float(value)
    if math.isinf(number):
        return "∞" if number > 0 else "-∞"
    if number == 0:
        return "0"
    mantissa, exponent = f"{number:.{digits - 1}e}".split("e")
    power = int(exponent)
    if -2 <= power < 3:
        return f"{number:.{max(digits - 1 - power, 0)}f}"
    return f"{mantissa}e{power}"


def format_value(value: Any) -> str:
    """Any cell: numbers by `format_number`, truth values as yes and no, lists joined, texts as they are."""
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {format_value(item)}" for key, item in value.items()) or UNDEFINED
    if isinstance(value, (list, tuple, set, frozenset, np.ndarray)):
        return ", ".join(format_value(item) for item in value) or UNDEFINED
    if _undefined(value) or isinstance(value, (int, float, np.number)):
        return format_number(value)
    return str(value)


def _undefined(value: Any) -> bool:
    missing = value is None or value is pd.NA or value is pd.NaT
    return missing or (isinstance(value, (float, np.floating)) and math.isnan(value))


# --- HTML ------------------------------------------------------------------------------------------------------------


def write_html(report: Report, path: Path | str) -> Path:
    """Write the report as one HTML file that opens offline.

    Raises:
        InputError: A picture that is not PNG.
        StorageError: A picture that cannot be read, or a file that cannot be written.
    """
    environment = Environment(
        loader=PackageLoader("mechkv"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    rows = report.claims.rows()
    page = environment.get_template("report.html.j2").render(
        report=report,
        question=_paragraphs(report.question),
        method=[(name, format_value(value)) for name, value in report.method],
        claims=[_claim_view(row) for row in rows],
        tally=[(verdict, n) for verdict in VERDICTS if (n := sum(row["verdict"] == verdict for row in rows))],
        n_claims=len(CLAIMS),
        paper=PAPER,
        sections=[_section_view(section, i) for i, section in enumerate(report.sections)],
        provenance=[(name, format_value(value)) for name, value in _flat(report.provenance)],
    )
    storage.write_text(path, page)
    return Path(path)


def _claim_view(row: Mapping[str, Any]) -> dict[str, str]:
    number = "" if row["value"] is None else format_number(row["value"], row["low"], row["high"])
    texts = {key: row[key] or UNDEFINED for key in ("claim", "says", "paper", "ours", "controls", "verdict")}
    slug = row["verdict"].replace(" ", "-")
    return texts | {key: row[key] for key in ("model", "note", "source")} | {"number": number, "slug": slug}


def _section_view(section: Section, index: int) -> dict[str, Any]:
    figures = [
        {"name": name, "caption": caption} | _image(_picture(picture))
        for name, (picture, caption) in section.figures.items()
    ]
    tables = [
        {"name": name, "caption": caption, "columns": [str(c) for c in frame.columns], **_cells(frame)}
        for name, (frame, caption) in section.tables.items()
    ]
    text = _paragraphs(section.text)
    return {"title": section.title, "id": f"section-{index + 1}", "text": text, "figures": figures, "tables": tables}


def _cells(frame: pd.DataFrame) -> dict[str, Any]:
    """The cells as text, and which columns are numbers."""
    numeric = [pd.api.types.is_numeric_dtype(kind) and not pd.api.types.is_bool_dtype(kind) for kind in frame.dtypes]
    columns = [[format_value(value) for value in frame.iloc[:, i]] for i in range(frame.shape[1])]
    return {"rows": [list(row) for row in zip(*columns, strict=True)], "numeric": numeric}


def _picture(picture: Figure | Path | str) -> bytes:
    if isinstance(picture, Figure):
        return figure_style.png(picture)
    try:
        data = Path(picture).read_bytes()
    except OSError as error:
        raise StorageError(
            "a picture cannot be read", got=error, expected="a PNG file", remedy="Draw the figures first."
        ) from error
    if not data.startswith(_PNG):
        raise InputError("a picture that is not PNG", got=picture, expected="a PNG file", remedy="Use plots.save.")
    return data


def _image(data: bytes) -> dict[str, Any]:
    """What an <img> needs; files are taken to have the resolution of `plots.save`."""
    width, height = struct.unpack(">II", data[16:24])
    scale = figure_style.PIXELS / figure_style.DPI
    return {"data": base64.b64encode(data).decode(), "width": round(width * scale), "height": round(height * scale)}


def _paragraphs(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]


def _flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested settings as dotted names."""
    rows: list[tuple[str, Any]] = []
    for key, item in value.items():
        nested = isinstance(item, Mapping) and item
        rows += _flat(item, f"{prefix}{key}.") if nested else [(f"{prefix}{key}", item)]
    return rows


# --- tables and JSON -------------------------------------------------------------------------------------------------

_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    UNDEFINED: "---",
    "∞": r"$\infty$",
} | {sign: f"\\{sign}" for sign in "&%$#_{}"}


def escape_latex(text: str) -> str:
    """Text with every character that means something to LaTeX written so that it stands for itself."""
    return "".join(_LATEX.get(sign, sign) for sign in " ".join(text.split()))


def write_latex(frame: pd.DataFrame, path: Path | str, caption: str, label: str) -> Path:
    """Write a table for LaTeX with booktabs, numbers formatted and to the right, every text escaped.

    Raises:
        InputError: A table without columns, or a label that LaTeX cannot take.
    """
    if not re.fullmatch(r"[A-Za-z0-9:.-]+", label) or frame.shape[1] == 0:
        raise InputError(
            "a table that LaTeX cannot take",
            got=f"label {label!r}, {frame.shape[1]} columns",
            expected="letters, digits, ':', '.' and '-' in the label, and at least one column",
            remedy="Use a label such as tab:drift.",
        )
    cells = _cells(frame)
    escaped = pd.DataFrame(
        [[escape_latex(cell) for cell in row] for row in cells["rows"]], columns=range(frame.shape[1])
    )
    escaped.columns = pd.Index([escape_latex(str(name)) for name in frame.columns])
    text = escaped.to_latex(
        index=False,
        escape=False,
        caption=escape_latex(caption),
        label=label,
        position="tbp",
        column_format="".join("r" if number else "l" for number in cells["numeric"]),
    )
    storage.write_text(path, text)
    return Path(path)


def write_csv(frame: pd.DataFrame, path: Path | str) -> Path:
    """Write a table as CSV in full precision; undefined values are empty, lists are JSON."""
    plain = frame.copy()
    for name in plain.select_dtypes(object).columns:
        plain[name] = [json.dumps(v.tolist()) if isinstance(v, np.ndarray) else v for v in plain[name]]
    storage.write_text(path, plain.to_csv(index=False, lineterminator="\n"))
    return Path(path)


def claims_json(claims: ClaimsTable, path: Path | str) -> Path:
    """Write all claims with their findings as JSON; undefined numbers are null."""
    storage.write_json(path, {"paper": PAPER, "claims": claims.rows()}, nan_as_null=True)
    return Path(path)
