"""Recording into a folder: killed runs go on to the same bits, other runs and damaged files are refused."""

import shutil
from dataclasses import replace

import pytest
import torch
from tiny import tiny_bridge, tokens

from mechkv import record_folder, result_folder, storage
from mechkv.errors import StorageError
from mechkv.paths import PathRunner
from mechkv.recording import RunRecord, estimate_bytes, record
from tests.record_helpers import (  # noqa: F401
    N_PROMPT,
    N_TOKENS,
    RAGGED,
    SEVERAL,
    Scale,
    assert_same,
    bridges,
    count_passes,
    run,
    tensors,
)


class Killed(Exception):
    pass


def killer(at):
    def progress(done, total, n_bytes):
        if done == at:
            raise Killed

    return progress


OPTIONS = {"sites": SEVERAL, "keep_states": True, "shard_steps": 2}


@pytest.mark.parametrize("path", ["cached", "recomputed"])
@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_killed_run_ends_with_the_same_bits(bridges, tmp_path, count_passes, path, at):
    model, folder = bridges(RAGGED), tmp_path / "run"
    whole = run(model, path, **OPTIONS | {"shard_steps": 32})
    with pytest.raises(Killed):
        run(model, path, folder=folder, progress=killer(at), **OPTIONS)
    with pytest.raises(StorageError, match="not a finished result"):
        RunRecord.load(folder)
    count_passes.clear()
    assert_same(run(model, path, folder=folder, **OPTIONS), whole)
    done = (at - 1) // 2 * 2  # the report comes before the shard is written
    assert len(count_passes) == whole.n_steps - done + (1 if done else 0) + 1  # one redone, one to learn the shapes
    expected = [
        "cache.safetensors",
        "mechkv.json",
        "settings.json",
        *(f"steps-00000{n}.safetensors" for n in (0, 2, 4)),
    ]
    assert sorted(file.name for file in folder.iterdir()) == expected
    count_passes.clear()
    assert_same(run(model, path, folder=folder, **OPTIONS), whole)
    assert len(count_passes) == 1


@pytest.mark.parametrize(
    ("where", "nth"),
    [*(("write_tensors", n) for n in (1, 2, 3, 6)), *(("write_json", n) for n in (0, 1, 3, 4)), ("seal", 0)],
)
def test_a_kill_at_any_write_loses_nothing(bridges, tmp_path, monkeypatch, where, nth):
    model, folder = bridges(), tmp_path / "run"
    whole = run(model, sites=["resid_post"])
    homes = [module for module in (storage, result_folder) if hasattr(module, where)]
    calls, original = [], getattr(homes[0], where)

    def killed(*args, **kwargs):
        calls.append(args)
        if len(calls) == nth + 1:
            raise Killed
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        for home in homes:
            patch.setattr(home, where, killed)
        with pytest.raises(Killed):
            run(model, sites=["resid_post"], folder=folder, shard_steps=2)
    assert not (folder / result_folder.INDEX).exists()
    assert_same(run(model, sites=["resid_post"], folder=folder, shard_steps=2), whole)


def half_done(model, folder, **options):
    with pytest.raises(Killed):
        run(model, folder=folder, progress=killer(5), shard_steps=2, **options)


def test_another_run_does_not_continue_this_one(bridges, tmp_path):
    model, folder = bridges(), tmp_path / "run"
    half_done(model, folder)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    others = {
        "tokens": lambda: record(
            model, tokens(N_TOKENS, 1), n_prompt=N_PROMPT, path="cached", folder=folder, shard_steps=2
        ),
        "n_prompt": lambda: record(model, tokens(N_TOKENS), n_prompt=4, path="cached", folder=folder, shard_steps=2),
        "path": lambda: run(model, "recomputed", folder=folder, shard_steps=2),
        "sites": lambda: run(model, sites=["v"], folder=folder, shard_steps=2),
        "keep_states": lambda: run(model, keep_states=True, folder=folder, shard_steps=2),
        "shard_steps": lambda: run(model, folder=folder, shard_steps=3),
        "weights_sha256": lambda: run(tiny_bridge(seed=1), folder=folder, shard_steps=2),
        "info": lambda: run(bridges("gpt2"), folder=folder, shard_steps=2),
        "interventions": lambda: run(model, interventions=[Scale()], folder=folder, shard_steps=2),
    }
    for setting, other in others.items():
        with pytest.raises(StorageError, match=rf"results folder of another run.*{setting}"):
            other()
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert_same(run(model, folder=folder, shard_steps=2), run(model))


