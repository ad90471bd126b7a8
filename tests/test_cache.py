"""What a cache holds after drafts were written, kept, moved or forgotten.

Garbage behind the length is finite here: slots that no node sees have the weight 0, and 0 times NaN is NaN.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.stages import Compiled

from specjax import cache as kv
from specjax.decode import rollout, row_keys, start
from specjax.drafters import adaptive, cascade, self_speculative
from specjax.eval.exactness.subjects import made_up
from specjax.models.functional import make_target, stack_layers
from specjax.prefill import read_prompt
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.trees.topology import ancestor_mask, depths
from specjax.types import NO_PARENT, DecodeState, KVCache, ModelParams, Params, Parts, Request, Target
from specjax.verify import greedy

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
        apart = np.asarray(leaf).reshape(*leaf.shape[:-3], batch, -1, *leaf.shape[-2:])
        found.append(apart[..., row, :, :end, :].copy())
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


NUM_NODES = 8
# How many nodes each row of each batch keeps: every number, 0 for a row that has ended.
KEPT = np.random.default_rng(2).permutation([*range(NUM_NODES + 1), 1, 4, NUM_NODES]).reshape(4, 3)


class Accepted(NamedTuple):
    """A written tree in each row, the path that was accepted, and the text it leaves."""

    written: KVCache
    path: np.ndarray
    kept: np.ndarray
    ends: np.ndarray
    texts: np.ndarray


def accept_random_paths(
    target: Target, params: Params, rng: np.random.Generator, kept: np.ndarray
) -> Accepted:
    """Rows of different lengths with random trees, in each a random path of `kept` nodes."""
    batch = len(kept)
    lengths = rng.permutation([9, 3, 6])
    texts = rng.integers(0, 32, size=(batch, 9 + NUM_NODES))
    prefix = read(target, params, jnp.asarray(texts[:, :9]))._replace(length=jnp.asarray(lengths))
    tree = rng.integers(0, 32, size=(batch, NUM_NODES))
    parents = np.array(
        [[NO_PARENT, *(rng.integers(0, i) for i in range(1, NUM_NODES))] for _ in range(batch)]
    )
    path = rng.integers(0, NUM_NODES, size=(batch, NUM_NODES))  # what is beyond the kept means nothing
    for row, count in enumerate(kept):
        drafts = rng.choice(np.arange(1, NUM_NODES), size=max(count - 1, 0), replace=False)
        nodes = [0, *sorted(drafts)][:count]
        path[row, :count] = nodes
        parents[row, nodes[1:]] = nodes[:-1]
        texts[row, lengths[row] : lengths[row] + count] = tree[row, nodes]
    _, written = run_tree(target, params, jnp.asarray(tree), jnp.asarray(parents), prefix)
    return Accepted(written, path, kept, lengths + kept, texts)


def deviations(found: KVCache, wanted: KVCache, ends: np.ndarray) -> list[float]:
    """How far two caches are apart in each row, in the slots below its end."""
    return [
        max(
            float(np.abs(mine - other).max())
            for mine, other in zip(slots_below(found, row, end), slots_below(wanted, row, end), strict=True)
        )
        for row, end in enumerate(ends)
    ]


commit_in_place = jax.jit(kv.commit, donate_argnums=0)


def compacted(case: Accepted, path: np.ndarray | None) -> KVCache:
    """The cache after a path, in the place of a copy of the one that was written."""
    given = jax.tree.map(jnp.copy, case.written)
    done = commit_in_place(given, jnp.asarray(case.kept), None if path is None else jnp.asarray(path))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((given.keys, given.values)))
    return done


@pytest.mark.parametrize("stacked", [False, True])
def test_paths_through_random_trees_equal_a_fresh_prefill(
    tiny_config, tiny_params: Params, stacked: bool
) -> None:
    target = make_target(tiny_config, stacked=stacked)
    params = stack_layers(tiny_params) if stacked else tiny_params
    rng = np.random.default_rng(1)
    for kept in KEPT:
        case = accept_random_paths(target, params, rng, kept)
        fresh = read(target, params, jnp.asarray(case.texts))._replace(length=jnp.asarray(case.ends))
        following = jnp.asarray(rng.integers(0, 32, size=(3, 1))), jnp.full((3, 1), NO_PARENT)
        wanted, _ = run_tree(target, params, *following, fresh)

        done = compacted(case, case.path)
        assert done.length.tolist() == case.ends.tolist()
        assert max(deviations(done, fresh, case.ends)) < 2e-5
        logits, _ = run_tree(target, params, *following, done)
        np.testing.assert_allclose(logits, wanted, atol=1e-4)

        # The negative controls, seen by the same comparison: another last node, and nothing moved.
        row = int(np.argmax(kept))
        other = case.path.copy()
        other[row, kept[row] - 1] = (other[row, kept[row] - 1] + 1) % NUM_NODES
        moved_rows = [r for r in range(3) if (case.path[r, : kept[r]] != np.arange(kept[r])).any()]
        for path, rows in ((other, [row]), (None, moved_rows)):
            wrong = compacted(case, path)
            apart = deviations(wrong, fresh, case.ends)
            logits, _ = run_tree(target, params, *following, wrong)
            for r in rows:
                assert apart[r] > 1e-2
                assert np.abs(logits[r] - wanted[r]).max() > 1e-3


def cache_operations(program: str, cache: KVCache) -> set[str]:
    """The operations of a compiled program whose result is as large as a layer's keys."""
    sizes = ",".join(map(str, jax.tree.leaves(cache.keys)[0].shape))
    return set(re.findall(rf"= f32\[{sizes}\]\S* ([\w-]+)\(", program))


