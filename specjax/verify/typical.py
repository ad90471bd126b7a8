"""Typical acceptance (Medusa, arXiv 2401.10774): what the target finds typical enough. Lossy."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.scipy.special import entr
from jaxtyping import Array, Float, Key

from specjax.errors import ConfigError
from specjax.sampling import law_at, prob_of, sample
from specjax.trees.topology import ancestor_mask, depths, path_to
from specjax.types import ROOT, Draft, ProposalLaw, Verdict

LOSSLESS = False
LAWS = frozenset(ProposalLaw)


@dataclasses.dataclass(frozen=True)
class Config:
    """A token passes above min(epsilon, delta * exp(-H)), H the entropy of the target's law in nats."""

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: give a number between 0 and 1")


def verify(
    keys: Key[Array, "B"],
    draft: Draft,
    target_probs: Float[Array, "B N V"],
    *,
    max_depth: int,
    epsilon: float = Config.epsilon,
    delta: float = Config.delta,
) -> Verdict:
    """The deepest node that passes with all its ancestors, the first among equals; then a target draw."""
    parents = jnp.maximum(draft.parents, ROOT)
    entropy = entr(target_probs).sum(-1)
    floor = jnp.minimum(epsilon, delta * jnp.exp(-entropy))
    by_parent = jnp.take_along_axis(target_probs, parents[..., None], axis=1)
    passes = prob_of(by_parent, draft.tokens) > jnp.take_along_axis(floor, parents, axis=1)
    passes = passes.at[:, ROOT].set(True)

    ancestors = ancestor_mask(draft.parents)
    reached = ~(ancestors & ~passes[:, None]).any(-1)
    last = jnp.argmax(jnp.where(reached, depths(ancestors), -1), axis=1).astype(jnp.int32)
    path, num_accepted = path_to(ancestors, last, max_depth)
    law = law_at(target_probs, last)
    return Verdict(path, num_accepted, sample(keys, law))
