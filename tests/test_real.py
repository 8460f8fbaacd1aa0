"""Real weights: logits are those of a plain loop in another process; float16 drifts, but not on the prompt."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mechkv
from mechkv.errors import NonFiniteError
from mechkv.guards import GuardLog
from mechkv.kv_difference import Place, localise_kv
from mechkv.patch_bench import PatchBench
from mechkv.paths import lockstep
from mechkv.policies import Forced, Greedy
from mechkv.prompts import format_prompt, word_problems
from mechkv.sources import pairs
from tests import plain
from tests.helpers import logits, relative_l2
from tests.test_patches import corrupted

pytestmark = pytest.mark.real

F16_DRIFT = (1e-5, 2e-2)  # relative L2 of the logits where it is not zero; measured 0 .. 2.7e-3, 0 at most lengths
F32_DRIFT = 1e-4  # measured 3e-7 .. 2.1e-6


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_both_paths_of_smollm2_are_the_plain_loop_and_drift_after_the_prompt(dtype, packaged_folder, tmp_path):
    folder = packaged_folder("smollm2-135m")
    expected = plain.in_another_process(tmp_path / "plain.safetensors", "folder", dtype, str(folder))
    model = mechkv.load_model("smollm2-135m", dtype=dtype, device="cpu")
    drift = []
    for index in range(plain.REAL_PROMPTS):
        fed = plain.real_prompt(index)
        prompt = fed[: len(fed) - plain.REAL_STEPS]
        pairs = list(
            lockstep(model, prompt, policy=Forced(fed.tolist()), n_steps=plain.REAL_STEPS, sites=["resid_post"])
        )
        for which, path in enumerate(("cached", "recomputed")):
            assert torch.equal(logits([pair[which] for pair in pairs]), expected[f"{index} {dtype} {path}"])
        drift.append([relative_l2(ours.logits, theirs.logits) for ours, theirs in pairs])
    assert [row[0] for row in drift] == [0.0] * plain.REAL_PROMPTS
    largest = max(max(row) for row in drift)
    if dtype == "float16":
        assert F16_DRIFT[0] < largest < F16_DRIFT[1]
    else:
        assert 0 < largest < F32_DRIFT


def test_gemma3_overflows_float16_and_runs_in_bfloat16(packaged_folder):
    packaged_folder("gemma3-270m")
    with pytest.raises(NonFiniteError, match=r"first at \w+ of layer \d+ .*dtype='bfloat16'"):
        mechkv.load_model("gemma3-270m", dtype="float16", device="cpu")
    model = mechkv.load_model("gemma3-270m", dtype="bfloat16", device="cpu")
    fed = torch.randint(1000, 40000, (16,), generator=torch.Generator().manual_seed(0))
    pairs = list(lockstep(model, fed[:12], policy=Forced(fed.tolist()), n_steps=4))
    assert torch.equal(pairs[0][0].logits, pairs[0][1].logits)
    assert all(torch.isfinite(ours.logits).all() for ours, _ in pairs)


def test_a_planted_row_is_localised_exactly():
    """SmolLM2 in float16: one KV head's K, one layer, one position, out of 30 x 2 x 3 x 30."""
    model = mechkv.load_model("smollm2-135m", dtype="float16")
    prompt = torch.tensor(model.tokenizer(format_prompt(word_problems()[1]))["input_ids"])[:30]
    *_, pair = pairs(model, prompt, policy=Greedy(), n_steps=2)
    with PatchBench(model, "cached", log=GuardLog()) as bench:
        bad = corrupted(pair.cached.kv_before, "cache_k", 17, 2, 11)
        base = bench.plain(pair.cached.tokens, bad, pair.cached.index)
        found = localise_kv(bench, base, pair.source("cached"), pair.cached)
    assert found.places == (Place("cache_k", 17, 2, 11),)


CODE = """
import mechkv, transformers
from tests.tiny import tiny_hf
assert transformers.__version__ == "5.24.0"
try:
    mechkv.from_hf(tiny_hf())
except mechkv.GuardError as error:
    print("refused:", error)
"""


def test_the_transformers_that_drops_the_cache_is_refused(tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    done = subprocess.run([*install, "transformers==5.24.0"], capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip("transformers 5.24.0 cannot be installed here (no package index?)")
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])}
    command = [sys.executable, "-W", "ignore", "-c", CODE]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert "refused: the model did not write to its KV cache" in done.stdout
    assert "install 'transformers>=5.9,<5.24'" in done.stdout
