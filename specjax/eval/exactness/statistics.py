"""The statistics of an output law: how well counts fit it, over how many tests, and what would be found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

# Cells that are expected less often are pooled: Pearson's statistic follows its law only above that.
LEAST_EXPECTED = 5


class Fit(NamedTuple):
    """Pearson's statistic of counts under a law, its degrees of freedom and its p-value."""

    chi_square: float
    degrees_of_freedom: int
    p_value: float


IMPOSSIBLE = Fit(np.inf, 0, 0.0)  # something came that the law excludes


def chi_square(counts: np.ndarray, law: np.ndarray) -> Fit:
    """The fit of counts to a law of the same shape; its rarest cells are pooled."""
    counts, expected = counts.ravel(), law.ravel() * counts.sum()
    if counts[expected == 0].any():
        return IMPOSSIBLE
    counts, expected = pool(counts[expected > 0], expected[expected > 0])
    statistic = float(((counts - expected) ** 2 / expected).sum())
    degrees = len(counts) - 1
    return Fit(statistic, degrees, float(stats.chi2.sf(statistic, degrees)) if degrees else 1.0)


def pool(counts: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge the rarest cells into one, and as many further ones as it takes until none is rare."""
    order = np.argsort(expected, kind="stable")
    counts, expected = counts[order], expected[order]
    num_pooled = int((expected < LEAST_EXPECTED).sum())
    if num_pooled == 0:
        return counts, expected
    enough = int(np.searchsorted(np.cumsum(expected), LEAST_EXPECTED)) + 1
    num_pooled = max(num_pooled, enough)

    def merged(cells: np.ndarray) -> np.ndarray:
        return np.append(cells[num_pooled:], cells[:num_pooled].sum())

    return merged(counts), merged(expected)


def marginals(joint: np.ndarray) -> list[np.ndarray]:
    """The law or the counts of each axis."""
    axes = range(joint.ndim)
    return [joint.sum(axis=tuple(other for other in axes if other != axis)) for axis in axes]


def total_variation(first: np.ndarray, second: np.ndarray) -> float:
    """Half the sum of absolute differences of two laws."""
    return float(np.abs(first - second).sum() / 2)


def kl(first: np.ndarray, second: np.ndarray) -> float:
    """The divergence of `first` from `second` in nats; infinite where `second` excludes what came."""
    held = first > 0
    if (second[held] == 0).any():
        return np.inf
    return float((first[held] * np.log(first[held] / second[held])).sum())


def holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Which hypotheses are rejected, the chance of any false rejection being at most `level` (Holm, 1979)."""
    order = np.argsort(p_values, kind="stable")
    rejected = [False] * len(p_values)
    for place, index in enumerate(order):
        if p_values[index] > level / (len(order) - place):
            break
        rejected[index] = True
    return rejected


def smallest_total_variation(samples: int, degrees_of_freedom: int, level: float, power: float) -> float:
    """The total variation from which on a deviation is found at `level` with probability `power`.

    Whatever its shape over the cells: by Cauchy-Schwarz, a total variation d gives a noncentrality of
    at least 4 n d^2. Without degrees of freedom the law is one cell, and one sample elsewhere is enough.
    """
    if degrees_of_freedom == 0:
        return float(1 - (1 - power) ** (1 / samples))
    critical = stats.chi2.isf(level, degrees_of_freedom)

    def excess(noncentrality: float) -> float:
        return float(stats.ncx2.sf(critical, degrees_of_freedom, noncentrality)) - power

    upper = 1.0
    while excess(upper) < 0:
        upper *= 2
    return float(np.sqrt(optimize.brentq(excess, 0, upper) / (4 * samples)))
