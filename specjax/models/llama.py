"""The Llama family as `flax.nnx` modules, named as in published checkpoints but for two packed products.

Queries, keys and values come out of one product, gate and up out of another: for one token the time goes
into starting products as well as into reading weights. `models.functional.pack` packs published weights.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from specjax.cache import write
from specjax.kernels.tree_attention import tree_attention
from specjax.models.layers import Embedding, Linear, RMSNorm, rotate

Slots = Float[Array, "BH S Dh"]  # one layer of the cache


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama-3's frequency scaling of the rotary embedding (arXiv 2407.21783), as its config names it."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """An architecture; every number comes from the model's own files, so none has a default."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float
    max_positions: int
    tie_embeddings: bool
    attention_bias: bool
    mlp_bias: bool


class Nodes(NamedTuple):
    """What every layer knows of the nodes: rotary `cos`, `sin` [B, N, Dh/2], cache `length`, tree `mask`."""

    cos: Float[Array, "B N Dh2"]
    sin: Float[Array, "B N Dh2"]
    length: Int[Array, "B"]
    mask: Bool[Array, "B N M"]


class Attention(nnx.Module):
    """Grouped-query attention of tree nodes over one layer's cache."""

    def __init__(self, config: LlamaConfig, *, dtype: Any, rngs: nnx.Rngs, in_size: int | None = None):
        self.config = config
        hidden, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        num_heads = config.num_heads + 2 * config.num_kv_heads
        in_size = in_size or hidden  # EAGLE-3 attends over two vectors a token
        self.qkv_proj = Linear(in_size, num_heads * head_dim, bias=bias, dtype=dtype, rngs=rngs)
        self.o_proj = Linear(config.num_heads * head_dim, hidden, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B N H"], nodes: Nodes, keys: Slots, values: Slots
    ) -> tuple[Float[Array, "B N H"], Slots, Slots]:
        batch, num_nodes, _ = x.shape
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        heads = self.qkv_proj(x).reshape(batch, num_nodes, num_heads + 2 * num_kv_heads, -1)
        rotated = rotate(heads[:, :, : num_heads + num_kv_heads], nodes.cos, nodes.sin)
        queries, new_keys = jnp.split(rotated, [num_heads], axis=2)
        start = nodes.length + nodes.mask.shape[-1] - num_nodes
        keys = write(keys, new_keys, start)
        values = write(values, heads[:, :, num_heads + num_kv_heads :], start)
        mixed = tree_attention(queries, keys, values, nodes.length, nodes.mask)
        return self.o_proj(mixed.reshape(batch, num_nodes, -1)), keys, values


class MLP(nnx.Module):
    """The gated SiLU network (arXiv 2002.05202)."""

    def __init__(self, config: LlamaConfig, *, dtype: Any, rngs: nnx.Rngs):
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=bias, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B N H"]) -> Float[Array, "B N H"]:
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(jax.nn.silu(gate) * up)


class Block(nnx.Module):
    """One decoder layer with pre-normalisation."""

    def __init__(self, config: LlamaConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.self_attn = Attention(config, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B N H"], nodes: Nodes, keys: Slots, values: Slots
    ) -> tuple[Float[Array, "B N H"], Slots, Slots]:
        mixed, keys, values = self.self_attn(self.input_layernorm(x), nodes, keys, values)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), keys, values


class Llama(nnx.Module):
    """Embedding, blocks, final norm and head; `models.functional` runs the blocks in turn."""

    def __init__(self, config: LlamaConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Block(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.lm_head = (
            None
            if config.tie_embeddings
            else Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, rngs=rngs)
        )

    def unembed(self, hidden: Float[Array, "B N H"]) -> Float[Array, "B N V"]:
        """Logits of states that have passed the final norm."""
        if self.lm_head is None:
            return self.embed_tokens.unembed(hidden)
        return self.lm_head(hidden)

    def head_rows(self, tokens: Int[Array, "K"]) -> Float[Array, "K H"]:
        """The head's weights for these tokens."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        rows = jnp.take(head.weight[...], tokens, axis=0)
        return rows if head.scale is None else rows * jnp.take(head.scale[...], tokens)[:, None]


def node_inputs(
    config: LlamaConfig, positions: Int[Array, "B N"], length: Int[Array, "B"], mask: Bool[Array, "B N M"]
) -> Nodes:
    """What all layers share: rotary angles of the positions, in float32, and what each node sees."""
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(config)[None, None]
    return Nodes(jnp.cos(angles), jnp.sin(angles), length, mask)


def rope_frequencies(config: LlamaConfig) -> Float[Array, "Dh2"]:
    """Inverse wavelengths of the rotary embedding, in radians a token."""
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    # Slow rotations are stretched by the factor, fast ones are left alone, those between are mixed.
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = jnp.clip(kept, 0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor
