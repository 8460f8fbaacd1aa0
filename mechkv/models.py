"""From a source to a `TransformerBridge` that is what was asked for.

A source is a packaged demo model (`smollm2-135m`, `gemma3-270m`), a `.gguf` file, a local folder in Hugging Face
format, or a hub id. `from_hf` takes a model in memory and makes no hub call. Every way ends in `admit`: the model is a
causal decoder, its parameters have the requested dtype, attention is eager (hooks need it), it is in eval mode, and a
live probe shows that the cache grows and that attention reads it. A model that fails is refused with a `ModelError` or
`GuardError`.

`TransformerBridge` changes the Hugging Face model it wraps (eager attention, wrapped modules): a plain reference goes
before, or in another process.
"""

import os
import tempfile
import weakref
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from mechkv import checkpoints, guards
from mechkv.cache import KVState
from mechkv.errors import CacheError, InputError, ModelError
from mechkv.guards import GuardLog
from mechkv.paths import At, PathRunner

DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class ModelInfo:
    """What was loaded, as read back from the model.

    Attributes:
        source: What the caller named; `in memory` for `from_hf` and for a bridge made elsewhere.
        weights: Where the values come from: `as stored`, or `float16 values in float32` and the like after `recast`.
    """

    source: str
    family: str
    dtype: str
    device: str
    attention: str
    weights: str
    n_layers: int
    n_heads: int
    n_kv: int
    d_head: int
    d_model: int
    d_vocab: int
    windows: tuple[int | None, ...]
    n_parameters: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


_ADMITTED: "weakref.WeakKeyDictionary[TransformerBridge, ModelInfo]" = weakref.WeakKeyDictionary()


