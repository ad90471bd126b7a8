"""The dynamic programme against all trees, against best-first growth, and the choice of a budget."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest

from specjax.errors import ConfigError
from specjax.trees.optimal import Budget, best_budget, expected_tokens, optimal_tree, optimal_values
from specjax.trees.static import Path, balanced, chain, from_paths, sparse

NUM_RANKS = 3


@cache
def all_trees(num_nodes: int, max_depth: int) -> list[frozenset[Path]]:
    """The paths of every tree of so many nodes in which a node has at most NUM_RANKS children of any rank."""
    if max_depth == 0 or num_nodes == 1:
        return [frozenset()] if num_nodes == 1 else []
    found = []
    for shares in itertools.product(range(num_nodes), repeat=NUM_RANKS):
        if sum(shares) != num_nodes - 1:
            continue
        below = [
            [
                frozenset({(rank,), *((rank, *path) for path in paths)})
                for paths in all_trees(n, max_depth - 1)
            ]
            if n
            else [frozenset()]
            for rank, n in enumerate(shares)
        ]
        found += [frozenset().union(*parts) for parts in itertools.product(*below)]
    return found


def value_of(paths: frozenset[Path], table: np.ndarray) -> float:
    """The sum of all products of acceptances along paths, straight from the definition."""
    return 1 + sum(float(np.prod([table[d, r] for d, r in enumerate(path)])) for path in paths)


def random_acceptance(seed: int, *shape: int) -> np.ndarray:
    """Acceptances in no order, so that the best child need not be the first."""
    *rows, num_ranks = shape
    return np.random.default_rng(seed).dirichlet(np.ones(num_ranks + 1), size=tuple(rows))[..., :num_ranks]


def test_all_trees_are_counted() -> None:
    # Ternary trees: 1, 3, 12, 55, 273, 1428, 7752 (binomial(3n, n) / (2n + 1)).
    assert [len(all_trees(n, 6)) for n in range(1, 8)] == [1, 3, 12, 55, 273, 1428, 7752]


@pytest.mark.parametrize("max_depth", [0, 1, 2, 6])
@pytest.mark.parametrize("by_depth", [False, True])
def test_no_tree_of_up_to_7_nodes_is_better(max_depth: int, by_depth: bool) -> None:
    acceptance = random_acceptance(max_depth, *([6] if by_depth else []), NUM_RANKS)
    table = acceptance if by_depth else np.tile(acceptance, (6, 1))
    values = optimal_values(acceptance, 7, max_depth)
    best = 0.0
    for num_nodes in range(1, 8):
        best = max([best, *(value_of(paths, table) for paths in all_trees(num_nodes, max_depth))])
        assert values[num_nodes - 1] == pytest.approx(best, abs=1e-12)
        tree = optimal_tree(acceptance, num_nodes, max_depth)
        assert tree.num_nodes <= num_nodes and tree.max_depth <= max_depth
        assert value_of(frozenset(tree.paths[1:]), table) == pytest.approx(best, abs=1e-12)
        assert expected_tokens(tree, acceptance) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("num_nodes", [2, 17, 64])
def test_best_first_growth_reaches_the_same_optimum(num_nodes: int) -> None:
    table = random_acceptance(5, 6, 8)
    tree = optimal_tree(table, num_nodes, max_depth=6)
    assert tree.num_nodes == num_nodes
    assert expected_tokens(tree, table) == pytest.approx(expected_tokens(sparse(table, num_nodes), table))


def test_nodes_that_add_nothing_are_left_out() -> None:
    assert optimal_tree(np.array([0.0, 0.4, 0.0]), 50, max_depth=3).paths == ((), (1,), (1, 1), (1, 1, 1))
    assert optimal_tree(np.array([1.0]), 4, max_depth=9) == chain(3)


def test_expected_tokens_of_a_chain_is_the_closed_form() -> None:
    assert expected_tokens(chain(4), np.array([0.7])) == pytest.approx((1 - 0.7**5) / (1 - 0.7))
    # A rank without acceptance is never the accepted one.
    assert expected_tokens(balanced((3,)), np.array([0.7])) == pytest.approx(1.7)


def test_budget_is_the_best_of_all_measured_sizes_and_depths() -> None:
    acceptance = np.array([0.6, 0.2, 0.1])
    verify_cost = {1: 1.0, 4: 1.1, 8: 1.3, 16: 1.9, 32: 3.2}
    chosen = best_budget(acceptance, verify_cost, draft_cost=0.1, max_depth=5)
    factors = {
        (n, d): expected_tokens(optimal_tree(acceptance, n, d), acceptance) / (cost + d * 0.1)
        for n, cost in verify_cost.items()
        for d in range(1, 6)
    }
    (num_nodes, depth), factor = max(factors.items(), key=lambda item: item[1])
    assert (chosen.num_nodes, chosen.max_depth) == (num_nodes, depth)
    assert chosen.factor == pytest.approx(factor)
    assert chosen.tokens_per_step == pytest.approx(factor * (verify_cost[num_nodes] + depth * 0.1))


def test_cheap_verification_wants_more_nodes_and_dear_one_none() -> None:
    acceptance = np.array([0.5, 0.2])

    def budget(cost_per_node: float) -> Budget:
        return best_budget(acceptance, {n: 1 + cost_per_node * (n - 1) for n in (1, 2, 8, 64)}, 0.01, 6)

    assert budget(0.0).num_nodes == 64
    assert 1 < budget(0.05).num_nodes < 64
    assert budget(1.0) == Budget(1, 0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"verify_cost": {}}, "verify_cost is {}"),
        ({"verify_cost": {0: 1.0}}, "numbers of nodes"),
        ({"verify_cost": {4: 0.0}}, "positive costs"),
        ({"draft_cost": -0.1}, "draft_cost is -0.1"),
        ({"acceptance": np.array([0.9, 0.9])}, "sum to at most 1"),
        ({"acceptance": np.full((2, 1), 0.5)}, "give 3 rows"),
    ],
)
def test_bad_budgets(change: dict, message: str) -> None:
    arguments = {"acceptance": np.array([0.5]), "verify_cost": {4: 1.2}, "draft_cost": 0.1, "max_depth": 3}
    with pytest.raises(ConfigError, match=message):
        best_budget(**arguments | change)


def test_bad_depth() -> None:
    with pytest.raises(ConfigError, match="max_depth is -1"):
        optimal_tree(np.array([0.5]), 4, max_depth=-1)
    assert from_paths([]) == optimal_tree(np.array([0.5]), 4, max_depth=0)
