"""Suffix decoding: a tree of what followed every earlier occurrence of the context's ending, by frequency.

No weights, and nothing leaves the device (arXiv 2411.04975). Occurrences are looked for in the context, and
in earlier outputs where some are named. The paper counts at one suffix length, that of
the tree which scores best, and drafts little where little matches. Here a pass has the same nodes anyway, so
the counts of all lengths fill them: an occurrence weighs twice as much for every token more that it matches.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.drafters.ngram import match_lengths
from specjax.errors import ConfigError
from specjax.proposals import MOST_NODES, Shape
from specjax.trees import dynamic, static
from specjax.types import NO_TOKEN, ROOT, Context, Draft, Drafter, ModelParams, ProposalLaw, Target

# Weights are powers of 2: with so many their float32 sums are exact, and no node outweighs its parent.
LONGEST_SUFFIX = 16
MOST_MATCHES = 256
EARLIER = "earlier"  # the name of the earlier outputs' tokens among the weights


@dataclasses.dataclass(frozen=True)
class Config:
    """The likeliest `num_nodes` nodes, the root included, at most `draft_length` deep.

    Occurrences of suffixes of `min_suffix` to `max_suffix` tokens count, the `num_matches` longest of them,
    of equals the latest. Where the longest is p tokens, at most `nodes_per_match` * p nodes are drafted (the
    paper's alpha; None is no limit), and none that is less probable than `min_prob`.

    `earlier` names outputs to search too, of which the last `num_earlier` tokens are kept: files of tokens,
    folders of them, or the generations.jsonl of runs.

    Raises ConfigError on numbers that contradict each other.
    """

    draft_length: int
    num_nodes: int
    max_suffix: int = LONGEST_SUFFIX
    min_suffix: int = 1
    num_matches: int = 16
    nodes_per_match: float | None = None
    min_prob: float = 0.0
    earlier: tuple[str, ...] = ()
    num_earlier: int = 8192

    def __post_init__(self) -> None:
        if self.draft_length < 1:
            raise ConfigError(f"draft_length is {self.draft_length}: draft at least 1 token a pass")
        # As many nodes as a chain has would be taken for one.
        if not self.draft_length + 2 <= self.num_nodes <= MOST_NODES:
            raise ConfigError(
                f"num_nodes is {self.num_nodes}: with draft_length {self.draft_length} give "
                f"{self.draft_length + 2} to {MOST_NODES}, the root included; for a chain take ngram"
            )
        if not 1 <= self.min_suffix <= self.max_suffix <= LONGEST_SUFFIX:
            raise ConfigError(
                f"min_suffix is {self.min_suffix} and max_suffix {self.max_suffix}: they need "
                f"1 <= min <= max <= {LONGEST_SUFFIX}"
            )
        if not 1 <= self.num_matches <= MOST_MATCHES:
            raise ConfigError(f"num_matches is {self.num_matches}: count 1 to {MOST_MATCHES} occurrences")
        if self.nodes_per_match is not None and not self.nodes_per_match > 0:
            raise ConfigError(
                f"nodes_per_match is {self.nodes_per_match}: give a number above 0, or leave it out"
            )
        if not 0 <= self.min_prob < 1:
            raise ConfigError(f"min_prob is {self.min_prob}: give a number from 0 (no limit) to below 1")
        if self.num_earlier < 1:
            raise ConfigError(f"num_earlier is {self.num_earlier}: keep at least 1 token of earlier outputs")

    @property
    def shape(self) -> Shape:
        """A dynamic tree of certain tokens."""
        return Shape(ProposalLaw.POINT_MASS, static.chain(self.draft_length), budget=self.num_nodes)


# Small settings that the contract tests and the certificate build it with.
EXAMPLES = {
    "suffix": Config(draft_length=2, num_nodes=5, num_matches=8),
    "suffix limits": Config(
        draft_length=3, num_nodes=6, max_suffix=4, num_matches=4, nodes_per_match=1.5, min_prob=0.2
    ),
}


def build(config: Config, target: Target, architecture: Any = None) -> Drafter:
    """Point-mass trees; it has no state, and no weights but the tokens of earlier outputs."""
    del target, architecture

    def propose(params: ModelParams, keys, state, context: Context) -> tuple[Draft, Any]:
        del keys
        return lookup(context.tokens, context.length, config, params.drafter.get(EARLIER)), state

    return Drafter(
        init=lambda params, context, features, prompt_size: {},
        propose=propose,
        observe=lambda params, state, draft, verdict, context, features: state,
        num_nodes=config.num_nodes,
        max_depth=config.draft_length,
        law=ProposalLaw.POINT_MASS,
    )


def lookup(
    tokens: Int[Array, "B T"],
    length: Int[Array, "B"],
    config: Config,
    earlier: Int[Array, "E"] | None = None,
) -> Draft:
    """The tree of each row's likeliest continuations; nodes for which there is none hold `NO_TOKEN`.

    A node's probability is the share of the occurrences' weight that follows its path: the product of the
    conditional frequencies along it. `earlier` texts are searched too; each ends with `NO_TOKEN`.
    """
    if earlier is not None:
        before = jnp.broadcast_to(earlier[None], (tokens.shape[0], *earlier.shape))
        tokens, length = jnp.concatenate((before, tokens), axis=1), length + earlier.shape[0]
    found = jax.vmap(lambda row, size: _continuations(row, size, config))(tokens, length)
    tree = dynamic.start(tokens.shape[0])

    def behind_root(root: Array, candidates: Array) -> Array:
        return jnp.concatenate((root, candidates), axis=1)

    ranked = dynamic.rerank(
        tree._replace(
            candidate_tokens=behind_root(tree.candidate_tokens, found.tokens),
            candidate_values=behind_root(tree.candidate_values, jnp.log(found.probs)),
            candidate_parents=behind_root(tree.candidate_parents, found.parents),
            candidate_slots=behind_root(tree.candidate_slots, jnp.full_like(found.tokens, dynamic.NO_SLOT)),
        ),
        config.num_nodes,
    )
    drafted = ranked.tokens
    if config.nodes_per_match is not None:
        # Stable: of equal nodes the parent stays. The root is the first of all.
        rank = jnp.argsort(jnp.argsort(-ranked.values, axis=1), axis=1)
        most = jnp.floor(config.nodes_per_match * found.matched)
        drafted = jnp.where(rank <= most[:, None], drafted, NO_TOKEN)
    return Draft(drafted, ranked.parents, None)


class _Continuations(NamedTuple):
    """Candidates level by level, one of each level for every match: C = K * M; `probs` 0 makes none.

    `parents` counts the root as candidate 0. `matched` is the length of the longest match.
    """

    tokens: Int[Array, "C"]
    probs: Float[Array, "C"]
    parents: Int[Array, "C"]
    matched: Int[Array, ""]


def _continuations(tokens: Int[Array, "T"], length: Int[Array, ""], config: Config) -> _Continuations:
    num_matches = min(config.num_matches, tokens.shape[0])
    by_end = match_lengths(tokens, length, config.max_suffix)
    # Backwards, for of equals the first is taken; as floats, for which XLA on CPU does not sort them all.
    _, place = jax.lax.top_k(by_end[::-1].astype(jnp.float32), num_matches)
    matched = by_end[::-1][place]
    after = tokens.shape[0] - place
    # What runs into the present goes on periodically, as if it had been accepted.
    period = jnp.maximum(length - after, 1)
    depth = jnp.arange(config.draft_length)[:, None]
    following = tokens[after[None] + depth % period[None]]

    # [K, M, M]: whose continuations are the same so far. The first of them stands for all.
    same = jax.lax.associative_scan(jnp.logical_and, following[:, :, None] == following[:, None, :])
    number = jnp.arange(num_matches)
    first = jnp.where(same, number[None, None], num_matches).min(-1)
    is_match = matched >= config.min_suffix
    weights = jnp.where(is_match, jnp.left_shift(1, matched), 0).astype(jnp.float32)
    probs = same.astype(jnp.float32) @ weights / jnp.maximum(weights.sum(), 1.0)
    stands = (first == number[None]) & is_match[None] & (probs >= config.min_prob)
    # Earlier texts end.
    stands &= jax.lax.associative_scan(jnp.logical_and, following != NO_TOKEN)
    parents = 1 + depth[:-1] * num_matches + first[:-1]
    parents = jnp.concatenate((jnp.full((1, num_matches), ROOT), parents))
    return _Continuations(
        jnp.where(stands, following, NO_TOKEN).reshape(-1),
        jnp.where(stands, probs, 0.0).reshape(-1),
        parents.reshape(-1).astype(jnp.int32),
        jnp.where(is_match[0], matched[0], 0),
    )
