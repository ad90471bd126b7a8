"""Greedy verification of any tree: follow the target's argmax (arXiv 2211.17192, temperature 0)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from specjax.sampling import argmax
from specjax.trees.descent import descend
from specjax.types import Draft, ProposalLaw, Verdict

LOSSLESS = True
LAWS = frozenset(ProposalLaw)
# Above temperature 0 it would emit the argmax where the target's law has other tokens too.
TEMPERATURE_ZERO_ONLY = True


def verify(
    keys: Key[Array, "B"], draft: Draft, target_probs: Float[Array, "B N V"], *, max_depth: int
) -> Verdict:
    """The longest path of target argmaxes, then the argmax at its end; `keys` are not used."""
    del keys
    best = argmax(target_probs)
    return descend(draft, lambda _, node: jnp.take_along_axis(best, node[:, None], axis=1)[:, 0], max_depth)
