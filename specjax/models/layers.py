"""Layers whose weights lie as published checkpoints have them: [out, in].

That order is also the faster one on CPU as soon as more than one row is multiplied.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from specjax.kernels.small_matmul import small_matmul


def _weight(shape: tuple[int, ...], rngs: nnx.Rngs, dtype) -> nnx.Param:
    return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype))


class Linear(nnx.Module):
    """x [.., in] -> [.., out], with `weight` [out, in] and an optional `bias` [out]."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool, dtype, rngs: nnx.Rngs):
        self.weight = _weight((out_size, in_size), rngs, dtype)
        self.bias = nnx.Param(jnp.zeros((out_size,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "*B I"]) -> Float[Array, "*B O"]:
        y = project(x, self.weight[...])
        return y if self.bias is None else y + along_last(self.bias[...], y)


class Embedding(nnx.Module):
    """Tokens to vectors through `weight` [V, H]; negative tokens read row 0, and nobody reads the result."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype, rngs: nnx.Rngs):
        self.weight = _weight((vocab_size, hidden_size), rngs, dtype)

    def __call__(self, tokens: Int[Array, "*B"]) -> Float[Array, "*B H"]:
        return jnp.take(self.weight[...], jnp.maximum(tokens, 0), axis=0)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation in float32 with `weight` [H] (arXiv 1910.07467)."""

    def __init__(self, size: int, *, eps: float, dtype):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((size,), dtype))

    def __call__(self, x: Float[Array, "*B H"]) -> Float[Array, "*B H"]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return along_last(self.weight[...], x) * wide.astype(x.dtype)


def along_last(vector: Float[Array, "H"], x: Float[Array, "*B H"]) -> Float[Array, "*1 H"]:
    """The vector with the rank of `x`: nothing broadcasts by accident."""
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)


def project(x: Float[Array, "*B I"], weight: Float[Array, "O I"]) -> Float[Array, "*B O"]:
    """x @ weight.T at the highest precision of the dtype."""
    rows = x.reshape(-1, x.shape[-1])
    return small_matmul(rows, weight).reshape(*x.shape[:-1], weight.shape[0])


def rotate(
    x: Float[Array, "B N H Dh"], cos: Float[Array, "B N Dh2"], sin: Float[Array, "B N Dh2"]
) -> Float[Array, "B N H Dh"]:
    """Rotary embedding in the half-split form (arXiv 2104.09864)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1).astype(x.dtype)
