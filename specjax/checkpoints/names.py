"""The dotted names that files give to the arrays of a nested dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax


def flatten(params: Mapping[Any, Any]) -> dict[str, Any]:
    """The leaves of a nested dict by their dotted names."""
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    return {".".join(str(part.key) for part in path): leaf for path, leaf in paths}


def unflatten(leaves: Mapping[str, Any]) -> dict[Any, Any]:
    """The inverse of `flatten`; a part of a name that is a number is a number."""
    params: dict[Any, Any] = {}
    for name, leaf in leaves.items():
        *parts, last = (int(part) if part.isdigit() else part for part in name.split("."))
        at = params
        for part in parts:
            at = at.setdefault(part, {})
        at[last] = leaf
    return params
