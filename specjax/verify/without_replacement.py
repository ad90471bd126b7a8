"""Siblings drawn without replacement, judged in turn (arXiv 2401.15077 with sampling; arXiv 2402.12374)."""

from __future__ import annotations

from jaxtyping import Array, Float, Key

from specjax.types import Draft, ProposalLaw, Verdict
from specjax.verify.multi_round import judge_in_turn

LOSSLESS = True
LAWS = frozenset({ProposalLaw.POINT_MASS, ProposalLaw.CHAIN, ProposalLaw.SIBLINGS_WITHOUT_REPLACEMENT})


def verify(
    keys: Key[Array, "B"], draft: Draft, target_probs: Float[Array, "B N V"], *, max_depth: int
) -> Verdict:
    """As multi-round, but a sibling's law is the draft's without the siblings before it, renormalised."""
    return judge_in_turn(keys, draft, target_probs, max_depth, replaced=False)
