"""Traversal verification of trees whose siblings were drawn independently, leaf to root (arXiv 2505.12398).

On a chain this is block verification. On trees it usually accepts more than judging siblings in turn; a
leaf that comes before a deeper sibling can make it accept less, so put the deepest subtree first.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.sampling import point_mass, sample, split_keys, uniform, without
from specjax.trees.topology import ancestor_mask, path_to
from specjax.types import NO_TOKEN, ROOT, Draft, ProposalLaw, Verdict
from specjax.verify.block import carried_weight, weight_after

LOSSLESS = True
LAWS = frozenset({ProposalLaw.POINT_MASS, ProposalLaw.CHAIN, ProposalLaw.IID_SIBLINGS})

FRESH = -1.0  # a weight that follows from the parent's
UNDECIDED = -1


def verify(
    keys: Key[Array, "B"], draft: Draft, target_probs: Float[Array, "B N V"], *, max_depth: int
) -> Verdict:
    """Try the leaves in depth-first order; a refused leaf leaves its parent's residual behind."""
    return traverse(keys, draft, target_probs, max_depth, replaced=True)


def traverse(
    keys: Key[Array, "B"],
    draft: Draft,
    target_probs: Float[Array, "B N V"],
    max_depth: int,
    replaced: bool,
) -> Verdict:
    """The walk from leaf to root; where siblings were not `replaced`, each one leaves the draft's law."""
    num_nodes = draft.tokens.shape[1]
    try_keys, next_keys = split_keys(keys, 2)
    judge = functools.partial(_judge_row, max_depth=max_depth, replaced=replaced)
    last, law = jax.vmap(judge)(uniform(try_keys, num_nodes), draft, target_probs)
    path, num_accepted = path_to(ancestor_mask(draft.parents), last, max_depth)
    return Verdict(path, num_accepted, sample(next_keys, law))


class _Walk(NamedTuple):
    """Where the walk stands: the nodes left, their weights (FRESH until a child is refused), both laws."""

    left: Bool[Array, "N"]
    weights: Float[Array, "N"]
    target_probs: Float[Array, "N V"]
    draft_probs: Float[Array, "N V"] | None


def _judge_row(
    thresholds: Float[Array, "N"],
    draft: Draft,
    target_probs: Float[Array, "N V"],
    max_depth: int,
    replaced: bool,
) -> tuple[Int[Array, ""], Float[Array, "V"]]:
    """One row: the last accepted node, and the law of the token after it."""
    tokens, parents, draft_probs = draft
    num_nodes, vocab_size = target_probs.shape

    def draft_law(walk: _Walk, parent: Int[Array, ""], child: Int[Array, ""]) -> Float[Array, "V"]:
        return point_mass(tokens[child], vocab_size) if walk.draft_probs is None else walk.draft_probs[parent]

    def first_leaf(walk: _Walk) -> tuple[Int[Array, ""], Float[Array, ""], Float[Array, ""]]:
        """The leaf that first children lead to, its weight and its parent's."""

        def descend(at, _):
            node, weight, above = at
            is_child = walk.left & (parents == node)
            child = jnp.argmax(is_child).astype(jnp.int32)
            token = tokens[child]
            draft_prob = 1.0 if walk.draft_probs is None else walk.draft_probs[node, token]
            fresh = carried_weight(weight * walk.target_probs[node, token], jnp.float32(draft_prob))
            below = jnp.where(walk.weights[child] == FRESH, fresh, walk.weights[child])
            go_on = is_child.any()
            at = (
                jnp.where(go_on, child, node),
                jnp.where(go_on, below, weight),
                jnp.where(go_on, weight, above),
            )
            return at, None

        root = (jnp.int32(ROOT), jnp.float32(1.0), jnp.float32(1.0))
        return jax.lax.scan(descend, root, length=max_depth)[0]

    def try_leaf(carry, threshold: Float[Array, ""]):
        walk, last = carry
        leaf, weight, above = first_leaf(walk)
        is_open = last == UNDECIDED
        accepted = is_open & (threshold < weight)
        refused = is_open & ~accepted
        parent = jnp.maximum(parents[leaf], ROOT)  # the root, of weight 1, is never refused

        law = draft_law(walk, parent, leaf)
        target = walk.target_probs[parent]
        excess = jnp.maximum(above * target - law, 0.0)
        mass = excess.sum()
        rest = jnp.where(mass > 0, excess / jnp.where(mass > 0, mass, 1.0), target)

        def put(old: Array, index: Int[Array, ""], new: Array) -> Array:
            return old.at[index].set(jnp.where(refused, new, old[index]))

        if walk.draft_probs is not None and not replaced:
            rest_of_draft = without(law[None], tokens[leaf][None])[0]
            walk = walk._replace(draft_probs=put(walk.draft_probs, parent, rest_of_draft))
        walk = walk._replace(
            left=put(walk.left, leaf, jnp.bool_(False)),
            weights=put(walk.weights, parent, weight_after(mass, above)),
            target_probs=put(walk.target_probs, parent, rest),
        )
        return (walk, jnp.where(accepted, leaf, last)), None

    left = (tokens != NO_TOKEN).at[ROOT].set(True)
    walk = _Walk(left, jnp.full((num_nodes,), FRESH), target_probs, draft_probs)
    (walk, last), _ = jax.lax.scan(try_leaf, (walk, jnp.int32(UNDECIDED)), thresholds)
    return last, walk.target_probs[last]
