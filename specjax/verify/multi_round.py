"""Multi-round sampling of trees whose siblings were drawn independently (arXiv 2305.09781, algorithm 3).

A child that is the only one, or a point mass, is a special case: on a chain this is the rejection rule.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from specjax.sampling import point_mass, prob_of, residual, sample, split_keys, uniform, without
from specjax.types import NO_TOKEN, ROOT, Draft, ProposalLaw, Verdict

LOSSLESS = True
LAWS = frozenset({ProposalLaw.POINT_MASS, ProposalLaw.CHAIN, ProposalLaw.IID_SIBLINGS})


def verify(
    keys: Key[Array, "B"], draft: Draft, target_probs: Float[Array, "B N V"], *, max_depth: int
) -> Verdict:
    """Judge the children of a node in turn: accept with min(1, target / draft), else take the residual."""
    return judge_in_turn(keys, draft, target_probs, max_depth, replaced=True)


def judge_in_turn(
    keys: Key[Array, "B"],
    draft: Draft,
    target_probs: Float[Array, "B N V"],
    max_depth: int,
    replaced: bool,
) -> Verdict:
    """The walk from the root; where siblings were not `replaced`, each one leaves the draft's law."""
    batch, num_nodes = draft.tokens.shape
    accept_keys, next_keys = split_keys(keys, 2)
    threshold = uniform(accept_keys, num_nodes)

    # Parents precede children, so one pass over the nodes meets the children of every accepted node.
    def try_node(carry, i: Int[Array, ""]):
        node, num_accepted, path, left, law = carry
        token = draft.tokens[:, i]
        own = point_mass(token, target_probs.shape[-1]) if draft.probs is None else law
        is_child = (draft.parents[:, i] == node) & (token != NO_TOKEN)
        # Strict, and threshold < 1: a token of target probability 0 never passes, one of equal laws always.
        accepted = is_child & (threshold[:, i] * prob_of(own, token) < prob_of(left, token))
        refused = is_child & ~accepted
        num_accepted += accepted
        node = jnp.where(accepted, i, node)
        place = jnp.arange(max_depth + 1)[None, :] == num_accepted[:, None]
        path = jnp.where(accepted[:, None] & place, i, path)

        def judged(target: Array, rest: Array, unchanged: Array) -> Array:
            kept = jnp.where(refused[:, None], rest, unchanged)
            return jnp.where(accepted[:, None], target, kept)

        left = judged(target_probs[:, i], residual(left, own), left)
        if draft.probs is not None:
            law = judged(draft.probs[:, i], law if replaced else without(law, token), law)
        return (node, num_accepted, path, left, law), None

    at_root = target_probs[:, ROOT] if draft.probs is None else draft.probs[:, ROOT]
    root = jnp.full((batch,), ROOT, jnp.int32)
    path = jnp.zeros((batch, max_depth + 1), jnp.int32)
    start = (root, jnp.zeros_like(root), path, target_probs[:, ROOT], at_root)
    (_, num_accepted, path, left, _), _ = jax.lax.scan(
        try_node, start, jnp.arange(1, num_nodes, dtype=jnp.int32)
    )
    return Verdict(path, num_accepted, sample(next_keys, left))
