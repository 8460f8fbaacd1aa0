"""Lifting sites to float32: no lift is the plain model, all lifts are the float32 model, and nothing stays patched."""

import pytest
import torch

from mechkv.errors import InputError
from mechkv.paths import decode
from mechkv.policies import Forced
from mechkv.precision_policy import POLICIES, SITES, SiteConfig, lifted, precision_by_site
from mechkv.rebuilding import recast
from tests.tiny import tiny_bridge, tokens

TOKENS = tokens(20, seed=3)


def logits(model, path) -> torch.Tensor:
    steps = decode(model, TOKENS[:14], path=path, policy=Forced(TOKENS.tolist()), n_steps=6)
    return torch.stack([step.logits for step in steps])


def both(model) -> dict[str, torch.Tensor]:
    return {path: logits(model, path) for path in ("cached", "recomputed")}


@pytest.fixture(scope="module")
def model():
    return tiny_bridge("llama-gqa", dtype=torch.bfloat16, num_hidden_layers=2)


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window", "qwen3"])
def test_all_lifts_are_bitwise_the_float32_model(family) -> None:
    half = tiny_bridge(family, dtype=torch.bfloat16, num_hidden_layers=2)
    exact, plain = both(recast(half, "float32")), both(half)
    with lifted(half, POLICIES["LayerCast"]):
        found = both(half)
    for path, values in found.items():
        assert values.dtype == torch.float32
        assert torch.equal(values, exact[path])
        assert not torch.equal(values, plain[path].float())


def test_no_lift_and_kv_storage_alone_are_bitwise_the_plain_model(model) -> None:
    plain = both(model)
    for name in ("none", "kv_storage only"):
        with lifted(model, POLICIES[name]):
            assert all(torch.equal(values, plain[path]) for path, values in both(model).items())
    # its twin: with everything else lifted, how K and V are stored does matter
    with lifted(model, POLICIES["all but kv_storage"]):
        without = both(model)
    with lifted(model, SITES):
        assert not torch.equal(both(model)["cached"], without["cached"])


@pytest.mark.parametrize("site", [site for site in SITES if site != "kv_storage"])
def test_every_other_site_alone_changes_the_logits_and_is_undone(model, site) -> None:
    plain = logits(model, "cached")
    with lifted(model, [site]):
        changed = logits(model, "cached")
    assert not torch.equal(changed.float(), plain.float())
    assert torch.equal(logits(model, "cached"), plain)


def test_everything_is_undone_after_an_error(model) -> None:
    plain = logits(model, "cached")
    modules = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
    with pytest.raises(RuntimeError, match="on purpose"), lifted(model, SITES):
        raise RuntimeError("on purpose")
    assert [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()] == modules
    assert torch.equal(logits(model, "cached"), plain)


def test_what_cannot_be_lifted_is_refused_and_left_alone(model) -> None:
    with pytest.raises(InputError, match="unknown site"), lifted(model, ["logits"]):
        pass
    with pytest.raises(InputError, match="nothing to lift"), lifted(tiny_bridge(), ["attention"]):
        pass
    gpt2 = tiny_bridge("gpt2", dtype=torch.bfloat16)
    before = logits(gpt2, "cached")
    with pytest.raises(InputError, match="cannot be lifted"), lifted(gpt2, ["attention"]):
        pass
    assert torch.equal(logits(gpt2, "cached"), before)


def test_the_study_compares_policies_on_the_same_tokens(model, tmp_path) -> None:
    config = SiteConfig(policies=("none", "kv_storage only", "LayerCast"), n_steps=4)
    study = precision_by_site(model, [tokens(9, seed) for seed in range(2)], config, folder=tmp_path / "run")
    fed = study.frame.groupby("policy")["token"].agg(list)
    assert all(tokens_fed == fed.iloc[0] for tokens_fed in fed)
    table = study.summary().set_index("policy")
    assert table.loc["kv_storage only", "kl_mean"] == table.loc["none", "kl_mean"]
    assert (study.frame.loc[study.frame["step"] == 0, "kl"] == 0).all()
    loaded = type(study).load(study.save(tmp_path / "saved"))
    assert loaded.config == config
    assert loaded.frame.equals(study.frame)