def test_other_bits_do_not_continue_this_run(bridges, tmp_path, monkeypatch):
    model, folder = bridges(), tmp_path / "run"
    half_done(model, folder)
    original = PathRunner._step

    def other_machine(self, *args):
        step = original(self, *args)
        return replace(step, logits=step.logits * (1 + 2**-20))

    with monkeypatch.context() as patch:
        patch.setattr(PathRunner, "_step", other_machine)
        with pytest.raises(StorageError, match="other bits than those stored when step 3"):
            run(model, folder=folder, shard_steps=2)
    assert_same(run(model, folder=folder, shard_steps=2), run(model))


def test_altered_files_of_a_half_done_run(bridges, tmp_path):
    half_done(bridges(), tmp_path / "run")
    for name in ("steps-000000.safetensors", ".state-000004.safetensors"):
        copy = tmp_path / name
        shutil.copytree(tmp_path / "run", copy)
        data = bytearray((copy / name).read_bytes())
        data[-1] ^= 1
        (copy / name).write_bytes(bytes(data))
        with pytest.raises(StorageError, match="SHA-256"):
            run(bridges(), folder=copy, shard_steps=2)
    run(bridges(), folder=tmp_path / "run", shard_steps=2)


def test_a_run_with_interventions_is_written_but_not_continued(bridges, tmp_path):
    model, options = bridges(), {"interventions": [Scale()], "shard_steps": 2}
    rec = run(model, folder=tmp_path / "a", **options)
    assert_same(rec, run(model, interventions=[Scale()]))
    with pytest.raises(StorageError, match="holds a run with interventions"):
        run(model, folder=tmp_path / "a", **options)
    half_done(model, tmp_path / "b", interventions=[Scale()])
    with pytest.raises(StorageError, match="holds a run with interventions"):
        run(model, folder=tmp_path / "b", **options)


def test_folders_of_something_else_are_refused_and_left_alone(bridges, tmp_path):
    folder = tmp_path / "theirs"
    storage.write_json(folder / "notes.json", {"precious": 1})
    with pytest.raises(StorageError, match="holds something else"):
        run(bridges(), folder=folder)
    with pytest.raises(StorageError, match="is taken"):
        run(bridges()).save(folder)
    result_folder.seal(folder, "drift", {})
    with pytest.raises(StorageError, match="results folder of another run"):
        RunRecord.load(folder)
    assert storage.read_json(folder / "notes.json") == {"precious": 1}
    run(bridges()).save(tmp_path / "saved")
    with pytest.raises(StorageError, match="holds something else"):
        run(bridges(), folder=tmp_path / "saved")


@pytest.mark.parametrize("name", ["steps-000000.safetensors", "cache.safetensors", "mechkv.json"])
def test_damaged_records_are_refused(bridges, tmp_path, name):
    run(bridges(RAGGED)).save(tmp_path / "run")
    data = (tmp_path / "run" / name).read_bytes()
    for damaged in (data[:-5], data[:-5] + bytes([data[-5] ^ 1]) + data[-4:], b"", b"not ours at all"):
        (tmp_path / "run" / name).write_bytes(damaged)
        with pytest.raises(StorageError, match="truncated, altered"):
            RunRecord.load(tmp_path / "run")
    (tmp_path / "run" / name).write_bytes(data)
    assert_same(RunRecord.load(tmp_path / "run"), run(bridges(RAGGED)))


def test_a_loaded_record_reads_what_is_touched(bridges, tmp_path, monkeypatch):
    run(bridges(), sites=["resid_pre", "resid_post"]).save(tmp_path / "run")
    back, read = RunRecord.load(tmp_path / "run"), []
    original = storage.TensorFile.__getitem__
    monkeypatch.setattr(storage.TensorFile, "__getitem__", lambda self, name: read.append(name) or original(self, name))
    layers = back.activations["resid_post"]
    read.clear()  # the type checker of the tests has looked at a layer
    value = layers[-1]
    assert read == ["resid_post/2"]
    assert torch.equal(value, run(bridges()).activations["resid_post"][2])
    assert len(back.activations["resid_post"][1:]) == 2
    with pytest.raises(IndexError):
        back.activations["resid_post"][3]


def test_a_full_disk_leaves_a_run_that_goes_on(bridges, tmp_path, monkeypatch):
    model, folder = bridges(), tmp_path / "run"
    real, size = shutil.disk_usage, estimate_bytes(model, N_TOKENS, N_PROMPT)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=size - 1))
        with pytest.raises(StorageError, match=rf"{size:,} bytes free"):
            run(model, folder=folder)
    assert not folder.exists()
    written = []
    original = record_folder.storage.save_file

    def fills_up(values, path, metadata):
        written.append(path)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        original(values, path, metadata=metadata)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "save_file", fills_up)
        with pytest.raises(StorageError, match="is full"):
            run(model, folder=folder, shard_steps=2)
    assert not list(folder.glob("*.part"))
    assert_same(run(model, folder=folder, shard_steps=2), run(model))
