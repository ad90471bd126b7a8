"""Trees whose shape is known before anything is drafted: chains, full trees and lists of paths.

A path names a node by the ranks that lead to it: (0, 2) is the third choice after the first one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from specjax.errors import ConfigError
from specjax.types import NO_PARENT

Path = tuple[int, ...]

ROUNDING = 1e-6  # how far the acceptances of one node's children may exceed 1 together

# The choices `mc_sim_7b_63` of eagle/model/choices.py in github.com/SafeAILab/EAGLE, made for 7B targets.
EAGLE_1_PATHS: tuple[Path, ...] = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)


class StaticTree(NamedTuple):
    """Nodes level by level, siblings together and best first; `paths[i]` leads to node i, () to the root."""

    parents: tuple[int, ...]
    paths: tuple[Path, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Which choice of its parent's law each node is, 0 the likeliest; 0 for the root."""
        return tuple(path[-1] if path else 0 for path in self.paths)

    @property
    def depths(self) -> tuple[int, ...]:
        """The depth of every node, the root's being 0."""
        return tuple(len(path) for path in self.paths)

    @property
    def num_nodes(self) -> int:
        """The number of nodes, the root included."""
        return len(self.parents)

    @property
    def max_depth(self) -> int:
        """The depth of the deepest node."""
        return len(self.paths[-1])

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """The number of nodes at each depth, the root's 1 first."""
        return tuple(np.bincount(self.depths).tolist())

    @property
    def is_without_gaps(self) -> bool:
        """Whether the children of every node have the ranks 0, 1, and so on."""
        known = set(self.paths)
        return all(path[-1] == 0 or (*path[:-1], path[-1] - 1) in known for path in self.paths[1:])


def from_paths(paths: Iterable[Sequence[int]]) -> StaticTree:
    """The tree of these paths in any order, the format of Medusa's choices (arXiv 2401.10774).

    Raises ConfigError on a path that comes twice, an empty one, a negative rank, and missing prefixes.
    """
    wanted = [tuple(path) for path in paths]
    for path in wanted:
        if not path or min(path) < 0:
            raise ConfigError(
                f"path {path}: give one rank, 0 or more, for every depth; the root needs no path"
            )
        if wanted.count(path) > 1:
            raise ConfigError(f"path {path} comes twice: give every path once")
    ordered = ((), *sorted(wanted, key=lambda path: (len(path), path)))
    node_of = {path: node for node, path in enumerate(ordered)}
    missing = sorted(
        {p[:n] for p in wanted for n in range(1, len(p))} - set(wanted), key=lambda p: (len(p), p)
    )
    if missing:
        raise ConfigError(
            f"paths lead through {', '.join(map(str, missing))}, which the tree lacks: add what is missing"
        )
    parents = (NO_PARENT, *(node_of[path[:-1]] for path in ordered[1:]))
    return StaticTree(parents, ordered)


def chain(length: int) -> StaticTree:
    """The likeliest token after the likeliest token, `length` times."""
    return balanced((1,) * length)


def balanced(branching: Sequence[int]) -> StaticTree:
    """Every node at depth d has `branching[d]` children; (3, 3) is the top 3 at both of two depths.

    Raises ConfigError where a number of children is less than 1.
    """
    if any(num_children < 1 for num_children in branching):
        raise ConfigError(f"branching is {tuple(branching)}: every depth needs at least 1 child a node")
    levels = (itertools.product(*map(range, branching[: d + 1])) for d in range(len(branching)))
    return from_paths(itertools.chain.from_iterable(levels))


def eagle_1() -> StaticTree:
    """The tree of EAGLE-1's published code: 25 drafted nodes, at most 5 deep (arXiv 2401.15077)."""
    return from_paths(EAGLE_1_PATHS)


def sparse(accuracies: Float[np.ndarray, "D R"], num_nodes: int) -> StaticTree:
    """Medusa's tree of at most `num_nodes` nodes, the root one, by products of accuracies (arXiv 2401.10774).

    `accuracies[d, r]` is how often choice r of head d is the right one. Each step adds the likeliest node
    below those chosen, so all its ancestors are there; nodes of probability 0 are left out. Raises
    ConfigError where accuracies are no probabilities or no node is asked for.
    """
    if np.ndim(accuracies) != 2:
        raise ConfigError(
            f"accuracies have the shape {np.shape(accuracies)}: give a row of ranks for each head"
        )
    accuracies = acceptance_table(accuracies, num_nodes, max_depth=len(accuracies))
    chosen: list[Path] = []
    frontier: list[tuple[float, int, Path]] = []

    def offer_children(path: Path, value: float) -> None:
        if len(path) < len(accuracies):
            for rank, accuracy in enumerate(accuracies[len(path)]):
                if value * accuracy > 0:
                    # Of equal nodes the shallower one first, then the one of better ranks.
                    heapq.heappush(frontier, (-value * accuracy, len(path) + 1, (*path, rank)))

    offer_children((), 1.0)
    while frontier and len(chosen) < num_nodes - 1:
        negative_value, _, path = heapq.heappop(frontier)
        chosen.append(path)
        offer_children(path, -negative_value)
    return from_paths(chosen)


def acceptance_table(
    acceptance: Float[np.ndarray, "*D R"], num_nodes: int, max_depth: int
) -> Float[np.ndarray, "D R"]:
    """Acceptances by depth and rank, from a table of at least `max_depth` rows or one row for all depths.

    Raises ConfigError on a budget or depth that is none, and where a row holds no probabilities of events
    that exclude one another: at most one child of a node is accepted.
    """
    if num_nodes < 1:
        raise ConfigError(f"num_nodes is {num_nodes}: the root alone is 1")
    if max_depth < 0:
        raise ConfigError(f"max_depth is {max_depth}: give 0 (the root alone) or more")
    table = np.asarray(acceptance, np.float64)
    if table.ndim == 1:
        table = np.tile(table, (max_depth, 1))
    if table.ndim != 2 or len(table) < max_depth:
        raise ConfigError(f"acceptances have the shape {table.shape}: give {max_depth} rows of ranks, or one")
    if not (table >= 0).all() or (table.sum(-1) > 1 + ROUNDING).any():
        raise ConfigError(
            "acceptances must be at least 0 and sum to at most 1 over the ranks: that of rank r is the share "
            "of all cases in which choice r is the accepted one"
        )
    return table[:max_depth]
