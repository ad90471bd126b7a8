"""Masks and depths against their definition, node by node."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.errors import ConfigError
from specjax.trees.topology import (
    ancestor_mask,
    chain_parents,
    chain_path,
    children_of,
    depths,
    paths_of,
    repeat_parents,
    validate_parents,
)
from specjax.types import NO_PARENT


def lineage(parents: np.ndarray, node: int) -> list[int]:
    """The node and its ancestors, root last."""
    found = [node]
    while parents[found[-1]] != NO_PARENT:
        found.append(int(parents[found[-1]]))
    return found


def random_parents(batch: int, num_nodes: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.array([[NO_PARENT, *(rng.integers(0, i) for i in range(1, num_nodes))] for _ in range(batch)])


def test_every_node_sees_itself_and_its_ancestors() -> None:
    parents = random_parents(batch=6, num_nodes=17)
    mask = jax.jit(ancestor_mask)(jnp.asarray(parents))
    depth = depths(mask)
    for row in range(6):
        for node in range(17):
            family = lineage(parents[row], node)
            assert np.flatnonzero(mask[row, node]).tolist() == sorted(family)
            assert depth[row, node] == len(family) - 1


def test_a_lone_root_sees_itself() -> None:
    mask = ancestor_mask(jnp.asarray([[NO_PARENT]]))
    assert mask.tolist() == [[[True]]] and depths(mask).tolist() == [[0]]


def test_chain_is_lower_triangular_and_its_path_takes_every_node() -> None:
    mask = ancestor_mask(chain_parents(2, 5))
    np.testing.assert_array_equal(mask, np.tile(np.tril(np.ones((5, 5), bool)), (2, 1, 1)))
    assert chain_path(2, 4).tolist() == [[0, 1, 2, 3, 4]] * 2


def test_paths_and_children_of_a_static_tree() -> None:
    (parents,) = random_parents(batch=1, num_nodes=17).tolist()
    paths, children = paths_of(parents), children_of(parents)
    for node in range(17):
        assert list(paths[node]) == lineage(np.array(parents), node)[::-1]
        assert children[node] == [child for child in range(17) if parents[child] == node]
    assert repeat_parents(parents, 3).tolist() == [parents] * 3


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([], "no nodes"),
        ([0, 0], "node 0 has the parent 0"),
        ([NO_PARENT, NO_PARENT], "node 1 has the parent -1"),
        ([NO_PARENT, 0, 2], "node 2 has the parent 2"),
        ([NO_PARENT, 2, 0], "node 1 has the parent 2"),
        ([NO_PARENT, 0, 7], "node 2 has the parent 7: give a node before it, 0 to 1"),
    ],
)
def test_what_is_no_tree_is_named(parents: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate_parents(parents)
