"""Static trees that accept the most: Sequoia's dynamic programme (arXiv 2402.12374).

The acceptance of a rank is the probability that this child of an accepted node is the accepted one, the
same at all nodes (or all nodes of a depth). A node is then accepted with the product of the acceptances
along its path, and the expected number of tokens a pass is the sum over the nodes, the root's 1 being the
token that the pass adds by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from specjax.errors import ConfigError
from specjax.trees.static import Path, StaticTree, acceptance_table, from_paths


class Budget(NamedTuple):
    """A size of the tree, 1 for plain decoding, what it yields a pass and the wall-clock factor."""

    num_nodes: int
    max_depth: int
    tokens_per_step: float
    factor: float


class _Solution(NamedTuple):
    """By depth and number of nodes n: the most tokens of a subtree of at most n nodes rooted there.

    `splits[d][r, n]` is how many of n nodes below a node at depth d its child of rank r takes, the ranks
    before it having taken theirs.
    """

    values: list[Float[np.ndarray, "N1"]]
    splits: list[Int[np.ndarray, "R N1"]]


def expected_tokens(tree: StaticTree, acceptance: Float[np.ndarray, "*D R"]) -> float:
    """The expected tokens a pass of a tree; ranks that `acceptance` lacks are never accepted."""
    table = acceptance_table(acceptance, tree.num_nodes, tree.max_depth)
    reach = [1.0]
    for parent, path in zip(tree.parents[1:], tree.paths[1:], strict=True):
        depth, rank = len(path) - 1, path[-1]
        reach.append(reach[parent] * (table[depth, rank] if rank < table.shape[1] else 0.0))
    return float(sum(reach))


def optimal_tree(acceptance: Float[np.ndarray, "*D R"], num_nodes: int, max_depth: int) -> StaticTree:
    """The tree of most expected tokens of at most `num_nodes` nodes, the root one, and depth `max_depth`.

    `acceptance` [R] holds for all depths, [D, R] for each its own. Nodes that add nothing are left out.
    Raises ConfigError where it holds no probabilities, or no node is asked for.
    """
    solution = _solve(acceptance_table(acceptance, num_nodes, max_depth), num_nodes)
    return from_paths(_paths(solution, (), num_nodes))


def optimal_values(
    acceptance: Float[np.ndarray, "*D R"], num_nodes: int, max_depth: int
) -> Float[np.ndarray, "N"]:
    """The most expected tokens of trees of at most 1, 2, ... `num_nodes` nodes."""
    return _solve(acceptance_table(acceptance, num_nodes, max_depth), num_nodes).values[0][1:]


def best_budget(
    acceptance: Float[np.ndarray, "*D R"],
    verify_cost: Mapping[int, float],
    draft_cost: float,
    max_depth: int,
) -> Budget:
    """The size and depth of the largest factor: expected tokens / (v(N) + depth c).

    `verify_cost` v maps the measured numbers of nodes N, the root included, to their cost; `draft_cost` c
    is that of drafting one more level; both in target passes over one token. Where no tree gains anything
    it is plain decoding. Raises ConfigError on costs that are none, and as `optimal_tree` does.
    """
    if not verify_cost or min(verify_cost) < 1 or not all(cost > 0 for cost in verify_cost.values()):
        raise ConfigError(f"verify_cost is {dict(verify_cost)}: give numbers of nodes and positive costs")
    if not draft_cost >= 0:
        raise ConfigError(f"draft_cost is {draft_cost}: give 0 or a positive share of a target pass")
    best = Budget(1, 0, 1.0, 1.0)
    for depth in range(1, max_depth + 1):
        values = optimal_values(acceptance, max(verify_cost), depth)
        for num_nodes, cost in sorted(verify_cost.items()):
            tokens = float(values[num_nodes - 1])
            # A tree shallower than the limit was judged before, at its own lower draft cost.
            factor = tokens / (cost + depth * draft_cost)
            if factor > best.factor:
                best = Budget(num_nodes, depth, tokens, factor)
    return best


def _solve(table: Float[np.ndarray, "D R"], num_nodes: int) -> _Solution:
    """From the deepest level up: what a node gains from its children is shared out rank by rank."""
    alone = np.ones(num_nodes + 1)
    alone[0] = 0.0
    values, splits = [alone], []
    for acceptance in table[::-1]:
        below = values[-1]
        shared = np.zeros(num_nodes + 1)
        taken = []
        for probability in acceptance[::-1]:
            shared, split = _share(probability * below, shared)
            taken.append(split)
        own = alone.copy()
        own[1:] += shared[:-1]
        values.append(own)
        splits.append(np.array(taken[::-1], np.int64).reshape(len(taken), num_nodes + 1))
    return _Solution(values[::-1], splits[::-1])


def _share(
    mine: Float[np.ndarray, "N1"], others: Float[np.ndarray, "N1"]
) -> tuple[Float[np.ndarray, "N1"], Int[np.ndarray, "N1"]]:
    """max over s of mine[s] + others[n - s] for every n, and the smallest such s."""
    size = len(mine)
    left = np.arange(size)[:, None] - np.arange(size)[None, :]
    total = np.where(left >= 0, mine[None, :] + others[np.maximum(left, 0)], -np.inf)
    return total.max(1), total.argmax(1)


def _paths(solution: _Solution, path: Path, num_nodes: int) -> list[Path]:
    """The paths below the node that `path` leads to, whose subtree may have `num_nodes` nodes."""
    if len(path) == len(solution.splits):
        return []
    found: list[Path] = []
    left = num_nodes - 1
    for rank, split in enumerate(solution.splits[len(path)]):
        share = int(split[left])
        left -= share
        if share:
            child = (*path, rank)
            found += [child, *_paths(solution, child, share)]
    return found
