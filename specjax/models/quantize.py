"""Weights in int8: symmetric, with one float32 scale for each output of a matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.layers import Scaled
from specjax.types import Params

LARGEST = 127


def quantize(params: Params) -> Params:
    """Unstacked weights, each matrix as int8 `weight` [O, I] and `scale` [O]; all else in float32."""
    return jax.tree.map(_widen, _map_matrices(params, _quantize_matrix))


def dequantize(params: Params) -> Params:
    """The float32 weights that quantised ones stand for; those that are not quantised stay as they are."""

    def dequantize_matrix(part: dict[str, Any]) -> dict[str, Any]:
        if "scale" not in part:
            return part
        rest = {name: leaf for name, leaf in part.items() if name != "scale"}
        return rest | {"weight": part["weight"].astype(np.float32) * part["scale"][:, None]}

    return _map_matrices(params, dequantize_matrix)


def quantize_products(params: Params) -> Params:
    """The weights of modules made for floats, each `weight` [O, I] `Scaled`; all else in float32.

    Embeddings are to be left out: they are not multiplied by.
    """

    def join(part: dict[str, Any]) -> dict[str, Any]:
        narrow = _quantize_matrix(part)
        scaled = Scaled(narrow.pop("weight"), narrow.pop("scale"))
        return narrow | {"weight": scaled}

    return jax.tree.map(_widen, _map_matrices(params, join))


def _quantize_matrix(part: dict[str, Any]) -> dict[str, Any]:
    weight = np.asarray(part["weight"], np.float32)
    largest = np.abs(weight).max(axis=1)
    # An output without weights has no scale of its own; any will do.
    scale = np.where(largest > 0, largest / LARGEST, 1).astype(np.float32)
    rounded = np.rint(weight / scale[:, None]).clip(-LARGEST, LARGEST).astype(np.int8)
    return part | {"weight": rounded, "scale": scale}


def _widen(leaf: Any) -> np.ndarray:
    """A floating leaf in float32; a draft vocabulary, say, is none."""
    return np.asarray(leaf, np.float32 if jnp.issubdtype(leaf.dtype, jnp.floating) else None)


def _map_matrices(params: Params, function: Callable[[dict[str, Any]], dict[str, Any]]) -> Params:
    mapped: Params = {
        name: _map_matrices(part, function) if isinstance(part, dict) else part
        for name, part in params.items()
    }
    return function(mapped) if np.ndim(mapped.get("weight", 0)) == 2 else mapped
