"""The closed forms against the articles' printed figures, enumeration and simulation."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from specjax.analysis import theory
from specjax.errors import ConfigError

RNG = np.random.default_rng(0)
TARGET = RNG.dirichlet(np.ones(3), 3)
DRAFT = RNG.dirichlet(np.ones(3), 3)


@pytest.mark.parametrize(("acceptance", "draft_length", "printed"), [(0.8, 4, 3.36), (0.75, 5, 3.29)])
def test_printed_tokens_per_pass(acceptance: float, draft_length: int, printed: float) -> None:
    assert round(theory.expected_tokens(acceptance, draft_length), 2) == printed


@pytest.mark.parametrize(("draft_cost", "printed"), [(0.02, 3.36), (0.05, 3.02), (0.10, 2.59), (0.25, 1.81)])
def test_printed_net_gain_of_four_drafts(draft_cost: float, printed: float) -> None:
    # The printed 3.63 is the measured 3.6292: the closed form's 3.6328 would give 1.82 at the last.
    assert round(theory.speedup(3.6292, 4, draft_cost, 1.0), 2) == printed


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("draft_length", [1, 4])
def test_sums_equal_the_quotients(acceptance: float, draft_length: int) -> None:
    def quotient(power: int) -> float:
        return (1 - acceptance**power) / (1 - acceptance)

    def tokens(bonus: bool) -> float:
        return theory.expected_tokens(acceptance, draft_length, bonus=bonus)

    assert tokens(bonus=True) == pytest.approx(quotient(draft_length + 1))
    assert tokens(bonus=False) == pytest.approx(quotient(draft_length))
    factor = theory.wall_clock_factor(acceptance, draft_length, 0.1, 1.3)
    assert factor == pytest.approx(quotient(draft_length + 1) / (0.1 * draft_length + 1.3))
    operations = theory.operations_factor(acceptance, draft_length, 0.1)
    assert operations == pytest.approx((1.1 * draft_length + 1) / quotient(draft_length + 1))


def test_extremes() -> None:
    assert theory.expected_tokens(1.0, 4) == 5
    assert theory.expected_tokens(1.0, 4, bonus=False) == 4
    assert theory.expected_tokens(0.0, 4) == 1
    assert theory.expected_tokens(0.7, 0) == 1
    assert theory.wall_clock_factor(0.7, 0, 0.1, 1.0) == 1


@pytest.mark.parametrize("bonus", [True, False])
def test_block_lengths_of_independent_drafts_by_simulation(bonus: bool) -> None:
    accepted = np.random.default_rng(1).random((200_000, 3)) < 0.7
    tokens = 1 + np.cumprod(accepted, axis=1).sum(1)
    tokens = tokens if bonus else np.minimum(tokens, 3)
    expected = theory.block_lengths(0.7, 3, bonus=bonus)
    measured = np.bincount(tokens, minlength=len(expected) + 1)[1:] / len(tokens)
    assert np.abs(measured - expected).max() < 0.005
    mean, variance = theory.mean_and_variance(expected)
    assert mean == pytest.approx(theory.expected_tokens(0.7, 3, bonus=bonus))
    assert mean == pytest.approx(tokens.mean(), abs=0.01)
    assert variance == pytest.approx(tokens.var(), abs=0.02)


def enumerated_lengths(draft_length: int, bonus: bool) -> np.ndarray:
    """Every drafted block after token 0, accepted token by token with min(1, target / draft)."""
    most = draft_length + 1 if bonus else draft_length
    lengths = np.zeros(most)
    for block in itertools.product(range(3), repeat=draft_length):
        pairs = list(itertools.pairwise((0, *block)))
        drawn = np.prod([DRAFT[pair] for pair in pairs])
        kept = 1.0
        for done, pair in enumerate(pairs):
            accept = min(1.0, TARGET[pair] / DRAFT[pair])
            lengths[done] += drawn * kept * (1 - accept)
            kept *= accept
        lengths[most - 1] += drawn * kept
    return lengths


@pytest.mark.parametrize("bonus", [True, False])
def test_markov_block_lengths_by_enumeration(bonus: bool) -> None:
    start = np.eye(3)[0]
    lengths = theory.markov_block_lengths(TARGET, DRAFT, start, 4, bonus=bonus)
    np.testing.assert_allclose(lengths, enumerated_lengths(4, bonus))
    assert lengths.sum() == pytest.approx(1)


def test_tables_of_equal_rows_are_the_independent_case() -> None:
    rows = np.tile([0.5, 0.5, 0, 0], (4, 1))
    draft = np.tile([0.7, 0.3, 0, 0], (4, 1))
    assert theory.acceptance_of(rows, draft) == pytest.approx(0.8)
    mean, variance = theory.kept_per_block(rows, draft, np.eye(4)[0], 4)
    assert mean == pytest.approx((1 - 0.8**4) / (1 - 0.8))
    assert (mean, variance) == pytest.approx(
        theory.mean_and_variance(theory.block_lengths(0.8, 4, bonus=False))
    )


def test_acceptance_is_what_the_two_laws_share() -> None:
    np.testing.assert_allclose(theory.acceptance_of(TARGET, DRAFT), np.minimum(TARGET, DRAFT).sum(1))
    np.testing.assert_allclose(theory.total_variation(TARGET, TARGET), 0)


def test_optimal_draft_length_is_the_best_of_all() -> None:
    factors = [theory.wall_clock_factor(0.8, length, 0.05, 1 + 0.06 * length) for length in range(1, 21)]
    listed = [1 + 0.06 * length for length in range(21)]
    for cost in (listed, lambda length: 1 + 0.06 * length):
        assert theory.optimal_draft_length(0.8, 0.05, cost, 20) == (1 + np.argmax(factors), max(factors))
    assert theory.optimal_draft_length(0.1, 0.25, lambda length: 1.0, 20) == (0, 1.0)


def test_with_free_verification_a_gain_needs_an_acceptance_above_the_draft_cost() -> None:
    assert theory.break_even_acceptance(1, 0.25, 1.0) == pytest.approx(0.25)
    assert theory.optimal_draft_length(0.26, 0.25, lambda length: 1.0, 20).draft_length == 1
    assert theory.optimal_draft_length(0.24, 0.25, lambda length: 1.0, 20).draft_length == 0


def test_break_even() -> None:
    acceptance = theory.break_even_acceptance(4, 0.1, 1.23)
    assert acceptance is not None
    assert theory.wall_clock_factor(acceptance, 4, 0.1, 1.23) == pytest.approx(1)
    assert theory.break_even_draft_cost(acceptance, 4, 1.23) == pytest.approx(0.1)
    assert theory.break_even_acceptance(4, 1.0, 1.0) is None
    assert theory.break_even_acceptance(4, 0.0, 1.0) == 0
    assert theory.break_even_draft_cost(0.1, 4, 2.0) < 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.expected_tokens(1.1, 4), "acceptance is 1.1"),
        (lambda: theory.expected_tokens(float("nan"), 4), "acceptance is nan"),
        (lambda: theory.expected_tokens(0.5, -1), "draft length is -1"),
        (lambda: theory.expected_tokens(0.5, 0, bonus=False), "yields nothing"),
        (lambda: theory.markov_block_lengths(TARGET, DRAFT, np.eye(3)[0], 0, bonus=False), "yields nothing"),
        (lambda: theory.speedup(3.0, 4, -0.1, 1.0), "draft cost is -0.1"),
        (lambda: theory.speedup(3.0, 4, 0.1, 0.0), "verification cost is 0.0"),
        (lambda: theory.operations_factor(0.5, 4, -1.0), "operations are -1.0"),
        (lambda: theory.optimal_draft_length(0.5, 0.1, [1.0, 1.1], 2), "end at 1 drafts and 2"),
        (lambda: theory.break_even_draft_cost(0.5, 0, 1.0), "draft length is 0"),
        (lambda: theory.acceptance_of(TARGET * 2, DRAFT), "not a law"),
        (lambda: theory.acceptance_of(np.array([1.5, -0.5]), np.array([0.5, 0.5])), "not a law"),
    ],
)
def test_impossible_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
