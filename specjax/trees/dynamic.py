"""Trees that grow where the drafter is confident (EAGLE-2, arXiv 2406.16858).

A drafter grows a tree level by level and keeps the best of all candidates at the end:

    tree = start(batch)
    for depth in range(max_depth):
        logits = ...  # the drafter's, for `tree.tokens`; at first for the pending token
        tree = expand(tree, *likeliest(logits, num_children), width)
    draft = rerank(tree, num_nodes)

Every node's children are a deterministic function of the context, so their law is a point mass. After
each `expand` the nodes of `tree.tokens` (`NO_TOKEN` where there are too few) go through the drafter, which
holds their keys in its first free slots, level after level; `tree.seen` is their mask over those slots,
as `Forward` wants it. All shapes are static and rows are independent.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.types import NO_PARENT, NO_TOKEN, ROOT

# The vocabulary is searched in blocks of this many tokens.
BLOCK = 128

NO_SLOT = -1


class GrowingTree(NamedTuple):
    """W nodes to expand next, and all C candidates so far, parents first (candidate 0 is the root).

    Values are cumulative log-probabilities, -inf for a candidate that is none (its token is `NO_TOKEN`).
    `nodes` numbers the W nodes among the candidates; `origin` is the place of each one's parent among the
    nodes expanded last. They take the last W of the M slots, of which each sees itself and its ancestors.
    """

    tokens: Int[Array, "B W"]
    values: Float[Array, "B W"]
    nodes: Int[Array, "B W"]
    origin: Int[Array, "B W"]
    seen: Bool[Array, "B W M"]
    candidate_tokens: Int[Array, "B C"]
    candidate_values: Float[Array, "B C"]
    candidate_parents: Int[Array, "B C"]
    candidate_slots: Int[Array, "B C"]


class RankedTree(NamedTuple):
    """N nodes, parents first; unused ones come last and hold `NO_TOKEN`, value -inf and the root as parent.

    Node 0 is the root, whose token is left as `NO_TOKEN`. `slots` says where the drafter holds each node's
    keys, counted from the first slot that was free, `NO_SLOT` for the root and what it has not read.
    """

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]
    values: Float[Array, "B N"]
    slots: Int[Array, "B N"]


def start(batch: int) -> GrowingTree:
    """The root alone, which is to be expanded and takes no slot: the drafter has read it."""

    def column(value: float, dtype: type) -> Array:
        return jnp.full((batch, 1), value, dtype)

    token, value = column(NO_TOKEN, jnp.int32), column(0.0, jnp.float32)
    root, slot = column(ROOT, jnp.int32), column(NO_SLOT, jnp.int32)
    seen = jnp.zeros((batch, 1, 0), bool)
    parent = column(NO_PARENT, jnp.int32)
    return GrowingTree(token, value, root, root, seen, token, value, parent, slot)


def likeliest(
    logits: Float[Array, "B W V"], num_children: int
) -> tuple[Int[Array, "B W K"], Float[Array, "B W K"]]:
    """The likeliest tokens of each law and their log-probabilities, best first, of equals the first token."""
    logits = logits.astype(jnp.float32)
    # Behind the barrier, for XLA on CPU sorts the whole vocabulary where it sees slices of a top-k.
    best, tokens = jax.lax.optimization_barrier(top_k(logits, num_children))
    # The best is the largest: a logsumexp would search for it once more.
    largest = best[..., :1]
    total = jnp.exp(logits - largest).sum(-1, keepdims=True)
    return jnp.where(best > -jnp.inf, tokens, NO_TOKEN), best - largest - jnp.log(total)


def covering(
    tokens: Int[Array, "B W K"], log_probs: Float[Array, "B W K"], top_p: float
) -> tuple[Int[Array, "B W K"], Float[Array, "B W K"]]:
    """Of children best first, those needed to cover the mass `top_p`: the surer a node, the fewer.

    `top_p` is above 0, so that the first child stays; where all of them cover less, all stay.
    """
    probs = jnp.exp(log_probs)
    is_needed = jnp.cumsum(probs, axis=-1) - probs < top_p
    return jnp.where(is_needed, tokens, NO_TOKEN), jnp.where(is_needed, log_probs, -jnp.inf)


def expand(
    tree: GrowingTree, tokens: Int[Array, "B W K"], log_probs: Float[Array, "B W K"], width: int
) -> GrowingTree:
    """Add K children to each of the W nodes; the `width` best of them, or all if fewer, are expanded next.

    A token of `NO_TOKEN` or a log-probability of -inf makes no child, nor does a node that is none.
    """
    batch, num_parents, num_children = tokens.shape
    width = min(width, num_parents * num_children)
    first, first_slot = tree.candidate_tokens.shape[1], tree.seen.shape[2]
    # Never above the parent's value, whatever the rounding: `rerank` relies on it.
    values = tree.values[..., None] + jnp.minimum(log_probs.astype(jnp.float32), 0.0)
    values = jnp.where(tokens == NO_TOKEN, -jnp.inf, values).reshape(batch, -1)
    tokens = jnp.where(values > -jnp.inf, tokens.reshape(batch, -1), NO_TOKEN)
    parents = jnp.repeat(tree.nodes, num_children, axis=1)

    best, chosen = jax.lax.top_k(values, width)
    origin = chosen // num_children
    own = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch, width, width))
    seen = jnp.take_along_axis(tree.seen, origin[..., None], axis=1)
    is_chosen = chosen[:, None] == jnp.arange(values.shape[1])[None, :, None]
    slots = jnp.where(is_chosen.any(-1), first_slot + jnp.argmax(is_chosen, axis=-1), NO_SLOT)
    return GrowingTree(
        tokens=jnp.take_along_axis(tokens, chosen, axis=1),
        values=best,
        nodes=first + chosen,
        origin=origin,
        seen=jnp.concatenate((seen, own), axis=2),
        candidate_tokens=jnp.concatenate((tree.candidate_tokens, tokens), axis=1),
        candidate_values=jnp.concatenate((tree.candidate_values, values), axis=1),
        candidate_parents=jnp.concatenate((tree.candidate_parents, parents), axis=1),
        candidate_slots=jnp.concatenate((tree.candidate_slots, slots.astype(jnp.int32)), axis=1),
    )


def rerank(tree: GrowingTree, num_nodes: int) -> RankedTree:
    """The root and the `num_nodes` - 1 candidates of the largest values, in the candidates' order.

    They are connected: a node's value is never above its parent's, and of equal values `lax.top_k` takes
    the earlier candidate, which the parent is.
    """
    num_candidates = tree.candidate_tokens.shape[1]
    values, chosen = jax.lax.top_k(tree.candidate_values, min(num_nodes, num_candidates))
    # What is no candidate goes behind all others.
    chosen = jnp.sort(jnp.where(values > -jnp.inf, chosen, num_candidates), axis=1)
    chosen = jnp.pad(chosen, ((0, 0), (0, num_nodes - chosen.shape[1])), constant_values=num_candidates)
    is_used = chosen < num_candidates

    def pick(candidates: Array, otherwise: float) -> Array:
        picked = jnp.take_along_axis(candidates, jnp.minimum(chosen, num_candidates - 1), axis=1)
        return jnp.where(is_used, picked, otherwise)

    old_parents = pick(tree.candidate_parents, NO_PARENT)
    # A parent's new number is how many of the chosen stand before it.
    parents = (chosen[:, None, :] < old_parents[:, :, None]).sum(-1, dtype=jnp.int32)
    slots = pick(tree.candidate_slots, NO_SLOT)
    # The nodes that the last level would expand were never an input.
    num_read = tree.seen.shape[2] - tree.tokens.shape[1]
    return RankedTree(
        tokens=pick(tree.candidate_tokens, NO_TOKEN),
        parents=parents.at[:, ROOT].set(NO_PARENT),
        values=pick(tree.candidate_values, -jnp.inf),
        slots=jnp.where(slots < num_read, slots, NO_SLOT),
    )


def top_k(values: Float[Array, "*N V"], num_best: int) -> tuple[Float[Array, "*N K"], Int[Array, "*N K"]]:
    """What `lax.top_k` returns, ties included, at a third of its time for a large vocabulary on a CPU.

    The K best lie in the K blocks of the largest maxima: anything elsewhere is behind K others.
    """
    vocab_size = values.shape[-1]
    if vocab_size <= num_best * BLOCK:
        return jax.lax.top_k(values, num_best)
    leading = [(0, 0)] * (values.ndim - 1)
    padded = jnp.pad(values, (*leading, (0, -vocab_size % BLOCK)), constant_values=-jnp.inf)
    blocks = padded.reshape(*values.shape[:-1], -1, BLOCK)
    _, which = jax.lax.top_k(blocks.max(-1), num_best)
    # In the order of the vocabulary, so that the first of equal values still comes first.
    which = jnp.sort(which, axis=-1)
    kept = jnp.take_along_axis(blocks, which[..., None], axis=-2)
    best, place = jax.lax.top_k(kept.reshape(*values.shape[:-1], -1), num_best)
    return best, jnp.take_along_axis(which, place // BLOCK, axis=-1) * BLOCK + place % BLOCK
