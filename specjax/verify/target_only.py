"""Sample and match: draw from the target at each node and descend while a child carries the draw.

The draft's law is never looked at, so any tree will do; for point-mass children this is the law of
judging them one after the other by the target's probability (arXiv 2305.09781, naive sampling).
"""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Key

from specjax.sampling import law_at, sample
from specjax.trees.descent import descend
from specjax.types import Draft, ProposalLaw, Verdict

LOSSLESS = True
LAWS = frozenset(ProposalLaw)


def verify(
    keys: Key[Array, "B"], draft: Draft, target_probs: Float[Array, "B N V"], *, max_depth: int
) -> Verdict:
    """The path of drawn tokens that the tree holds, then the first draw that it does not."""

    def choose(depth, node):
        law = law_at(target_probs, node)
        return sample(jax.vmap(lambda key: jax.random.fold_in(key, depth))(keys), law)

    return descend(draft, choose, max_depth)
