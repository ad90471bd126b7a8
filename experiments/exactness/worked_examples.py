"""The worked examples of the founding articles: closed forms beside what the step itself measures.

    python experiments/exactness/worked_examples.py --out experiments/exactness

Toys with a vocabulary of 8 are decoded by the same loops as a real model. Writes results.json, tables.md and
the plots. The four questions: is the output law the target's, and would the test notice if it were not; how
many tokens does a block of 4 drafts keep; which number of drafts is best; does the divergence between draft
and target tell the acceptance.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from report import draw, tables
from scipy import stats

from specjax.analysis import theory
from specjax.decode import generate, new_tokens, rollout, row_keys, start
from specjax.eval.exactness.statistics import chi_square, kl, marginals
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.testing import side_by_side, tabulated_drafter, tabulated_target, unverified
from specjax.types import ModelParams, StepInfo, Verify
from specjax.verify import rejection

VOCAB = 8
CRITICAL_5_PERCENT = 14.07  # chi-square with 7 degrees of freedom
NO_WEIGHTS = ModelParams({}, {})
CAPACITY = 12  # the toys' prompts, outputs and drafts fit, except in the long run
Results = dict[str, Any]


def make_method(target: np.ndarray, draft: np.ndarray, draft_length: int, rule: Verify) -> Method:
    """Tables of laws, [V, V] or [V + 1, V, V], as target and drafter."""

    def logits(laws: np.ndarray) -> jnp.ndarray:
        size = laws.shape[-1]
        whole = np.broadcast_to(laws, (size + 1, size, size))
        return jnp.log(jnp.asarray(whole, jnp.float32))

    return Method(tabulated_target(logits(target)), tabulated_drafter(logits(draft), draft_length), rule)


def decode(method: Method, prompts: list[list[int]], length: int, seed: int, capacity: int) -> np.ndarray:
    """The new tokens [B, length] of every prompt at temperature 1."""
    request, state = start(
        method,
        NO_WEIGHTS,
        prompts,
        max_new_tokens=length,
        warp=make_warp(len(prompts), 1.0),
        keys=row_keys(seed, range(len(prompts))),
        capacity=capacity,
    )
    state, _ = generate(method, NO_WEIGHTS, request, state)
    return np.array(new_tokens(state, prompts))


def one_pass(method: Method, prompts: list[list[int]], length: int, seed: int) -> StepInfo:
    """What one target pass did for every prompt, with at most `length` new tokens."""
    request, state = start(
        method,
        NO_WEIGHTS,
        prompts,
        max_new_tokens=length,
        warp=make_warp(len(prompts), 1.0),
        keys=row_keys(seed, range(len(prompts))),
        capacity=CAPACITY,
    )
    _, info = rollout(method, NO_WEIGHTS, request, state, 1)
    return StepInfo(*(np.asarray(part)[0] for part in info))


# --- 1. The output law ---------------------------------------------------------------------------------


def order_two_laws() -> tuple[np.ndarray, np.ndarray]:
    """A target's and a resembling drafter's laws after every two tokens, [V + 1, V, V]."""
    rng = np.random.default_rng(0)
    target = 1.2 * rng.normal(size=(VOCAB + 1, VOCAB, VOCAB))
    draft = target + 0.8 * rng.normal(size=target.shape)
    both = np.exp([target, draft])
    both /= both.sum(-1, keepdims=True)
    return both[0], both[1]


def compare(tokens: np.ndarray, law: np.ndarray) -> Results:
    """Chi-square, KL and TV of the tokens [B] against their law [V], and the TV of exact draws as many."""
    counts = np.bincount(tokens, minlength=VOCAB)
    share, fit = counts / len(tokens), chi_square(counts, law)
    return {
        "chi_square": fit.chi_square,
        "p_value": fit.p_value,
        "kl": kl(share, law),
        "tv": float(theory.total_variation(share, law)),
        "tv_expected_of_exact_draws": float(np.sqrt(law * (1 - law) / (2 * np.pi * len(tokens))).sum()),
    }


def output_law(rows: int, runs: int) -> Results:
    """Three new tokens a row, verified and not, against their exact laws; then longer texts."""
    target, draft = order_two_laws()
    prompt, length, draft_length = 3, 3, 2
    joint = target[VOCAB, prompt][:, None, None] * target[prompt][:, :, None] * target[:VOCAB]
    laws = marginals(joint)
    rules = side_by_side([rejection.verify, unverified], [0] * rows + [1] * rows)
    method = make_method(target, draft, draft_length, rules)

    def by_position(tokens: np.ndarray) -> list[Results]:
        return [compare(column, law) for column, law in zip(tokens.T, laws, strict=True)]

    found, statistics = {}, []
    for seed in range(runs):
        tokens = decode(method, [[prompt]] * (2 * rows), length, seed, CAPACITY)
        verified, control = tokens[:rows], tokens[rows:]
        statistics += [position["chi_square"] for position in by_position(verified)]
        if seed == 0:
            found = {
                name: {"all_rows": by_position(own), "first_10000_rows": by_position(own[:10_000])}
                for name, own in (("rejection", verified), ("unverified", control))
            }
    return {
        "rows": rows,
        **found,
        "runs": runs,
        "statistics_of_all_runs": statistics,
        "share_above_critical": float(np.mean(np.array(statistics) > CRITICAL_5_PERCENT)),
        "uniformity_of_p_values": float(stats.kstest(stats.chi2.sf(statistics, VOCAB - 1), "uniform").pvalue),
        "long_texts": {
            "tokens": 50_000,
            "rejection": long_texts(make_method(target, draft, draft_length, rejection.verify), target, 10),
            "unverified": long_texts(make_method(target, draft, draft_length, unverified), target, 1),
        },
    }


def long_texts(method: Method, target: np.ndarray, runs: int) -> list[Results]:
    """500 texts of 100 tokens, each token against the law after the two before it.

    Tokens of a text depend on one another; given the two before, their counts fit as independent ones do.
    """
    first = np.arange(500) % VOCAB
    found = []
    for seed in range(runs):
        tokens = decode(method, first[:, None].tolist(), 100, seed, capacity=128)
        text = np.column_stack([np.full_like(first, VOCAB), first, tokens])
        counts = np.zeros((VOCAB + 1, VOCAB, VOCAB))
        np.add.at(counts, (text[:, :-2], text[:, 1:-1], text[:, 2:]), 1)
        contexts = [at for at in np.ndindex(*counts.shape[:2]) if counts[at].sum()]
        fits = [chi_square(counts[at], target[at]) for at in contexts]
        statistic = sum(fit.chi_square for fit in fits)
        degrees = sum(fit.degrees_of_freedom for fit in fits)
        divergences = [counts[at].sum() * kl(counts[at] / counts[at].sum(), target[at]) for at in contexts]
        found.append(
            {
                "chi_square": statistic,
                "degrees_of_freedom": degrees,
                "p_value": float(stats.chi2.sf(statistic, degrees)),
                "kl": float(sum(divergences) / tokens.size),
            }
        )
    return found


# --- 2. Tokens kept of a block -------------------------------------------------------------------------

PUBLISHED_BLOCKS = {
    0.04: {"tv": 0.0486, "kept": 3.6328, "measured": 3.6292},
    0.25: {"tv": 0.1338, "kept": 3.0727, "measured": 3.0668},
}


def block_target() -> np.ndarray:
    """Random rows pulled towards uniform until their mean distance from it is the published 0.20065."""
    rows = np.random.default_rng(0).dirichlet(np.ones(VOCAB), VOCAB) - 1 / VOCAB
    return 1 / VOCAB + rows * 0.20065 / (np.abs(rows).sum(1).mean() / 2)


def kept_blocks(blocks: int, block: int) -> dict[str, Results]:
    """Tokens kept per pass without a bonus, closed form and measured, for the two published blurs."""
    target, found = block_target(), {}
    uniform = np.full(VOCAB, 1 / VOCAB)
    for blur, published in PUBLISHED_BLOCKS.items():
        draft = (target + blur) / (1 + VOCAB * blur)
        method = make_method(target, draft, block, rejection.verify)
        # A limit of `block` new tokens cuts the bonus.
        info = one_pass(method, [[row % VOCAB] for row in range(blocks)], block, seed=0)
        kept = np.asarray(info.num_emitted)
        lengths = theory.markov_block_lengths(target, draft, uniform, block, bonus=False)
        mean, variance = theory.mean_and_variance(lengths)
        found[str(blur)] = {
            "tv": float(theory.total_variation(target, draft).mean()),
            "kept_closed_form": mean,
            "kept_measured": float(kept.mean()),
            "standard_error": (variance / blocks) ** 0.5,
            "passes_per_1000_tokens": 1000 / float(kept.mean()),
            "lengths_closed_form": lengths.tolist(),
            "lengths_measured": (np.bincount(kept, minlength=block + 1)[1:] / blocks).tolist(),
            "published": published,
        }
    return found


# --- 3. The number of drafts ---------------------------------------------------------------------------

ACCEPTANCES = (0.5, 0.7, 0.85, 0.9)
DRAFT_COSTS = (0.02, 0.05, 0.1, 0.25)
# Measured on the CPU: a pass over five tokens costs 1.23 passes over one. That it grows linearly is assumed.
CPU_COST_PER_DRAFT = 0.23 / 4
VERIFY_COSTS: dict[str, Callable[[int], float]] = {
    "v = 1": lambda length: 1.0,
    "v = 1 + 0.0575 K": lambda length: 1 + CPU_COST_PER_DRAFT * length,
}


def draft_lengths(longest: int) -> Results:
    """Expected tokens over K, the best K for every draft cost, and the articles' printed figures."""
    best = {
        name: {
            str(cost): {
                str(a): theory.optimal_draft_length(a, cost, verify_cost, longest)._asdict()
                for a in ACCEPTANCES
            }
            for cost in DRAFT_COSTS
        }
        for name, verify_cost in VERIFY_COSTS.items()
    }
    return {
        "tokens_at_0.8_and_4": theory.expected_tokens(0.8, 4),
        "tokens_at_0.75_and_5": theory.expected_tokens(0.75, 5),
        "gain_of_3.6292_kept_with_4_drafts": {
            str(cost): theory.speedup(3.6292, 4, cost, 1.0) for cost in DRAFT_COSTS
        },
        "expected_tokens": {
            str(a): [theory.expected_tokens(a, length) for length in range(1, 17)] for a in ACCEPTANCES
        },
        "optimal": best,
    }


