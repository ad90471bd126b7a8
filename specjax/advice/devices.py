"""Devices that are not at hand: their roofs, and what passes would cost there. A model, not a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.advice.predict import RelativeCost
from specjax.analysis import theory
from specjax.analysis.memory import BYTES
from specjax.analysis.theory import Device, Work
from specjax.errors import ConfigError, nearest

LAUNCH = 1e-4  # seconds that a pass takes anyhow: assumed, not measured
OWN_HEAD = {"head", "lm_head"}  # names of weights


class Known(NamedTuple):
    """A device's roof by its data sheet, and the type of weights that its arithmetic is given for."""

    device: Device
    dtype: str


def _known(bytes_per_second: float, operations_per_second: float, dtype: str = "bfloat16") -> Known:
    return Known(Device(bytes_per_second, operations_per_second, LAUNCH), dtype)


# Memory bandwidth and dense arithmetic by the manufacturers' data sheets, of the largest variant.
DEVICES = {
    "cpu": _known(307e9, 4.1e12, "float32"),  # 8 channels of DDR5-4800, 32 cores of 64 operations at 2 GHz
    "t4": _known(320e9, 65e12),
    "l4": _known(300e9, 121e12),
    "l40s": _known(864e9, 362e12),
    "rtx4090": _known(1008e9, 165e12),
    "a100": _known(2039e9, 312e12),
    "h100": _known(3350e9, 989e12),
    "h200": _known(4800e9, 989e12),
    "tpu_v5e": _known(819e9, 197e12),
}


def find_device(name: str) -> Known:
    """The device of that name; ConfigError, with the nearest one, where there is none."""
    if name not in DEVICES:
        raise ConfigError(
            f"there is no device '{name}'{nearest(name, DEVICES)}: choose one of {', '.join(DEVICES)}, or "
            "leave --device out to measure on this machine"
        )
    return DEVICES[name]


def draft_work(weights: Mapping[str, Any], unembedding: int, dtype: str) -> Work | None:
    """What a draft step reads and computes, None without weights; the drafter's small cache is left out.

    Of an embedding only single rows are read, unless it is the head too. A drafter with neither reads the
    target's, of `unembedding` numbers.
    """
    leaves = [
        ({getattr(part, "key", None) for part in path}, np.shape(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(weights)
    ]
    if not leaves:
        return None
    embedding = sum(int(np.prod(size)) for names, size in leaves if "embed_tokens" in names and len(size) > 1)
    has_head = any(names & OWN_HEAD for names, _ in leaves)
    matrices = sum(int(np.prod(size)) for _, size in leaves if len(size) > 1) - embedding
    matrices += 0 if has_head else embedding or unembedding
    vectors = sum(int(np.prod(size)) for _, size in leaves if len(size) == 1)
    return Work((matrices + vectors) * BYTES[dtype], 0.0, 2.0 * matrices, 0.0)


def roofline(target: Work, device: Device, context_length: float) -> RelativeCost:
    """v(batch, nodes) on the device's roofline, by `theory.roofline_costs`."""
    return lambda batch, nodes: (
        theory.roofline_costs(target, None, device, batch, nodes, context_length).verify_cost
    )
