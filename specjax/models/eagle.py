"""EAGLE's network (arXiv 2401.15077): one decoder layer over the target's last states and the next tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from specjax.models.layers import Linear, RMSNorm
from specjax.models.llama import MLP, Attention, LlamaConfig, Nodes, Slots, node_inputs
from specjax.types import KVCache, ModelParams, Target

EMBEDDING = "embed_tokens"


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """The layer's own `layer`, of Llama's kind, and whether `fc` has a bias."""

    layer: LlamaConfig
    fc_bias: bool


def embed(target: Target, params: ModelParams, tokens: Int[Array, "B N"]) -> Float[Array, "B N H"]:
    """Tokens as the head reads them: by the target's embedding, or its own where its weights have one."""
    own = params.drafter.get(EMBEDDING)
    if own is None:
        return target.embed(params.target, tokens)
    # As the target's embedding does, negative tokens read row 0, and nobody reads the result.
    return jnp.take(own["weight"], jnp.maximum(tokens, 0), axis=0)


class EagleBlock(nnx.Module):
    """A decoder layer without a norm at its input, as published checkpoints have it."""

    def __init__(self, config: LlamaConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.self_attn = Attention(config, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B N H"], nodes: Nodes, keys: Slots, values: Slots
    ) -> tuple[Float[Array, "B N H"], Slots, Slots]:
        mixed, keys, values = self.self_attn(x, nodes, keys, values)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), keys, values


class Eagle(nnx.Module):
    """From the state of a token and the embedding of the next one to the next one's state."""

    def __init__(self, config: EagleConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        hidden = config.layer.hidden_size
        self.fc = Linear(2 * hidden, hidden, bias=config.fc_bias, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([EagleBlock(config.layer, dtype=dtype, rngs=rngs)])

    def __call__(
        self,
        embedded: Float[Array, "B N H"],
        states: Float[Array, "B N H"],
        positions: Int[Array, "B N"],
        mask: Bool[Array, "B N M"],
        cache: KVCache,
    ) -> tuple[Float[Array, "B N H"], KVCache]:
        nodes = node_inputs(self.config.layer, positions, cache.length, mask)
        x = self.fc(jnp.concatenate((embedded, states), axis=-1))
        x, keys, values = self.layers[0](x, nodes, cache.keys[0], cache.values[0])
        return x, KVCache((keys,), (values,), cache.length)
