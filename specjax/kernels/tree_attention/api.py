"""Chooses the implementation: the C++ kernel for few float32 nodes on a CPU, the reference elsewhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.kernels import cpu_library
from specjax.kernels.tree_attention import reference

MAX_NODES = 16  # beyond, the reference's matrix products are the faster ones


@jax.custom_vjp
def tree_attention(
    queries: Float[Array, "B N Hq Dh"],
    keys: Float[Array, "BH S Dh"],
    values: Float[Array, "BH S Dh"],
    length: Int[Array, "B"],
    mask: Bool[Array, "B N M"],
) -> Float[Array, "B N Hq Dh"]:
    """Grouped-query attention of N nodes, as `reference.tree_attention` defines it."""
    arguments = (queries, keys, values, length, mask)
    is_float32 = queries.dtype == keys.dtype == values.dtype == jnp.float32
    is_small = 0 < queries.shape[1] <= MAX_NODES
    if is_small and is_float32 and jax.default_backend() == "cpu" and cpu_library.is_available():
        return jax.lax.platform_dependent(*arguments, cpu=_cpu, default=reference.tree_attention)
    return reference.tree_attention(*arguments)


def _cpu(queries, keys, values, length, mask):
    result = jax.ShapeDtypeStruct(queries.shape, queries.dtype)
    call = jax.ffi.ffi_call("specjax_tree_attention", result, vmap_method="sequential")
    return call(queries, keys, values, length.astype(jnp.int32), mask)


def _forward(*arguments):
    return tree_attention(*arguments), arguments


def _backward(saved, gradient):
    queries, keys, values, length, mask = saved
    _, pull = jax.vjp(lambda q, k, v: reference.tree_attention(q, k, v, length, mask), queries, keys, values)
    return (*pull(gradient), None, None)


tree_attention.defvjp(_forward, _backward)
