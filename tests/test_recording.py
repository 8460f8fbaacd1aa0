"""A record holds, bit for bit, what the model gave; it survives the disk and a kill, and its size is foretold."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from jaxtyping import TypeCheckError
from tiny import FAMILIES, WINDOW, tiny_bridge, tokens
from transformers import DynamicCache

from mechkv import record_folder, storage
from mechkv.errors import InputError, StorageError
from mechkv.paths import PathRunner
from mechkv.recording import DEFAULT_SITES, RunRecord, estimate_bytes, record
from mechkv.sites import HOOKS, supported

N_PROMPT, N_TOKENS = 6, 11  # step 5 of the cached path is beyond the window of 8
RAGGED = "gemma3"
SEVERAL = ["resid_post", "pattern", "k", "blocks.1.hook_resid_mid", "ln_final.hook_normalized"]


@pytest.fixture(scope="module")
def bridges():
    made = {}

    def get(family="llama-gqa", dtype=torch.float32):
        if (family, dtype) not in made:
            made[family, dtype] = tiny_bridge(family, dtype=dtype)
        return made[family, dtype]

    return get


def run(model, path="cached", **options):
    return record(model, tokens(N_TOKENS), n_prompt=N_PROMPT, path=path, **options)


def tensors(rec):
    found = {f"{name}/{i}": value for name, layers in rec.values.items() for i, value in enumerate(layers)}
    for index, state in enumerate([rec.state, *(rec.states or [])]):
        found |= {f"{index}k{i}": rows for i, rows in enumerate(state.keys)}
        found |= {f"{index}v{i}": rows for i, rows in enumerate(state.values)}
    return found


def assert_same(a, b):
    ours, theirs = tensors(a), tensors(b)
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype, name
        assert torch.equal(value, theirs[name]), name
    assert torch.equal(a.tokens, b.tokens)
    assert (a.path, a.n_prompt, a.guards, a.info) == (b.path, b.n_prompt, b.guards, b.info)


def bare_loop(model, given, n_prompt):
    """Logits, step by step, and the cache at the end, without any of our code."""
    cache, logits = DynamicCache(config=model.original_model.config), []
    with torch.no_grad():
        for start, stop in [(0, n_prompt), *((i, i + 1) for i in range(n_prompt, len(given)))]:
            logits.append(model(given[None, start:stop], past_key_values=cache, logits_to_keep=1)[0, -1])
    return torch.stack(logits), cache


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_logits_and_cache_are_those_of_a_bare_loop(bridges, family):
    model, given = bridges(family), tokens(N_TOKENS)
    logits, cache = bare_loop(model, given, N_PROMPT)
    rec = run(model)
    assert torch.equal(rec.logits, logits)
    assert not torch.equal(rec.logits[1:], logits[:-1])
    assert rec.positions.tolist() == list(range(N_PROMPT - 1, N_TOKENS))
    for layer, held in enumerate(cache.layers):
        assert torch.equal(rec.cache_keys[layer], held.keys[0])
        assert torch.equal(rec.cache_values[layer], held.values[0])
        assert not torch.equal(rec.cache_values[layer], rec.cache_keys[layer])
        expected = N_TOKENS - (WINDOW - 1) if rec.info.windows[layer] else 0
        assert rec.cache_first_position[layer] == expected
        row_origins = ["prefill" if p < N_PROMPT else "decode" for p in range(expected, N_TOKENS)]
        assert rec.cache_provenance[layer] == row_origins
    assert list(rec.activations) == supported(model, DEFAULT_SITES)


@pytest.mark.parametrize("family", ["llama-gqa", RAGGED, "gpt2", "gpt-neox"])
def test_recomputed_rows_are_those_of_run_with_cache(bridges, family):
    model, given = bridges(family), tokens(N_TOKENS)
    sites = [s for s in supported(model, list(HOOKS)) if not (family == "gpt-neox" and s.startswith("rot_"))]
    rec = run(model, "recomputed", sites=sites)
    assert list(rec.activations) == sites
    for t in range(rec.n_steps):
        n = N_PROMPT + t
        with torch.no_grad():
            # a cache and one row of logits, as in every recomputed step
            logits, seen = model.run_with_cache(
                given[None, :n], past_key_values=DynamicCache(config=model.original_model.config), logits_to_keep=1
            )
        assert torch.equal(rec.logits[t], logits[0, -1])
        for site in sites:
            for layer, ours in enumerate(rec.activations[site]):
                theirs = seen[f"blocks.{layer}.{HOOKS[site]}"][0]
                if site == "pattern":
                    assert torch.equal(ours[t][:, :n], theirs[:, -1])
                    assert not ours[t][:, n:].any()
                else:
                    assert torch.equal(ours[t], theirs[-1])
                    assert not torch.equal(ours[t], theirs[-2])


def test_pattern_columns_are_absolute_positions(bridges):
    rec = run(bridges(RAGGED), sites=["pattern"])
    full = run(bridges(RAGGED), "recomputed", sites=["pattern"])
    assert rec.info.windows == (WINDOW, None, WINDOW)
    for layer, window in enumerate(rec.info.windows):
        ours = rec.activations["pattern"][layer]
        assert ours.shape == (rec.n_steps, rec.info.n_heads, N_TOKENS)
        assert torch.allclose(ours.sum(-1), torch.ones(1), atol=1e-5)
        for t, position in enumerate(rec.positions.tolist()):
            first = max(0, position + 1 - window) if window else 0
            seen = torch.zeros(N_TOKENS, dtype=torch.bool)
            seen[first : position + 1] = True
            assert torch.equal(ours[t] != 0, seen.expand(rec.info.n_heads, -1))
        torch.testing.assert_close(ours, full.activations["pattern"][layer])
        assert not torch.allclose(ours.roll(1, -1), full.activations["pattern"][layer])


def test_hidden_attention_scores_are_minus_infinity(bridges):
    rec = run(bridges(RAGGED), sites=["blocks.0.attn.hook_attn_scores"])
    (scores,) = rec.activations["blocks.0.attn.hook_attn_scores"]
    (pattern,) = run(bridges(RAGGED), sites=["blocks.0.attn.hook_pattern"]).activations["blocks.0.attn.hook_pattern"]
    torch.testing.assert_close(scores.softmax(-1), pattern)
    assert torch.equal(torch.isinf(scores[1:]), pattern[1:] == 0)


@pytest.mark.parametrize("path", ["cached", "recomputed"])
def test_states_of_every_step(bridges, path):
    model, given = bridges(RAGGED), tokens(N_TOKENS)
    rec = run(model, path, keep_states=True)
    assert len(rec.states) == rec.n_steps
    for t, state in enumerate(rec.states):
        assert (state.n_tokens, state.n_prompt) == (N_PROMPT + t, N_PROMPT)
        part = record(model, given[: N_PROMPT + t], n_prompt=N_PROMPT, path=path, sites=[])
        for kept, alone in zip((*state.keys, *state.values), (*part.cache_keys, *part.cache_values), strict=True):
            assert torch.equal(kept, alone)
            assert kept.untyped_storage().nbytes() == kept.nbytes
    assert not torch.equal(rec.states[-1].keys[1][:, -1], rec.states[-2].keys[1][:, -1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_save_and_load_round_trip_bitwise(bridges, tmp_path, dtype):
    rec = run(bridges(RAGGED, dtype), sites=SEVERAL, keep_states=True)
    rec.save(tmp_path / "run")
    back = RunRecord.load(tmp_path / "run", verify=True)
    assert back.logits.dtype == dtype
    assert_same(rec, back)
    assert back.provenance == json.loads(json.dumps(rec.provenance))
    assert back.n_bytes == rec.n_bytes
    back.save(tmp_path / "again")
    assert_same(rec, RunRecord.load(tmp_path / "again"))
    other = run(bridges(RAGGED, dtype), "recomputed", sites=SEVERAL, keep_states=True)
    with pytest.raises(AssertionError):
        assert_same(other, back)


@pytest.mark.parametrize("keep_states", [False, True])
@pytest.mark.parametrize(
    ("family", "dtype", "path"),
    [
        (RAGGED, torch.float32, "cached"),
        (RAGGED, torch.float32, "recomputed"),
        ("olmo2", torch.float16, "recomputed"),
        ("gpt2", torch.float16, "cached"),
    ],
)
def test_the_size_foretold_is_the_size_kept(bridges, family, dtype, path, keep_states):
    model = bridges(family, dtype)
    told: list = []
    for chosen in (None, [*supported(model, list(HOOKS)), "ln_final.hook_normalized"]):
        foretold = estimate_bytes(model, N_TOKENS, N_PROMPT, sites=chosen, keep_states=keep_states)
        told.clear()
        rec = run(model, path, sites=chosen, keep_states=keep_states, progress=lambda *args: told.append(args))
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(rec).values()}
        assert sum(storages.values()) == rec.n_bytes == foretold
        assert told == [(done, rec.n_steps, foretold) for done in range(rec.n_steps + 1)]
    assert foretold > estimate_bytes(model, N_TOKENS, N_PROMPT + 1, sites=chosen, keep_states=keep_states)


@pytest.fixture
def count_passes(monkeypatch):
    passes = []
    original = PathRunner._forward
    monkeypatch.setattr(PathRunner, "_forward", lambda self, *args: passes.append(args) or original(self, *args))
    return passes


def test_over_the_limit_nothing_runs(bridges, count_passes, tmp_path):
    model = bridges()
    size = estimate_bytes(model, N_TOKENS, N_PROMPT)
    count_passes.clear()
    with pytest.raises(InputError, match=rf"{size:,} bytes\); expected at most limit_bytes") as caught:
        run(model, limit_bytes=size - 1, folder=tmp_path / "run")
    assert "GB" in str(caught.value)
    assert not count_passes
    assert not (tmp_path / "run").exists()
    run(model, limit_bytes=size)
    assert len(count_passes) == N_TOKENS - N_PROMPT + 1
    run(model, limit_bytes=None)


BAD = {
    "empty prompt": ({"n_prompt": 0}, "n_prompt=0"),
    "prompt beyond the tokens": ({"n_prompt": N_TOKENS + 1}, f"1 to {N_TOKENS}"),
    "no tokens": ({"given": tokens(0)}, "at least one"),
    "batched tokens": ({"given": tokens(N_TOKENS)[None]}, r"batch axis|Int\[Tensor"),
    "floats": ({"given": tokens(N_TOKENS).float()}, r"integers of shape|Int\[Tensor"),
    "out of vocabulary": ({"given": tokens(N_TOKENS) + 90}, "expected 0..100"),
    "context overflow": ({"given": tokens(129)}, "at most 128"),
    "unknown site": ({"sites": ["resid_middle"]}, "unknown site"),
    "unknown hook": ({"sites": ["blocks.7.hook_resid_pre"]}, "no hook point"),
    "one string for sites": ({"sites": "resid_pre"}, "sequence of names"),
    "no steps a shard": ({"shard_steps": 0}, "shard_steps"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_anything_runs(bridges, count_passes, tmp_path, case):
    model, (changes, message) = bridges(), BAD[case]
    options = {"n_prompt": N_PROMPT, "path": "cached", "folder": tmp_path / "run"} | changes
    given = options.pop("given", tokens(N_TOKENS))
    with pytest.raises((InputError, TypeCheckError), match=message):
        record(model, given, **options)
    assert not count_passes
    assert not (tmp_path / "run").exists()


def test_unsupported_sites_and_unknown_keywords(bridges):
    with pytest.raises(InputError, match="no resid_mid"):
        run(bridges("gpt-neox"), sites=["resid_mid"])
    with pytest.raises(TypeError, match="steps"):
        run(bridges(), steps=3)
    with pytest.raises(InputError, match="n_prompt=9 with 8"):
        estimate_bytes(bridges(), 8, 9)


class Scale:
    """Multiplies one layer's output of attention."""

    sites = ("attn_out",)

    def __call__(self, value, at):
        return value * 3 if at.layer == 1 and at.step == 2 else None


def test_interventions_show_from_their_step_and_layer_on(bridges):
    plain, changed = run(bridges()), run(bridges(), interventions=[Scale()])
    assert torch.equal(plain.logits[:2], changed.logits[:2])
    assert not torch.equal(plain.logits[2], changed.logits[2])
    before, after = plain.activations["attn_out"], changed.activations["attn_out"]
    assert torch.equal(after[1][2], before[1][2] * 3)
    assert torch.equal(after[0], before[0])


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
    calls, original = [], getattr(storage, where)

    def killed(*args, **kwargs):
        calls.append(args)
        if len(calls) == nth + 1:
            raise Killed
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(storage, where, killed)
        with pytest.raises(Killed):
            run(model, sites=["resid_post"], folder=folder, shard_steps=2)
    assert not (folder / storage.INDEX).exists()
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
    original = PathRunner._forward

    def other_machine(self, *args):
        step = original(self, *args)
        return replace(step, logits=step.logits * (1 + 2**-20))

    with monkeypatch.context() as patch:
        patch.setattr(PathRunner, "_forward", other_machine)
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
    storage.seal(folder, "drift", {})
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
