"""Every notebook runs from top to bottom, draws something, and its two files (percent script, ipynb) say the same."""

from pathlib import Path

import jupytext
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "notebooks").glob("[0-9]*.py"))
TIMEOUT = 600


@pytest.mark.notebook
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_notebook_runs(script: Path) -> None:
    notebook = jupytext.read(script)
    NotebookClient(notebook, timeout=TIMEOUT, kernel_name="python3", resources={"metadata": {"path": ROOT}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs), "no figure"
    assert not any(output.output_type == "error" for output in outputs)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_pair_says_the_same(script: Path) -> None:
    pair = jupytext.read(script.with_suffix(".ipynb"))
    ours = [(cell.cell_type, cell.source) for cell in jupytext.read(script).cells]
    assert ours == [(cell.cell_type, cell.source) for cell in pair.cells]
    assert not any(cell.get("outputs") for cell in pair.cells), "commit notebooks without outputs"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_notebook_is_thin(script: Path) -> None:
    cells = jupytext.read(script).cells
    code = " ".join(cell.source for cell in cells if cell.cell_type == "code")
    prose = " ".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert code.count("def ") <= 2
    assert len(prose.split()) > len(code.split())
