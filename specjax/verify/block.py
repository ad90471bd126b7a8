"""Block verification of chains: never shorter than token by token (arXiv 2403.10444, algorithm 2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from specjax.sampling import law_at, point_mass, prob_of, residual, sample, split_keys, uniform
from specjax.trees.topology import chain_path
from specjax.types import NO_TOKEN, Draft, ProposalLaw, Verdict

LOSSLESS = True
LAWS = frozenset({ProposalLaw.POINT_MASS, ProposalLaw.CHAIN})
CHAINS_ONLY = True


def verify(
    keys: Key[Array, "B"], draft: Draft, target_probs: Float[Array, "B N V"], *, max_depth: int
) -> Verdict:
    """Accept the longest prefix that passes its own test, whatever became of shorter ones.

    The i-th test passes with h_i = S_i / (S_i + 1 - p_i), where p_i is the prefix's weight, the running
    min(1, p * target / draft), and S_i the mass by which p_i * target exceeds the draft's law after it.
    Raises ValueError on a tree.
    """
    if draft.tokens.shape[1] != max_depth + 1:
        raise ValueError(
            f"block judges chains: {draft.tokens.shape[1]} nodes at depth {max_depth} are a tree"
        )
    batch = draft.tokens.shape[0]
    drafted = draft.tokens[:, 1:]
    # After the last token nothing is drafted: a law of 0 there makes h the weight itself.
    after = jnp.append(drafted, jnp.full((batch, 1), NO_TOKEN, jnp.int32), axis=1)
    if draft.probs is None:
        laws = point_mass(after, target_probs.shape[-1])
    else:
        laws = jnp.where(after[..., None] == NO_TOKEN, 0.0, draft.probs)

    def extend(weight: Float[Array, "B"], probs) -> tuple[Float[Array, "B"], Float[Array, "B"]]:
        weight = carried_weight(weight * probs[0], probs[1])
        return weight, weight

    first = jnp.ones((batch,))
    _, rest = jax.lax.scan(extend, first, (prob_of(target_probs, after).T, prob_of(laws, after).T))
    weights = jnp.concatenate((first[:, None], rest.T[:, :-1]), axis=1)
    mass = jnp.maximum(weights[..., None] * target_probs - laws, 0.0).sum(-1)

    test_keys, next_keys = split_keys(keys, 2)
    passed = (uniform(test_keys, max_depth + 1) < weight_after(mass, weights)).at[:, 0].set(True)
    num_accepted = jnp.where(passed, jnp.arange(max_depth + 1, dtype=jnp.int32), 0).max(1)

    weight = jnp.take_along_axis(weights, num_accepted[:, None], axis=1)
    next_token = sample(
        next_keys, residual(weight * law_at(target_probs, num_accepted), law_at(laws, num_accepted))
    )
    return Verdict(chain_path(batch, max_depth), num_accepted, next_token)


def carried_weight(target_prob: Float[Array, "B"], draft_prob: Float[Array, "B"]) -> Float[Array, "B"]:
    """min(1, target / draft); a token that the target excludes, or none, carries nothing."""
    is_whole = (target_prob > 0) & (target_prob >= draft_prob)
    return jnp.where(is_whole, 1.0, target_prob / jnp.where(draft_prob > 0, draft_prob, 1.0))


def weight_after(mass: Float[Array, "*B"], weight: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """S / (S + 1 - weight); a weight of 1 stays, even where the residual has no mass."""
    odds = mass + 1 - weight
    return jnp.where(odds > 0, mass / jnp.where(odds > 0, odds, 1.0), 1.0)
