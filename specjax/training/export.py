"""A trained drafter as a folder: its weights in bfloat16, and what it is and how it came about."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from specjax.checkpoints.drafters_export import to_published
from specjax.checkpoints.export import write_json
from specjax.checkpoints.names import flatten, unflatten
from specjax.errors import CheckpointError
from specjax.types import Params

WEIGHTS, ABOUT = "model.safetensors", "config.json"
ABOUT_PUBLISHED = "training.json"  # beside a published format, whose config.json is its own


def write_drafter(folder: Path, params: Params, about: Mapping[str, Any]) -> None:
    """Write the weights, under their dotted names, and `about` as JSON; the folder is replaced whole."""
    with _replacing(folder) as draft:
        draft.mkdir()
        save_file({name: _stored(leaf) for name, leaf in flatten(params).items()}, draft / WEIGHTS)
        (draft / WEIGHTS).chmod(0o644)  # the library leaves it to the owner alone
        write_json(draft / ABOUT, about)


def write_published(
    folder: Path,
    params: Params,
    architecture: Any,
    about: Mapping[str, Any],
    *,
    base: str,
    state_layers: Sequence[int],
) -> None:
    """Write the weights as `to_published` does, with `about` beside them; the folder is replaced whole."""
    with _replacing(folder) as draft:
        stored = jax.tree.map(_stored, params)
        to_published(draft, stored, architecture, base=base, state_layers=state_layers)
        write_json(draft / ABOUT_PUBLISHED, about)


@contextlib.contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Where to make a folder that then takes the place of `folder`; nothing stays of what fails."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as staging:
        draft = Path(staging) / folder.name
        yield draft
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(draft, folder)


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
