"""Question: which dense weights does a quantised GGUF file stand for?

A GGUF file holds blocks: a few bits per weight and one scale (and offset) per block, `w = d * q + m`. Loaded naively
they stay packed and are multiplied in float32 whatever dtype was asked for, so a "float16 model" would not compute in
float16. `convert_gguf` unpacks each block once and writes an ordinary Hugging Face folder.

Conventions: the folder holds the float32 values that the blocks decode to, not yet rounded to a half precision, so that
every rung of a precision ladder is rounded from the same master.

Controls, each an error when it fails: no parameter is missing from the file (it would be filled at random); each is
dense, float32, finite; the configuration says what the file's header says (layers, widths, heads, rotary base, window);
rotary scaling is not lost on the way; tokens and special ids are those of the header; the saved folder, loaded in
float16, gives float16 parameters that are exactly the rounded masters.
"""

import contextlib
import io
import math
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mechkv.errors import ModelError

PROBE_SENTENCE = "The quick brown fox jumps over 12 lazy dogs."
# header key (after the architecture's name) -> attribute of the configuration
HEADER_TO_CONFIG = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# What loading libraries raise for a file they cannot read.
_UNREADABLE = (ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError, OSError, OverflowError)
_USE_HF = "Use the model's Hugging Face folder or hub id instead of this GGUF file."


def convert_gguf(gguf_path: Path, folder: Path, *, quiet: bool = True) -> int:
    """Write the dense float32 model with configuration and tokenizer to `folder`; return its number of parameters."""
    header = read_header(gguf_path)
    with tempfile.TemporaryDirectory(prefix="mechkv-gguf-") as scratch, _silenced(quiet):
        # A folder of its own: a neighbour of the user's file (generation_config.json, an adapter) must not be read.
        alone = Path(scratch) / "model.gguf"
        try:
            alone.symlink_to(gguf_path.resolve())
        except OSError:  # no symbolic links on this file system
            shutil.copyfile(gguf_path, alone)
        model, tokenizer = _load(alone, gguf_path.name)
    _check_weights(model, gguf_path)
    _check_config(model.config, header, gguf_path)
    _check_tokenizer(tokenizer, header, gguf_path)
    folder.mkdir(parents=True, exist_ok=True)
    with _silenced(quiet):
        if not model.config.architectures:
            model.config.architectures = [type(model).__name__]
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for weights in folder.glob("*.safetensors"):
            shutil.copymode(folder / "config.json", weights)
        _check_saved(model, tokenizer, folder)
    return sum(parameter.numel() for parameter in model.parameters())


def read_header(gguf_path: Path) -> dict[str, Any]:
    """Key-value pairs of a GGUF file, plus `tensor_names`; refuses what is no GGUF or one shard of several."""
    from gguf import GGUFReader

    try:
        with gguf_path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise _unreadable(gguf_path.name, error) from error
    if magic != b"GGUF":
        raise ModelError(
            f"{gguf_path.name} is not a GGUF file", got=f"first bytes {magic!r}", expected="b'GGUF'",
            remedy="Check that the download is complete and is the model file itself.",
        )  # fmt: skip
    try:
        reader = GGUFReader(gguf_path)
        header = {key: field.contents() for key, field in reader.fields.items()}
        header["tensor_names"] = [tensor.name for tensor in reader.tensors]
    except _UNREADABLE as error:
        raise _unreadable(gguf_path.name, error) from error
    if int(header.get("split.count", 1)) > 1:
        raise ModelError(
            f"{gguf_path.name} is one shard of a split GGUF", got=f"{header['split.count']} shards",
            expected="one file", remedy="Merge the shards first (llama-gguf-split --merge).",
        )  # fmt: skip
    return header


def _unreadable(shown: str, error: BaseException) -> ModelError:
    return ModelError(
        f"{shown} could not be read as a GGUF model", got=f"{type(error).__name__}: {error}",
        expected="a complete GGUF file of a causal decoder that transformers knows", remedy=_USE_HF,
    )  # fmt: skip


def _load(alone: Path, shown: str) -> tuple[Any, Any]:
    import torch
    import transformers

    # Older transformers unpack always and have no such class; newer ones keep the blocks packed unless told.
    gguf_config = getattr(transformers, "GgufConfig", None)
    extra = {} if gguf_config is None else {"quantization_config": gguf_config(dequantize=True)}
    common = {"gguf_file": alone.name, "local_files_only": True, "trust_remote_code": False}
    info: dict[str, Any]
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            alone.parent, dtype=torch.float32, output_loading_info=True, **common, **extra
        )
        model, info = loaded
        tokenizer = transformers.AutoTokenizer.from_pretrained(alone.parent, **common)
    except _UNREADABLE as error:
        raise _unreadable(shown, error) from error
    strays = {kind: sorted(map(str, info[kind]))[:5] for kind in info if info[kind]}
    if strays:
        raise ModelError(
            f"{shown}: its tensors and the model parameters do not match one to one", got=strays,
            expected="none missing, none left", remedy=_USE_HF,
        )  # fmt: skip
    return model.eval(), tokenizer


