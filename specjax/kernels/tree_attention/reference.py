"""Tree attention in jnp: the meaning that every kernel must reproduce."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def visible_slots(
    length: Int[Array, "B"], mask: Bool[Array, "B N M"], num_slots: int
) -> Bool[Array, "B N S"]:
    """The slots each node sees: all below `length`, and from there on those that `mask` names."""
    slots = jnp.arange(num_slots)
    scratch = slots[None, :] - length[:, None]
    inside = (scratch >= 0) & (scratch < mask.shape[-1])
    index = jnp.clip(scratch, 0, mask.shape[-1] - 1)
    in_tree = jnp.take_along_axis(
        mask, jnp.broadcast_to(index[:, None], (*mask.shape[:2], num_slots)), axis=2
    )
    return (scratch < 0)[:, None] | (inside[:, None] & in_tree)


def tree_attention(
    queries: Float[Array, "B N Hq Dh"],
    keys: Float[Array, "BH S Dh"],
    values: Float[Array, "BH S Dh"],
    length: Int[Array, "B"],
    mask: Bool[Array, "B N M"],
) -> Float[Array, "B N Hq Dh"]:
    """Grouped-query attention of N nodes over a cache in which their keys already stand.

    Node i sees the slots below `length` and the scratch slots `length + j` where `mask[b, i, j]`.
    Scores and sums are float32, scaled by 1/sqrt(Dh). Slots that nobody sees must hold finite values.
    """
    batch, num_nodes, num_query_heads, head_dim = queries.shape
    num_slots = keys.shape[1]
    num_kv_heads = keys.shape[0] // batch
    group = num_query_heads // num_kv_heads

    # [B, N, Hq, Dh] -> [B * Hkv, N * group, Dh]: the queries that share a head's keys, together.
    grouped = queries.reshape(batch, num_nodes, num_kv_heads, group, head_dim)
    grouped = grouped.transpose(0, 2, 1, 3, 4).reshape(batch * num_kv_heads, num_nodes * group, head_dim)
    scores = jnp.einsum(
        "hqd,hsd->hqs", grouped, keys, precision="highest", preferred_element_type=jnp.float32
    )
    seen = visible_slots(length, mask, num_slots)[:, None, :, None]
    seen = jnp.broadcast_to(seen, (batch, num_kv_heads, num_nodes, group, num_slots)).reshape(scores.shape)
    scores = jnp.where(seen, scores * head_dim**-0.5, -jnp.inf)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    mixed = jnp.einsum(
        "hqs,hsd->hqd",
        weights.astype(values.dtype),
        values,
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    mixed = (mixed / weights.sum(-1, keepdims=True)).astype(queries.dtype)
    mixed = mixed.reshape(batch, num_kv_heads, num_nodes, group, head_dim)
    return mixed.transpose(0, 2, 1, 3, 4).reshape(batch, num_nodes, num_query_heads, head_dim)
