"""Layers whose weights lie as published checkpoints have them: [out, in].

That order is also the faster one on CPU as soon as more than one row is multiplied.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from specjax.kernels.small_matmul import row_sums, small_matmul


def activation_dtype(dtype) -> jnp.dtype:
    """What a model with weights of `dtype` computes and caches in: float32 for int8, else the same."""
    return jnp.dtype(jnp.float32 if dtype == jnp.int8 else dtype)


def _weight(shape: tuple[int, int], rngs: nnx.Rngs, dtype) -> nnx.Param:
    # Nobody draws integers: `models.quantize` makes them.
    is_int8 = dtype == jnp.int8
    return nnx.Param(
        jnp.zeros(shape, dtype) if is_int8 else 0.02 * jax.random.normal(rngs.params(), shape, dtype)
    )


def _scale(size: int, dtype) -> nnx.Param | None:
    return nnx.Param(jnp.ones((size,), jnp.float32)) if dtype == jnp.int8 else None


class Scaled(NamedTuple):
    """A matrix in int8 with the `scale` of its outputs: what a `Linear` made for floats may be given."""

    weight: Int[Array, "O I"]
    scale: Float[Array, "O"]


class Linear(nnx.Module):
    """x [.., in] -> [.., out], with `weight` [out, in], its `scale` [out] in int8, and perhaps a `bias`."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool, dtype, rngs: nnx.Rngs):
        self.weight = _weight((out_size, in_size), rngs, dtype)
        self.scale = _scale(out_size, dtype)
        self.bias = nnx.Param(jnp.zeros((out_size,), activation_dtype(dtype))) if bias else None

    def __call__(self, x: Float[Array, "*B I"]) -> Float[Array, "*B O"]:
        # Taken whole: it may be `Scaled`, which has no index.
        y = project(x, self.weight.get_value(), None if self.scale is None else self.scale[...])
        return y if self.bias is None else y + along_last(self.bias[...], y)


class Embedding(nnx.Module):
    """Tokens to vectors through `weight` [V, H], in int8 with its `scale` [V].

    Negative tokens read row 0, and nobody reads the result.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype, rngs: nnx.Rngs):
        self.weight = _weight((vocab_size, hidden_size), rngs, dtype)
        self.scale = _scale(vocab_size, dtype)

    def __call__(self, tokens: Int[Array, "*B"]) -> Float[Array, "*B H"]:
        tokens = jnp.maximum(tokens, 0)
        vectors = jnp.take(self.weight[...], tokens, axis=0)
        if self.scale is None:
            return vectors
        return vectors.astype(jnp.float32) * jnp.take(self.scale[...], tokens)[..., None]

    def unembed(self, hidden: Float[Array, "*B H"]) -> Float[Array, "*B V"]:
        """Logits through the same weights: a tied head."""
        return project(hidden, self.weight[...], None if self.scale is None else self.scale[...])


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation in float32 with `weight` [H] (arXiv 1910.07467)."""

    def __init__(self, size: int, *, eps: float, dtype):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((size,), activation_dtype(dtype)))

    def __call__(self, x: Float[Array, "*B H"]) -> Float[Array, "*B H"]:
        wide = x.astype(jnp.float32)
        mean_square = row_sums(jnp.square(wide)) / x.shape[-1]
        wide = wide * jax.lax.rsqrt(mean_square + self.eps)
        return along_last(self.weight[...], x) * wide.astype(x.dtype)


def along_last(vector: Float[Array, "H"], x: Float[Array, "*B H"]) -> Float[Array, "*1 H"]:
    """The vector with the rank of `x`: nothing broadcasts by accident."""
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)


def project(
    x: Float[Array, "*B I"],
    weight: Float[Array, "O I"] | Int[Array, "O I"] | Scaled,
    scale: Float[Array, "O"] | None = None,
) -> Float[Array, "*B O"]:
    """x @ weight.T at the highest precision of x's dtype, int8 outputs times their `scale`."""
    if isinstance(weight, Scaled):
        weight, scale = weight
    rows = x.reshape(-1, x.shape[-1])
    return small_matmul(rows, weight, scale).reshape(*x.shape[:-1], weight.shape[0])


def rotate(
    x: Float[Array, "B N H Dh"], cos: Float[Array, "B N Dh2"], sin: Float[Array, "B N Dh2"]
) -> Float[Array, "B N H Dh"]:
    """Rotary embedding in the half-split form (arXiv 2104.09864)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1).astype(x.dtype)
