"""Style, as far as a program can see it: linter, formatter, types, sizes, and what must not be in the package."""

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = sorted((ROOT / "mechkv").glob("**/*.py"))
ALL = sorted(path for part in ("mechkv", "experiments", "tests") for path in (ROOT / part).glob("**/*.py"))
FILE_LINES, FUNCTION_LINES, CLASS_LINES = 400, 60, 300


@pytest.mark.parametrize(
    "arguments",
    [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)],
    ids=["lint", "format", "types"],
)
def test_the_checkers_are_content(arguments):
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-1000:]}"


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_functions_and_classes_stay_small(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= FILE_LINES
    assert too_long(text) == []


def too_long(text: str) -> list[str]:
    """Functions and classes over the limits."""
    found = []
    for node in ast.walk(ast.parse(text)):
        limit = CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            n_lines = (node.end_lineno or 0) - node.lineno + 1
            if n_lines > limit:
                found.append(f"{node.name}: {n_lines} lines")
    return found


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: path.name)
def test_the_package_does_without(path):
    assert forbidden(path.read_text(encoding="utf-8")) == []


def forbidden(text: str) -> list[str]:
    """A device by name, pickle, torch.load, code from the hub, exceptions caught by the dozen."""
    found, tree = [], ast.parse(text)
    names = {id(node.slice) for node in ast.walk(tree) if isinstance(node, ast.Subscript)}  # settings["cuda"] is a name
    for node in ast.walk(tree):
        if id(node) in names:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.split(":")[0] == "cuda":
            found.append("a literal 'cuda'")
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [name for name in imported if name.split(".")[0] in ("pickle", "dill", "cloudpickle")]
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
            found.append("torch.load")
        if isinstance(node, ast.ExceptHandler):
            caught = "everything" if node.type is None else ast.unparse(node.type)
            if caught in ("everything", "Exception", "BaseException"):
                found.append(f"except {caught}")
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and ast.unparse(node.value) != "False":
            found.append("trust_remote_code")
    return found


def test_every_module_begins_with_a_docstring():
    assert [path.name for path in PACKAGE if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))] == []
    assert not [path for path in ALL if path.stem in ("utils", "misc", "common")]


def test_the_checks_see_what_they_look_for():
    bad = "import pickle\ntry:\n    torch.load(x, device='cuda:0')\nexcept Exception:\n    pass\n"
    assert sorted(forbidden(bad)) == ["a literal 'cuda'", "except Exception", "pickle", "torch.load"]
    assert forbidden("try:\n    f(trust_remote_code=True)\nexcept:\n    pass") == [
        "except everything",
        "trust_remote_code",
    ]
    assert too_long("def f():\n" + "    x = 1\n" * 60) == ["f: 61 lines"]
    assert too_long("def f():\n" + "    x = 1\n" * 59) == []


def test_comments_hold_no_left_over_code_marks():
    marks = ("TO" + "DO", "FIX" + "ME", "X" + "XX")
    for path in ALL:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            assert token.type != tokenize.COMMENT or not any(mark in token.string for mark in marks), path.name
