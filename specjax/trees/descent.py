"""The walk of rules that choose a token at a node and then look for the child that carries it."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.types import NO_TOKEN, ROOT, Draft, Verdict


def descend(
    draft: Draft, choose: Callable[[Int[Array, ""], Int[Array, "B"]], Int[Array, "B"]], max_depth: int
) -> Verdict:
    """From the root, follow the child that carries `choose(depth, node)` [B]; where none does, emit it."""
    batch = draft.tokens.shape[0]

    def step(carry, depth):
        node, alive, next_token = carry
        chosen = choose(depth, node)
        next_token = jnp.where(alive, chosen, next_token)
        is_match = (draft.parents == node[:, None]) & (draft.tokens == chosen[:, None])
        is_match &= draft.tokens != NO_TOKEN
        alive &= is_match.any(-1)
        node = jnp.where(alive, jnp.argmax(is_match, axis=-1).astype(jnp.int32), node)
        return (node, alive, next_token), (node, alive)

    root = jnp.full((batch,), ROOT, jnp.int32)
    start = (root, jnp.ones((batch,), bool), jnp.full((batch,), NO_TOKEN, jnp.int32))
    (_, _, next_token), (nodes, accepted) = jax.lax.scan(step, start, jnp.arange(max_depth + 1))
    path = jnp.concatenate((root[:, None], nodes[:max_depth].T), axis=1)
    return Verdict(path, accepted[:max_depth].sum(0, dtype=jnp.int32), next_token)
