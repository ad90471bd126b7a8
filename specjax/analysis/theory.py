"""Closed forms of speculative sampling with a chain of drafts (arXiv 2211.17192, 2302.01318).

The acceptance alpha is the probability that one draft token is accepted, 1 - TV(target, draft); K is the
number of drafts a pass. Tokens per pass include the token that every pass adds by itself: the resampled
one after a refusal, the bonus token where all drafts were accepted. Without the bonus a pass keeps at most
K tokens. All costs are in units of one pass of the target over one token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from specjax.errors import ConfigError

# What a pass that verifies K drafts costs, as a function of K or listed from K = 0 on.
VerifyCost = Callable[[int], float] | Sequence[float]

ROUNDING = 1e-6  # how far a law's sum may be from 1


class Choice(NamedTuple):
    """A number of drafts, 0 for plain decoding, and the wall-clock factor that it gives."""

    draft_length: int
    factor: float


def total_variation(
    target_probs: Float[np.ndarray, "*batch V"], draft_probs: Float[np.ndarray, "*batch V"]
) -> Float[np.ndarray, "*batch"]:
    """Half the absolute difference of two laws; raises ConfigError where either is not a law."""
    target_probs, draft_probs = _laws(target_probs), _laws(draft_probs)
    return np.abs(target_probs - draft_probs).sum(-1) / 2


def acceptance_of(
    target_probs: Float[np.ndarray, "*batch V"], draft_probs: Float[np.ndarray, "*batch V"]
) -> Float[np.ndarray, "*batch"]:
    """The probability that one draft token is accepted, 1 - TV (arXiv 2211.17192, theorem 3.5)."""
    return 1 - total_variation(target_probs, draft_probs)


def expected_tokens(acceptance: float, draft_length: int, *, bonus: bool = True) -> float:
    """Tokens per pass, (1 - alpha^(K+1)) / (1 - alpha), or (1 - alpha^K) / (1 - alpha) without the bonus."""
    return float(_reached(acceptance, draft_length, bonus).sum())


def speedup(tokens_per_pass: float, draft_length: int, draft_cost: float, verify_cost: float) -> float:
    """Tokens per unit of time, tokens / (K c + v); plain decoding is 1.

    `draft_cost` c is one draft step's; `verify_cost` v that of verifying K drafts, which is to be measured:
    the papers take 1, and a CPU is far from it.
    """
    _check_draft_length(draft_length)
    if not draft_cost >= 0:
        raise ConfigError(f"the draft cost is {draft_cost}: give 0 or a positive share of a target pass")
    if not verify_cost > 0:
        raise ConfigError(f"the verification cost is {verify_cost}: give a positive number of target passes")
    return tokens_per_pass / (draft_length * draft_cost + verify_cost)


def wall_clock_factor(acceptance: float, draft_length: int, draft_cost: float, verify_cost: float) -> float:
    """(1 - alpha^(K+1)) / ((1 - alpha) (K c + v)) (arXiv 2211.17192, theorem 3.8, where v is 1)."""
    return speedup(expected_tokens(acceptance, draft_length), draft_length, draft_cost, verify_cost)


def operations_factor(acceptance: float, draft_length: int, draft_operations: float) -> float:
    """Arithmetic per token against plain decoding (arXiv 2211.17192, theorem 3.11).

    `draft_operations` is one draft step's share of the target's operations per token.
    """
    if not draft_operations >= 0:
        raise ConfigError(f"the draft's operations are {draft_operations}: give 0 or a positive share")
    operations = draft_length * draft_operations + draft_length + 1
    return operations / expected_tokens(acceptance, draft_length)


def optimal_draft_length(
    acceptance: float, draft_cost: float, verify_cost: VerifyCost, max_draft_length: int
) -> Choice:
    """The K up to `max_draft_length` of the largest wall-clock factor; 0 where none exceeds 1.

    Raises ConfigError where a listed `verify_cost` ends before `max_draft_length`.
    """
    _check_draft_length(max_draft_length)
    best = Choice(0, 1.0)
    for length in range(1, max_draft_length + 1):
        factor = wall_clock_factor(acceptance, length, draft_cost, _cost_at(verify_cost, length))
        if factor > best.factor:
            best = Choice(length, factor)
    return best


def break_even_acceptance(draft_length: int, draft_cost: float, verify_cost: float) -> float | None:
    """The acceptance above which K drafts gain anything, None where no acceptance is enough."""
    if wall_clock_factor(1.0, draft_length, draft_cost, verify_cost) <= 1:
        return None
    low, high = 0.0, 1.0
    if wall_clock_factor(low, draft_length, draft_cost, verify_cost) >= 1:
        return low
    # The factor grows with the acceptance; halving the interval 60 times exhausts a float.
    for _ in range(60):
        middle = (low + high) / 2
        if wall_clock_factor(middle, draft_length, draft_cost, verify_cost) < 1:
            low = middle
        else:
            high = middle
    return high


def break_even_draft_cost(acceptance: float, draft_length: int, verify_cost: float) -> float:
    """The draft cost below which K drafts gain anything; negative where verification alone costs too much."""
    if draft_length < 1:
        raise ConfigError(f"the draft length is {draft_length}: give at least 1")
    return (expected_tokens(acceptance, draft_length) - verify_cost) / draft_length


def block_lengths(acceptance: float, draft_length: int, *, bonus: bool = True) -> Float[np.ndarray, "L"]:
    """The probabilities that a pass yields 1, 2, ... tokens, all drafts being accepted independently."""
    return _ends(_reached(acceptance, draft_length, bonus))


def markov_block_lengths(
    target_rows: Float[np.ndarray, "V V"],
    draft_rows: Float[np.ndarray, "V V"],
    start: Float[np.ndarray, "V"],
    draft_length: int,
    *,
    bonus: bool = True,
) -> Float[np.ndarray, "L"]:
    """The probabilities that a pass yields 1, 2, ... tokens where each row holds the law after one token.

    `start` is the law of the token before the block. Raises ConfigError where a row is not a law.
    """
    _check_draft_length(draft_length, bonus)
    # The probability that token y is drafted after x and accepted; what rows lack of 1 is refused.
    accepted = np.minimum(_laws(target_rows), _laws(draft_rows))
    alive = _laws(start)
    reached = [alive.sum()]
    for _ in range(draft_length if bonus else draft_length - 1):
        alive = alive @ accepted
        reached.append(alive.sum())
    return _ends(np.array(reached))


def mean_and_variance(lengths: Float[np.ndarray, "L"]) -> tuple[float, float]:
    """Of a distribution over 1, 2, ... tokens."""
    tokens = np.arange(1, len(lengths) + 1)
    mean = float(lengths @ tokens)
    return mean, float(lengths @ (tokens - mean) ** 2)


def kept_per_block(
    target_rows: Float[np.ndarray, "V V"],
    draft_rows: Float[np.ndarray, "V V"],
    start: Float[np.ndarray, "V"],
    draft_length: int,
) -> tuple[float, float]:
    """Mean and variance of the tokens kept of a block without a bonus, over Markov tables.

    The i-th token is kept if the i - 1 drafts before it were accepted: it is accepted too or resampled.
    """
    return mean_and_variance(markov_block_lengths(target_rows, draft_rows, start, draft_length, bonus=False))


def _reached(acceptance: float, draft_length: int, bonus: bool) -> Float[np.ndarray, "L"]:
    """The probability that a pass yields at least 1, 2, ... tokens.

    Summing these powers, and not their quotient, holds for an acceptance of 1 as well.
    """
    if not 0 <= acceptance <= 1:
        raise ConfigError(f"the acceptance is {acceptance}: give a probability, from 0 to 1")
    _check_draft_length(draft_length, bonus)
    return float(acceptance) ** np.arange(draft_length + 1 if bonus else draft_length)


def _ends(reached: Float[np.ndarray, "L"]) -> Float[np.ndarray, "L"]:
    """The probability of each number of tokens, from that of at least so many."""
    return reached - np.append(reached[1:], 0.0)


def _cost_at(verify_cost: VerifyCost, draft_length: int) -> float:
    if callable(verify_cost):
        return verify_cost(draft_length)
    if draft_length >= len(verify_cost):
        raise ConfigError(
            f"the verification costs end at {len(verify_cost) - 1} drafts and {draft_length} were asked for: "
            "measure more or lower max_draft_length"
        )
    return verify_cost[draft_length]


def _check_draft_length(draft_length: int, bonus: bool = True) -> None:
    if draft_length < 0:
        raise ConfigError(f"the draft length is {draft_length}: give 0 (plain decoding) or more")
    if draft_length == 0 and not bonus:
        raise ConfigError("a block of 0 drafts without a bonus token yields nothing: draft at least 1")


def _laws(probs: Float[np.ndarray, "*batch V"]) -> Float[np.ndarray, "*batch V"]:
    probs = np.asarray(probs, np.float64)
    if not (probs >= 0).all() or not np.allclose(probs.sum(-1), 1, rtol=0, atol=ROUNDING):
        raise ConfigError("a row is not a law: its probabilities must be at least 0 and sum to 1")
    return probs
