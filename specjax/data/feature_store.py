"""Features on disk beside their tokens: one safetensors file for each file of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specjax.errors import ConfigError
from specjax.storage import replacing


def features_path(tokens_path: Path) -> Path:
    """Where the features of a file of tokens lie."""
    return tokens_path.with_suffix(".safetensors")


def write_features(path: Path, features: Mapping[str, Sequence[np.ndarray]]) -> None:
    """Write the features [T, F] of every text, by name and in the order of the texts, whole or not at all."""
    with replacing(path) as draft:
        save_file({name: np.concatenate(parts) for name, parts in features.items()}, draft)
        draft.chmod(0o644)  # the library leaves it to the owner alone


def read_features(
    path: Path, names: Sequence[str], start: int, stop: int
) -> dict[str, Float[np.ndarray, "T F"]]:
    """Rows `start` to `stop` of a file's features; ConfigError where they are not all there."""
    try:
        with safe_open(path, framework="numpy") as file:
            known = list(file.keys())
            for name in names:
                if name not in known:
                    raise ConfigError(f"{path} holds no feature '{name}' (it has {', '.join(known)})")
            slices = {name: file.get_slice(name) for name in names}
            if any(part.get_shape()[0] < stop for part in slices.values()):
                raise ConfigError(f"{path} is shorter than its file of tokens: write both again")
            return {name: part[start:stop] for name, part in slices.items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"cannot read the features {path} ({error}): write them again") from error
