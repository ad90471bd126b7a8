"""Whatever the tree, the laws and the padding: no rule leaves the target's support, and none yields NaN."""

from __future__ import annotations

import functools
import itertools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from specjax.decode import row_keys
from specjax.modules import find_module, module_names
from specjax.sampling import make_warp, warp_probs
from specjax.types import NO_PARENT, NO_TOKEN, ROOT, Draft, Verdict

ROWS, NODES, VOCAB, PADDED = 8, 6, 5, 7  # ids from VOCAB on are padding: the target excludes them
LARGE_VOCAB = 128_256
RULES = {name: find_module("verify", name) for name in module_names("verify")}
TINY = float(np.finfo(np.float32).tiny)

# Zeros, underflows and certainty are all likely.
weights = st.one_of(st.sampled_from([0.0, TINY, 1e-30, 1e-7, 1.0]), st.floats(0.0, 1.0, width=32))


@functools.cache
def compiled(name: str, has_probs: bool):
    """One compilation a rule: trees of every shape have the same bounds."""

    @jax.jit
    def judge(seed, tokens, parents, probs, target_probs):
        keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.key(seed), row))(jnp.arange(ROWS))
        draft = Draft(tokens, parents, probs if has_probs else None)
        return RULES[name].verify(keys, draft, target_probs, max_depth=NODES - 1)

    return judge


@st.composite
def laws(draw, num_tokens: int) -> np.ndarray:
    row = np.zeros(PADDED)
    row[:num_tokens] = draw(st.lists(weights, min_size=num_tokens, max_size=num_tokens))
    if row.max() < TINY:
        row[draw(st.integers(0, num_tokens - 1))] = 1.0
    return (row / row.sum()).astype(np.float32)


@st.composite
def cases(draw, is_chain: bool):
    """A batch: trees with padding and repeats, draft laws that may have mass on padded ids, target laws."""
    tokens = np.full((ROWS, NODES), NO_TOKEN, np.int32)
    parents = np.full((ROWS, NODES), NO_PARENT, np.int32)
    tokens[:, ROOT] = 0
    pool = np.stack([draw(laws(VOCAB)) for _ in range(3)])
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    draft_pool = np.stack([draw(laws(PADDED)), *pool[:2]])
    target, probs = (p[rng.integers(0, 3, (ROWS, NODES))] for p in (pool, draft_pool))
    for row in range(ROWS):
        for node in range(1, NODES):
            parent = node - 1 if is_chain else int(rng.integers(0, node))
            parents[row, node] = parent
            law = probs[row, parent]
            is_open = parent == ROOT or tokens[row, parent] != NO_TOKEN
            if is_open and rng.random() < 0.9:
                tokens[row, node] = rng.choice(np.flatnonzero(law > 0))
    return tokens, parents, probs, target, draw(st.integers(0, 2**31 - 1))


def check(verdict: Verdict, tokens: np.ndarray, parents: np.ndarray, target: np.ndarray) -> None:
    verdict = jax.device_get(verdict)
    for row in range(len(tokens)):
        accepted = verdict.path[row, : verdict.num_accepted[row] + 1]
        assert accepted[0] == ROOT
        for parent, node in itertools.pairwise(accepted):
            assert parents[row, node] == parent
            assert tokens[row, node] != NO_TOKEN
            assert target[row, parent, tokens[row, node]] > 0
        assert 0 <= verdict.next_token[row] < target.shape[-1]
        assert target[row, accepted[-1], verdict.next_token[row]] > 0


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("has_probs", [True, False])
def test_nothing_leaves_the_support_of_the_target(name: str, has_probs: bool) -> None:
    is_chain = getattr(RULES[name], "CHAINS_ONLY", False)

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(cases(is_chain))
    def holds(case) -> None:
        tokens, parents, probs, target, seed = case
        check(compiled(name, has_probs)(seed, tokens, parents, probs, target), tokens, parents, target)

    holds()


@functools.cache
def large_batch(dtype: str, is_chain: bool) -> tuple[Draft, jax.Array]:
    """A draft over the large vocabulary, both laws cut, and the target's law at its nodes."""
    rows, nodes = 4, 8
    rng = np.random.default_rng(0)
    lineage = [NO_PARENT, *(range(nodes - 1) if is_chain else [0, 0, 0, 1, 1, 2, 4])]
    logits = jnp.asarray(4 * rng.normal(size=(rows, nodes, LARGE_VOCAB)), dtype)
    noise = jnp.asarray(rng.normal(size=logits.shape), dtype)
    warp = make_warp(rows, 1.0, 0, 0.9)._replace(top_k=jnp.asarray([0, 50, 3, 1]))

    @jax.jit
    def drawn(logits, noise):
        target, probs = warp_probs(logits, warp), warp_probs(logits + noise, warp)
        tokens = jnp.argmax(probs + jnp.where(probs > 0, 0.1 * jnp.abs(noise), 0.0), -1).astype(jnp.int32)
        parents = jnp.broadcast_to(jnp.asarray(lineage, jnp.int32)[None], tokens.shape)
        drafted = jnp.take_along_axis(tokens, jnp.maximum(parents, 0), axis=1).at[:, ROOT].set(0)
        return Draft(drafted, parents, probs), target

    return drawn(logits, noise)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_large_vocabulary_after_cuts(name: str, dtype: str) -> None:
    rule = RULES[name]
    draft, target = large_batch(dtype, getattr(rule, "CHAINS_ONLY", False))
    rows, nodes = draft.tokens.shape
    judge = jax.jit(functools.partial(rule.verify, max_depth=nodes - 1))
    verdict = judge(row_keys(0, range(rows)), draft, target)
    laws = np.asarray(target)
    assert np.isfinite(laws).all()
    np.testing.assert_allclose(laws.sum(-1), 1.0, rtol=1e-5)
    check(verdict, np.asarray(draft.tokens), np.asarray(draft.parents), laws)
