"""What a training run measured on its way, how sure that is, and what more texts would bring."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.optimize import least_squares

from specjax.errors import ConfigError
from specjax.training.history import LINES

RESAMPLES = 1000
PERCENT_95 = (0.025, 0.975)


class Point(NamedTuple):
    """A measurement on held-out prompts, after so many steps and training tokens.

    `counts` [P, 2] are the tokens emitted and the target passes of each prompt, where they were kept.
    """

    step: int
    tokens: int
    tokens_per_step: float
    acceptance: tuple[float | None, ...]
    counts: Float[np.ndarray, "P 2"] | None


def read_curve(folder: Path, draft_length: int) -> list[Point]:
    """The measurements of a run in their order; ConfigError where there is none."""
    path = folder / LINES
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    measured = [line for line in map(json.loads, lines) if "held_out/tokens_per_step" in line]
    if not measured:
        raise ConfigError(f"{path} holds no measurement: remove {folder} and run it again")
    return [
        Point(
            line["step"],
            line.get("tokens", 0),
            line["held_out/tokens_per_step"],
            tuple(line.get(f"held_out/acceptance_{depth}") for depth in range(1, draft_length + 1)),
            np.array(line["held_out/counts"], float) if "held_out/counts" in line else None,
        )
        for line in measured
    ]


def resample(points: Sequence[Point]) -> Float[np.ndarray, "R M"] | None:
    """Tokens a pass of M measurements on R draws of their prompts, the same for all; None without counts.

    Raises ConfigError where they were measured on different numbers of prompts.
    """
    kept = [point.counts for point in points if point.counts is not None]
    if len(kept) < len(points):
        return None
    if len({len(counts) for counts in kept}) > 1:
        raise ConfigError("the runs were measured on different numbers of prompts: give all one eval_prompts")
    counts = np.stack(kept)
    num_prompts = counts.shape[1]
    chosen = np.random.default_rng(0).integers(0, num_prompts, (RESAMPLES, num_prompts))
    emitted, steps = np.moveaxis(counts[:, chosen].sum(2), -1, 0)
    return (emitted / steps).T


def interval(values: Float[np.ndarray, "R"]) -> list[float]:
    """The bounds of the middle 95 %."""
    return np.quantile(values, PERCENT_95).tolist()


class Law(NamedTuple):
    """Tokens a pass after learning from n tokens: limit - gap * (n / `unit`) ** -exponent."""

    limit: float
    gap: float
    exponent: float
    unit: float

    def at(self, tokens: Float[np.ndarray, "M"]) -> Float[np.ndarray, "M"]:
        """Tokens a pass after learning from so many."""
        return self.limit - self.gap * (np.asarray(tokens) / self.unit) ** -self.exponent


def fit(tokens: Sequence[float], values: Float[np.ndarray, "M"], draft_length: int) -> Law:
    """The saturating power law nearest to M measurements, in least squares.

    A pass gives 1 to `draft_length` + 1 tokens, and so does the limit. Raises ConfigError on less than three.
    """
    if len(tokens) < 3:
        raise ConfigError(f"a saturating law has three numbers and there are {len(tokens)} runs: make more")
    unit = float(max(tokens))
    low, high = np.array([1.0, 0.0, 0.01]), np.array([draft_length + 1.0, float(draft_length), 2.0])

    def law(numbers: np.ndarray) -> Law:
        limit, gap, exponent = numbers.tolist()
        return Law(limit, gap, exponent, unit)

    def errors(numbers: np.ndarray) -> np.ndarray:
        return law(numbers).at(np.asarray(tokens, float)) - values

    # Saturation may be near or far: what is nearest may lie in either place.
    begins = [np.clip([max(values) + gap, gap, 0.3], low + 1e-3, high - 1e-3) for gap in (0.05, 1.0)]
    best = min((least_squares(errors, begin, bounds=(low, high)) for begin in begins), key=lambda f: f.cost)
    return law(best.x)
