"""Trees grown by value against a plain Python implementation, ties included."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.trees.dynamic import (
    BLOCK,
    NO_SLOT,
    GrowingTree,
    RankedTree,
    covering,
    expand,
    likeliest,
    rerank,
    start,
    top_k,
)
from specjax.trees.topology import ancestor_mask, depths, paths_of
from specjax.types import NO_PARENT, NO_TOKEN

VOCAB = 7
DEPTH = 4


class Settings(NamedTuple):
    """The numbers of children a node, of nodes expanded at each depth and of nodes kept."""

    num_children: int
    width: int
    num_nodes: int


def children(law: Any, num_children: int) -> tuple[Any, Any]:
    """The best tokens of a law [..., V] of log-probabilities and theirs, untouched by any rounding."""
    best, tokens = jax.lax.top_k(law, num_children)
    return tokens.astype(jnp.int32), best


def grow(table: Any, pending: Any, settings: Settings) -> tuple[RankedTree, Any, GrowingTree]:
    """Drive a tree whose law after a node is the row `sum of its path's tokens` of a table [V, V].

    The sums are made of what each node sees in the slots, so that a wrong mask gives another tree.
    """
    tree = start(pending.shape[0])
    laws = table[pending][:, None]
    slots = jnp.zeros((pending.shape[0], 0), jnp.int32)
    for _ in range(DEPTH):
        tree = expand(tree, *children(laws, settings.num_children), settings.width)
        slots = jnp.concatenate((slots, jnp.maximum(tree.tokens, 0)), axis=1)
        total = pending[:, None] + jnp.where(tree.seen, slots[:, None], 0).sum(-1)
        laws = table[total % VOCAB]
    return rerank(tree, settings.num_nodes), slots, tree


grow_jitted = jax.jit(grow, static_argnums=2)


class Node:
    """A node of the plain implementation."""

    def __init__(self, token: int, parent: Node | None, value: float, total: int) -> None:
        self.token, self.parent, self.value, self.total = token, parent, value, total


def grow_plainly(table: np.ndarray, pending: int, settings: Settings) -> list[Node]:
    """EAGLE-2 as the paper has it: expand the best of each level, keep the best of all."""
    level = [Node(NO_TOKEN, None, 0.0, pending)]
    candidates = list(level)
    for _ in range(DEPTH):
        found = []
        for parent in level:
            law = table[parent.total % VOCAB]
            for token in sorted(range(VOCAB), key=lambda token: -law[token])[: settings.num_children]:
                if law[token] > -np.inf:
                    found.append(Node(token, parent, parent.value + law[token], parent.total + token))
        candidates += found
        level = sorted(found, key=lambda node: -node.value)[: settings.width]
    number = {id(node): i for i, node in enumerate(candidates)}
    best = sorted(candidates, key=lambda node: -node.value)[: settings.num_nodes]
    return sorted(best, key=lambda node: number[id(node)])


def quantised_table(seed: int, with_gaps: bool) -> np.ndarray:
    """Log-probabilities of eighths: sums are exact and most values tie, some being certain tokens (0)."""
    rng = np.random.default_rng(seed)
    table = -rng.integers(0, 5, size=(VOCAB, VOCAB)) / 8
    if with_gaps:
        table[rng.random(table.shape) < 0.6] = -np.inf
    return table.astype(np.float32)


@pytest.mark.parametrize(
    ("settings", "with_gaps"),
    [
        (Settings(3, 3, 12), False),
        (Settings(3, 3, 12), True),
        (Settings(7, 2, 80), True),
        (Settings(1, 1, 5), False),
    ],
)
def test_same_tree_as_the_plain_implementation(settings: Settings, with_gaps: bool) -> None:
    pending = np.arange(VOCAB)
    for seed in range(6):
        table = quantised_table(seed, with_gaps)
        ranked, _, _ = grow_jitted(jnp.asarray(table), jnp.asarray(pending), settings)
        assert ranked.tokens.shape == ranked.parents.shape == (VOCAB, settings.num_nodes)
        for row in range(VOCAB):
            expected = grow_plainly(table, row, settings)
            place = {id(node): i for i, node in enumerate(expected)}
            unused = settings.num_nodes - len(expected)
            parents = [NO_PARENT if n.parent is None else place[id(n.parent)] for n in expected]
            assert ranked.tokens[row].tolist() == [n.token for n in expected] + [NO_TOKEN] * unused
            assert ranked.parents[row].tolist() == parents + [0] * unused
            assert ranked.values[row].tolist() == [n.value for n in expected] + [-np.inf] * unused


def test_every_parent_comes_first_and_is_worth_no_less() -> None:
    """With certain tokens a child is worth as much as its parent, and must not displace it."""
    for table in (np.zeros((VOCAB, VOCAB), np.float32), quantised_table(9, with_gaps=False)):
        ranked, _, _ = grow_jitted(jnp.asarray(table), jnp.arange(VOCAB), Settings(3, 3, 12))
        for parents, values in zip(ranked.parents.tolist(), ranked.values.tolist(), strict=True):
            paths_of(parents)
            assert all(values[p] >= v for p, v in zip(parents[1:], values[1:], strict=True))
        assert int(depths(ancestor_mask(ranked.parents)).max()) <= DEPTH


def test_slots_hold_each_nodes_own_token_and_its_ancestors_are_seen() -> None:
    settings = Settings(3, 4, 25)
    ranked, slots, tree = grow_jitted(jnp.asarray(quantised_table(3, True)), jnp.arange(VOCAB), settings)
    num_read = slots.shape[1] - tree.tokens.shape[1]
    num_held = 0
    for row in range(VOCAB):
        for token, slot in zip(ranked.tokens[row].tolist(), ranked.slots[row].tolist(), strict=True):
            if slot != NO_SLOT:
                num_held += 1
                assert 0 <= slot < num_read and slots[row, slot] == token
    assert num_held > VOCAB
    assert (ranked.slots[:, 0] == NO_SLOT).all()
    # Every node sees one slot of each depth from the first to its own, its own among them.
    assert (tree.seen.sum(-1) == DEPTH).all()
    np.testing.assert_array_equal(tree.seen[..., num_read:], np.tile(np.eye(4, dtype=bool), (VOCAB, 1, 1)))


def test_interior_nodes_were_all_read() -> None:
    ranked, _, _ = grow_jitted(jnp.asarray(quantised_table(4, False)), jnp.arange(VOCAB), Settings(3, 4, 25))
    for parents, slots in zip(ranked.parents.tolist(), ranked.slots.tolist(), strict=True):
        assert all(slots[parent] != NO_SLOT for parent in set(parents[1:]) - {0})


def test_a_row_depends_on_itself_alone() -> None:
    table, settings = jnp.asarray(quantised_table(5, True)), Settings(3, 3, 12)
    one, _, _ = grow_jitted(table, jnp.arange(VOCAB), settings)
    other, _, _ = grow_jitted(table, jnp.arange(VOCAB).at[:3].set(6), settings)
    assert (one.tokens[:3] != other.tokens[:3]).any()
    for before, after in zip(one, other, strict=True):
        np.testing.assert_array_equal(before[3:], after[3:])


def test_traces_once() -> None:
    count = 0

    def counted(table: Any, pending: Any) -> RankedTree:
        nonlocal count
        count += 1
        return grow(table, pending, Settings(3, 3, 12))[0]

    jitted = jax.jit(counted)
    for seed in range(3):
        jitted(jnp.asarray(quantised_table(seed, with_gaps=seed > 0)), jnp.asarray([seed, 1]))
    assert count == 1


def test_rounding_above_probability_1_does_not_break_connectivity() -> None:
    @jax.jit
    def build() -> RankedTree:
        tree = start(1)
        for log_prob in (0.0, 1e-6):
            tree = expand(tree, jnp.zeros((1, 1, 1), jnp.int32), jnp.full((1, 1, 1), log_prob), width=1)
        return rerank(tree, 2)

    ranked = build()
    assert ranked.parents.tolist() == [[NO_PARENT, 0]] and ranked.values.tolist() == [[0.0, 0.0]]


def test_likeliest_are_the_best_log_probabilities() -> None:
    logits = 3 * np.random.default_rng(0).normal(size=(2, 3, 2000)).astype(np.float32)
    logits[0, 0, 5:] = -np.inf
    tokens, log_probs = jax.jit(likeliest, static_argnums=1)(jnp.asarray(logits), 8)
    law = np.asarray(jax.nn.log_softmax(logits))
    order = np.argsort(-logits, axis=-1, kind="stable")[..., :8]
    expected = np.take_along_axis(law, order, axis=-1)
    np.testing.assert_array_equal(tokens, np.where(expected > -np.inf, order, NO_TOKEN))
    np.testing.assert_allclose(log_probs, expected, rtol=1e-5)
    assert tokens[0, 0].tolist()[5:] == [NO_TOKEN] * 3


def test_an_empty_law_has_no_children() -> None:
    @jax.jit
    def build(logits: Any) -> RankedTree:
        return rerank(expand(start(1), *likeliest(logits, 3), width=2), 3)

    assert build(jnp.full((1, 1, VOCAB), -jnp.inf)).tokens.tolist() == [[NO_TOKEN] * 3]


@pytest.mark.parametrize("vocab_size", [50, BLOCK * 10, BLOCK * 40 + 1])
@pytest.mark.parametrize("num_best", [1, 3, 10])
def test_top_k_in_blocks_is_top_k(vocab_size: int, num_best: int) -> None:
    rng = np.random.default_rng(vocab_size + num_best)
    jitted = jax.jit(lambda values: top_k(values, num_best))
    for values in (
        rng.normal(size=(2, 3, vocab_size)),
        rng.integers(0, 3, size=(2, 3, vocab_size)),
        np.where(rng.random((2, 3, vocab_size)) < 2 / vocab_size, 1.0, -np.inf),
    ):
        wanted, where = jax.lax.top_k(jnp.asarray(values, jnp.float32), num_best)
        best, found = jitted(jnp.asarray(values, jnp.float32))
        np.testing.assert_array_equal(best, wanted)
        np.testing.assert_array_equal(found, where)


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 1.0])
def test_as_many_children_as_cover_the_mass(top_p: float) -> None:
    probs = -np.sort(-np.random.default_rng(1).dirichlet(np.full(9, 0.5), size=(4, 3)))[..., :6]
    tokens = np.broadcast_to(np.arange(6, dtype=np.int32), probs.shape)
    kept, log_probs = covering(jnp.asarray(tokens), jnp.log(jnp.asarray(probs, jnp.float32)), top_p)
    for law, row, left in zip(
        probs.reshape(-1, 6), kept.reshape(-1, 6), log_probs.reshape(-1, 6), strict=True
    ):
        wanted, mass = 0, 0.0
        while wanted < 6 and mass < top_p:
            mass += law[wanted]
            wanted += 1
        assert row.tolist() == [*range(wanted), *[NO_TOKEN] * (6 - wanted)]
        assert (np.isneginf(left) == (np.arange(6) >= wanted)).all()


def test_branching_by_mass_gives_sure_nodes_fewer_children() -> None:
    @jax.jit
    def build(first: Any, second: Any) -> RankedTree:
        tree = expand(start(1), jnp.asarray([[[4, 5]]]), first, width=2)
        return rerank(expand(tree, *covering(*likeliest(second, 3), 0.9), width=3), 10)

    laws = ([[[0.6, 0.4]]], [[[0.95, 0.03, 0.02], [0.4, 0.35, 0.25]]])
    ranked = build(*(np.log(np.asarray(law, np.float32)) for law in laws))
    assert ranked.tokens.tolist() == [[NO_TOKEN, 4, 5, 0, 0, 1, 2, *[NO_TOKEN] * 3]]
    assert ranked.parents.tolist() == [[NO_PARENT, 0, 0, 1, 2, 2, 2, 0, 0, 0]]