PASSED_ON = {"parameter", "get-tuple-element"}
WRITTEN_IN_PLACE = {"fusion", "dynamic-update-slice", "scatter"}


def test_a_chain_moves_nothing_and_a_path_only_itself() -> None:
    cache = kv.init_cache(2, 500, num_layers=2, num_heads=2, head_dim=8, dtype=jnp.float32)
    path = jnp.zeros((2, 4), jnp.int32)
    chain, tree = (
        commit_in_place.lower(cache, cache.length, *given).compile().as_text() for given in ((), (path,))
    )
    assert cache_operations(chain, cache) == {"parameter"}
    assert cache_operations(tree, cache) <= PASSED_ON | WRITTEN_IN_PLACE
    # The negative control: a cache that is not given away has to be copied.
    kept = jax.jit(kv.commit).lower(cache, cache.length, path).compile().as_text()
    assert "copy" in cache_operations(kept, cache)


def compiled_rounds(method: Method, params: ModelParams) -> tuple[Compiled, Request, DecodeState]:
    """Three rounds as one program, and what it takes."""
    options = {"warp": make_warp(2), "keys": row_keys(0, [0, 1]), "capacity": 500}
    request, state = start(method, params, [[1, 2, 3], [4, 5]], max_new_tokens=20, **options)
    return rollout.lower(method, params, request, state, 3).compile(), request, state


def test_adaptive_rounds_draft_in_the_targets_cache_in_place(
    tiny_target: Target, tiny_params: Params
) -> None:
    thinned = self_speculative.Config(draft_length=3, skip_layers=(1,), share_cache=True)
    inner = self_speculative.build(thinned, tiny_target)
    config = adaptive.Config({}, (1.3, 1.6, 1.9))
    drafter = adaptive.build(config, tiny_target, Parts(inner))
    method, params = Method(tiny_target, drafter, greedy.verify), ModelParams(tiny_params, {"inner": {}})
    compiled, _, state = compiled_rounds(method, params)
    assert cache_operations(compiled.as_text(), state.cache) <= PASSED_ON | WRITTEN_IN_PLACE


def test_a_cascade_writes_the_targets_cache_in_place(tiny_target: Target, tiny_params: Params) -> None:
    config = cascade.Config({"name": "eagle", "draft_length": 2}, None, 3, share_cache=True)
    drafter, weights = made_up(cascade, config, tiny_target, tiny_params, 0.1)
    method, params = Method(tiny_target, drafter, greedy.verify), ModelParams(tiny_params, weights)
    compiled, _, state = compiled_rounds(method, params)
    assert cache_operations(compiled.as_text(), state.cache) <= PASSED_ON | WRITTEN_IN_PLACE


@pytest.mark.parametrize("branching", [(), (2, 2, 1)])
def test_rounds_write_the_cache_in_place(
    tiny_target: Target, tiny_params: Params, branching: tuple[int, ...]
) -> None:
    config = self_speculative.Config(
        draft_length=3, skip_layers=(1,), branching=branching, proposal="point_mass"
    )
    method = Method(tiny_target, self_speculative.build(config, tiny_target), greedy.verify)
    params = ModelParams(tiny_params, {})
    compiled, request, state = compiled_rounds(method, params)
    assert cache_operations(compiled.as_text(), state.cache) <= PASSED_ON | WRITTEN_IN_PLACE
    caches = state.cache.keys, state.cache.values, state.draft_state.cache.keys
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(caches))
    assert compiled.memory_analysis().alias_size_in_bytes >= size
    places = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(caches)}
    after, _ = compiled(params, request, state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(caches))
    caches = after.cache.keys, after.cache.values, after.draft_state.cache.keys
    assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(caches)} == places


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
