"""Preallocated key/value cache: undecided nodes are written beyond `length`, then committed or forgotten.

Rows and heads share one leading axis: with them apart, XLA on CPU copies the whole cache at every
write inside a loop.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.errors import ConfigError
from specjax.types import KVCache


def init_cache(
    batch: int, capacity: int, num_layers: int, num_heads: int, head_dim: int, dtype, stacked: bool = False
) -> KVCache:
    """An empty cache of `capacity` slots for `batch` rows."""
    shape = (batch * num_heads, capacity, head_dim)
    if stacked:
        return KVCache(
            jnp.zeros((num_layers, *shape), dtype),
            jnp.zeros((num_layers, *shape), dtype),
            jnp.zeros((batch,), jnp.int32),
        )
    return KVCache(
        tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        jnp.zeros((batch,), jnp.int32),
    )


def layer_by_layer(cache: KVCache) -> KVCache:
    """The cache, for a drafter that shares it; ConfigError where its layers are stacked."""
    if not isinstance(cache.keys, tuple):
        raise ConfigError("share_cache needs layers with a cache each: leave out stacked_layers")
    return cache


def capacity(cache: KVCache) -> int:
    """The number of slots S of each row."""
    return jax.tree.leaves(cache.keys)[0].shape[-2]


def write(
    slots: Float[Array, "BH S Dh"], new: Float[Array, "B N H Dh"], start: Int[Array, "B"]
) -> Float[Array, "BH S Dh"]:
    """One layer's slots with N nodes written from slot `start` [B] on; the caller leaves room for them."""
    batch, num_nodes, num_heads, head_dim = new.shape
    new = new.transpose(0, 2, 1, 3).reshape(batch * num_heads, num_nodes, head_dim)
    if batch == 1:
        return jax.lax.dynamic_update_slice(slots, new.astype(slots.dtype), (0, start[0], 0))
    return jax.vmap(lambda row, nodes, at: jax.lax.dynamic_update_slice(row, nodes, (at, 0)))(
        slots, new.astype(slots.dtype), jnp.repeat(start, num_heads)
    )


def commit(cache: KVCache, num_kept: Int[Array, "B"], path: Int[Array, "B P"] | None = None) -> KVCache:
    """Keep the first `num_kept` [B] nodes of `path` [B, P] and advance; a chain (None) moves nothing."""
    if path is not None:
        batch = cache.length.shape[0]
        slots = cache.length[:, None] + path

        def compact(rows: Float[Array, "*L BH S Dh"]) -> Float[Array, "*L BH S Dh"]:
            if rows.ndim == 4:
                return jax.vmap(compact)(rows)
            num_heads = rows.shape[0] // batch
            by_head = jnp.repeat(slots, num_heads, axis=0)
            kept = jnp.take_along_axis(rows, by_head[:, :, None], axis=1)
            kept = kept.reshape(batch, num_heads, *kept.shape[1:]).transpose(0, 2, 1, 3)
            return write(rows, kept, cache.length)

        cache = cache._replace(
            keys=jax.tree.map(compact, cache.keys), values=jax.tree.map(compact, cache.values)
        )
    return cache._replace(length=cache.length + num_kept)


def rollback(cache: KVCache, length: Int[Array, "B"]) -> KVCache:
    """Forget everything beyond `length` [B]; what was never there is not invented."""
    return cache._replace(length=jnp.minimum(cache.length, length))
