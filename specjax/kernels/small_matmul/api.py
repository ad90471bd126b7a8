"""Chooses the implementation: the C++ kernel for few float32 rows on a CPU, XLA for everything else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.kernels import cpu_library
from specjax.kernels.small_matmul import reference

MAX_ROWS = 16  # beyond, XLA's own product is the faster one


@jax.custom_vjp
def small_matmul(x: Float[Array, "N I"], weight: Float[Array, "O I"]) -> Float[Array, "N O"]:
    """x @ weight.T at the highest precision of the dtype.

    On a CPU a row's result does not depend, to the bit, on how many rows there are, up to `MAX_ROWS`.
    """
    is_float32 = x.dtype == weight.dtype == jnp.float32
    is_small = 0 < x.shape[0] <= MAX_ROWS
    if is_small and is_float32 and jax.default_backend() == "cpu" and cpu_library.is_available():
        return jax.lax.platform_dependent(x, weight, cpu=_cpu, default=reference.small_matmul)
    return reference.small_matmul(x, weight)


def _cpu(x: Float[Array, "N I"], weight: Float[Array, "O I"]) -> Float[Array, "N O"]:
    result = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), x.dtype)
    return jax.ffi.ffi_call("specjax_small_matmul", result, vmap_method="sequential")(x, weight)


def _forward(x, weight):
    return small_matmul(x, weight), (x, weight)


def _backward(saved, gradient):
    return jax.vjp(reference.small_matmul, *saved)[1](gradient)


small_matmul.defvjp(_forward, _backward)
