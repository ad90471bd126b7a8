"""What drafts gain, from their acceptance by depth and what rounds cost, and which of them to take.

All costs are in steps of plain decoding. A round of K drafts yields 1 + the sum over depths of the chance
that all drafts up to there are accepted: nothing is assumed about how the acceptance changes with the depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from specjax.analysis import theory
from specjax.errors import ConfigError
from specjax.trees import optimal

RESAMPLES = 2000
LEAST_GAIN = 0.02  # below which the trouble is not worth it
MOST_BATCH = 512  # up to which a break-even is looked for

RelativeCost = Callable[[int, int], float]  # of a pass over (batch, nodes a row), in passes over (batch, 1)


class Costs(NamedTuple):
    """The cost c of a draft token, v(N) of verifying N = 1, 2, ... nodes, and what every round adds."""

    draft_cost: float
    verify_costs: tuple[float, ...]
    overhead: float = 0.0

    def rounds(self, num_nodes: int | None = None) -> Float[np.ndarray, "K"]:
        """A round's cost with 1, 2, ... drafts; with trees of so many nodes by their depth."""
        lengths = np.arange(1, len(self.verify_costs))
        verify = np.asarray(self.verify_costs)[lengths if num_nodes is None else [num_nodes - 1]]
        return lengths * self.draft_cost + verify + self.overhead


class Candidate(NamedTuple):
    """A drafter as measured: by prompt the rounds [P] and those that accepted depth 1, 2, ... [P, D].

    `lengths` are the numbers of drafts to consider, `num_nodes` is that of a tree. The seconds are those a
    prompt and a process cost beyond plain decoding's.
    """

    name: str
    num_steps: Int[np.ndarray, "P"]
    accepted: Int[np.ndarray, "P D"]
    costs: Costs
    lengths: tuple[int, ...]
    num_nodes: int | None = None
    prefill_seconds: float = 0.0
    compile_seconds: float = 0.0


class Prediction(NamedTuple):
    """What one drafter gains with one number of drafts; the interval is one of 95 %, None for one prompt.

    `factor` is the speed-up of decoding, `answer_factor` that of an answer with the drafter's prefill.
    """

    drafter: str
    draft_length: int
    num_nodes: int
    tokens_per_pass: float
    pass_cost: float
    factor: float
    interval: tuple[float, float] | None
    answer_factor: float


class Outlook(NamedTuple):
    """Where the gain ends: None is "nowhere" for the batch, "at once" for an acceptance or a length."""

    acceptance: float
    break_even_acceptance: float | None
    break_even_batch: int | None
    repays_prefill: float | None  # new tokens an answer
    repays_compilation: float | None  # new tokens a process


class Advice(NamedTuple):
    """The best prediction, and whether to follow it; `reason` says why in a sentence."""

    best: Prediction
    speculate: bool
    reason: str


def calibrate(
    round_cost: float, draft_share: float, draft_length: int, num_nodes: int, verify_costs: Sequence[float]
) -> Costs:
    """The costs by which a round of `draft_length` drafts costs what it was measured to.

    `draft_share` of it is drafting; what is left beyond v(num_nodes) is what every round adds. Where v is
    more than what is left, its increments are scaled down: passes were timed apart from rounds.
    """
    left = max(round_cost * (1 - draft_share) - 1, 0.0)
    increments = np.asarray(verify_costs) - 1
    scale = min(1.0, left / increments[num_nodes - 1]) if increments[num_nodes - 1] > 0 else 1.0
    verify = 1 + scale * increments
    overhead = left + 1 - float(verify[num_nodes - 1])
    return Costs(round_cost * draft_share / draft_length, tuple(verify.tolist()), overhead)


def acceptances(
    num_steps: Int[np.ndarray, "*batch"], accepted: Int[np.ndarray, "*batch D"]
) -> Float[np.ndarray, "*batch D"]:
    """Of the rounds that accepted all drafts before each depth, the share that accepted that one too.

    A round without a draft there counts as one that did not: it is paid for as well.
    """
    before = np.concatenate((np.asarray(num_steps)[..., None], accepted[..., :-1]), axis=-1)
    return np.divide(accepted, before, out=np.zeros(before.shape), where=before > 0)


def tokens_per_pass(
    alpha_by_depth: Float[np.ndarray, "*batch D"], max_length: int
) -> Float[np.ndarray, "*batch K"]:
    """Expected tokens of rounds with 1, 2, ... drafts; depths that were not measured are as the last one."""
    alphas = np.asarray(alpha_by_depth, float)
    if not alphas.shape[-1] or not ((alphas >= 0) & (alphas <= 1)).all():
        raise ConfigError(f"the acceptances are {alphas}: give probabilities, at least one")
    beyond = np.repeat(alphas[..., -1:], max(max_length - alphas.shape[-1], 0), axis=-1)
    alphas = np.concatenate((alphas, beyond), axis=-1)[..., :max_length]
    return 1 + np.cumsum(np.cumprod(alphas, axis=-1), axis=-1)


def predict(
    alpha_by_depth: Float[np.ndarray, "*batch D"], costs: Costs, num_nodes: int | None = None
) -> Float[np.ndarray, "*batch K"]:
    """The speed-up with 1, 2, ... drafts, as many as `costs` know; ConfigError on no probabilities.

    After arXiv 2211.17192, theorem 3.8, with an acceptance for each depth and verification at its price.
    """
    rounds = costs.rounds(num_nodes)
    tokens = tokens_per_pass(alpha_by_depth, len(rounds))
    return tokens / rounds.reshape((1,) * (tokens.ndim - 1) + (-1,))


