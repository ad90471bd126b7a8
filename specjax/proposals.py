"""How the children of a node are chosen from a drafter's law, for every drafter that has one."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from specjax.errors import ConfigError, nearest
from specjax.sampling import argmax, sample
from specjax.types import NO_TOKEN, ProposalLaw

WITHOUT_REPEATS = (ProposalLaw.POINT_MASS, ProposalLaw.SIBLINGS_WITHOUT_REPLACEMENT)


class Shape(NamedTuple):
    """A tree of equal levels: every node at depth d has `branching[d]` children, chosen as `law` says.

    With a `budget` it is not of equal levels: the likeliest `branching[d]` nodes of each level get so many
    children, and the best `budget` nodes of all are kept, the root among them.
    """

    branching: tuple[int, ...]
    law: ProposalLaw
    budget: int | None = None

    @property
    def is_chain(self) -> bool:
        """Whether every node has one child."""
        return max(self.branching) == 1


def make_shape(
    draft_length: int, branching: tuple[int, ...], proposal: str, num_nodes: int | None = None
) -> Shape:
    """The tree of depth `draft_length` that a config describes; missing entries of `branching` are 1.

    Raises ConfigError on a proposal that is none, and where it does not fit the branching or `num_nodes`.
    """
    if draft_length < 1:
        raise ConfigError(f"drafter.draft_length is {draft_length}: draft at least 1 token a pass")
    known = [law.value for law in ProposalLaw]
    if proposal not in known:
        raise ConfigError(
            f"proposal is '{proposal}'{nearest(proposal, known)}: choose one of {', '.join(known)}"
        )
    if len(branching) > draft_length or any(not isinstance(b, int) or b < 1 for b in branching):
        raise ConfigError(
            f"branching is {branching}: give at most draft_length = {draft_length} numbers of children, "
            "each at least 1"
        )
    branching += (1,) * (draft_length - len(branching))
    law = ProposalLaw(proposal)
    if law is ProposalLaw.CHAIN and max(branching) > 1:
        raise ConfigError(
            f"branching is {branching} and proposal 'chain': siblings are {' or '.join(known[2:])}, "
            "or point_mass for the most probable ones"
        )
    if law is not ProposalLaw.POINT_MASS and max(branching) == 1:
        law = ProposalLaw.CHAIN
    if num_nodes is not None:
        _check_budget(num_nodes, branching, law)
    return Shape(branching, law, num_nodes)


def _check_budget(num_nodes: int, branching: tuple[int, ...], law: ProposalLaw) -> None:
    most = 1 + branching[0] + sum(above * here for above, here in itertools.pairwise(branching))
    if law is not ProposalLaw.POINT_MASS or max(branching) == 1:
        raise ConfigError(
            f"num_nodes is {num_nodes}, which prunes a tree by confidence: that takes proposal 'point_mass' "
            "and a branching, for drawn siblings lose their law by it"
        )
    # As many nodes as a chain has would be taken for one.
    if not len(branching) + 2 <= num_nodes <= most:
        raise ConfigError(
            f"num_nodes is {num_nodes}: with branching {branching} give {len(branching) + 2} to {most}, "
            "the root included"
        )


def level_sizes(branching: tuple[int, ...]) -> list[int]:
    """The number of nodes at each depth, the root's 1 first."""
    return [math.prod(branching[:depth]) for depth in range(len(branching) + 1)]


def next_sibling(
    keys: Key[Array, "B"], choices: Float[Array, "B V"], law: ProposalLaw
) -> tuple[Int[Array, "B"], Float[Array, "B V"]]:
    """The next child of a node and what its later siblings are chosen from.

    `choices` need not be normalised. Point masses are the most probable tokens in turn, all others are
    drawn. Where nothing is left to choose the child is `NO_TOKEN`.
    """
    token = argmax(choices) if law is ProposalLaw.POINT_MASS else sample(keys, choices)
    token = jnp.where(choices.max(-1) > 0, token, NO_TOKEN)
    if law in WITHOUT_REPEATS:
        taken = jnp.arange(choices.shape[-1])[None, :] == token[:, None]
        choices = jnp.where(taken, 0.0, choices)
    return token, choices


def draw_children(
    keys: Key[Array, "B"], choices: Float[Array, "B N V"], num_children: int, law: ProposalLaw
) -> Int[Array, "B NC"]:
    """`num_children` for each of N nodes, the first node's first."""
    batch, num_nodes, vocab_size = choices.shape
    by_node = jax.vmap(lambda key: jax.random.split(key, (num_children, num_nodes)))(keys)
    rest = choices.reshape(batch * num_nodes, vocab_size)
    children = []
    for number in range(num_children):
        token, rest = next_sibling(by_node[:, number].reshape(-1), rest, law)
        children.append(token.reshape(batch, num_nodes))
    return jnp.stack(children, axis=-1).reshape(batch, num_nodes * num_children)
