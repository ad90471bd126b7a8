"""What a comparison's generations say, each method beside plain decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import stats

from specjax.eval.compare import PLAIN, Generation
from specjax.eval.timing import PARTS, STEP

RESAMPLES = 2000
ALPHAS = ("alpha", "n_alpha")

Metrics = dict[str, Any]


def summarize(generations: Sequence[Generation], *, greedy: bool) -> dict[str, Metrics]:
    """The metrics of each method, in order of appearance; all of them go into JSON as they are.

    `tokens_per_step` is new tokens a target pass: the bonus token counts, the prompt and whatever fell
    after a stop token do not. `tokens_per_second` leaves prefill and compilation out. `speedup` is the
    ratio of it to plain decoding's. `break_even_tokens_per_step` is what a pass of this method costs in
    plain ones, and so what `tokens_per_step` has to exceed to gain anything. `identical_to_greedy` counts
    prompts with exactly plain decoding's tokens, and is None unless `greedy`, that is, at temperature 0.
    """
    by_method: dict[str, list[Generation]] = {}
    for generation in generations:
        by_method.setdefault(generation.method, []).append(generation)
    return {name: _metrics(own, by_method[PLAIN], greedy) for name, own in by_method.items()}


def summarize_lines(
    lines: Sequence[Mapping[str, Any]], *, greedy: bool, lossless: Mapping[str, bool]
) -> dict[str, dict[str, Any]]:
    """`methods` and `tasks` of a summary, from generations that were stored with their `task`."""
    everything: list[Generation] = []
    by_task: dict[str, list[Generation]] = {}
    for line in sorted(lines, key=lambda line: line["batch"]):
        generation = Generation(**{field: line[field] for field in Generation._fields})
        everything.append(generation)
        by_task.setdefault(line["task"], []).append(generation)
    methods = summarize(everything, greedy=greedy)
    return {
        "methods": {name: {**metrics, "lossless": lossless[name]} for name, metrics in methods.items()},
        "tasks": {task: summarize(own, greedy=greedy) for task, own in by_task.items()},
    }


def chain_acceptance(metrics: Metrics, is_chain: bool) -> Metrics:
    """`alpha`, the acceptance, and `n_alpha`, that behind n accepted drafts of the same chain.

    After arXiv 2401.15077, where n of the drafter's inputs are predictions of its own. Both are defined for
    chains, and None for others: a tree's siblings would raise them.
    """
    conditional = metrics["acceptance_by_depth"]["conditional"]
    return {"alpha": metrics["acceptance"], "n_alpha": conditional} if is_chain else dict.fromkeys(ALPHAS)


def step_shares(seconds: Mapping[str, float]) -> Metrics:
    """The seconds of a `STEP`, the share of each part in their sum, and this sum over the step's seconds.

    The last should be near 1; None, with the shares empty, where the step has no parts.
    """
    parts = {part: seconds[part] for part in PARTS if part in seconds}
    total = sum(parts.values())
    return {
        "seconds": dict(seconds),
        "shares": {part: value / total for part, value in parts.items()},
        "parts_over_step": total / seconds[STEP] if parts else None,
    }


def _metrics(own: list[Generation], plain: list[Generation], greedy: bool) -> Metrics:
    num_steps = sum(g.num_steps for g in own)
    num_tokens = sum(len(g.tokens) for g in own)
    seconds = sum(g.decode_seconds for g in own)
    plain_step_seconds = sum(g.decode_seconds for g in plain) / sum(g.num_steps for g in plain)
    reference = {g.row: g.tokens for g in plain}
    tried, accepted = sum(sum(g.tried_at_depth) for g in own), sum(sum(g.accepted_at_depth) for g in own)
    identical = sum(g.tokens == reference[g.row] for g in own)
    return {
        "prompts": len(own),
        "tokens": num_tokens,
        "steps": num_steps,
        "tokens_per_step": num_tokens / num_steps,
        "acceptance": accepted / tried if tried else None,
        "acceptance_by_depth": _acceptance(own),
        "tokens_per_second": num_tokens / seconds,
        "speedup": _speedup(own, plain),
        "break_even_tokens_per_step": seconds / num_steps / plain_step_seconds,
        "prefill_seconds": sum(g.prefill_seconds for g in own),
        "decode_seconds": seconds,
        "compile_seconds": sum(g.compile_seconds for g in own),
        "identical_to_greedy": {"identical": identical, "of": len(own)} if greedy else None,
    }


def _acceptance(own: list[Generation]) -> dict[str, list[float | None]]:
    """By depth: of the passes that tried a draft there, and of all passes, the share that accepted it."""
    tried = np.sum([g.tried_at_depth for g in own], axis=0).tolist()
    accepted = np.sum([g.accepted_at_depth for g in own], axis=0).tolist()
    num_steps = sum(g.num_steps for g in own)
    return {
        "conditional": [a / t if t else None for a, t in zip(accepted, tried, strict=True)],
        "unconditional": [a / num_steps for a in accepted],
    }


def _speedup(own: list[Generation], plain: list[Generation]) -> dict[str, Any]:
    """The ratio of seconds a token, and its 95 % interval over batches, whose prompts share their seconds."""
    costs = np.concatenate((_costs(plain), _costs(own)))
    value = float(_ratio(*costs))
    if own is plain:
        return {"value": 1.0, "interval": None, "why_no_interval": "it is the reference"}
    if costs.shape[1] < 2:
        return {"value": value, "interval": None, "why_no_interval": "one batch has no spread"}
    found = stats.bootstrap(
        tuple(costs),
        _ratio,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=0.95,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return {"value": value, "interval": [float(found.low), float(found.high)], "why_no_interval": None}


def _costs(generations: list[Generation]) -> Float[np.ndarray, "2 M"]:
    """Seconds and tokens of each batch."""
    totals: dict[int, tuple[float, int]] = {}
    for g in generations:
        seconds, tokens = totals.get(g.batch, (0.0, 0))
        totals[g.batch] = seconds + g.decode_seconds, tokens + len(g.tokens)
    return np.array([totals[number] for number in sorted(totals)]).T


def _ratio(
    plain_seconds: np.ndarray,
    plain_tokens: np.ndarray,
    seconds: np.ndarray,
    tokens: np.ndarray,
    axis: int = -1,
) -> np.ndarray:
    plain_cost = plain_seconds.sum(axis) / plain_tokens.sum(axis)
    return plain_cost / (seconds.sum(axis) / tokens.sum(axis))
