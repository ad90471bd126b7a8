"""A Llama without its embedding and its head, for a model that shares another one's."""

from __future__ import annotations

from typing import Any

from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from specjax.models.layers import RMSNorm
from specjax.models.llama import Block, LlamaConfig, node_inputs
from specjax.types import KVCache


class Trunk(nnx.Module):
    """Decoder layers and the final norm, named as in `Llama`: from embedded tokens to what enters a head."""

    def __init__(self, config: LlamaConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        self.layers = nnx.List([Block(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "B N H"],
        positions: Int[Array, "B N"],
        mask: Bool[Array, "B N M"],
        cache: KVCache,
    ) -> tuple[Float[Array, "B N H"], KVCache]:
        nodes = node_inputs(self.config, positions, cache.length, mask)
        slots = []
        for block, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            x, keys, values = block(x, nodes, keys, values)
            slots.append((keys, values))
        all_keys, all_values = zip(*slots, strict=True)
        return self.norm(x), KVCache(all_keys, all_values, cache.length)
