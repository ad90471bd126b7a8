"""What a cache holds after drafts were written, kept, moved or forgotten.

Garbage behind the length is finite here: slots that no node sees have the weight 0, and 0 times NaN is NaN.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as kv
from specjax.models.functional import make_target, stack_layers
from specjax.prefill import read_prompt
from specjax.trees.topology import ancestor_mask, depths
from specjax.types import NO_PARENT, KVCache, Params, Target

CAPACITY = 24


@functools.partial(jax.jit, static_argnums=0)
def read(target: Target, params: Params, tokens: jax.Array) -> KVCache:
    """A cache that has read `tokens` [B, P] from scratch."""
    empty = target.init_cache(tokens.shape[0], CAPACITY)
    return read_prompt(target.forward, params, tokens, empty)[0]


@functools.partial(jax.jit, static_argnums=0)
def run_tree(
    target: Target, params: Params, tokens: jax.Array, parents: jax.Array, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    """One target pass over a tree that starts at the end of the cache."""
    mask = ancestor_mask(parents)
    out = target.forward(params, tokens, cache.length[:, None] + depths(mask), mask, cache)
    return out.logits, out.cache


def slots_below(cache: KVCache, row: int, end: int) -> list[np.ndarray]:
    """Every layer's keys and values of one row, below `end`."""
    batch = cache.length.shape[0]
    found = []
    for leaf in jax.tree.leaves((cache.keys, cache.values)):
        apart = leaf.reshape(*leaf.shape[:-3], batch, -1, *leaf.shape[-2:])
        found.append(np.asarray(apart[..., row, :, :end, :]))
    return found


def with_garbage_from(cache: KVCache, end: int, garbage: float) -> KVCache:
    """The same cache with everything at and beyond `end` overwritten."""
    behind = jnp.arange(CAPACITY)[:, None] >= end

    def spoil(leaf: jax.Array) -> jax.Array:
        shape = (1,) * (leaf.ndim - 2) + behind.shape
        return jnp.where(behind.reshape(shape), garbage, leaf)

    return cache._replace(keys=jax.tree.map(spoil, cache.keys), values=jax.tree.map(spoil, cache.values))


def test_rollback_of_a_chain_refused_at_its_third_token(tiny_target: Target, tiny_params: Params) -> None:
    tokens = np.random.default_rng(0).integers(0, 32, size=(1, 16))
    prefix = read(tiny_target, tiny_params, jnp.asarray(tokens[:, :10]))
    parents = jnp.arange(6)[None] - 1
    _, written = run_tree(tiny_target, tiny_params, jnp.asarray(tokens[:, 10:]), parents, prefix)
    kept = kv.commit(written, jnp.asarray([3]))  # the pending token and two drafts
    assert kept.length.tolist() == [13]

    for before, now in zip(slots_below(prefix, 0, 10), slots_below(kept, 0, 10), strict=True):
        np.testing.assert_array_equal(before, now)
    for verified, now in zip(slots_below(written, 0, 13), slots_below(kept, 0, 13), strict=True):
        np.testing.assert_array_equal(verified, now)

    following = jnp.asarray([[7, 8]]), jnp.asarray([[NO_PARENT, 0]])
    read_next, _ = run_tree(tiny_target, tiny_params, *following, kept)
    for garbage in (0.0, 1e4, -1e30):
        spoiled = with_garbage_from(kept, 13, garbage)
        found, _ = run_tree(tiny_target, tiny_params, *following, spoiled)
        np.testing.assert_array_equal(found, read_next)
    # The negative control: one slot that is seen.
    found, _ = run_tree(tiny_target, tiny_params, *following, with_garbage_from(kept, 12, 1.0))
    assert np.abs(found - read_next).max() > 1e-3

    fresh = read(tiny_target, tiny_params, jnp.asarray(tokens[:, :13]))
    from_fresh, _ = run_tree(tiny_target, tiny_params, *following, fresh)
    np.testing.assert_allclose(read_next, from_fresh, atol=1e-5)