# --- 4. Acceptance against divergence ------------------------------------------------------------------


QUALITIES = 12  # of the drafts of a family, and the vocabulary here: see `acceptance_over_divergence`


def draft_families(target: np.ndarray) -> dict[str, list[np.ndarray]]:
    """Draft tables from equal to the target to useless, departing from it in three ways."""
    noise = np.random.default_rng(1).dirichlet(np.ones(QUALITIES), QUALITIES)
    rarest = np.eye(QUALITIES)[target.argmin(1)]

    def sharpened(power: float) -> np.ndarray:
        return target**power / (target**power).sum(1, keepdims=True)

    return {
        "mixed with noise": [(1 - m) * target + m * noise for m in np.linspace(0, 1, QUALITIES)],
        "mass moved to the rarest token": [
            (1 - m) * target + m * rarest for m in np.linspace(0, 0.5, QUALITIES)
        ],
        "sharpened": [sharpened(power) for power in np.linspace(1, 6, QUALITIES)],
    }


def acceptance_over_divergence(rows: int) -> dict[str, list[Results]]:
    """KL(draft, target), 1 - TV and the measured acceptance of one draft, from every starting token alike.

    The token before the last chooses the draft table, so that one program serves a whole family.
    """
    target = np.random.default_rng(2).dirichlet(np.ones(QUALITIES), QUALITIES)
    prompts = [[quality, row % QUALITIES] for quality in range(QUALITIES) for row in range(rows)]
    found: dict[str, list[Results]] = {}
    for seed, (name, drafts) in enumerate(draft_families(target).items()):
        method = make_method(target, np.array([*drafts, target]), 1, rejection.verify)
        info = one_pass(method, prompts, 2, seed)
        accepted = np.asarray(info.num_accepted).reshape(QUALITIES, rows).sum(1)
        found[name] = []
        for draft, count in zip(drafts, accepted.tolist(), strict=True):
            interval = stats.binomtest(count, rows).proportion_ci(method="wilson")
            found[name].append(
                {
                    # Of equal laws a rounding below 0.
                    "kl": max(0.0, float(stats.entropy(draft, target, axis=1).mean())),
                    "closed_form": float(theory.acceptance_of(target, draft).mean()),
                    "measured": count / rows,
                    "low": float(interval.low),
                    "high": float(interval.high),
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=60_000, help="rows of a run and blocks")
    parser.add_argument("--runs", type=int, default=20, help="repetitions of the output law's test")
    parser.add_argument("--acceptance_rows", type=int, default=24_000, help="of each draft quality")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()

    parts: dict[str, Callable[[], Any]] = {
        "output_law": lambda: output_law(args.rows, args.runs),
        "kept_blocks": lambda: kept_blocks(args.rows, block=4),
        "draft_lengths": lambda: draft_lengths(longest=64),
        "acceptance": lambda: acceptance_over_divergence(args.acceptance_rows),
    }
    results: Results = {}
    for name, part in parts.items():
        begin = time.perf_counter()
        results[name] = part()
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    (args.out / "tables.md").write_text(tables(results), encoding="utf-8")
    draw(results, args.out)


if __name__ == "__main__":
    main()
