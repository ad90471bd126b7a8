"""Traversal verification of siblings drawn without replacement (arXiv 2505.12398)."""

from __future__ import annotations

from jaxtyping import Array, Float, Key

from specjax.types import Draft, ProposalLaw, Verdict
from specjax.verify.traversal import traverse

LOSSLESS = True
LAWS = frozenset({ProposalLaw.POINT_MASS, ProposalLaw.CHAIN, ProposalLaw.SIBLINGS_WITHOUT_REPLACEMENT})


def verify(
    keys: Key[Array, "B"], draft: Draft, target_probs: Float[Array, "B N V"], *, max_depth: int
) -> Verdict:
    """As traversal, but a refused sibling leaves the draft's law, which is renormalised."""
    return traverse(keys, draft, target_probs, max_depth, replaced=False)
