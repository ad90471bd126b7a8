"""A trained drafter as a folder: its weights in bfloat16, and what it is and how it came about."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from specjax.checkpoints.names import flatten, unflatten
from specjax.errors import CheckpointError
from specjax.types import Params

WEIGHTS, ABOUT = "model.safetensors", "config.json"


def write_drafter(folder: Path, params: Params, about: Mapping[str, Any]) -> None:
    """Write the weights, under their dotted names, and `about` as JSON; the folder is replaced whole."""
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        save_file({name: _stored(leaf) for name, leaf in flatten(params).items()}, staging / WEIGHTS)
        (staging / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        staging.chmod(0o755)  # both are made for their owner alone
        (staging / WEIGHTS).chmod(0o644)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def read_drafter(folder: Path) -> tuple[Params, dict[str, Any]]:
    """The weights, on the host, and what was written about them; CheckpointError if they cannot be read."""
    try:
        weights = load_file(folder / WEIGHTS)
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} is no folder of a trained drafter ({error}): name one that specjax.train wrote"
        ) from error
    return unflatten(weights), about


def fit(params: Params, template: Params, source: str) -> Params:
    """`params` in the types of `template`; CheckpointError where names or shapes differ."""
    given, wanted = flatten(params), flatten(template)
    for name in sorted(given.keys() | wanted.keys()):
        shapes = [part[name].shape if name in part else None for part in (given, wanted)]
        if shapes[0] != shapes[1]:
            raise CheckpointError(
                f"the weight {name} of '{source}' is {shapes[0] or 'absent'} and the drafter's is "
                f"{shapes[1] or 'absent'}: give the drafter the fields that {ABOUT} there names"
            )
    return unflatten({name: jnp.asarray(given[name], wanted[name].dtype) for name in wanted})


def _stored(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return np.ascontiguousarray(
        array.astype(jnp.bfloat16) if jnp.issubdtype(array.dtype, jnp.floating) else array
    )
