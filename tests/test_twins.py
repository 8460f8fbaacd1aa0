"""Twins compute the same function, in the shape they promise; a wrong one is refused."""

import functools

import pytest
import torch

from mechkv import twins
from mechkv.comparison import compare
from mechkv.errors import GuardError, InputError, ModelError
from mechkv.models import info
from mechkv.paths import decode
from mechkv.policies import Forced
from mechkv.rebuilding import plain_state, rebuild, recast
from mechkv.twin_proof import PROOF_TOLERANCE, prove
from mechkv.twins import materialise_kv_heads, pad_head_dim, permute_heads, twin_info, window_off, window_on
from tests.tiny import WINDOW, tiny_bridge, tokens

FAMILIES = ("llama-gqa", "mistral-window", "qwen2", "qwen3", "gemma2", "gemma3")
NORMED = ("qwen3", "gemma3")
WINDOWED = ("mistral-window", "gemma2", "gemma3")
# Float32 rows that went through other kernels; measured 0 to 4e-7.
FLOAT32_FLOOR = 3e-6


@functools.cache
def shared(name):
    """One bridge of two layers a family for all tests here; its float64 logits are then computed once as well."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"]} if name == "gemma3" else {}
    return tiny_bridge(name, num_hidden_layers=2, **kinds)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param, shared(request.param)


def last(model, n=WINDOW, path="recomputed", sites=()):
    """The last of two decode steps, over `n` tokens."""
    text = tokens(n, seed=4)
    steps = decode(model, text[:-2], path=path, policy=Forced(text.tolist()), n_steps=2, sites=sites)
    return list(steps)[-1]


@functools.cache
def last_of(name, sites=()):
    """The same of the shared model of a family."""
    return last(shared(name), sites=sites)


def test_materialised_heads_are_copies(family) -> None:
    name, model = family
    twin = materialise_kv_heads(model)
    assert (info(twin).n_kv, info(model).n_kv) == (4, 2)
    assert twin_info(twin).float64_rel_l2 <= PROOF_TOLERANCE
    assert twin_info(twin).bitwise
    ours, theirs = last(twin), last_of(name)
    assert torch.equal(ours.logits, theirs.logits)
    for mine, original in zip(ours.kv.keys, theirs.kv.keys, strict=True):
        assert torch.equal(mine, original.repeat_interleave(2, 0))
        assert not torch.equal(mine, original.repeat(2, 1, 1))


def test_padded_dimensions_are_zero_and_the_rest_in_place(family) -> None:
    name, model = family
    old, new = 12, 20
    twin = pad_head_dim(model, new)
    assert info(twin).d_head == new
    assert twin_info(twin).float64_rel_l2 <= PROOF_TOLERANCE
    ours, theirs = last(twin), last_of(name)
    real = torch.cat([torch.arange(old // 2), new // 2 + torch.arange(old // 2)])
    scale = (new / old) ** 0.5 if name in NORMED else 1.0
    for mine, original in zip(ours.kv.keys, theirs.kv.keys, strict=True):
        assert compare(mine[..., real], original * scale).rel_l2 < FLOAT32_FLOOR
        rest = torch.ones(new, dtype=torch.bool).index_fill(0, real, False)
        assert (mine[..., rest] == 0).all()
    assert compare(ours.logits, theirs.logits).rel_l2 < FLOAT32_FLOOR


def test_permuted_heads_change_order_only(family) -> None:
    _, model = family
    twin = permute_heads(model, seed=1)
    order = twins.head_order(4, 2, 1)
    assert order.tolist() != [0, 1, 2, 3]
    assert {int(h) // 2 for h in order[:2]} in ({0}, {1}), "heads stay with their group"
    ours, theirs = (last(m, sites=("q", "z")) for m in (twin, model))
    for site in ("q", "z"):
        assert compare(ours.activations[site][0], theirs.activations[site][0][:, order]).rel_l2 < FLOAT32_FLOOR
        assert compare(ours.activations[site][0], theirs.activations[site][0]).rel_l2 > 0.1
    kv = torch.tensor([int(h) // 2 for h in order[::2]])
    assert torch.equal(ours.kv.values[0], theirs.kv.values[0][kv])
    assert compare(ours.logits, theirs.logits).rel_l2 < FLOAT32_FLOOR


@pytest.mark.parametrize("name", WINDOWED)
def test_window_off_and_back(name) -> None:
    model = shared(name)
    off = window_off(model)
    assert twin_info(off).max_tokens == WINDOW
    assert all(window is None or window > 100 for window in info(off).windows)
    back = window_on(off, WINDOW)
    assert torch.equal(last(off).logits, last_of(name).logits)
    assert torch.equal(last(back).logits, last_of(name).logits)
    longer = WINDOW + 6
    assert compare(last(off, longer).logits, last(model, longer).logits).rel_l2 > 1e-3, "beyond the window"
    assert off_rows(off, longer) == longer > min(off_rows(model, longer), WINDOW)


def off_rows(model, n):
    return last(model, n, path="cached").kv.keys[0].shape[1]


def test_some_layers_get_a_window() -> None:
    model = shared("qwen2")
    twin = window_on(model, 6, layers=[1])
    assert info(twin).windows == (None, 6)
    assert twin_info(twin).max_tokens == 6


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
def test_any_number_of_kv_heads_that_the_groups_divide(name) -> None:
    one_layer = {"num_hidden_layers": 1} | ({"layer_types": ["sliding_attention"]} if name == "gemma3" else {})
    model = tiny_bridge(name, num_key_value_heads=1, **one_layer)
    twin = materialise_kv_heads(model, 2)
    assert info(twin).n_kv == 2
    assert info(materialise_kv_heads(twin)).n_kv == 4


def test_unaligned_weights_do_not_count_against_a_twin() -> None:
    """Weights mapped from a file are where the file has them; the proof compares with a copy in fresh memory."""
    model = tiny_bridge("llama-gqa", num_hidden_layers=1)
    for parameter in model.original_model.parameters():
        room = torch.empty(parameter.numel() + 8)
        start = 10 - (room.data_ptr() // 4) % 16 if room.data_ptr() % 64 else 2
        moved = room[start % 8 : start % 8 + parameter.numel()].view_as(parameter)
        parameter.data = moved.copy_(parameter.data)
    assert twin_info(materialise_kv_heads(model)).bitwise


def test_olmo2_norms_over_all_heads_at_once() -> None:
    model = tiny_bridge("olmo2", num_hidden_layers=1)
    for twin in (materialise_kv_heads(model), pad_head_dim(model, 24), permute_heads(model)):
        assert twin_info(twin).float64_rel_l2 <= PROOF_TOLERANCE


def test_a_twin_in_another_dtype_is_still_a_twin() -> None:
    model = tiny_bridge("llama-gqa", dtype=torch.bfloat16, num_hidden_layers=1)
    twin = recast(recast(pad_head_dim(model, 24), "float32"), "float64")
    assert prove(model, twin) <= PROOF_TOLERANCE
    assert twin.original_model.model.layers[0].self_attn.scaling == pytest.approx(12**-0.5)


@pytest.mark.parametrize("broken", ["rotation", "scale", "weights", "norm"])
def test_a_wrong_twin_is_refused(broken, monkeypatch) -> None:
    model = shared("qwen3")
    if broken == "rotation":
        monkeypatch.setattr(twins, "_pad_tables", lambda module, old, width: None)
    elif broken == "scale":
        monkeypatch.setattr(twins, "_scaled_by_width", lambda attention: False)
    elif broken == "norm":
        monkeypatch.setattr(twins, "_plain_names", lambda model: [])
    else:
        state = plain_state(model)
        name = "model.layers.1.self_attn.v_proj.weight"
        state[name] = state[name] * 1.001
        changed = rebuild(model, dtype=torch.float32, config=model.original_model.config, state=state)
        with pytest.raises(GuardError, match="same function"):
            prove(model, changed)
        return
    with pytest.raises(GuardError, match="same function"):
        pad_head_dim(model, 24)


def test_refusals() -> None:
    model, mha = shared("llama-gqa"), tiny_bridge("llama-mha", num_hidden_layers=1)
    with pytest.raises(InputError, match="materialised"):
        materialise_kv_heads(mha)
    with pytest.raises(InputError, match="3 from 2 KV heads"):
        materialise_kv_heads(model, 3)
    for d_head in (12, 10, 15):
        with pytest.raises(InputError, match="even number above 12"):
            pad_head_dim(model, d_head)
    with pytest.raises(ModelError, match="padded already"):
        pad_head_dim(pad_head_dim(model, 24), 48)
    with pytest.raises(InputError, match="no window"):
        window_off(model)
    with pytest.raises(InputError, match="no window can be set"):
        window_on(model, 8)
    with pytest.raises(InputError, match="not a twin"):
        twin_info(model)
    for name in ("phi3", "gpt2"):
        with pytest.raises(ModelError, match="not known here"):
            permute_heads(tiny_bridge(name, num_hidden_layers=1))
    scaled = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    with pytest.raises(ModelError, match="rotary tables"):
        pad_head_dim(tiny_bridge("llama-gqa", rope_parameters=scaled), 24)
