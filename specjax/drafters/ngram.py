"""Prompt lookup: propose what followed the last occurrence of the context's longest known suffix.

No weights, and nothing leaves the device (the idea is that of vLLM's and transformers' prompt lookup).
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.errors import ConfigError
from specjax.proposals import Shape
from specjax.trees import static
from specjax.types import NO_PARENT, NO_TOKEN, ROOT, Context, Draft, Drafter, ProposalLaw, Target


@dataclasses.dataclass(frozen=True)
class Config:
    """`draft_length` tokens at most, for suffixes of `min_ngram` to `max_ngram` tokens.

    With `num_branches` above 1, so many continuations that begin with different tokens, best match first.
    """

    draft_length: int
    max_ngram: int
    min_ngram: int = 1
    num_branches: int = 1

    def __post_init__(self) -> None:
        if self.num_branches < 1:
            raise ConfigError(f"num_branches is {self.num_branches}: propose at least 1 continuation")
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ConfigError(
                f"min_ngram is {self.min_ngram} and max_ngram {self.max_ngram}: they need 1 <= min <= max"
            )

    @property
    def shape(self) -> Shape:
        """A bundle of chains of certain tokens."""
        branches = range(self.num_branches)
        paths = [(branch, *[0] * depth) for branch in branches for depth in range(self.draft_length)]
        return Shape(ProposalLaw.POINT_MASS, static.from_paths(paths))


# Small settings that the contract tests and the certificate build it with.
EXAMPLES = {
    "ngram": Config(draft_length=2, max_ngram=2),
    "ngram branches": Config(draft_length=2, max_ngram=2, num_branches=2),
}


def build(config: Config, target: Target, architecture: Any = None) -> Drafter:
    """Point-mass drafts, one chain or several from the root; it has neither weights nor state."""
    del target, architecture
    length, branches = config.draft_length, config.num_branches
    chain = [[ROOT, *range(first, first + length - 1)] for first in range(1, branches * length + 1, length)]
    parents = jnp.asarray([NO_PARENT, *itertools.chain(*chain)], jnp.int32)

    def propose(params, keys, state, context: Context) -> tuple[Draft, Any]:
        del params, keys
        batch = context.tokens.shape[0]
        drafted = jax.vmap(lambda tokens, length: lookup(tokens, length, config))(
            context.tokens, context.length
        )
        root = jnp.full((batch, 1), NO_TOKEN, jnp.int32)
        tokens = jnp.concatenate((root, drafted.reshape(batch, branches * length)), axis=1)
        return Draft(tokens, jnp.broadcast_to(parents[None], tokens.shape), None), state

    return Drafter(
        init=lambda params, context, features, prompt_size: {},
        propose=propose,
        observe=lambda params, state, draft, verdict, context, features: state,
        num_nodes=1 + branches * length,
        max_depth=length,
        law=ProposalLaw.POINT_MASS,
    )


def lookup(tokens: Int[Array, "T"], length: Int[Array, ""], config: Config) -> Int[Array, "W K"]:
    """The tokens that followed the latest, longest matches of the suffix; `NO_TOKEN` without a match.

    Every branch begins with a token of its own. A match so late that its continuation runs into the
    present is continued periodically.
    """
    ends = jnp.arange(tokens.shape[0])
    matched = match_lengths(tokens, length, config.max_ngram)
    following = jnp.roll(tokens, -1)
    branches = []
    for _ in range(config.num_branches):
        # The longest match first, among equals the latest.
        best = jnp.argmax(matched * tokens.shape[0] + ends)
        best = jnp.where(matched.max() > 0, best, 0)
        after = best + 1
        period = jnp.maximum(length - after, 1)
        found = tokens[after + jnp.arange(config.draft_length) % period]
        branches.append(jnp.where(matched[best] >= config.min_ngram, found, NO_TOKEN))
        matched = jnp.where(following == found[0], 0, matched)
    return jnp.stack(branches)


def match_lengths(tokens: Int[Array, "T"], length: Int[Array, ""], most: int) -> Int[Array, "T"]:
    """How many tokens, up to `most`, the text that ends at each position shares with the context's end.

    It is 0 at the end itself and behind it.
    """
    size = tokens.shape[0]
    # What stands before the first token ends every run, for no token equals it.
    padded = jnp.concatenate((jnp.full((most,), NO_TOKEN, tokens.dtype), tokens))
    ending = jax.lax.dynamic_slice(padded, (length,), (most,))
    run = jnp.arange(size) < length - 1
    matched = jnp.zeros(size, jnp.int32)
    for back in range(most):
        start = most - back
        # Where the text begins, so does its ending.
        run &= (padded[start : start + size] == ending[start - 1]) & (ending[start - 1] != NO_TOKEN)
        matched += run
    return matched
