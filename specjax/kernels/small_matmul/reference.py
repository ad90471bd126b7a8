"""The product of a few rows in jnp: the meaning that every kernel must reproduce."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def small_matmul(
    x: Float[Array, "N I"],
    weight: Float[Array, "O I"] | Int[Array, "O I"],
    scale: Float[Array, "O"] | None = None,
) -> Float[Array, "N O"]:
    """x @ weight.T at the highest precision of x's dtype, int8 outputs times their `scale`."""
    y = jnp.einsum("ni,oi->no", x, weight.astype(x.dtype), precision="highest")
    return y if scale is None else y * scale[None].astype(x.dtype)
