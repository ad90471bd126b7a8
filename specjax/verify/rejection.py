"""The rejection rule for chains (arXiv 2211.17192, algorithm 1; arXiv 2302.01318, algorithm 2).

A lenience below 1 accepts more than the target's law allows (arXiv 2211.17192, appendix A.5): lossy.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from specjax.errors import ConfigError
from specjax.sampling import law_at, point_mass, prob_of, residual, sample, split_keys, uniform
from specjax.trees.topology import chain_path
from specjax.types import NO_TOKEN, Draft, ProposalLaw, Verdict

LOSSLESS = True
LAWS = frozenset({ProposalLaw.POINT_MASS, ProposalLaw.CHAIN})
CHAINS_ONLY = True


@dataclasses.dataclass(frozen=True)
class Config:
    """The factor on the draft's probability in the ratio; 1 is exact."""

    lenience: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.lenience <= 1:
            raise ConfigError(f"lenience is {self.lenience}: give a number above 0 and at most 1 (exact)")


def is_lossless(lenience: float) -> bool:
    """Only without lenience."""
    return lenience == 1


def verify(
    keys: Key[Array, "B"],
    draft: Draft,
    target_probs: Float[Array, "B N V"],
    *,
    max_depth: int,
    lenience: float = Config.lenience,
) -> Verdict:
    """Accept each token with min(1, target / (lenience * draft)); a refusal resamples from the residual.

    Where all are accepted, or nothing more was drafted, the next token comes from the target's law.
    Raises ValueError on a tree.
    """
    if draft.tokens.shape[1] != max_depth + 1:
        raise ValueError(
            f"rejection judges chains: {draft.tokens.shape[1]} nodes at depth {max_depth} are a tree"
        )
    batch = draft.tokens.shape[0]
    drafted = draft.tokens[:, 1:]
    accept_keys, next_keys = split_keys(keys, 2)
    threshold = uniform(accept_keys, max_depth)
    draft_prob = jnp.ones(drafted.shape) if draft.probs is None else prob_of(draft.probs[:, :-1], drafted)
    # Strict, and threshold < 1: a token of target probability 0 never passes, one of equal laws always.
    accepted = threshold * lenience * draft_prob < prob_of(target_probs[:, :-1], drafted)
    num_accepted = jnp.cumprod(accepted, axis=1).sum(1, dtype=jnp.int32)

    nothing = jnp.full((batch, 1), NO_TOKEN, jnp.int32)
    refused = jnp.take_along_axis(jnp.append(drafted, nothing, axis=1), num_accepted[:, None], axis=1)
    if draft.probs is None:
        draft_law = point_mass(refused[:, 0], target_probs.shape[-1])
    else:
        draft_law = jnp.where(refused == NO_TOKEN, 0.0, law_at(draft.probs, num_accepted))
    next_token = sample(next_keys, residual(law_at(target_probs, num_accepted), draft_law))
    return Verdict(chain_path(batch, max_depth), num_accepted, next_token)