def intervals(candidate: Candidate, resamples: int = RESAMPLES) -> Float[np.ndarray, "2 K"] | None:
    """Of every prediction the 2.5 and 97.5 % quantiles over prompts drawn anew; None with one prompt."""
    num_prompts = len(candidate.num_steps)
    if num_prompts < 2:
        return None
    drawn = np.random.default_rng(0).integers(num_prompts, size=(resamples, num_prompts))
    alphas = acceptances(candidate.num_steps[drawn].sum(1), candidate.accepted[drawn].sum(1))
    return np.quantile(predict(alphas, candidate.costs, candidate.num_nodes), (0.025, 0.975), axis=0)


def predictions(candidate: Candidate, plain_seconds: float, new_tokens: int) -> list[Prediction]:
    """One for each of the candidate's lengths; `plain_seconds` is a plain step, `new_tokens` an answer's."""
    alphas = acceptances(candidate.num_steps.sum(), candidate.accepted.sum(0))
    rounds = candidate.costs.rounds(candidate.num_nodes)
    tokens = tokens_per_pass(alphas, len(rounds))
    factors, spread = predict(alphas, candidate.costs, candidate.num_nodes), intervals(candidate)
    # The drafter reads the prompt before anything is gained.
    late = candidate.prefill_seconds / (plain_seconds * new_tokens)
    return [
        Prediction(
            drafter=candidate.name,
            draft_length=k,
            num_nodes=candidate.num_nodes or k + 1,
            tokens_per_pass=float(tokens[k - 1]),
            pass_cost=float(rounds[k - 1]),
            factor=float(factors[k - 1]),
            interval=None if spread is None else (float(spread[0, k - 1]), float(spread[1, k - 1])),
            answer_factor=float(1 / (1 / factors[k - 1] + late)),
        )
        for k in candidate.lengths
    ]


def promising_trees(chains: Iterable[Candidate], sizes: Sequence[int], least: float) -> dict[str, int]:
    """By a chain's name, the size of a tree in its place that could gain most, if that is over `least`.

    A node's later choices are taken to be right as often as its first, up to always together, and levels to
    cost what a chain's drafts do: both flatter trees.
    """
    found = {}
    for chain in chains:
        depth, costs = chain.accepted.shape[1], chain.costs
        tried = chain.num_steps.sum() + chain.accepted[:, :-1].sum()
        first = chain.accepted.sum() / tried
        ranks = np.clip(1 - first * np.arange(max(sizes)), 0, first)
        verify = {size: costs.verify_costs[size - 1] + costs.overhead for size in sizes}
        best = optimal.best_budget(ranks, verify, costs.draft_cost, depth)
        if best.factor > least:
            found[chain.name] = best.num_nodes
    return found


def decide(found: Sequence[Prediction]) -> Advice:
    """The prediction of the largest gain over an answer, or plain decoding where that is not worth it."""
    best = max(found, key=lambda p: p.answer_factor)
    highs = [p.interval[1] if p.interval else np.inf for p in found]
    if max(highs) < 1:
        return Advice(best, False, "every setting is expected to be slower, up to the end of its interval")
    if best.factor >= 1 + LEAST_GAIN > best.answer_factor:
        return Advice(best, False, "the answers are too short: the drafter's own prefill takes what it gains")
    if best.answer_factor < 1 + LEAST_GAIN:
        return Advice(best, False, f"the best setting is expected to gain less than {LEAST_GAIN:.0%}")
    if best.interval is None or best.interval[0] < 1:
        return Advice(best, True, "a gain is expected, but its interval includes a loss: try more prompts")
    return Advice(best, True, "its whole interval is a gain")


def outlook(
    best: Prediction, candidate: Candidate, plain_seconds: float, batch: int, cost_at: RelativeCost
) -> Outlook:
    """What would have to change for the best setting to gain nothing any more."""
    costs, length = candidate.costs, best.draft_length
    verify = best.pass_cost - length * costs.draft_cost
    saved = plain_seconds * (1 - 1 / best.factor)

    def repaid(seconds: float) -> float | None:
        return max(seconds, 0.0) / saved if saved > 0 else None

    def gain(rows: int) -> float:
        cost = cost_at(rows, best.num_nodes) + costs.overhead
        return theory.speedup(best.tokens_per_pass, length, costs.draft_cost, cost)

    return Outlook(
        acceptance=theory.acceptance_for(best.tokens_per_pass, length),
        break_even_acceptance=theory.break_even_acceptance(length, costs.draft_cost, verify),
        break_even_batch=next((rows for rows in range(batch, MOST_BATCH + 1) if gain(rows) <= 1), None),
        repays_prefill=repaid(candidate.prefill_seconds),
        repays_compilation=repaid(candidate.compile_seconds),
    )


def measured_cost(verify_costs: Sequence[float], measured_batch: int) -> RelativeCost:
    """v of any batch from v(N) of one: all rows cost alike, and those beyond N what the last three did."""
    sizes = np.arange(1, len(verify_costs) + 1)
    # A pass does not get cheaper by more rows; what says so is noise.
    slope = max(float(np.polyfit(sizes[-3:], verify_costs[-3:], 1)[0]), 0.0)

    def cost(rows: float) -> float:
        inside = float(np.interp(rows, sizes, verify_costs))
        return inside + slope * max(rows - sizes[-1], 0.0)

    return lambda batch, nodes: cost(batch * nodes / measured_batch) / cost(batch / measured_batch)
