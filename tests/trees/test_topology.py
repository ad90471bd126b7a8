"""Masks and depths against their definition, node by node."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from specjax.trees.topology import ancestor_mask, chain_parents, chain_path, depths
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
