"""The files of a published drafter: where they lie, what they hold, and the checks that all kinds share."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from specjax.checkpoints import huggingface
from specjax.checkpoints.names import flatten, unflatten
from specjax.checkpoints.validate import FLOAT_DTYPES, Array, Params, StoredTensor, check_names, check_tensor
from specjax.data.tokenizer import read_json
from specjax.errors import CheckpointError

HUB, CONFIG = "hf:", "config.json"
MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"
PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")
# Which token of the target's each drafted one is, as an offset from its own number; which ones are drafted.
OFFSETS, IS_DRAFTED = "d2t", "t2d"
_DTYPES = {OFFSETS: ("int64", "int32"), IS_DRAFTED: ("bool",)}
_OF_SAFETENSORS = {"I64": "int64", "I32": "int32", "BOOL": "bool"}


def fetch(source: str) -> Path:
    """The folder of hf:owner/name[@revision]; its pickles are fetched only where it has nothing better."""
    reference = source.removeprefix(HUB)
    folder = huggingface.download(reference)
    if _safetensors(folder) is not None:
        return folder
    import huggingface_hub

    repository, _, revision = reference.partition("@")
    try:
        wanted = [CONFIG, MEDUSA_WEIGHTS, *PICKLES]
        return Path(
            huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=wanted)
        )
    except Exception as error:  # the client's transport raises errors of its own
        raise CheckpointError(
            f"'{source}' could not be fetched ({type(error).__name__}: {error})."
        ) from error


def is_published(folder: Path) -> bool:
    """Whether a folder holds a drafter in a published format, and not one that specjax.train wrote."""
    if (folder / CONFIG).exists():
        return "drafter" not in read_json(folder / CONFIG)
    return _safetensors(folder) is not None or _pickle(folder) is not None


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder by name, unread; CheckpointError where there are none or a file is damaged."""
    path = _safetensors(folder)
    if path is not None and path.name == MEDUSA_WEIGHTS:
        tensors = huggingface.read_header(path)
    elif path is not None:
        tensors = huggingface.folder_tensors(folder)
    elif (path := _pickle(folder)) is not None:
        return _read_pickle(path)
    else:
        names = ", ".join((huggingface.WEIGHTS, MEDUSA_WEIGHTS, *PICKLES))
        raise CheckpointError(f"{folder} has none of {names}; download it again.")
    return {
        name: StoredTensor(tensor.shape, _OF_SAFETENSORS.get(tensor.dtype, tensor.dtype), tensor.read)
        for name, tensor in tensors.items()
    }


def check(
    tensors: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    source: str,
    optional: Collection[str] = (),
) -> None:
    """Raise CheckpointError by its name where a tensor is missing, unused, or of another shape or dtype."""
    check_names(tensors, shapes, source, optional=optional)
    for name, shape in shapes.items():
        if name in tensors:
            check_tensor(name, tensors[name], shape, source, _DTYPES.get(name, FLOAT_DTYPES))


def nest(tensors: Mapping[str, StoredTensor], names: Collection[str], dtype: npt.DTypeLike) -> Params:
    """Those of the named tensors that there are, nested, as `dtype` arrays; numbers in names are ints."""
    found = (name for name in names if name in tensors)
    return unflatten({name: np.asarray(tensors[name]).astype(dtype, copy=False) for name in found})


def named(params: Mapping[Any, Any]) -> dict[str, Array]:
    """The arrays of a nested dict by their dotted names, on the host, as files want them."""
    return {name: np.ascontiguousarray(leaf) for name, leaf in flatten(params).items()}


def _safetensors(folder: Path) -> Path | None:
    names = (huggingface.INDEX, huggingface.WEIGHTS, MEDUSA_WEIGHTS)
    return next((folder / name for name in names if (folder / name).exists()), None)


def _pickle(folder: Path) -> Path | None:
    return next((folder / name for name in PICKLES if (folder / name).exists()), None)


def _read_pickle(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file of PyTorch's, which nobody else reads; nothing else in it is run."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise CheckpointError(
            f"{path} is a pickle, which takes PyTorch to read; install it with: pip install torch. Or "
            "convert the weights to safetensors."
        ) from error
    try:
        loaded = torch.load(path, weights_only=True, map_location="cpu")
        tensors = {
            str(name): (tensor, str(tensor.dtype).removeprefix("torch.")) for name, tensor in loaded.items()
        }
    except Exception as error:  # anything at all may be raised by a damaged pickle
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is truncated or damaged ({first}); download it again.") from error

    def read(tensor: Any, dtype: str) -> Array:
        # NumPy's own types lack bfloat16.
        if dtype == "bfloat16":
            return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.contiguous().numpy()

    return {
        name: StoredTensor(tuple(tensor.shape), dtype, partial(read, tensor, dtype))
        for name, (tensor, dtype) in tensors.items()
    }
