"""Models: every way in gives what was asked for or says what was found, and nothing but a hub id needs a network."""

import json
import subprocess
import sys
import time
from pathlib import Path

import jaxtyping
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformer_lens.model_bridge import TransformerBridge
from transformers import (
    BertConfig,
    BertLMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import mechkv
from mechkv import models, rebuilding
from mechkv.errors import GuardError, InputError, ModelError
from tests.helpers import logits, run
from tests.tiny import FAMILIES, VOCABULARY, WINDOW, tiny_bridge, tiny_hf, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    tiny_hf("llama-gqa").save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def broken(folder, tmp_path):
    """A copy of the folder to break."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.mark.usefixtures("no_network")
def test_a_model_in_memory_needs_no_network_with_or_without_a_tokenizer():
    without = mechkv.from_hf(tiny_hf())
    bridge = mechkv.from_hf(tiny_hf(), tiny_tokenizer())
    assert torch.equal(logits(run(without, "cached", n_steps=2)), logits(run(bridge, "cached", n_steps=2)))
    assert without.tokenizer is None
    assert bridge.tokenizer("w3 w5", add_special_tokens=False)["input_ids"] == [3, 5]


@pytest.mark.usefixtures("no_network")
def test_the_guard_against_the_network_works():
    import socket

    with pytest.raises(BaseException, match="a connection was attempted"):
        socket.create_connection(("127.0.0.1", 9))


def test_info_is_read_back_from_the_model(shared_bridge):
    info = models.info(shared_bridge("gemma3", torch.float64))
    assert (info.dtype, info.attention, info.device, info.source) == ("float64", "eager", "cpu", "in memory")
    assert (info.n_layers, info.n_heads, info.n_kv, info.d_head, info.d_model) == (3, 4, 2, 12, 48)
    assert (info.d_vocab, info.windows) == (VOCABULARY, (WINDOW, None, WINDOW))
    assert models.info(shared_bridge("mistral")).windows == (None, None, None)
    assert models.info(shared_bridge("mistral-window")).windows == (WINDOW, WINDOW, WINDOW)
    assert models.info(shared_bridge("llama-mha")).n_kv == 4
    assert json.loads(json.dumps(info.to_dict()))["family"] == "Gemma3ForCausalLM"


def test_a_bridge_that_the_user_booted_is_admitted(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    saved = type(tiny_tokenizer()).from_pretrained(tmp_path)
    bridge = TransformerBridge.boot_transformers("mine", hf_model=tiny_hf(), tokenizer=saved, dtype=torch.float32)
    assert models.admit(bridge) is bridge
    assert models.info(bridge).n_parameters == sum(p.numel() for p in tiny_hf().parameters())
    assert torch.equal(run(bridge, "cached", n_steps=2)[-1].logits, run(tiny_bridge(), "cached", n_steps=2)[-1].logits)


def test_a_model_built_for_another_attention_becomes_eager():
    config = LlamaConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, vocab_size=101
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    assert models.info(mechkv.from_hf(model)).attention == "eager"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: tiny_hf().model, "got LlamaModel; expected a decoder-only"),
        (
            lambda: T5ForConditionalGeneration(
                T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=50)
            ),
            "got T5ForConditionalGeneration",
        ),
        (
            lambda: BertLMHeadModel(
                BertConfig(
                    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=50
                )
            ),
            "bidirectional attention; expected causal",
        ),
    ],
    ids=["base", "encoder-decoder", "bidirectional"],
)
def test_what_is_not_a_causal_decoder_is_refused(make, says):
    with pytest.raises(ModelError, match=says):
        mechkv.from_hf(make())


def test_an_architecture_without_adapter_is_refused():
    model = tiny_hf()
    model.config.architectures = ["HomeMadeForCausalLM"]
    with pytest.raises(ModelError, match=r"cannot wrap this model: got HomeMadeForCausalLM.*check_paths"):
        mechkv.from_hf(model)


@pytest.mark.parametrize("tokenizer", [None, "tiny"])
def test_mixed_dtypes_are_refused_and_not_cast(tokenizer):
    model = tiny_hf(dtype=torch.float16)
    model.model.layers[1].mlp.up_proj.float()
    with pytest.raises(GuardError, match=r"layers.1.mlp.up_proj.weight: torch.float32; expected torch.float16"):
        mechkv.from_hf(model, tiny_tokenizer() if tokenizer else None)


def test_what_is_no_bridge_is_refused():
    jaxtyping.config.update("jaxtyping_disable", True)  # as outside pytest, where nobody checks annotations
    try:
        with pytest.raises(InputError, match=r"got LlamaForCausalLM.*from_hf"):
            models.admit(tiny_hf())
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("dtype", ["float8", "int8", "half precision", torch.int64])
def test_unknown_dtypes_are_refused_before_anything_is_loaded(dtype):
    with pytest.raises(InputError, match=r"unknown dtype.*float16, bfloat16, float32, float64"):
        mechkv.load_model("nowhere", dtype=dtype)
    assert models.to_dtype("torch.bfloat16") is models.to_dtype("bfloat16") is torch.bfloat16


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_local_folder_is_loaded_in_the_dtype_asked_for(dtype, folder):
    model = mechkv.load_model(folder, dtype=dtype, device="cpu")
    wanted = models.to_dtype(dtype)
    assert {p.dtype for p in model.original_model.parameters()} == {wanted}
    assert (models.info(model).dtype, models.info(model).source) == (dtype, str(folder))
    held, given = model.original_model.state_dict(), tiny_bridge(dtype=wanted)
    assert all(torch.equal(value, held[name]) for name, value in given.original_model.state_dict().items())
    for parameter in model.original_model.parameters():
        parameter.data = (
            parameter.data.clone()
        )  # float32 weights lie in the file's own alignment, which decides kernels
    assert torch.equal(logits(run(model, "cached", n_steps=2)), logits(run(given, "cached", n_steps=2)))
    assert model.tokenizer("w7", add_special_tokens=False)["input_ids"] == [7]


@pytest.mark.parametrize(
    ("device", "says"),
    [("gpu0", "'gpu0'"), ("meta", "'meta'")]
    + ([] if torch.cuda.is_available() else [("cuda", "'cuda'.*device='auto'")]),
)
def test_devices_that_cannot_be_used_are_refused(device, says, folder):
    with pytest.raises(InputError, match=f"this device cannot be used: got {says}"):
        mechkv.load_model(folder, dtype="float32", device=device)


def test_auto_is_the_accelerator_or_the_cpu():
    found = torch.accelerator.current_accelerator(check_available=True)
    assert models.to_device("auto") == (found or torch.device("cpu"))
    assert models.to_device("cpu") == torch.device("cpu")


def _drop(weights):
    del weights["model.layers.1.mlp.up_proj.weight"]


def _cut(weights):
    weights["model.norm.weight"] = weights["model.norm.weight"][:40].contiguous()


@pytest.mark.parametrize("breakage", [_drop, _cut])
def test_gaps_in_the_weights_are_refused_and_not_filled_with_random_numbers(breakage, broken):
    file = broken / "model.safetensors"
    weights = load_file(file)
    breakage(weights)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"do not fill the model: got 1 missing or of another shape, such as .*(up_proj|norm)"
    ):
        mechkv.load_model(broken, dtype="float32", device="cpu")


@pytest.mark.parametrize("size", [0, 100, 20_000])
def test_truncated_weights_are_refused(size, broken):
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"cannot load .*Check that the folder is complete"):
        mechkv.load_model(broken, dtype="float32", device="cpu")


def test_folders_that_hold_no_model_are_refused(broken, tmp_path_factory):
    with pytest.raises(ModelError, match=r"not a model folder.*without config.json"):
        mechkv.load_model(tmp_path_factory.mktemp("empty"))
    with pytest.raises(ModelError, match=r"no such file: got .*none.gguf"):
        mechkv.load_model(broken / "none.gguf")
    (broken / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ModelError, match="cannot load"):
        mechkv.load_model(broken)
    (broken / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot load .*JSON"):
        mechkv.load_model(broken)


@pytest.mark.parametrize("name", ["nobody/nothing", "no id at all!", "nobody/nothing/at/all"])
def test_a_hub_id_without_a_network_says_so_at_once(name):
    started = time.monotonic()
    with pytest.raises(ModelError, match=r"cannot load .*hub id needs a network.*mechkv models"):
        mechkv.load_model(name)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("family", FAMILIES)
def test_recast_keeps_the_values_and_leaves_the_original_alone(family, shared_bridge):
    half = shared_bridge(family, torch.float16)
    held = {name: value.clone() for name, value in half.original_model.state_dict().items()}
    before, random_state = run(half, "cached", n_steps=1), torch.get_rng_state()
    wide = rebuilding.recast(half, "float32")
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, value in wide.original_model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, held[name].float())
    assert all(torch.equal(value, held[name]) for name, value in half.original_model.state_dict().items())
    assert torch.equal(logits(run(half, "cached", n_steps=1)), logits(before))
    assert models.info(wide).weights == "float16 values in float32"
    assert not torch.equal(run(wide, "cached", n_steps=1)[-1].logits, before[-1].logits.float())
    tables = {n.rpartition(".")[2]: b for n, b in wide.original_model.named_buffers() if "inv_freq" in n}
    fresh = {n.rpartition(".")[2]: b for n, b in tiny_hf(family).named_buffers() if "inv_freq" in n}
    assert tables.keys() == fresh.keys()
    for name, table in tables.items():
        assert torch.equal(table, fresh[name])
        assert not torch.equal(table, table.half().float())


def test_recast_of_float32_rounds_to_the_nearest_float16():
    model = tiny_bridge()
    half = rebuilding.recast(model, torch.float16)
    assert torch.equal(run(half, "cached")[-1].logits, run(tiny_bridge(dtype=torch.float16), "cached")[-1].logits)


def test_importing_the_package_loads_no_torch():
    heavy = ("torch", "transformers", "transformer_lens", "pandas")
    code = f"import sys, mechkv; dir(mechkv); print([name for name in {heavy} if name in sys.modules])"
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="no attribute 'drift_profiles'"):
        mechkv.drift_profiles  # noqa: B018
