"""Chooses the implementation: the C++ kernel on a CPU, XLA for everything else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.kernels import cpu_library
from specjax.kernels.small_matmul import reference

# Beyond, in float32, it is XLA's product: from here on no slower, and its rows need no fixed order of sums.
# On two cores the kernel takes 0.4 to 0.7 of XLA's time up to 16 rows and as long as XLA from 64 on.
MAX_ROWS = 512


def small_matmul(
    x: Float[Array, "N I"],
    weight: Float[Array, "O I"] | Int[Array, "O I"],
    scale: Float[Array, "O"] | None = None,
) -> Float[Array, "N O"]:
    """x @ weight.T in x's dtype, for weights in that dtype, or in int8 with a float32 `scale` an output.

    On a CPU, in float32 and int8, a row's result does not depend, to the bit, on how many rows there are, up
    to `MAX_ROWS`. Raises ValueError where shapes or dtypes do not fit.
    """
    _check(x, weight, scale)
    return _small_matmul(x, weight, scale)


def row_sums(x: Float[Array, "*B I"]) -> Float[Array, "*B 1"]:
    """x.sum(-1, keepdims=True), with the promise of `small_matmul`: XLA's order depends on the other rows."""
    rows = x.reshape(-1, x.shape[-1])
    ones = jnp.ones((1, x.shape[-1]), x.dtype)
    if not _takes_kernel(rows, ones):
        return x.sum(-1, keepdims=True)
    return _small_matmul(rows, ones, None).reshape(*x.shape[:-1], 1)


def _takes_kernel(x, weight) -> bool:
    has_kernel = x.dtype == jnp.float32 or x.dtype == weight.dtype == jnp.bfloat16
    # XLA has no fast product with narrow weights, however many rows there are.
    is_small = x.shape[0] <= MAX_ROWS or weight.dtype != jnp.float32
    is_empty = 0 in (*x.shape, *weight.shape)
    is_kernel = has_kernel and is_small and not is_empty
    return is_kernel and jax.default_backend() == "cpu" and cpu_library.is_available()


@jax.custom_vjp
def _small_matmul(x, weight, scale):
    if _takes_kernel(x, weight):
        return jax.lax.platform_dependent(x, weight, scale, cpu=_cpu, default=reference.small_matmul)
    return reference.small_matmul(x, weight, scale)


def _cpu(x, weight, scale):
    result = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
    name = "specjax_small_matmul" if scale is None else "specjax_scaled_matmul"
    weights = (weight,) if scale is None else (weight, scale)
    call = jax.ffi.ffi_call(name, result, vmap_method="sequential")
    return call(x.astype(jnp.float32), *weights).astype(x.dtype)


def _check(x, weight, scale) -> None:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"small_matmul takes x [N, I] and weight [O, I], not {x.shape} and {weight.shape}")
    if (scale is None) != (weight.dtype != jnp.int8):
        raise ValueError(f"small_matmul takes a scale with int8 weights and only there, not {weight.dtype}")
    if scale is None:
        if x.dtype != weight.dtype:
            raise ValueError(
                f"small_matmul takes x and weight in one dtype, not {x.dtype} and {weight.dtype}"
            )
    elif scale.shape != weight.shape[:1] or scale.dtype != jnp.float32:
        raise ValueError(
            f"small_matmul takes a float32 scale [{weight.shape[0]}], not {scale.dtype} {scale.shape}"
        )


def _forward(x, weight, scale):
    return _small_matmul(x, weight, scale), (x, weight, scale)


def _backward(saved, gradient):
    x, weight, scale = saved
    if scale is None:
        return (*jax.vjp(reference.small_matmul, x, weight)[1](gradient), None)
    # There is no gradient of an integer.
    pull = jax.vjp(lambda x, scale: reference.small_matmul(x, weight, scale), x, scale)[1]
    to_x, to_scale = pull(gradient)
    return to_x, None, to_scale


_small_matmul.defvjp(_forward, _backward)
