"""Weights in int8: symmetric, with one float32 scale for each output of a matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from specjax.types import Params

LARGEST = 127


def quantize(params: Params) -> Params:
    """Unstacked weights, each matrix as int8 `weight` [O, I] and `scale` [O]; all else in float32."""
    return _map_matrices(params, _quantize_matrix)


def dequantize(params: Params) -> Params:
    """The float32 weights that quantised ones stand for."""

    def dequantize_matrix(part: dict[str, Any]) -> dict[str, Any]:
        weight, scale = np.asarray(part["weight"], np.float32), np.asarray(part["scale"])
        rest = {name: leaf for name, leaf in part.items() if name != "scale"}
        return rest | {"weight": weight * scale[:, None]}

    return _map_matrices(params, dequantize_matrix)


def _quantize_matrix(part: dict[str, Any]) -> dict[str, Any]:
    weight = np.asarray(part["weight"], np.float32)
    largest = np.abs(weight).max(axis=1)
    # An output without weights has no scale of its own; any will do.
    scale = np.where(largest > 0, largest / LARGEST, 1).astype(np.float32)
    rounded = np.rint(weight / scale[:, None]).clip(-LARGEST, LARGEST).astype(np.int8)
    return part | {"weight": rounded, "scale": scale}


def _map_matrices(params: Params, function: Callable[[dict[str, Any]], dict[str, Any]]) -> Params:
    mapped: Params = {}
    for name, part in params.items():
        if not isinstance(part, dict):
            mapped[name] = part if np.ndim(part) > 1 or name == "scale" else np.asarray(part, np.float32)
        else:
            mapped[name] = _map_matrices(part, function)
    return function(mapped) if np.ndim(mapped.get("weight", 0)) == 2 else mapped