def _check_weights(model: Any, gguf_path: Path) -> None:
    import torch

    if getattr(model.config, "quantization_config", None) is not None:
        raise ModelError(
            f"{gguf_path.name}: the loaded model", got="weights still packed in blocks", expected="dense weights",
            remedy="Install a transformers version within mechkv's requirements.",
        )  # fmt: skip
    for name, parameter in model.named_parameters():
        dense = type(parameter) is torch.nn.Parameter and parameter.layout == torch.strided
        if not dense or parameter.dtype != torch.float32:
            found = f"{type(parameter).__name__} of {parameter.dtype}"
        elif not bool(torch.isfinite(parameter).all()):
            found = "a value that is not finite"
        else:
            continue
        raise ModelError(
            f"{gguf_path.name}: parameter {name} after unpacking", got=found, expected="dense, finite float32",
            remedy=_USE_HF,
        )  # fmt: skip


def _check_config(config: Any, header: dict[str, Any], gguf_path: Path) -> None:
    architecture = header.get("general.architecture", "")
    wrong: dict[str, tuple[Any, Any]] = {}
    for key, attribute in HEADER_TO_CONFIG.items():
        expected = header.get(f"{architecture}.{key}")
        if isinstance(expected, int | float) and hasattr(config, attribute):
            found = getattr(config, attribute)
            if found is None or not math.isclose(found, expected, rel_tol=1e-6):
                wrong[attribute] = (found, expected)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    base = header.get(f"{architecture}.rope.freq_base")
    if base is not None and "rope_theta" in rope and not math.isclose(rope["rope_theta"], base, rel_tol=1e-6):
        wrong["rope_theta"] = (rope["rope_theta"], base)
    scaling = header.get(f"{architecture}.rope.scaling.type", "none")
    if "rope_freqs.weight" in header["tensor_names"] and scaling == "none":
        scaling = "per-frequency factors"
    if scaling != "none" and rope.get("rope_type", "default") == "default":
        wrong["rope_type"] = ("default", scaling)
    if wrong:
        raise ModelError(
            f"{gguf_path.name}: the configuration made from its header differs from the header",
            got={name: pair[0] for name, pair in wrong.items()},
            expected={name: pair[1] for name, pair in wrong.items()},
            remedy=_USE_HF,
        )


def _check_tokenizer(tokenizer: Any, header: dict[str, Any], gguf_path: Path) -> None:
    tokens = header.get("tokenizer.ggml.tokens", [])
    ids = tokenizer(PROBE_SENTENCE, add_special_tokens=False).input_ids
    wrong: dict[str, tuple[Any, Any]] = {}
    for kind in ("bos", "eos"):
        expected = header.get(f"tokenizer.ggml.{kind}_token_id")
        found = getattr(tokenizer, f"{kind}_token_id")
        if expected is not None and found is not None and found != expected:
            wrong[f"{kind} id"] = (found, expected)
    if tokenizer.convert_ids_to_tokens(ids) != [tokens[i] for i in ids if i < len(tokens)]:
        wrong["tokens"] = (tokenizer.convert_ids_to_tokens(ids), "the header's vocabulary at the same ids")
    if tokenizer.decode(ids).strip() != PROBE_SENTENCE:
        wrong["round trip"] = (tokenizer.decode(ids), PROBE_SENTENCE)
    if wrong:
        raise ModelError(
            f"{gguf_path.name}: the tokenizer made from its header is not the file's own",
            got={name: pair[0] for name, pair in wrong.items()},
            expected={name: pair[1] for name, pair in wrong.items()},
            remedy=_USE_HF,
        )
    adds_bos = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    if bool(header.get("tokenizer.ggml.add_bos_token", adds_bos)) != adds_bos:
        warnings.warn(
            f"{gguf_path.name}: tokenizer adds a first token: {adds_bos}; header says otherwise", stacklevel=3
        )


def _check_saved(master: Any, tokenizer: Any, folder: Path) -> None:
    """Load the folder as a user will, in float16, and hold it against the masters it was rounded from."""
    import torch
    import transformers

    saved = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16, local_files_only=True)
    masters = dict(master.named_parameters())
    wrong = sorted(
        name
        for name, parameter in saved.named_parameters()
        if parameter.dtype != torch.float16 or not torch.equal(parameter, masters[name].to(torch.float16))
    )
    if getattr(saved.config, "quantization_config", None) is not None or not saved.config.architectures:
        wrong.append("config.json")
    reloaded = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    same_template = reloaded.chat_template == tokenizer.chat_template
    if reloaded(PROBE_SENTENCE).input_ids != tokenizer(PROBE_SENTENCE).input_ids or not same_template:
        wrong.append("tokenizer")
    if wrong or len(masters) != len(list(saved.named_parameters())):
        raise ModelError(
            f"the model saved to {folder.name} does not load back as it was", got=wrong[:5], expected="no difference",
            remedy=_USE_HF,
        )  # fmt: skip


@contextlib.contextmanager
def _silenced(quiet: bool) -> Iterator[None]:
    """Hold back the progress bars of the loading library."""
    if not quiet:
        yield
        return
    with contextlib.redirect_stderr(io.StringIO()):
        yield
