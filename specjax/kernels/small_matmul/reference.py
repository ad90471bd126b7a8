"""The product of a few rows in jnp: the meaning that every kernel must reproduce."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def small_matmul(x: Float[Array, "N I"], weight: Float[Array, "O I"]) -> Float[Array, "N O"]:
    """x @ weight.T at the highest precision of the dtype."""
    return jnp.einsum("ni,oi->no", x, weight, precision="highest")
