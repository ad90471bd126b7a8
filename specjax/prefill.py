"""Reading a prompt into a cache, the same way for targets and for drafters that keep a cache of their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax import cache as kv
from specjax.trees.topology import chain_mask
from specjax.types import Forward, KVCache, Params

# Long prompts are read in pieces, so that their scores need not stand in memory at once.
CHUNK = 256


def read_prompt(
    forward: Forward,
    params: Params,
    tokens: Int[Array, "B P"],
    cache: KVCache,
    features: tuple[str, ...] = (),
) -> tuple[KVCache, dict[str, jax.Array]]:
    """Run P tokens through an empty cache and return it with length P, and features [B, P, F] by name.

    Rows shorter than P are padded; the caller then sets the true lengths, behind which nothing is seen.
    """
    batch, size = tokens.shape

    def read(cache: KVCache, piece: Int[Array, "B C"]) -> tuple[KVCache, dict[str, jax.Array]]:
        width = piece.shape[1]
        positions = cache.length[:, None] + jnp.arange(width)[None, :]
        out = forward(params, piece, positions, chain_mask(batch, width), cache, features)
        return kv.commit(out.cache, jnp.full((batch,), width, jnp.int32)), out.features

    whole = size - size % CHUNK if size > CHUNK else 0
    parts = []
    if whole:
        pieces = tokens[:, :whole].reshape(batch, -1, CHUNK).transpose(1, 0, 2)
        cache, stacked = jax.lax.scan(read, cache, pieces)
        # [pieces, B, CHUNK, F] -> [B, whole, F]
        parts.append({k: v.swapaxes(0, 1).reshape(batch, whole, -1) for k, v in stacked.items()})
    if whole < size:
        cache, rest = read(cache, tokens[:, whole:])
        parts.append(rest)
    return cache, {name: jnp.concatenate([part[name] for part in parts], axis=1) for name in features}
