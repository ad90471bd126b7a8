"""Medusa's heads (arXiv 2401.10774): residual blocks on the target's last state, one head a token ahead."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from specjax.models.layers import Linear


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
    """`num_heads` heads of `num_layers` blocks; `own_vocab_size` rows of a head's own unembedding."""

    hidden_size: int
    num_heads: int
    num_layers: int
    own_vocab_size: int | None


class ResBlock(nnx.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, hidden_size: int, *, dtype: Any, rngs: nnx.Rngs):
        self.linear = Linear(hidden_size, hidden_size, bias=True, dtype=dtype, rngs=rngs)
        # A head starts as the target's own, one token late.
        self.linear.weight[...] = jnp.zeros_like(self.linear.weight[...])

    def __call__(self, x: Float[Array, "*B H"]) -> Float[Array, "*B H"]:
        return x + jax.nn.silu(self.linear(x))


class Head(nnx.Module):
    """The blocks of one head, and its own unembedding if it has one."""

    def __init__(self, config: MedusaConfig, *, dtype: Any, rngs: nnx.Rngs):
        size, own = config.hidden_size, config.own_vocab_size
        # One block each: a list multiplied would share its weights.
        self.blocks = nnx.List([ResBlock(size, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.lm_head = None if own is None else Linear(size, own, bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*B H"]) -> Float[Array, "*B H"]:
        for block in self.blocks:
            x = block(x)
        return x if self.lm_head is None else self.lm_head(x)


class Medusa(nnx.Module):
    """All heads; what they return is a state for a shared unembedding, or logits where each has its own."""

    def __init__(self, config: MedusaConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.heads = nnx.List([Head(config, dtype=dtype, rngs=rngs) for _ in range(config.num_heads)])

    def __call__(self, x: Float[Array, "*B H"]) -> list[Float[Array, "*B O"]]:
        return [head(x) for head in self.heads]
