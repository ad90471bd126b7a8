"""Targets on the device: a model by its source, with weights of any type that it may have."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.checkpoints import source as checkpoints
from specjax.data.tokenizer import Tokenizer
from specjax.models.functional import make_target, pack, stack_layers
from specjax.models.llama import LlamaConfig
from specjax.models.quantize import quantize
from specjax.types import Params, Target


class LoadedTarget(NamedTuple):
    """A target with its weights on the device."""

    target: Target
    params: Params
    tokenizer: Tokenizer | None
    config: LlamaConfig
    source: str


def build_target(source: str, dtype: Any = jnp.float32, stacked: bool = False) -> LoadedTarget:
    """Load a target onto the device, its weights in `dtype`; CheckpointError if it cannot be read.

    In int8 they are quantised from float32, and activations and caches are float32.
    """
    is_int8 = dtype == jnp.int8
    checkpoint = checkpoints.load(source, jnp.float32 if is_int8 else dtype)
    params = pack(checkpoint.params)
    params = jax.device_put(quantize(params) if is_int8 else params)
    target = make_target(checkpoint.config, dtype=dtype, stacked=stacked)
    params = stack_layers(params) if stacked else params
    return LoadedTarget(target, params, checkpoint.tokenizer, checkpoint.config, source)