def to_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A torch dtype from its name.

    Raises:
        InputError: Not one of float16, bfloat16, float32, float64.
    """
    found = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found is None or found not in DTYPES.values():
        raise InputError("unknown dtype", got=repr(dtype), expected=f"one of {', '.join(DTYPES)}", remedy="Name one.")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """`float16` for `torch.float16`."""
    return str(dtype).removeprefix("torch.")


def to_device(device: str | torch.device) -> torch.device:
    """A torch device that works here; `auto` is the accelerator that torch reports, else the CPU.

    Raises:
        InputError: No such device, or it does not compute.
    """
    if device == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator if accelerator is not None else torch.device("cpu")
    try:
        found = torch.device(device)
        torch.zeros(1, device=found).item()
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        first = str(error).strip().splitlines()[0]
        raise InputError(
            "this device cannot be used",
            got=f"{str(device)!r}: {first[:120]}",
            expected="'auto', 'cpu' or an accelerator of this computer",
            remedy="Leave device='auto' to take what there is.",
        ) from error
    return found


def load_model(
    source: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "float16",
    device: str | torch.device = "auto",
    device_map: str | dict[str, str | int] | None = None,
    revision: str | None = None,
) -> TransformerBridge:
    """Load a model with hook points, ready for both paths.

    Args:
        source: A packaged model's name, a `.gguf` file, a local folder, or a hub id, looked for in that order.
        dtype: Dtype of every floating parameter.
        device: Where to put it; not used with `device_map`.
        device_map: Spread over several devices, as accelerate understands it.
        revision: Commit, branch or tag, for a hub id.

    Raises:
        ModelError: It cannot be fetched or is not a causal decoder.
        GuardError: It was loaded and is not what was asked for.
    """
    if not isinstance(source, str | os.PathLike):
        raise InputError(
            "not the source of a model", got=type(source).__name__, expected="a name, a path or a hub id",
            remedy="For a model in memory use mechkv.from_hf(hf_model, tokenizer).",
        )  # fmt: skip
    wanted, name = to_dtype(dtype), os.fspath(source)
    place = None if device_map is not None else to_device(device)
    where = checkpoints.locate(name, revision)
    model = checkpoints.read_model(where, wanted, device_map)
    if place is not None:
        model = model.to(place)  # type: ignore[arg-type]
    return admit(boot(model, checkpoints.read_tokenizer(where), name), source=name, dtype=wanted)


def from_hf(hf_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> TransformerBridge:
    """A bridge around a Hugging Face model in memory; no hub call. The model itself is changed (see the module).

    Args:
        hf_model: A causal decoder, in the dtype and on the device it is to run in.
        tokenizer: Its tokenizer, if prompts are to be given as text.

    Raises:
        InputError: Not a Hugging Face model. A bridge is refused as well: wrapped again, it would lose its hooks.
        ModelError: Not a causal decoder, or a family that TransformerLens has no adapter for.
        GuardError: The guards of `admit`.
    """
    if not isinstance(hf_model, PreTrainedModel):
        raise InputError(
            "not a Hugging Face model", got=type(hf_model).__name__, expected="a transformers PreTrainedModel",
            remedy="Pass a TransformerBridge as it is, a name or a path to mechkv.load_model(source).",
        )  # fmt: skip
    floating = [p.dtype for p in hf_model.parameters() if p.is_floating_point()]
    if not floating:
        raise ModelError("no floating-point weights", got="none", expected="dense weights", remedy="Dequantise first.")
    hf_model.eval()
    if not hf_model.config.architectures:
        hf_model.config.architectures = [type(hf_model).__name__]
    return admit(boot(hf_model, tokenizer, "in memory"), source="in memory", dtype=floating[0])


def admit(
    model: TransformerBridge,
    *,
    source: str = "in memory",
    dtype: torch.dtype | None = None,
    weights: str = "as stored",
) -> TransformerBridge:
    """Check a bridge, whoever made it, and remember what it is. Analyses call this on what they are given; the live
    probe runs once per model, the other checks every time.

    Raises:
        ModelError, GuardError: What was found, what was expected, how to mend it.
    """
    if not isinstance(model, TransformerBridge):
        raise InputError(
            "not a TransformerBridge", got=type(model).__name__, expected="a TransformerBridge",
            remedy="Use mechkv.load_model(source) or mechkv.from_hf(hf_model, tokenizer).",
        )  # fmt: skip
    known = _ADMITTED.get(model)
    wanted = dtype or (DTYPES[known.dtype] if known else next(model.original_model.parameters()).dtype)
    log = GuardLog()
    attention = guards.check_model(model, wanted, log)
    if known is None:
        _check_causal(model)
        probe_cache(model, log)
        _ADMITTED[model] = _describe(model, source, wanted, attention, weights)
    return model


def info(model: TransformerBridge) -> ModelInfo:
    """What is known about an admitted model; a bridge not seen before is admitted. Checks nothing again: `admit` does,
    and the decode loop."""
    return _ADMITTED[model if model in _ADMITTED else admit(model)]


class _Overwrite:
    """Doubles one cached V row: if attention reads the cache, the logits change."""

    sites = ("cache_v",)

    def __call__(self, value: torch.Tensor, at: At) -> torch.Tensor | None:
        if at.step == 0 or at.layer != 0:
            return None
        changed = value.clone()
        changed[:, 0] = changed[:, 0] * 2 + 1
        return changed


def probe_cache(model: TransformerBridge, log: GuardLog) -> None:
    """Prefill two tokens, decode one: the cache grows, and overwriting a cached value changes the logits.

    Raises:
        GuardError: The cache is not written, or not read.
    """
    device = guards.input_device(model)
    vocabulary = guards.text_config(model).vocab_size
    tokens = torch.tensor([1, 2, 3], device=device) % vocabulary
    with PathRunner(model, "cached", log=log) as runner:
        before = runner.step(tokens[:2], KVState.empty(2), 0).kv
        plain = runner.step(tokens, before, 1).logits
    with PathRunner(model, "cached", interventions=[_Overwrite()], log=log) as runner:
        patched = runner.step(tokens, before, 1).logits
    if torch.equal(plain, patched):
        raise CacheError(
            "attention does not read the KV cache",
            got="the same logits after a cached value was overwritten",
            expected="other logits",
            remedy="Check that transformers and TransformerLens agree (transformers>=5.9,<5.24 with 4.3).",
        )
    log["cache_live"] += 1


def boot(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str) -> TransformerBridge:
    """Wrap a Hugging Face model; nothing is checked beyond its kind (see `admit`).

    Raises:
        ModelError: Not a causal decoder, or TransformerLens has no adapter for it.
    """
    if getattr(model.config, "is_encoder_decoder", False) or model.get_output_embeddings() is None:
        raise ModelError(
            "not a causal decoder",
            got=type(model).__name__,
            expected="a decoder-only language model with an output head",
            remedy="Load it as AutoModelForCausalLM; encoders and encoder-decoders have no decode path to compare.",
        )
    architecture = (model.config.architectures or [type(model).__name__])[0]
    try:
        if tokenizer is None:  # boot_transformers would ask the hub for one
            with torch.random.fork_rng(devices=[]):  # joint projections are split into modules that draw weights first
                bridge = build_bridge_from_module(model, architecture, hf_config=model.config, model_name=name)
            model.set_attn_implementation("eager")
            return bridge
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:  # boot reads it back
            tokenizer.save_pretrained(folder)
            saved = AutoTokenizer.from_pretrained(folder)
            return TransformerBridge.boot_transformers(name, hf_model=model, tokenizer=saved, dtype=dtype)
    except (ValueError, KeyError, NotImplementedError, AttributeError) as error:
        raise ModelError(
            "TransformerLens cannot wrap this model",
            got=f"{architecture}: {str(error)[:200]}",
            expected="an architecture that TransformerLens has an adapter for",
            remedy="See transformer_lens.supported_models, or compare your own functions with mechkv.check_paths.",
        ) from error


def _check_causal(model: TransformerBridge) -> None:
    direction = getattr(model.cfg, "attention_dir", "causal")
    if direction != "causal":
        raise ModelError(
            "not a causal decoder", got=f"{direction} attention", expected="causal attention",
            remedy="A KV cache is exact only where later tokens cannot change earlier rows.",
        )  # fmt: skip


def _describe(model: TransformerBridge, source: str, dtype: torch.dtype, attention: str, weights: str) -> ModelInfo:
    cfg, config = model.cfg, guards.text_config(model)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding" if window else "full"] * cfg.n_layers
    return ModelInfo(
        source=source,
        family=str(cfg.architecture),
        dtype=dtype_name(dtype),
        device=str(next(model.original_model.parameters()).device),
        attention=attention,
        weights=weights,
        n_layers=cfg.n_layers,
        n_heads=cfg.n_heads,
        n_kv=getattr(cfg, "n_key_value_heads", None) or cfg.n_heads,
        d_head=cfg.d_head,
        d_model=cfg.d_model,
        d_vocab=config.vocab_size,
        windows=tuple(window if "sliding" in kind else None for kind in kinds),
        n_parameters=sum(p.numel() for p in {id(p): p for p in model.original_model.parameters()}.values()),
    )
