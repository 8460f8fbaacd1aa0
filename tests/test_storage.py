"""Everything written comes back bit for bit; whatever is damaged, foreign or does not fit is refused, nothing lost."""

import errno
import json
import os
import shutil
import stat
from collections import namedtuple
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import SafetensorError

from mechkv import plain_json, result_folder, storage
from mechkv.errors import InputError, StorageError

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool)


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


@pytest.fixture
def sealed(tmp_path):
    root = tmp_path / "result"
    storage.write_json(root / "a.json", {"x": 1})
    storage.write_tensors(root / "t.safetensors", {"t": torch.arange(5.0)})
    storage.write_frame(root / "frame.parquet", pd.DataFrame({"layer": [0, 1], "drift": [0.5, 0.25]}))
    result_folder.seal(root, "drift", {"n": 3})
    return root


def test_json_is_sorted_plain_and_ends_with_a_newline(tmp_path):
    value = {"b": np.float64(0.1), "a": (np.int64(3), True, None), "c": np.arange(2), "d": "θ"}
    storage.write_json(tmp_path / "v.json", value)
    text = (tmp_path / "v.json").read_text()
    assert text.endswith("}\n")
    assert text.index('"a"') < text.index('"b"')
    assert storage.read_json(tmp_path / "v.json") == {"a": [3, True, None], "b": 0.1, "c": [0, 1], "d": "θ"}


def test_a_table_in_json_keeps_every_digit():
    small = 1e-12 / 3
    frame = pd.DataFrame({"x": [small, np.nan, -np.inf], "n": [1, 2, 3], "flag": [True, False, True]})
    frame = frame.assign(kind=pd.Categorical(["a", "b", "a"]), ids=[[1, 2], [3], []])
    rows = json.loads(json.dumps(plain_json.records(frame)))
    assert [row["x"] for row in rows] == [small, None, None]
    assert rows[0] == {"x": small, "n": 1, "flag": True, "kind": "a", "ids": [1, 2]}
    assert json.loads(frame.to_json(orient="records"))[0]["x"] == 0  # the twin: what it replaces


@pytest.mark.parametrize("bad", [float("nan"), np.float32("inf"), np.array([1.0, np.nan])])
def test_json_refuses_what_is_not_finite_unless_told(tmp_path, bad):
    with pytest.raises(InputError, match=r"value\['k'\]\['j'\]"):
        storage.write_json(tmp_path / "v.json", {"k": {"j": bad}})
    assert names(tmp_path) == []
    storage.write_json(tmp_path / "v.json", {"k": {"j": bad}}, nan_as_null=True)
    assert None in np.atleast_1d(np.array(storage.read_json(tmp_path / "v.json")["k"]["j"], dtype=object))


@pytest.mark.parametrize("bad", [{1: 2}, {"k": {3}}, {"k": torch.zeros(1)}, object()])
def test_json_refuses_what_it_would_change(tmp_path, bad):
    with pytest.raises(InputError):
        storage.write_json(tmp_path / "v.json", bad)


def test_json_reader_refuses_nan_and_junk(tmp_path):
    for text in ('{"a": NaN}', '{"a": 1', "\x80"):
        (tmp_path / "v.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(StorageError, match="truncated, altered"):
            storage.read_json(tmp_path / "v.json")


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_come_back_bitwise_in_their_dtype(tmp_path, dtype):
    value = (torch.randn(5, 7, generator=torch.Generator().manual_seed(1)) * 3).round().clamp(0).to(dtype)
    given = {"plain": value, "view": value[1:3], "turned": value.T, "same": value, "empty": value[:0]}
    storage.write_tensors(tmp_path / "t.safetensors", given, {"note": "x"})
    found = storage.read_tensors(tmp_path / "t.safetensors")
    assert found.metadata == {"note": "x"}
    assert set(found) == set(given)
    for name, tensor in given.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], tensor)
    assert not torch.equal(found["turned"].T[1:3], found["plain"][2:4])


def test_writing_to_a_mapped_tensor_leaves_the_file_alone(tmp_path):
    storage.write_tensors(tmp_path / "t.safetensors", {"t": torch.zeros(3)})
    storage.read_tensors(tmp_path / "t.safetensors")["t"].fill_(7)
    assert torch.equal(storage.read_tensors(tmp_path / "t.safetensors")["t"], torch.zeros(3))


def test_a_rewritten_file_is_a_new_one(tmp_path):
    path = tmp_path / "t.safetensors"
    storage.write_tensors(path, {"t": torch.zeros(3)})
    held = storage.read_tensors(path)
    storage.write_tensors(path, {"t": torch.ones(3)})
    assert torch.equal(held["t"], torch.zeros(3))
    assert torch.equal(storage.read_tensors(path)["t"], torch.ones(3))


