"""Guards of the single rules: what must never be accepted, and what always must."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode import row_keys
from specjax.trees.topology import chain_parents
from specjax.types import NO_TOKEN, Draft
from specjax.verify import greedy, rejection, target_only

ROWS = 64
VOCAB = 5


def chain(tokens: list[int], probs: np.ndarray | None) -> Draft:
    """The same chain in every row; the root is token 0."""
    rows = jnp.broadcast_to(jnp.asarray([0, *tokens], jnp.int32), (ROWS, len(tokens) + 1))
    laws = None if probs is None else jnp.broadcast_to(jnp.asarray(probs, jnp.float32), (ROWS, *probs.shape))
    return Draft(rows, chain_parents(ROWS, len(tokens) + 1), laws)


def certain(*tokens: int) -> np.ndarray:
    """Laws that put probability 1 on these tokens in turn."""
    return np.eye(VOCAB, dtype=np.float32)[list(tokens)]


def judge(rule, draft: Draft, target: np.ndarray):
    laws = jnp.broadcast_to(jnp.asarray(target, jnp.float32), (ROWS, *target.shape))
    keys = row_keys(0, range(ROWS))
    return jax.jit(rule.verify, static_argnames="max_depth")(
        keys, draft, laws, max_depth=draft.tokens.shape[1] - 1
    )


@pytest.mark.parametrize("rule", [greedy, rejection, target_only])
@pytest.mark.parametrize("with_probs", [False, True])
def test_no_token_is_never_accepted_even_where_the_last_entry_is_certain(rule, with_probs: bool) -> None:
    last = VOCAB - 1
    laws = certain(last, last, last) if with_probs else None
    verdict = judge(rule, chain([NO_TOKEN, NO_TOKEN], laws), certain(last, last, last))
    assert not verdict.num_accepted.any()
    assert (verdict.next_token == last).all()
    verdict = judge(rule, chain([last, NO_TOKEN], laws), certain(last, last, last))
    assert (verdict.num_accepted == 1).all()
    assert (verdict.next_token == last).all()


@pytest.mark.parametrize("rule", [greedy, rejection, target_only])
def test_agreement_is_accepted_whole_and_the_bonus_follows(rule) -> None:
    verdict = judge(rule, chain([3, 1], certain(3, 1, 0)), certain(3, 1, 2))
    assert (verdict.num_accepted == 2).all() and (verdict.next_token == 2).all()
    assert verdict.path[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("rule", [greedy, rejection, target_only])
def test_a_token_of_probability_0_is_refused_and_the_rest_with_it(rule) -> None:
    verdict = judge(rule, chain([3, 1], certain(3, 1, 0)), certain(4, 1, 2))
    assert not verdict.num_accepted.any() and (verdict.next_token == 4).all()


def test_rejection_accepts_with_the_ratio() -> None:
    # Acceptance 0.25 / 0.5, 4 standard errors of 64 rows wide; a rule that took the target alone gives 0.25.
    draft_law = np.tile([0.5, 0.5, 0, 0, 0], (2, 1))
    target_law = np.tile([0.25, 0.75, 0, 0, 0], (2, 1))
    rows = 40 * ROWS
    draft = chain([0], draft_law)
    draft = Draft(*(jnp.tile(part, (40,) + (1,) * (part.ndim - 1)) for part in draft))
    laws = jnp.broadcast_to(jnp.asarray(target_law, jnp.float32), (rows, 2, VOCAB))
    verdict = rejection.verify(row_keys(0, range(rows)), draft, laws, max_depth=1)
    assert abs(float(verdict.num_accepted.mean()) - 0.5) < 4 * 0.5 / rows**0.5
    # What was refused resamples from the residual, which holds token 1 only.
    assert (verdict.next_token[verdict.num_accepted == 0] == 1).all()


def test_equal_laws_are_always_accepted() -> None:
    law = np.tile([0.1, 0.2, 0.3, 0.4, 0.0], (3, 1))
    verdict = judge(rejection, chain([0, 3], law), law)
    assert (verdict.num_accepted == 2).all()


def test_a_drawn_token_of_draft_probability_0_yields_no_nan() -> None:
    verdict = judge(rejection, chain([2], certain(1, 1)), np.full((2, VOCAB), 0.2))
    assert ((verdict.next_token >= 0) & (verdict.next_token < VOCAB)).all()


def test_rejection_refuses_a_tree() -> None:
    parents = jnp.asarray([[-1, 0, 0]] * ROWS, jnp.int32)
    draft = Draft(jnp.asarray([[0, 0, 1]] * ROWS, jnp.int32), parents, None)
    laws = jnp.full((ROWS, 3, VOCAB), 1 / VOCAB)
    with pytest.raises(ValueError, match="rejection judges chains: 3 nodes at depth 1 are a tree"):
        rejection.verify(row_keys(0, range(ROWS)), draft, laws, max_depth=1)
