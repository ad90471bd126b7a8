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


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.97, 1.0])
def test_acceptance_of_a_yield(acceptance: float) -> None:
    yielded = theory.expected_tokens(acceptance, 4)
    assert theory.acceptance_for(yielded, 4) == pytest.approx(acceptance)


def test_costs_of_seconds() -> None:
    assert theory.costs(0.02, 0.001, 0.03) == theory.Costs(pytest.approx(0.05), pytest.approx(1.5))


# A pass reads for 1 ms, and computes for as long once it has 100 tokens.
DEVICE = theory.Device(bytes_per_second=1e12, operations_per_second=1e14, seconds_per_pass=0.0)
MODEL = theory.Work(weight_bytes=1e9, cache_bytes=0.0, operations=1e9, attention_operations=0.0)
HALF = MODEL._replace(weight_bytes=5e8, operations=5e8)


@pytest.mark.parametrize(
    ("batch", "num_nodes", "milliseconds"), [(1, 1, 1.0), (25, 4, 1.0), (100, 1, 1.0), (50, 4, 2.0)]
)
def test_a_pass_takes_the_longer_of_reading_and_computing(
    batch: int, num_nodes: int, milliseconds: float
) -> None:
    assert theory.pass_seconds(MODEL, DEVICE, batch, num_nodes, 1000) == pytest.approx(milliseconds / 1e3)


def test_context_is_read_for_every_row_and_attended_by_every_token() -> None:
    reading = MODEL._replace(cache_bytes=1e5)
    assert theory.pass_seconds(reading, DEVICE, 3, 2, 1000) == pytest.approx(1.3e-3)
    attending = MODEL._replace(attention_operations=1e6)
    assert theory.pass_seconds(attending, DEVICE, 100, 2, 1000) == pytest.approx(4e-3)
    slow = DEVICE._replace(seconds_per_pass=0.5)
    assert theory.pass_seconds(MODEL, slow, 1, 1, 0) == pytest.approx(0.501)


def test_verification_is_free_until_the_batch_fills_the_arithmetic() -> None:
    for batch, verify in ((1, 1.0), (25, 1.0), (50, 2.0), (100, 4.0), (1000, 4.0)):
        found = theory.roofline_costs(MODEL, HALF, DEVICE, batch, 4, 0)
        assert found == theory.Costs(pytest.approx(0.5), pytest.approx(verify))
    assert theory.roofline_costs(MODEL, None, DEVICE, 1, 4, 0).draft_cost == 0


def test_the_batch_at_which_drafts_stop_paying() -> None:
    def factor(batch: int, acceptance: float = 0.8) -> float:
        return theory.batch_factor(acceptance, 3, MODEL, None, DEVICE, batch, 0)

    # 2.952 tokens a pass, which 4 B / 100 target passes outweigh from B = 73.8 on.
    assert factor(1) == factor(25) == pytest.approx(2.952)
    assert factor(50) == pytest.approx(2.952 / 2)
    assert theory.break_even_batch(0.8, 3, MODEL, None, DEVICE, 0, max_batch=500) == 74
    assert theory.break_even_batch(0.8, 3, MODEL, None, DEVICE, 0, max_batch=73) is None
    assert theory.break_even_batch(0.1, 3, MODEL, HALF, DEVICE, 0, max_batch=500) == 1
    assert theory.break_even_batch(1.0, 3, MODEL, None, DEVICE, 0, max_batch=99) is None


def test_with_long_contexts_caches_keep_drafts_worthwhile() -> None:
    reading = MODEL._replace(cache_bytes=1e5)
    assert theory.break_even_batch(0.8, 3, reading, None, DEVICE, 1000, max_batch=200) is None
    assert theory.break_even_batch(0.8, 3, reading, None, DEVICE, 0, max_batch=200) == 74


LOGITS = RNG.normal(size=(2, 5, 8)) * 3  # a target's and a draft's, five rows each


def test_heated_laws_agree_and_a_certain_draft_falls_to_one_in_all_tokens() -> None:
    target, draft = LOGITS
    certain = np.where(np.arange(8) == target.argmax(-1)[:, None], 0.0, -np.inf)
    for proposal, limit in ((draft, 1.0), (certain, 1 / 8)):
        np.testing.assert_allclose(theory.high_temperature_acceptance(target, proposal), limit)
        np.testing.assert_allclose(theory.acceptance_at(target, proposal, 1e7), limit, atol=1e-5)
        # Far from the limit at the usual temperature.
        assert np.abs(theory.acceptance_at(target, proposal, 1.0) - limit).min() > 0.05


def test_heated_laws_after_top_k_agree_where_they_keep_the_same_tokens() -> None:
    target, draft = np.array([3.0, 2, 1, -np.inf, -np.inf]), np.array([-np.inf, 2, 1, 5, 4])
    assert theory.high_temperature_acceptance(target, draft) == 2 / 4
    assert theory.acceptance_at(target, draft, 1e7) == pytest.approx(2 / 4)


def test_temperature_1_is_the_laws_own() -> None:
    laws = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    np.testing.assert_allclose(theory.acceptance_at(*LOGITS, 1.0), theory.acceptance_of(*laws))


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
        (lambda: theory.acceptance_for(5.1, 4), "from 1 to 5"),
        (lambda: theory.acceptance_for(0.9, 4), "from 1 to 5"),
        (lambda: theory.costs(0.0, 0.1, 1.0), "target pass takes 0.0 s"),
        (lambda: theory.costs(1.0, -0.1, 1.0), "draft step takes -0.1 s"),
        (lambda: theory.costs(1.0, 0.1, 0.0), "verification takes 0.0 s"),
        (lambda: theory.pass_seconds(MODEL, DEVICE, 0, 1, 0), "batch is 0"),
        (lambda: theory.pass_seconds(MODEL, DEVICE, 1, 0, 0), "num_nodes is 0"),
        (lambda: theory.pass_seconds(MODEL, DEVICE, 1, 1, -1), "context_length is -1"),
        (lambda: theory.pass_seconds(MODEL, DEVICE._replace(bytes_per_second=0), 1, 1, 0), "positive rates"),
        (lambda: theory.pass_seconds(MODEL._replace(cache_bytes=-1), DEVICE, 1, 1, 0), "none of them neg"),
        (lambda: theory.break_even_batch(0.5, 3, MODEL, None, DEVICE, 0, 0), "max_batch is 0"),
        (lambda: theory.acceptance_at(*LOGITS, 0.0), "temperature is 0.0"),
        (lambda: theory.acceptance_at(*(LOGITS * np.nan), 1.0), "row of logits"),
        (lambda: theory.high_temperature_acceptance(*(LOGITS - np.inf)), "row of logits"),
        (lambda: theory.acceptance_of(np.array([1.5, -0.5]), np.array([0.5, 0.5])), "not a law"),
    ],
)
def test_impossible_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