def test_tensor_files_have_the_permissions_of_other_files(tmp_path):
    storage.write_tensors(tmp_path / "t.safetensors", {"t": torch.zeros(3)})
    (tmp_path / "plain").touch()
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("t.safetensors", "plain")]
    assert modes[0] == modes[1]


def test_frames_come_back_and_an_index_is_refused(tmp_path):
    frame = pd.DataFrame({"site": ["a", "b"], "value": [1e-300, np.nan], "n": np.array([1, 2], dtype="int32")})
    storage.write_frame(tmp_path / "f.parquet", frame)
    pd.testing.assert_frame_equal(storage.read_frame(tmp_path / "f.parquet"), frame)
    with pytest.raises(InputError, match="reset_index"):
        storage.write_frame(tmp_path / "g.parquet", frame.set_index("site"))
    with pytest.raises(InputError, match="reset_index"):
        storage.write_frame(tmp_path / "g.parquet", frame[frame["n"] == 2])


@pytest.mark.parametrize("reader", [storage.read_json, storage.read_frame, storage.read_tensors])
def test_missing_and_foreign_files(tmp_path, reader):
    with pytest.raises(StorageError, match="No such file"):
        reader(tmp_path / "nothing")
    (tmp_path / "foreign").write_bytes(b"PK\x03\x04 something else entirely")
    with pytest.raises(StorageError, match="truncated, altered or not one of ours"):
        reader(tmp_path / "foreign")


def test_truncated_files(sealed):
    for name, reader in (("t.safetensors", storage.read_tensors), ("frame.parquet", storage.read_frame)):
        data = (sealed / name).read_bytes()
        (sealed / name).write_bytes(data[:-3])
        with pytest.raises(StorageError, match="truncated"):
            reader(sealed / name)
        with pytest.raises(StorageError, match=f"{len(data) - 3} bytes; expected {len(data)} bytes"):
            result_folder.open_folder(sealed, "drift")
        (sealed / name).write_bytes(data)
    result_folder.open_folder(sealed, "drift")


def test_a_sealed_folder_opens_with_its_facts(sealed):
    (sealed / "figure.png").write_bytes(b"not listed, not ours")
    opened = result_folder.open_folder(sealed, "drift", verify=True)
    assert (opened.kind, opened.facts) == ("drift", {"n": 3})
    assert opened.files == ("a.json", "frame.parquet", "t.safetensors")
    assert storage.read_json(opened.file("a.json")) == {"x": 1}
    with pytest.raises(StorageError, match=r"no figure\.png"):
        opened.file("figure.png")


@pytest.mark.parametrize("name", ["a.json", "t.safetensors", "frame.parquet"])
def test_one_flipped_bit_is_found(sealed, name):
    flip(sealed / name)
    with pytest.raises(StorageError, match="SHA-256"):
        result_folder.open_folder(sealed, "drift")
    flip(sealed / name)
    result_folder.open_folder(sealed, "drift")


def test_large_files_are_hashed_on_request(sealed, monkeypatch):
    monkeypatch.setattr(result_folder, "HASHED_AT_OPEN", 10)
    flip(sealed / "t.safetensors")
    result_folder.open_folder(sealed, "drift")
    with pytest.raises(StorageError, match="SHA-256"):
        result_folder.open_folder(sealed, "drift", verify=True)


def test_missing_file_other_kind_other_format_unfinished(sealed):
    with pytest.raises(StorageError, match="results folder of another run"):
        result_folder.open_folder(sealed, "run")
    index = json.loads((sealed / "mechkv.json").read_text())
    (sealed / "mechkv.json").write_text(json.dumps(index | {"format": 99}))
    with pytest.raises(StorageError, match="format 99"):
        result_folder.open_folder(sealed, "drift")
    (sealed / "mechkv.json").write_text(json.dumps(index | {"facts": {"n": 4}}))
    with pytest.raises(StorageError, match="digest"):
        result_folder.open_folder(sealed, "drift")
    (sealed / "mechkv.json").write_text(json.dumps(["theirs"]))
    with pytest.raises(StorageError, match="index of something else"):
        result_folder.open_folder(sealed, "drift")
    (sealed / "mechkv.json").write_text(json.dumps(index))
    result_folder.open_folder(sealed, "drift")
    (sealed / "a.json").unlink()
    with pytest.raises(StorageError, match="is missing"):
        result_folder.open_folder(sealed, "drift")
    (sealed / "mechkv.json").unlink()
    with pytest.raises(StorageError, match="not a finished result"):
        result_folder.open_folder(sealed, "drift")
    with pytest.raises(StorageError, match="no such folder"):
        result_folder.open_folder(sealed / "nowhere", "drift")


