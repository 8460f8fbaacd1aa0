"""A tiny Llama is written as GGUF by hand; the folder made from it must be that Llama; damaged copies are refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from mechkv import gguf_weights
from mechkv.errors import ModelError
from mechkv.gguf_weights import PROBE_SENTENCE, convert_gguf, read_header

# Sizes that cannot be taken for one another; rows are multiples of 32, the block length of Q8_0.
D_MODEL, N_LAYERS, N_HEADS, N_KV, D_HEAD, D_MLP, CONTEXT, ROPE_BASE = 96, 3, 6, 2, 16, 160, 77, 5000.0
SPECIAL = ["<unk>", "<s>", "</s>"]
VOCABULARY = [*SPECIAL, *sorted(ByteLevel.alphabet()), "Ġt"]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
HF_TO_GGUF = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make_llama(seed: int = 0) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=D_MODEL, intermediate_size=D_MLP, num_hidden_layers=N_LAYERS, num_attention_heads=N_HEADS,
        num_key_value_heads=N_KV, head_dim=D_HEAD, max_position_embeddings=CONTEXT, vocab_size=len(VOCABULARY),
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE}, rms_norm_eps=1e-5, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.12 + (parameter.dim() == 1))
    return model


def gguf_name(name: str) -> str:
    whole = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    if name in whole:
        return f"{whole[name]}.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{HF_TO_GGUF[rest.removesuffix('.weight')]}.weight"


def interleave_rotary(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """GGUF stores the rotary halves of a head interleaved: row 2i of a head is row i, row 2i+1 is row i + d_head/2."""
    return weight.reshape(n_heads, 2, D_HEAD // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path, model: LlamaForCausalLM, *, quant="F32", permute=True, skip=(), extra=None, **header
) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    facts = {
        "block_count": N_LAYERS, "context_length": CONTEXT, "embedding_length": D_MODEL, "feed_forward_length": D_MLP,
        "attention.head_count": N_HEADS, "attention.head_count_kv": N_KV, "rope.dimension_count": D_HEAD,
        "vocab_size": model.config.vocab_size,
    }  # fmt: skip
    for key, value in facts.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.rope.freq_base", ROPE_BASE)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in header.items():
        writer.add_string(f"llama.{key.replace('__', '.')}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3] * len(SPECIAL) + [1] * 257)
    writer.add_token_merges(["Ġ t"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in model.state_dict().items():
        if name in skip:
            continue
        array = tensor.numpy()
        for part, n_heads in (("q_proj", N_HEADS), ("k_proj", N_KV)):
            if part in name and permute:
                array = interleave_rotary(array, n_heads)
        kind = gguf.GGMLQuantizationType[quant if array.ndim == 2 else "F32"]
        writer.add_tensor(gguf_name(name), gguf.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return make_llama()


@pytest.fixture(scope="module")
def converted(llama, tmp_path_factory) -> SimpleNamespace:
    base = tmp_path_factory.mktemp("f32")
    path = write_gguf(base / "tiny.gguf", llama)
    n_params = convert_gguf(path, base / "model")
    return SimpleNamespace(folder=base / "model", n_params=n_params)


def test_unquantised_weights_and_logits_survive_bit_for_bit(llama, converted):
    again = AutoModelForCausalLM.from_pretrained(converted.folder, dtype=torch.float32)
    assert converted.n_params == sum(p.numel() for p in llama.parameters())
    ours = dict(again.named_parameters())
    assert {name for name, p in llama.named_parameters() if not torch.equal(p, ours[name])} == set()
    tokens = torch.arange(3, 43)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, llama(tokens).logits)


def test_rotary_order_matters(llama, converted, tmp_path):
    """Twin of the test above: the same weights written without the interleaving are another model."""
    convert_gguf(write_gguf(tmp_path / "x.gguf", llama, permute=False), tmp_path / "model")
    theirs = load_file(tmp_path / "model" / "model.safetensors")
    ours = load_file(converted.folder / "model.safetensors")
    differing = {name.split(".")[-2] for name in ours if not torch.equal(ours[name], theirs[name])}
    assert differing == {"q_proj", "k_proj"}


def test_quantised_weights_decode_to_the_block_formula(llama, tmp_path):
    convert_gguf(write_gguf(tmp_path / "x.gguf", llama, quant="Q8_0"), tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    for name, tensor in llama.state_dict().items():
        if tensor.dim() == 1:
            assert torch.equal(stored[name], tensor)
            continue
        blocks = tensor.numpy().reshape(-1, 32)  # w = d * q with one float16 d per 32 weights
        scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
        error = np.abs(stored[name].numpy().reshape(-1, 32) - blocks)
        assert (error <= 0.51 * scale + 127 * scale * 2.0**-11).all(), name
        kind = gguf.GGMLQuantizationType.Q8_0
        expected = gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind)
        assert np.array_equal(stored[name].numpy(), expected), name
        assert not torch.equal(stored[name], tensor), name


def test_folder_is_dense_and_complete(converted):
    config = json.loads((converted.folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    assert config["rope_parameters"]["rope_theta"] == ROPE_BASE
    assert {t.dtype for t in load_file(converted.folder / "model.safetensors").values()} == {torch.float32}
    half = AutoModelForCausalLM.from_pretrained(converted.folder, dtype=torch.float16)
    assert {p.dtype for p in half.parameters()} == {torch.float16}
    assert {type(m) for m in half.modules() if "proj" in getattr(m, "_get_name", str)()} <= {torch.nn.Linear}


def test_tokenizer_is_the_files_own(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted.folder)
    ids = tokenizer(PROBE_SENTENCE).input_ids
    by_hand = [VOCABULARY.index("Ġ" if c == " " else c) for c in PROBE_SENTENCE]
    assert ids == by_hand
    assert tokenizer(" t").input_ids == [VOCABULARY.index("Ġt")]
    assert tokenizer.decode(ids) == PROBE_SENTENCE
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_a_parameter_missing_from_the_file_is_not_made_up(llama, tmp_path):
    path = write_gguf(tmp_path / "x.gguf", llama, skip=["model.layers.1.mlp.up_proj.weight"])
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj"):
        convert_gguf(path, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_non_finite_weight_is_refused(tmp_path):
    model = make_llama()
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight[5, 7] = float("inf")
    with pytest.raises(ModelError, match=r"layers\.2\.self_attn\.v_proj.*not finite"):
        convert_gguf(write_gguf(tmp_path / "x.gguf", model), tmp_path / "model")


@pytest.mark.parametrize(
    ("header", "extra"),
    [
        ({"rope__scaling__type": "yarn"}, None),
        ({}, {"rope_freqs.weight": np.full(D_HEAD // 2, 4.0, dtype=np.float32)}),
    ],
)
def test_rotary_scaling_that_would_be_lost_is_refused(llama, tmp_path, header, extra):
    path = write_gguf(tmp_path / "x.gguf", llama, extra=extra, **header)
    with pytest.raises(ModelError, match=r"yarn|per-frequency|rope_freqs"):
        convert_gguf(path, tmp_path / "model")


def swap(tokens: list[str], first: str, second: str) -> list[str]:
    other = {first: second, second: first}
    return [other.get(token, token) for token in tokens]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"llama.block_count": N_LAYERS + 1}, "num_hidden_layers"),
        ({"llama.attention.head_count_kv": N_HEADS}, "num_key_value_heads"),
        ({"llama.rope.freq_base": 1e4}, "rope_theta"),
        ({"llama.attention.layer_norm_rms_epsilon": 1e-6}, "rms_norm_eps"),
        ({"tokenizer.ggml.bos_token_id": 2}, "bos id"),
        ({"tokenizer.ggml.tokens": swap(VOCABULARY, "q", "z")}, "tokens"),
    ],
)
def test_a_model_that_is_not_what_the_header_says_is_refused(llama, tmp_path, monkeypatch, edit, message):
    """The loader's reading of the file is held against the header; here the header disagrees in one place."""
    path = write_gguf(tmp_path / "x.gguf", llama)
    header = {**read_header(path), **edit}
    monkeypatch.setattr(gguf_weights, "read_header", lambda path: header)
    with pytest.raises(ModelError, match=message):
        convert_gguf(path, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_loader_that_leaves_blocks_packed_is_refused(llama, tmp_path, monkeypatch):
    import transformers

    packed = transformers.GgufConfig
    monkeypatch.setattr(transformers, "GgufConfig", lambda dequantize: packed(dequantize=False))
    with pytest.raises(ModelError, match="still packed"):
        convert_gguf(write_gguf(tmp_path / "x.gguf", llama, quant="Q8_0"), tmp_path / "model")


def test_other_and_damaged_files_are_refused(llama, tmp_path):
    (tmp_path / "zip.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="not a GGUF file"):
        convert_gguf(tmp_path / "zip.gguf", tmp_path / "model")
    whole = write_gguf(tmp_path / "x.gguf", llama).read_bytes()
    for length in (4, 60, len(whole) // 2, len(whole) - 1000):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(ModelError, match="could not be read"):
            convert_gguf(tmp_path / "cut.gguf", tmp_path / "model")
    with pytest.raises(ModelError, match="could not be read"):
        convert_gguf(tmp_path / "absent.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_neighbouring_files_are_not_read(llama, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.123, "do_sample": true}')
    convert_gguf(write_gguf(tmp_path / "x.gguf", llama), tmp_path / "model")
    assert "temperature" not in json.loads((tmp_path / "model" / "generation_config.json").read_text())