@pytest.mark.parametrize("stacked", [False, True])
def test_paths_through_random_trees_equal_a_fresh_prefill(
    tiny_config, tiny_params: Params, stacked: bool
) -> None:
    target = make_target(tiny_config, stacked=stacked)
    params = stack_layers(tiny_params) if stacked else tiny_params
    rng = np.random.default_rng(1)
    lengths = np.array([9, 3, 6])
    prompts = rng.integers(0, 32, size=(3, 9))
    prefix = read(target, params, jnp.asarray(prompts))._replace(length=jnp.asarray(lengths))
    for _ in range(4):
        parents = np.array([[NO_PARENT, *(rng.integers(0, i) for i in range(1, 8))] for _ in range(3)])
        tree = rng.integers(0, 32, size=(3, 8))
        _, written = run_tree(target, params, jnp.asarray(tree), jnp.asarray(parents), prefix)
        path = np.zeros((3, 8), np.int32)
        kept = np.zeros(3, np.int32)
        for row in range(3):
            nodes = [int(rng.integers(4, 8))]
            while nodes[0]:
                nodes.insert(0, int(parents[row, nodes[0]]))
            path[row, : len(nodes)], kept[row] = nodes, len(nodes)
        done = jax.jit(kv.commit)(written, jnp.asarray(kept), jnp.asarray(path))
        assert done.length.tolist() == (lengths + kept).tolist()

        texts = np.zeros((3, 16), np.int64)
        for row, (length, count) in enumerate(zip(lengths, kept, strict=True)):
            texts[row, :length] = prompts[row, :length]
            texts[row, length : length + count] = tree[row, path[row, :count]]
        fresh = read(target, params, jnp.asarray(texts))
        for row, end in enumerate(lengths + kept):
            for found, wanted in zip(slots_below(done, row, end), slots_below(fresh, row, end), strict=True):
                np.testing.assert_allclose(found, wanted, atol=2e-5)
        next_token = jnp.asarray(rng.integers(0, 32, size=(3, 1)))
        root = jnp.full((3, 1), NO_PARENT)
        found, _ = run_tree(target, params, next_token, root, done)
        wanted, _ = run_tree(target, params, next_token, root, fresh._replace(length=done.length))
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_rows_write_and_keep_different_numbers_of_nodes() -> None:
    cache = kv.init_cache(2, 6, num_layers=1, num_heads=2, head_dim=1, dtype=jnp.float32)
    cache = cache._replace(length=jnp.asarray([0, 2]))
    new = jnp.arange(1.0, 13.0).reshape(2, 3, 2, 1)
    written = kv.write(cache.keys[0], new, cache.length)
    assert written[..., 0].tolist() == [
        [1, 3, 5, 0, 0, 0],
        [2, 4, 6, 0, 0, 0],
        [0, 0, 7, 9, 11, 0],
        [0, 0, 8, 10, 12, 0],
    ]
    cache = cache._replace(keys=(written,), values=(-written,))
    done = kv.commit(cache, jnp.asarray([2, 1]), jnp.asarray([[0, 2], [1, 0]]))
    assert done.keys[0][..., 0].tolist() == [
        [1, 5, 5, 0, 0, 0],
        [2, 6, 6, 0, 0, 0],
        [0, 0, 9, 7, 11, 0],
        [0, 0, 10, 8, 12, 0],
    ]
    np.testing.assert_array_equal(done.values[0], -done.keys[0])
    assert done.length.tolist() == [2, 3]


def test_one_row_is_written_as_many_rows_are() -> None:
    slots, new = jnp.zeros((2, 5, 3)), jnp.arange(12.0).reshape(1, 2, 2, 3)
    alone = kv.write(slots, new, jnp.asarray([3]))
    pair = kv.write(jnp.zeros((4, 5, 3)), jnp.tile(new, (2, 1, 1, 1)), jnp.asarray([3, 0]))
    np.testing.assert_array_equal(alone, pair[:2])


def test_rollback_forgets_and_does_not_invent() -> None:
    cache = kv.init_cache(2, 8, num_layers=1, num_heads=1, head_dim=1, dtype=jnp.float32)
    cache = cache._replace(length=jnp.asarray([6, 2]))
    assert kv.rollback(cache, jnp.asarray([4, 4])).length.tolist() == [4, 2]
    assert kv.capacity(cache) == 8


def test_layers_may_be_stacked() -> None:
    cache = kv.init_cache(2, 8, num_layers=3, num_heads=2, head_dim=4, dtype=jnp.float32, stacked=True)
    assert cache.keys.shape == cache.values.shape == (3, 4, 8, 4)
    assert kv.capacity(cache) == 8