WRITERS = {
    "j.json": lambda path, n: storage.write_json(path, {"n": [n] * 50}),
    "f.parquet": lambda path, n: storage.write_frame(path, pd.DataFrame({"n": [n] * 50})),
    "t.safetensors": lambda path, n: storage.write_tensors(path, {"n": torch.full((50,), float(n))}),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_disk_that_is_full_beforehand(tmp_path, monkeypatch, name):
    WRITERS[name](tmp_path / name, 1)
    before = (tmp_path / name).read_bytes()
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 90, 10))
    with pytest.raises(StorageError, match=r"full: got 10 bytes free; expected \d+ bytes free"):
        WRITERS[name](tmp_path / name, 2)
    assert (tmp_path / name).read_bytes() == before
    assert names(tmp_path) == [name]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fills_up_while_writing(tmp_path, monkeypatch, name, call):
    WRITERS[name](tmp_path / name, 1)
    before = (tmp_path / name).read_bytes()

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(StorageError, match=r"the disk of .* is full") as caught:
            WRITERS[name](tmp_path / name, 2)
    assert isinstance(caught.value, OSError)
    assert (tmp_path / name).read_bytes() == before
    assert names(tmp_path) == [name]
    WRITERS[name](tmp_path / name, 2)
    assert (tmp_path / name).read_bytes() != before


def test_a_full_disk_as_safetensors_reports_it(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(storage, "save_file", full)
    with pytest.raises(StorageError, match=r"is full.*expected 12 bytes"):
        storage.write_tensors(tmp_path / "t.safetensors", {"t": torch.zeros(3)})
    assert names(tmp_path) == []


def test_new_folder_appears_whole_or_not_at_all(tmp_path):
    def fail():
        with result_folder.new_folder(tmp_path / "a") as part:
            storage.write_json(part / "x.json", 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert names(tmp_path) == []
    with result_folder.new_folder(tmp_path / "a") as part:
        storage.write_json(part / "x.json", 1)
        assert not (tmp_path / "a").exists()
    assert names(tmp_path / "a") == ["x.json"]
    with pytest.raises(StorageError, match="is taken"), result_folder.new_folder(tmp_path / "a"):
        pass
    assert names(tmp_path / "a") == ["x.json"]


# ------------------------------------------------------------------------------------------------------ sealed folders


def save(folder: Path, text: str) -> None:
    with result_folder.sealed_folder(folder, "notes") as part:
        (part / "a.txt").write_text(text)


def test_a_result_takes_the_place_of_its_own_kind_and_of_nothing_else(tmp_path):
    save(tmp_path / "one", "first")
    save(tmp_path / "one", "second")
    assert (tmp_path / "one" / "a.txt").read_text() == "second"
    assert [entry.name for entry in tmp_path.iterdir()] == ["one"]

    def edited(place):
        (place / "a.txt").write_text("my own notes")

    def more(place):
        (place / "thesis.tex").write_text("years of work")

    def folder(place):
        (place / "drafts").mkdir()

    def link(place):
        (place / "elsewhere").symlink_to(tmp_path)

    def forged(place):
        (place / result_folder.INDEX).write_text('{"kind": "notes", "files": ["a.txt"]}')

    for number, spoil in enumerate((edited, more, folder, link, forged)):
        place = tmp_path / f"spoiled-{number}"
        save(place, "first")
        spoil(place)
        before = sorted(place.rglob("*"))
        with pytest.raises(StorageError, match="is taken"):
            save(place, "second")
        assert sorted(place.rglob("*")) == before
    (tmp_path / "link").symlink_to(tmp_path / "one")
    with pytest.raises(StorageError, match="is taken"):
        save(tmp_path / "link", "third")


def test_a_failure_while_names_change_leaves_the_old_result(tmp_path, monkeypatch):
    save(tmp_path / "one", "first")
    real, calls = os.replace, []

    def fails_second(source, target):
        calls.append(Path(target).name)
        if calls[-1] == "one" and len([name for name in calls if name == "one"]) == 1:
            raise OSError(39, "not empty")
        real(source, target)

    monkeypatch.setattr(result_folder.os, "replace", fails_second)
    with pytest.raises(StorageError):
        save(tmp_path / "one", "second")
    assert (tmp_path / "one" / "a.txt").read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["one"]
