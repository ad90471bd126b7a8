"""How the children of a node are chosen from a drafter's law, for every drafter that has one."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from specjax.errors import ConfigError, nearest
from specjax.sampling import argmax, sample
from specjax.trees import static
from specjax.trees.static import StaticTree
from specjax.types import NO_TOKEN, ProposalLaw

MOST_NODES = 1024
WITHOUT_REPEATS = (ProposalLaw.POINT_MASS, ProposalLaw.SIBLINGS_WITHOUT_REPLACEMENT)


class Shape(NamedTuple):
    """A static tree, whose nodes are chosen as `law` says, or a dynamic one, with a `budget` of nodes.

    A dynamic tree has no shape of its own: the likeliest `widths[d]` nodes of each level get so many
    children, and the best `budget` nodes of all are kept, the root among them.
    """

    law: ProposalLaw
    tree: StaticTree
    widths: tuple[int, ...] = ()
    budget: int | None = None

    @property
    def max_depth(self) -> int:
        """The depth of the deepest node."""
        return self.tree.max_depth

    @property
    def num_nodes(self) -> int:
        """The number of nodes, the root included."""
        return self.budget or self.tree.num_nodes

    @property
    def is_chain(self) -> bool:
        """Whether every node has one child."""
        return self.num_nodes == self.max_depth + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeConfig:
    """The trees, `draft_length` deep, of a drafter with a law over the next token.

    `branching` is the number of children at each depth (missing ones are 1) and `proposal` how they are
    chosen: a value of `ProposalLaw`. `paths` lists the nodes of any other static tree instead: (0, 2) is
    the third choice after the first one. With `num_nodes` the tree grows where the drafter is confident,
    at each depth `branching` wide, and the best so many nodes are kept (EAGLE-2, arXiv 2406.16858).

    Raises ConfigError on a tree that is none and a proposal that does not fit it.
    """

    draft_length: int
    branching: tuple[int, ...] = ()
    proposal: str = ProposalLaw.CHAIN.value
    num_nodes: int | None = None
    paths: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        _ = self.shape

    @property
    def shape(self) -> Shape:
        """The trees that the fields ask for."""
        law = _law(self.proposal)
        if self.draft_length < 1:
            raise ConfigError(f"drafter.draft_length is {self.draft_length}: draft at least 1 token a pass")
        if self.paths:
            return self._listed(law)
        branching = self.branching
        if len(branching) > self.draft_length or any(not isinstance(b, int) or b < 1 for b in branching):
            raise ConfigError(
                f"branching is {branching}: give at most draft_length = {self.draft_length} numbers of "
                "children, each at least 1"
            )
        branching += (1,) * (self.draft_length - len(branching))
        if self.num_nodes is not None:
            _check_budget(self.num_nodes, branching, law)
            # Its depth is all that counts: a full tree of such widths would be huge.
            return Shape(law, static.chain(self.draft_length), branching, self.num_nodes)
        return _static(law, _balanced(branching))

    def _listed(self, law: ProposalLaw) -> Shape:
        tree = static.from_paths(self.paths)
        if self.branching or self.num_nodes is not None:
            raise ConfigError("paths list every node of a tree: leave out branching and num_nodes")
        if tree.max_depth != self.draft_length:
            raise ConfigError(
                f"draft_length is {self.draft_length} and the paths are up to {tree.max_depth} long: "
                "give the same number"
            )
        if law is not ProposalLaw.POINT_MASS and not tree.is_without_gaps:
            raise ConfigError(
                f"proposal is '{law.value}' and the paths leave out ranks: drawn siblings have none, so give "
                "each node's children the ranks 0, 1, ..., or take proposal 'point_mass'"
            )
        return _static(law, tree)


def _law(proposal: str) -> ProposalLaw:
    known = [law.value for law in ProposalLaw]
    if proposal not in known:
        raise ConfigError(
            f"proposal is '{proposal}'{nearest(proposal, known)}: choose one of {', '.join(known)}"
        )
    return ProposalLaw(proposal)


def _balanced(branching: tuple[int, ...]) -> StaticTree:
    num_nodes = sum(itertools.accumulate(branching, operator.mul, initial=1))
    if num_nodes > MOST_NODES:
        raise ConfigError(
            f"branching {branching} makes a tree of {num_nodes} nodes, and {MOST_NODES} are the most: give "
            "fewer children, or num_nodes for a tree that keeps the best of them"
        )
    return static.balanced(branching)


def _static(law: ProposalLaw, tree: StaticTree) -> Shape:
    has_siblings = tree.num_nodes > tree.max_depth + 1
    if law is ProposalLaw.CHAIN and has_siblings:
        known = [other.value for other in ProposalLaw]
        raise ConfigError(
            f"the tree has siblings and proposal is 'chain': siblings are {' or '.join(known[2:])}, "
            "or point_mass for the most probable ones"
        )
    if law is not ProposalLaw.POINT_MASS and not has_siblings:
        law = ProposalLaw.CHAIN
    return Shape(law, tree)


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
