"""Jacobi decoding (arXiv 2305.10427): the target's choices of the last pass are the next pass's drafts.

All K tokens ahead are guessed at once and every pass replaces them by the target's arg-max after each. What
the target confirms is committed, which at temperature 0 makes the text that of greedy decoding. A pass adds
a token at least, so the fixed point is reached after at most as many passes as there are tokens: tokens per
pass is what Jacobi decoding gains. The block of K tokens slides along with the text.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.errors import ConfigError
from specjax.models.functional import LOGITS
from specjax.sampling import argmax
from specjax.trees.topology import chain_parents
from specjax.types import NO_TOKEN, Context, Draft, Drafter, ProposalLaw, Target, Verdict


@dataclasses.dataclass(frozen=True)
class Config:
    """`draft_length` tokens are iterated at once."""

    draft_length: int

    def __post_init__(self) -> None:
        if self.draft_length < 1:
            raise ConfigError(f"drafter.draft_length is {self.draft_length}: iterate at least 1 token a pass")


# Small settings that the contract tests and the certificate build it with.
EXAMPLES = {"jacobi": Config(draft_length=2)}


def build(config: Config, target: Target, architecture: Any = None) -> Drafter:
    """The chain of the current iterate, point masses; its state is that iterate [B, K]."""
    del target, architecture
    length = config.draft_length

    def init(params, context: Context, features, prompt_size: int) -> Int[Array, "B K"]:
        del params, features, prompt_size
        return first_guess(context, length)

    def propose(params, keys, state: Int[Array, "B K"], context) -> tuple[Draft, Int[Array, "B K"]]:
        del params, keys, context
        tokens = jnp.pad(state, ((0, 0), (1, 0)), constant_values=NO_TOKEN)
        return Draft(tokens, chain_parents(*tokens.shape), None), state

    def observe(params, state, draft, verdict: Verdict, context, features) -> Int[Array, "B K"]:
        del params, state, draft, context
        iterate = argmax(features[LOGITS])
        # Entry m follows node m. That at the last accepted node is decided by the rule, those behind it are
        # guesses still; where the block reaches beyond them the last one is repeated.
        behind = verdict.num_accepted[:, None] + 1 + jnp.arange(length)[None]
        return jnp.take_along_axis(iterate, jnp.minimum(behind, length), axis=1)

    return Drafter(
        init,
        propose,
        observe,
        num_nodes=1 + length,
        max_depth=length,
        law=ProposalLaw.POINT_MASS,
        features=(LOGITS,),
    )


def first_guess(context: Context, size: int) -> Int[Array, "B K"]:
    """What an iteration starts from: each row's first `size` tokens, over again where it has fewer."""
    places = jnp.arange(size)[None] % context.length[:, None]
    return jnp.take_along_axis(context.tokens, places, axis=1)
