"""Hugging Face folders: config.json, safetensors in one file or in shards, and the tokenizer's files."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from specjax.checkpoints.hf_config import parse_config
from specjax.checkpoints.validate import Params, StoredTensor, check_and_nest
from specjax.data.tokenizer import Tokenizer, from_folder, read_json
from specjax.errors import CheckpointError
from specjax.models.llama import LlamaConfig

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What of a published repository is needed; everything else stays where it is.
NEEDED_FILES = (
    "config.json",
    "generation_config.json",
    WEIGHTS,
    INDEX,
    "model-*-of-*.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def load_folder(
    folder: Path, dtype: npt.DTypeLike = np.float32
) -> tuple[LlamaConfig, Params, Tokenizer | None]:
    """Read a folder's config, weights and tokenizer (None without a tokenizer.json).

    Raises CheckpointError naming the file, field or tensor that is missing, broken or does not fit.
    """
    config = parse_config(read_json(folder / "config.json"), str(folder / "config.json"))
    params = check_and_nest(folder_tensors(folder), config, str(folder), dtype, spell=published_name)
    tokenizer = from_folder(folder) if (folder / "tokenizer.json").exists() else None
    return config, params, tokenizer


def download(reference: str) -> Path:
    """Fetch `owner/name[@revision]` from the Hugging Face hub and return its folder.

    Raises CheckpointError where the client is not installed, or the repository cannot be had.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise CheckpointError(
            f"'hf:{reference}' needs the Hugging Face client; install it with: pip install 'specjax[hub]'"
        ) from error
    repository, _, revision = reference.partition("@")
    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision or None, allow_patterns=list(NEEDED_FILES)
        )
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"'hf:{reference}' is gated; accept its licence on its page, then log in with `hf auth login`."
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise CheckpointError(
            f"'hf:{reference}' was not found; the form is hf:owner/name or hf:owner/name@revision, and a "
            "private repository needs `hf auth login`."
        ) from error
    except Exception as error:  # the client's transport raises errors of its own, offline above all
        raise CheckpointError(
            f"'hf:{reference}' could not be fetched ({type(error).__name__}: {error}). Without a network, "
            "name a local folder or a .gguf file instead."
        ) from error
    return Path(folder)


def published_name(name: str) -> str:
    """The name under which published checkpoints hold the parameter `name`."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def folder_tensors(folder: Path) -> dict[str, StoredTensor]:
    """List the tensors of every file of the folder by their names without `model.`, unread."""
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX)
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise CheckpointError(f"{folder / INDEX} has no 'weight_map' of file names; download it again.")
        paths = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        weight_map, paths = None, [folder / WEIGHTS]

    tensors: dict[str, StoredTensor] = {}
    files: dict[str, str] = {}
    for path in paths:
        for name, tensor in read_header(path).items():
            short = name.removeprefix("model.")
            if short in tensors:
                raise CheckpointError(
                    f"{folder}: tensor '{name}' is in {files[short]} and again in {path.name}; "
                    "download the folder again."
                )
            tensors[short], files[short] = tensor, path.name
    for name, file in (weight_map or {}).items():
        if files.get(name.removeprefix("model.")) != file:
            raise CheckpointError(
                f"{folder / INDEX} promises tensor '{name}' in {file}, which does not hold it; "
                "the index and the shards belong to different downloads."
            )
    return tensors


def read_header(path: Path) -> dict[str, StoredTensor]:
    """List the tensors of a safetensors file by their names, unread; CheckpointError where it is damaged."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; download it, or convert the weights to safetensors.")
    try:
        file = safe_open(path, framework="np")
        tensors = {}
        for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
            part = file.get_slice(name)
            dtype = part.get_dtype()
            tensors[name] = StoredTensor(
                tuple(part.get_shape()), _DTYPES.get(dtype, dtype), partial(file.get_tensor, name)
            )
        return tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is truncated or damaged ({error}); download it again.") from error
