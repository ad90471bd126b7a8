"""EAGLE-3's network (arXiv 2503.01840): one decoder layer over fused states, and most often a head."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from specjax.models.layers import Linear, RMSNorm
from specjax.models.llama import MLP, Attention, LlamaConfig, Nodes, Slots, node_inputs
from specjax.types import KVCache


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """The layer's own `layer`, of Llama's kind, the width of the fused states, and the draft vocabulary.

    With `norm_before_residual` what the layer adds to is the normalised state, not the state as it is.
    Without `own_unembedding` it has no head, and the target's makes logits of its normalised outputs.
    """

    layer: LlamaConfig
    state_size: int
    draft_vocab_size: int
    norm_before_residual: bool
    own_unembedding: bool = True


class MidLayer(nnx.Module):
    """A decoder layer that attends over the normalised embedding and state side by side."""

    def __init__(self, config: LlamaConfig, *, norm_before_residual: bool, dtype: Any, rngs: nnx.Rngs):
        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)

        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = norm(), norm(), norm()
        self.self_attn = Attention(config, dtype=dtype, rngs=rngs, in_size=2 * config.hidden_size)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)
        self.norm_before_residual = norm_before_residual

    def __call__(
        self,
        embedded: Float[Array, "B N H"],
        states: Float[Array, "B N H"],
        nodes: Nodes,
        keys: Slots,
        values: Slots,
    ) -> tuple[Float[Array, "B N H"], Slots, Slots]:
        normed = self.hidden_norm(states)
        both = jnp.concatenate((self.input_layernorm(embedded), normed), axis=-1)
        mixed, keys, values = self.self_attn(both, nodes, keys, values)
        x = (normed if self.norm_before_residual else states) + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), keys, values


class Eagle3(nnx.Module):
    """From the state of a token and the embedding of the next one to the next one's state."""

    def __init__(self, config: Eagle3Config, *, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        hidden = config.layer.hidden_size
        self.fc = Linear(config.state_size, hidden, bias=False, dtype=dtype, rngs=rngs)
        self.midlayer = MidLayer(
            config.layer, norm_before_residual=config.norm_before_residual, dtype=dtype, rngs=rngs
        )
        self.norm = RMSNorm(hidden, eps=config.layer.rms_norm_eps, dtype=dtype)
        self.lm_head = (
            Linear(hidden, config.draft_vocab_size, bias=False, dtype=dtype, rngs=rngs)
            if config.own_unembedding
            else None
        )

    def fuse(self, features: Float[Array, "B N F"]) -> Float[Array, "B N H"]:
        """The states that the target's low, middle and high ones make together."""
        return self.fc(features)

    def unembedded(self, states: Float[Array, "B N H"]) -> Float[Array, "B N O"]:
        """Logits over the draft vocabulary, or without a head of its own what is to enter the target's."""
        normed = self.norm(states)
        return normed if self.lm_head is None else self.lm_head(normed)

    def __call__(
        self,
        embedded: Float[Array, "B N H"],
        states: Float[Array, "B N H"],
        positions: Int[Array, "B N"],
        mask: Bool[Array, "B N M"],
        cache: KVCache,
    ) -> tuple[Float[Array, "B N H"], KVCache]:
        nodes = node_inputs(self.config.layer, positions, cache.length, mask)
        x, keys, values = self.midlayer(embedded, states, nodes, cache.keys[0], cache.values[0])
        return x, KVCache((keys,), (values,), cache.length)
