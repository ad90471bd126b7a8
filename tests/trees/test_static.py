"""Trees from paths: every constructor against its definition, and errors that name what is wrong."""

from __future__ import annotations

import itertools
import operator

import numpy as np
import pytest

from specjax.errors import ConfigError
from specjax.trees.optimal import expected_tokens
from specjax.trees.static import StaticTree, balanced, chain, eagle_1, from_paths, sparse
from specjax.trees.topology import children_of, paths_of, validate_parents
from specjax.types import NO_PARENT


def assert_consistent(tree: StaticTree) -> None:
    """What the tree says of its nodes agrees with its parents."""
    validate_parents(tree.parents)
    assert tree.paths[0] == () and tree.ranks[0] == 0
    for node, lineage in enumerate(paths_of(tree.parents)):
        assert tree.depths[node] == len(lineage) - 1
        assert tree.paths[node] == tuple(tree.ranks[ancestor] for ancestor in lineage[1:])
    for siblings in children_of(tree.parents):
        assert siblings == sorted(siblings, key=lambda node: tree.ranks[node])
    assert list(tree.depths) == sorted(tree.depths)
    assert tree.num_nodes == len(tree.paths) == sum(tree.level_sizes)
    assert tree.max_depth == max(tree.depths) == len(tree.level_sizes) - 1
    assert list(tree.level_sizes) == [tree.depths.count(depth) for depth in range(tree.max_depth + 1)]


@pytest.mark.parametrize("branching", [(), (1,), (3, 3, 3), (4, 1, 2)])
def test_balanced_trees_have_equal_levels(branching: tuple[int, ...]) -> None:
    tree = balanced(branching)
    assert_consistent(tree)
    assert tree.level_sizes == tuple(itertools.accumulate(branching, operator.mul, initial=1))
    assert tree.max_depth == len(branching) and tree.is_without_gaps


def test_chain() -> None:
    assert chain(3) == StaticTree((NO_PARENT, 0, 1, 2), ((), (0,), (0, 0), (0, 0, 0)))
    assert chain(0).num_nodes == 1


def test_paths_come_in_any_order_and_ranks_may_have_gaps() -> None:
    tree = from_paths([[2, 4], [0], (2,), (0, 1), (2, 0)])
    assert_consistent(tree)
    assert tree.paths == ((), (0,), (2,), (0, 1), (2, 0), (2, 4))
    assert tree.parents == (NO_PARENT, 0, 0, 1, 2, 2)
    assert tree.ranks == (0, 0, 2, 1, 0, 4)


def test_eagle_1_has_25_drafted_nodes_by_depth_as_published() -> None:
    tree = eagle_1()
    assert_consistent(tree)
    assert tree.num_nodes == 26
    assert tree.level_sizes == (1, 4, 8, 8, 3, 2)
    assert [len(children) for children in children_of(tree.parents)][:5] == [4, 3, 2, 2, 1]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([(0,), (1, 0, 2)], r"\(1,\), \(1, 0\)"),
        ([(0, 1)], r"\(0,\)"),
        ([(0,), (1,), (0,)], r"path \(0,\) comes twice"),
        ([()], "the root needs no path"),
        ([(0,), (0, -1)], r"path \(0, -1\)"),
    ],
)
def test_bad_paths_are_named(paths: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_paths(paths)


def test_no_depth_without_children() -> None:
    with pytest.raises(ConfigError, match="at least 1 child"):
        balanced((2, 0))


def random_accuracies(seed: int, num_heads: int, num_ranks: int) -> np.ndarray:
    """Head by head the shares of its choices, likeliest first, and something left over."""
    shares = np.random.default_rng(seed).dirichlet(np.ones(num_ranks + 1), size=num_heads)
    return -np.sort(-shares)[:, :num_ranks]


@pytest.mark.parametrize("seed", range(3))
def test_sparse_tree_holds_the_paths_of_the_largest_products(seed: int) -> None:
    accuracies = random_accuracies(seed, num_heads=4, num_ranks=3)
    paths = [p for depth in range(1, 5) for p in itertools.product(range(3), repeat=depth)]
    products = {p: np.prod([accuracies[d, r] for d, r in enumerate(p)]) for p in paths}
    best = sorted(paths, key=lambda p: -products[p])
    for num_nodes in (1, 2, 13, 40):
        tree = sparse(accuracies, num_nodes)
        assert_consistent(tree)
        assert set(tree.paths[1:]) == set(best[: num_nodes - 1])
        total = 1 + sum(products[p] for p in best[: num_nodes - 1])
        assert expected_tokens(tree, accuracies) == pytest.approx(total)


def test_sparse_tree_leaves_out_what_is_never_right() -> None:
    assert sparse(np.array([[0.5, 0.0], [0.3, 0.3]]), 100).paths == ((), (0,), (0, 0), (0, 1))


@pytest.mark.parametrize(
    ("accuracies", "num_nodes", "message"),
    [
        ([[0.5, 0.6]], 4, "sum to at most 1"),
        ([[0.5, -0.1]], 4, "at least 0"),
        ([[0.5, float("nan")]], 4, "at least 0"),
        ([0.5, 0.1], 4, "a row of ranks for each head"),
        ([[0.5]], 0, "num_nodes is 0"),
    ],
)
def test_bad_accuracies(accuracies: list, num_nodes: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sparse(np.array(accuracies), num_nodes)
