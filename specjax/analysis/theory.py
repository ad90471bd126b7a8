"""Closed forms of speculative sampling with a chain of drafts (arXiv 2211.17192, 2302.01318).

The acceptance alpha is the probability that one draft token is accepted, 1 - TV(target, draft); K is the
number of drafts a pass. Tokens per pass include the token that every pass adds by itself: the resampled
one after a refusal, the bonus token where all drafts were accepted. Without the bonus a pass keeps at most
K tokens. All costs are in units of one pass of the target over one token.

Where nothing was measured, a roofline stands in: a pass takes as long as the slower of reading its bytes and
doing its operations, which foresees how a growing batch uses up the arithmetic that verification lives on.
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


class Costs(NamedTuple):
    """What a draft step (c) and verifying K drafts (v) cost, in target passes over one token."""

    draft_cost: float
    verify_cost: float


class Device(NamedTuple):
    """A machine's roof: bytes and operations a second at most, and the seconds that every pass takes anyhow.

    A multiplication and an addition are two operations, as manufacturers count.
    """

    bytes_per_second: float
    operations_per_second: float
    seconds_per_pass: float


class Work(NamedTuple):
    """What a model does in a pass: bytes of all weights, and for each row its context and its tokens.

    `cache_bytes` are read for each token of the context, `operations` done for each token of the pass, and
    `attention_operations` for each pair of both. `specjax.analysis.memory.work` counts them.
    """

    weight_bytes: float
    cache_bytes: float
    operations: float
    attention_operations: float


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
    return tokens_per_pass / _pass_cost(draft_length, draft_cost, verify_cost)


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


def acceptance_for(tokens_per_pass: float, draft_length: int) -> float:
    """The acceptance at which K drafts yield so many tokens a pass, the inverse of `expected_tokens`.

    Raises ConfigError where no acceptance does: a pass yields at least 1 and at most K + 1 tokens.
    """
    if not 1 <= tokens_per_pass <= draft_length + 1:
        raise ConfigError(
            f"{tokens_per_pass} tokens a pass: {draft_length} drafts yield from 1 to {draft_length + 1}"
        )
    if tokens_per_pass == 1:
        return 0.0
    low, high = 0.0, 1.0
    # The yield grows with the acceptance; halving the interval 60 times exhausts a float.
    for _ in range(60):
        middle = (low + high) / 2
        if expected_tokens(middle, draft_length) < tokens_per_pass:
            low = middle
        else:
            high = middle
    return high


def break_even_acceptance(draft_length: int, draft_cost: float, verify_cost: float) -> float | None:
    """The acceptance above which K drafts gain anything, None where no acceptance is enough."""
    cost = _pass_cost(draft_length, draft_cost, verify_cost)
    if cost >= draft_length + 1:
        return None
    return acceptance_for(max(cost, 1.0), draft_length)


def break_even_draft_cost(acceptance: float, draft_length: int, verify_cost: float) -> float:
    """The draft cost below which K drafts gain anything; negative where verification alone costs too much."""
    if draft_length < 1:
        raise ConfigError(f"the draft length is {draft_length}: give at least 1")
    return (expected_tokens(acceptance, draft_length) - verify_cost) / draft_length


def costs(target_seconds: float, draft_seconds: float, verify_seconds: float) -> Costs:
    """c and v of measured seconds: a target pass over one token, a draft step, and verifying K drafts."""
    for name, seconds in (("target pass", target_seconds), ("verification", verify_seconds)):
        if not seconds > 0:
            raise ConfigError(f"the {name} takes {seconds} s: give a positive number of seconds")
    if not draft_seconds >= 0:
        raise ConfigError(f"the draft step takes {draft_seconds} s: give 0 or a positive number of seconds")
    return Costs(draft_seconds / target_seconds, verify_seconds / target_seconds)


def pass_seconds(model: Work, device: Device, batch: int, num_nodes: int, context_length: float) -> float:
    """Seconds of one pass over `num_nodes` tokens in each of `batch` rows with so many tokens of context.

    The larger of the time to read weights and caches and the time to compute, plus the device's own; a bound
    from below, since no kernel reaches both roofs (roofline model, doi 10.1145/1498765.1498785).
    """
    for name, value in (("batch", batch), ("num_nodes", num_nodes)):
        if value < 1:
            raise ConfigError(f"{name} is {value}: give at least 1")
    if not context_length >= 0:
        raise ConfigError(f"context_length is {context_length}: give 0 or more tokens")
    if not (
        device.bytes_per_second > 0 and device.operations_per_second > 0 and device.seconds_per_pass >= 0
    ):
        raise ConfigError(f"{device}: give positive rates, and 0 or more seconds a pass")
    if not min(model) >= 0 or not model.weight_bytes + model.operations > 0:
        raise ConfigError(f"{model}: give weights to read and operations to do, none of them negative")
    read = model.weight_bytes + batch * context_length * model.cache_bytes
    tokens = batch * num_nodes
    computed = tokens * (model.operations + context_length * model.attention_operations)
    return device.seconds_per_pass + max(
        read / device.bytes_per_second, computed / device.operations_per_second
    )


def roofline_costs(
    target: Work, draft: Work | None, device: Device, batch: int, num_nodes: int, context_length: float
) -> Costs:
    """c and v(N, batch) on a roofline: a draft step, and a pass over N nodes a row, the root among them.

    Both in target passes over one token a row of the same batch and context; drafts of None are free.
    """
    return costs(
        target_seconds=pass_seconds(target, device, batch, 1, context_length),
        draft_seconds=0.0 if draft is None else pass_seconds(draft, device, batch, 1, context_length),
        verify_seconds=pass_seconds(target, device, batch, num_nodes, context_length),
    )


def batch_factor(
    acceptance: float,
    draft_length: int,
    target: Work,
    draft: Work | None,
    device: Device,
    batch: int,
    context_length: float,
) -> float:
    """The wall-clock factor of K drafts in each row of a batch, at the roofline's costs.

    Rows go on independently, so a row gains what its own pass yields and the batch only sets the costs.
    """
    found = roofline_costs(target, draft, device, batch, draft_length + 1, context_length)
    return wall_clock_factor(acceptance, draft_length, found.draft_cost, found.verify_cost)


def break_even_batch(
    acceptance: float,
    draft_length: int,
    target: Work,
    draft: Work | None,
    device: Device,
    context_length: float,
    max_batch: int,
) -> int | None:
    """The smallest batch at which K drafts gain nothing any more, None where they pay up to `max_batch`.

    With long contexts they may pay again in larger batches, where caches are most of what is read
    (arXiv 2408.11049).
    """
    if max_batch < 1:
        raise ConfigError(f"max_batch is {max_batch}: give at least 1")
    for batch in range(1, max_batch + 1):
        if batch_factor(acceptance, draft_length, target, draft, device, batch, context_length) <= 1:
            return batch
    return None


def acceptance_at(
    target_logits: Float[np.ndarray, "*batch V"],
    draft_logits: Float[np.ndarray, "*batch V"],
    temperature: float,
) -> Float[np.ndarray, "*batch"]:
    """The acceptance of one draft token, both laws taken at `temperature`, above 0.

    A logit of -inf is a token that top-k left out; a draft with a single finite logit is a certain token.
    """
    if not temperature > 0:
        raise ConfigError(f"the temperature is {temperature}: give a positive one")
    return acceptance_of(_softmax(target_logits, temperature), _softmax(draft_logits, temperature))


def high_temperature_acceptance(
    target_logits: Float[np.ndarray, "*batch V"], draft_logits: Float[np.ndarray, "*batch V"]
) -> Float[np.ndarray, "*batch"]:
    """What `acceptance_at` tends to as the temperature grows: tokens in common / the larger of both supports.

    Both laws become uniform over the tokens that have a finite logit. So a draft that is drawn at the
    target's temperature is accepted always, and a certain one with 1 / V, or 1 / k after top-k.
    """
    kept = [np.isfinite(_logits(logits)) for logits in (target_logits, draft_logits)]
    return (kept[0] & kept[1]).sum(-1) / np.maximum(kept[0].sum(-1), kept[1].sum(-1))


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


def _pass_cost(draft_length: int, draft_cost: float, verify_cost: float) -> float:
    """K c + v, what a pass of K drafts costs."""
    _check_draft_length(draft_length)
    if not draft_cost >= 0:
        raise ConfigError(f"the draft cost is {draft_cost}: give 0 or a positive share of a target pass")
    if not verify_cost > 0:
        raise ConfigError(f"the verification cost is {verify_cost}: give a positive number of target passes")
    return draft_length * draft_cost + verify_cost


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


def _logits(logits: Float[np.ndarray, "*batch V"]) -> Float[np.ndarray, "*batch V"]:
    logits = np.asarray(logits, np.float64)
    if np.isnan(logits).any() or np.isposinf(logits).any() or not np.isfinite(logits).any(-1).all():
        raise ConfigError("a row of logits is none: give numbers or -inf, and a number at least once")
    return logits


def _softmax(logits: Float[np.ndarray, "*batch V"], temperature: float) -> Float[np.ndarray, "*batch V"]:
    scaled = _logits(logits) / temperature
    weights = np.exp(scaled - scaled.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)
