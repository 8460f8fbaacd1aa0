"""What the tests of recording share."""

import pytest
import torch
from tiny import tiny_bridge, tokens

from mechkv.paths import PathRunner
from mechkv.recording import record

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


@pytest.fixture
def count_passes(monkeypatch):
    passes = []
    original = PathRunner._step
    monkeypatch.setattr(PathRunner, "_step", lambda self, *args: passes.append(args) or original(self, *args))
    return passes


class Scale:
    """Multiplies one layer's output of attention."""

    sites = ("attn_out",)

    def __call__(self, value, at):
        return value * 3 if at.layer == 1 and at.step == 2 else None
