"""Runs that can be killed: a piece counts when its marker is there, and pieces of different runs never mix."""

import pandas as pd
import pytest

from mechkv.errors import StorageError
from mechkv.runs import Piece, RunFolder

SETTINGS = {"model": "a", "n": 3}


def piece(value: float) -> Piece:
    return Piece({"frame": pd.DataFrame({"x": [value, 0.1]})}, {"note": value})


def test_a_finished_piece_is_not_computed_again(tmp_path) -> None:
    first = RunFolder(tmp_path / "run", SETTINGS).piece("p", lambda: piece(1.5))

    def never() -> Piece:
        raise AssertionError("computed again")

    again = RunFolder(tmp_path / "run", SETTINGS).piece("p", never)
    pd.testing.assert_frame_equal(first.frames["frame"], again.frames["frame"])
    assert again.values == {"note": 1.5}


def test_an_unfinished_piece_is_computed_again(tmp_path) -> None:
    run = RunFolder(tmp_path / "run", SETTINGS)
    run.piece("p", lambda: piece(1.0))
    (tmp_path / "run" / "pieces" / "p" / "piece.json").unlink()
    assert not run.has("p")
    assert run.piece("p", lambda: piece(2.0)).values["note"] == 2.0


def test_another_run_is_refused_and_loses_nothing(tmp_path) -> None:
    RunFolder(tmp_path / "run", SETTINGS).piece("p", lambda: piece(1.0))
    with pytest.raises(StorageError, match=r"n = 3.*n = 4"):
        RunFolder(tmp_path / "run", SETTINGS | {"n": 4})
    assert RunFolder(tmp_path / "run", SETTINGS).has("p")


def test_a_folder_with_other_files_is_refused(tmp_path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(StorageError, match="other files"):
        RunFolder(tmp_path, SETTINGS)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_without_a_folder_everything_is_computed(tmp_path) -> None:
    run = RunFolder(None, SETTINGS)
    assert run.piece("p", lambda: piece(1.0)).values["note"] == 1.0
    assert run.piece("p", lambda: piece(2.0)).values["note"] == 2.0
    assert not run.has("p")
