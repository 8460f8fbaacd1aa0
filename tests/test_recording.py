"""A record holds, bit for bit, what the model gave; it survives the disk and a kill, and its size is foretold."""

import json

import pytest
import torch
from jaxtyping import TypeCheckError
from tiny import FAMILIES, WINDOW, tokens
from transformers import DynamicCache

from mechkv.errors import InputError
from mechkv.recording import DEFAULT_SITES, RunRecord, estimate_bytes, record
from mechkv.sites import HOOKS, supported
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
    count_passes.clear()  # admitting the bridge probes its cache
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


def test_interventions_show_from_their_step_and_layer_on(bridges):
    plain, changed = run(bridges()), run(bridges(), interventions=[Scale()])
    assert torch.equal(plain.logits[:2], changed.logits[:2])
    assert not torch.equal(plain.logits[2], changed.logits[2])
    before, after = plain.activations["attn_out"], changed.activations["attn_out"]
    assert torch.equal(after[1][2], before[1][2] * 3)
    assert torch.equal(after[0], before[0])
