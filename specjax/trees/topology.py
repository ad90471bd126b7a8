"""From parents to depths, ancestor masks and chains.

Functions of a `Sequence[int]` are for static trees and run in Python; those of arrays are traced.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.errors import ConfigError
from specjax.types import NO_PARENT, ROOT


def chain_parents(batch: int, num_nodes: int) -> Int[Array, "B N"]:
    """The parents of a chain, one row repeated."""
    return jnp.broadcast_to(jnp.arange(num_nodes, dtype=jnp.int32) + NO_PARENT, (batch, num_nodes))


def chain_path(batch: int, max_depth: int) -> Int[Array, "B D1"]:
    """The only path through a chain: every node in turn."""
    return jnp.broadcast_to(jnp.arange(max_depth + 1, dtype=jnp.int32), (batch, max_depth + 1))


def chain_mask(batch: int, num_nodes: int) -> Bool[Array, "B N N"]:
    """The ancestor mask of a chain, a constant."""
    return jnp.broadcast_to(jnp.tril(jnp.ones((num_nodes, num_nodes), bool)), (batch, num_nodes, num_nodes))


def ancestor_mask(parents: Int[Array, "B N"]) -> Bool[Array, "B N N"]:
    """True at [b, i, j] where node j is node i or one of its ancestors; parents precede children."""
    num_nodes = parents.shape[-1]
    own = jnp.eye(num_nodes, dtype=bool)

    def add_node(i: Int[Array, ""], mask: Bool[Array, "B N N"]) -> Bool[Array, "B N N"]:
        parent = jnp.take(parents, i, axis=1)
        of_parent = jnp.take_along_axis(mask, parent[:, None, None], axis=1)[:, 0]
        return mask.at[:, i].set(of_parent | own[i][None])

    mask = jnp.zeros((*parents.shape, num_nodes), bool).at[:, 0, 0].set(True)
    return jax.lax.fori_loop(1, num_nodes, add_node, mask)


def depths(mask: Bool[Array, "B N N"]) -> Int[Array, "B N"]:
    """The depth of every node, the root's being 0."""
    return mask.sum(-1, dtype=jnp.int32) - 1


def path_to(
    ancestors: Bool[Array, "B N N"], node: Int[Array, "B"], max_depth: int
) -> tuple[Int[Array, "B D1"], Int[Array, "B"]]:
    """The nodes from the root to `node` of each row, and its depth; entries beyond it are the root."""
    depth = depths(ancestors)
    own = jnp.take_along_axis(ancestors, node[:, None, None], axis=1)[:, 0]
    at_depth = own[:, None] & (depth[:, None] == jnp.arange(max_depth + 1)[None, :, None])
    return jnp.argmax(at_depth, axis=-1).astype(jnp.int32), own.sum(-1, dtype=jnp.int32) - 1


def validate_parents(parents: Sequence[int]) -> None:
    """Raise ConfigError, naming the node, unless node 0 is the one root and parents precede children."""
    if not len(parents):
        raise ConfigError("the tree has no nodes: give at least the root")
    if parents[ROOT] != NO_PARENT:
        raise ConfigError(f"node {ROOT} has the parent {parents[ROOT]}: it is the root, give it {NO_PARENT}")
    for node, parent in enumerate(parents[1:], start=1):
        if not ROOT <= parent < node:
            raise ConfigError(f"node {node} has the parent {parent}: give a node before it, 0 to {node - 1}")


def children_of(parents: Sequence[int]) -> list[list[int]]:
    """The children of every node, in their order."""
    validate_parents(parents)
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    return children


def paths_of(parents: Sequence[int]) -> list[tuple[int, ...]]:
    """For every node, the nodes from the root to it, both included."""
    validate_parents(parents)
    paths: list[tuple[int, ...]] = [(ROOT,)]
    for node, parent in enumerate(parents[1:], start=1):
        paths.append((*paths[parent], node))
    return paths


def repeat_parents(parents: Sequence[int], batch: int) -> Int[Array, "B N"]:
    """The parents of a static tree, one row repeated."""
    return jnp.broadcast_to(jnp.asarray(parents, jnp.int32)[None], (batch, len(parents)))
