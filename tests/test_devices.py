"""The same checks wherever the model lives: always on the CPU, and on a GPU where there is one."""

import pytest
import torch

import mechkv
from mechkv.checking import check
from mechkv.drift import DriftConfig, drift_profile
from mechkv.errors import GuardError, InputError
from mechkv.factorial import FactorialConfig, causal_factorial
from mechkv.paths import decode, lockstep
from mechkv.policies import Forced
from mechkv.provenance import collect
from mechkv.recording import RunRecord, estimate_bytes, record
from tests.helpers import FED, FLOORS, relative_l2
from tests.plain import N_PROMPT, N_STEPS
from tests.tiny import tiny_bridge, tiny_hf

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
F64 = torch.float64


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, GPU])])
def device(request) -> torch.device:
    return torch.device(request.param, 0) if request.param != "cpu" else torch.device("cpu")


@pytest.fixture(params=["llama-gqa", "gemma2", "gpt2"])
def family(request) -> str:
    return request.param


@pytest.fixture
def model(family, device):
    return mechkv.from_hf(tiny_hf(family, dtype=F64).to(device))


def test_both_paths_agree_at_the_floor_and_with_the_cpu(model, family, device):
    policy = Forced(FED.tolist())
    both = list(lockstep(model, FED[:N_PROMPT].to(device), policy=policy, n_steps=N_STEPS, sites=["resid_post"]))
    assert torch.equal(both[0][0].logits, both[0][1].logits)
    assert max(relative_l2(ours.logits, theirs.logits) for ours, theirs in both) < FLOORS[F64]
    here = decode(tiny_bridge(family, dtype=F64), FED[:N_PROMPT], path="cached", policy=policy, n_steps=N_STEPS)
    for (ours, _), plain in zip(both, here, strict=True):
        assert ours.logits.device == ours.activations["resid_post"][0].device == device
        assert relative_l2(ours.logits.cpu(), plain.logits) < FLOORS[F64]


def test_what_is_recorded_leaves_the_device_and_comes_back_the_same(model, device, tmp_path):
    fed = FED.to(device)
    found = record(model, fed, n_prompt=N_PROMPT, path="cached", folder=tmp_path / "run")
    assert found.logits.device.type == found.cache_keys[0].device.type == "cpu"
    assert found.n_bytes == estimate_bytes(model, len(FED), N_PROMPT)
    kept = record(model, fed, n_prompt=N_PROMPT, path="cached", device=device)
    assert kept.logits.device == device
    assert torch.equal(RunRecord.load(tmp_path / "run").logits, kept.logits.cpu())


def test_profile_and_factorial_are_on_the_floor(model, device):
    prompts = [FED[:N_PROMPT].to(device), FED[3 : 3 + N_PROMPT].to(device)]
    profile = drift_profile(model, prompts, DriftConfig(n_steps=4, split_every=2), control=None)
    assert profile.frame["rel_l2"].max() < FLOORS[F64]
    assert profile.guards["float64"]["null_control"] == profile.guards["float64"]["repeatable"] / 2 == 2
    found = causal_factorial(model, prompts, FactorialConfig(n_steps=3))
    assert found.frame["rel_l2"].max() < FLOORS[F64]


def test_a_planted_row_is_seen(model, device):
    point = model.hook_dict["blocks.1.attn.hook_v"]
    handle = point.add_hook(lambda value, hook: value + 0.5 if value.shape[1] == 1 else None)
    try:
        profile = drift_profile(model, [FED[:N_PROMPT].to(device)], DriftConfig(n_steps=2, split_every=0), control=None)
    finally:
        handle.hook.remove()
        point.fwd_hooks.remove(handle)
    large = profile.frame[profile.frame["rel_l2"] > 1e-3]
    assert (large["step"].min(), large["layer"].min()) == (1, 1)
    assert "cache_v" in set(large[large["layer"] == 1]["site"])


def test_tokens_elsewhere_and_noise_are_refused(model, device):
    elsewhere, message = ("meta", "meta device") if device.type == "cpu" else ("cpu", "got cpu; expected cuda")
    with pytest.raises(InputError, match=message):
        record(model, FED.to(elsewhere), n_prompt=N_PROMPT, path="cached")
    noisy = model.hook_dict["blocks.0.hook_mlp_out"]
    noisy.add_hook(lambda value, hook: value + 1e-9 * torch.randn_like(value))
    with pytest.raises(GuardError, match="differ on the prompt"):
        next(lockstep(model, FED[:5].to(device), policy=Forced(FED.tolist()), n_steps=1))


def test_check_finds_it_clean_and_says_where_it_ran(model, device):
    found = check(model, dtypes=("float64", "float32"))
    assert found.verdict in ("identical", "numerical")
    kernels = collect(model)["kernels"]
    assert ("gpu" in kernels) == torch.cuda.is_available()
