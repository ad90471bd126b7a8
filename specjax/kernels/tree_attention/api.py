"""Chooses the implementation: C++ for few nodes on a CPU, jnp elsewhere.

With SPECJAX_PALLAS=1 in the environment, Pallas on TPUs and Hopper GPUs (scripts/device_check.sh tries them).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.kernels import cpu_library
from specjax.kernels.tree_attention import pallas_gpu, pallas_tpu, reference

MAX_NODES = 64  # beyond, on a CPU, it is the reference: prompts are read so

Implementation = Literal["cpu", "pallas_tpu", "pallas_gpu", "reference"]


def tree_attention(
    queries: Float[Array, "B N Hq Dh"],
    keys: Float[Array, "BH S Dh"],
    values: Float[Array, "BH S Dh"],
    length: Int[Array, "B"],
    mask: Bool[Array, "B N M"],
    implementation: Implementation | None = None,
) -> Float[Array, "B N Hq Dh"]:
    """Grouped-query attention of N nodes, as `reference.tree_attention` defines it.

    `implementation` overrides the choice by device and shapes; nothing is checked then.
    """
    return _tree_attention(queries, keys, values, length, mask, implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _tree_attention(queries, keys, values, length, mask, implementation):
    arguments = (queries, keys, values, length, mask)
    if implementation is not None:
        return _IMPLEMENTATIONS[implementation](*arguments)
    one_type = queries.dtype == keys.dtype == values.dtype
    backend = jax.default_backend()
    is_small = 0 < queries.shape[1] <= MAX_NODES
    has_kernel = one_type and queries.dtype in (jnp.float32, jnp.bfloat16)
    if is_small and has_kernel and backend == "cpu" and cpu_library.is_available():
        return jax.lax.platform_dependent(*arguments, cpu=_cpu, default=reference.tree_attention)
    # The Pallas kernels have been interpreted and compiled, but not yet run on a device: ask for them.
    if os.environ.get("SPECJAX_PALLAS") != "1":
        return reference.tree_attention(*arguments)
    if one_type and queries.dtype in (jnp.float32, jnp.bfloat16) and backend == "tpu":
        return jax.lax.platform_dependent(
            *arguments, tpu=pallas_tpu.tree_attention, default=reference.tree_attention
        )
    if backend == "gpu" and _is_hopper() and pallas_gpu.supports(queries, keys, values):
        return jax.lax.platform_dependent(
            *arguments, cuda=pallas_gpu.tree_attention, default=reference.tree_attention
        )
    return reference.tree_attention(*arguments)


def _is_hopper() -> bool:
    # Neither older nor later GPUs have the matrix instruction that the kernel is written for.
    return getattr(jax.devices()[0], "compute_capability", None) == "9.0"


def _cpu(queries, keys, values, length, mask):
    cpu_library.is_available()  # registers the kernel, should nobody have asked before
    result = jax.ShapeDtypeStruct(queries.shape, jnp.float32)
    call = jax.ffi.ffi_call("specjax_tree_attention", result, vmap_method="sequential")
    mixed = call(queries.astype(jnp.float32), keys, values, length.astype(jnp.int32), mask)
    return mixed.astype(queries.dtype)


_IMPLEMENTATIONS: dict[Implementation, Callable[..., jax.Array]] = {
    "cpu": _cpu,
    "pallas_tpu": pallas_tpu.tree_attention,
    "pallas_gpu": pallas_gpu.tree_attention,
    "reference": reference.tree_attention,
}


def _forward(queries, keys, values, length, mask, implementation):
    arguments = (queries, keys, values, length, mask)
    return _tree_attention(*arguments, implementation), arguments


def _backward(implementation, saved, gradient):
    queries, keys, values, length, mask = saved
    _, pull = jax.vjp(lambda q, k, v: reference.tree_attention(q, k, v, length, mask), queries, keys, values)
    return (*pull(gradient), None, None)


_tree_attention.defvjp(_forward, _backward)
