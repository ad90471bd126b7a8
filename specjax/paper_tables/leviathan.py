"""What the formulas give beside the published factors (arXiv 2211.17192, tables 1 and 4)."""

from __future__ import annotations

from collections.abc import Sequence

from specjax.analysis.theory import operations_factor, wall_clock_factor
from specjax.eval.tables import Report, Table, interval
from specjax.paper_tables._published import LEVIATHAN, LEVIATHAN_TABLE1, LEVIATHAN_TABLE4, Measured
from specjax.paper_tables._runs import Run

READS_RUNS = False
HALF_DIGIT = 0.005  # acceptance and c are printed with two decimals


def report(runs: Sequence[Run]) -> Report:
    """Table 1, where drafts cost nothing, and table 4, predictions against measurements."""
    del runs
    tradeoffs = [
        (
            f"{row.acceptance}",
            str(row.draft_length),
            f"{operations_factor(row.acceptance, row.draft_length, 0.0):.2f}x",
            f"{row.operations}x",
            f"{wall_clock_factor(row.acceptance, row.draft_length, 0.0, 1.0):.2f}x",
            f"{row.speed}x",
        )
        for row in LEVIATHAN_TABLE1
    ]
    predictions = [
        (
            f"{row.task}, T={row.temperature}",
            row.draft,
            str(row.draft_length),
            f"{row.acceptance:.2f}",
            f"{row.draft_cost:.2f}",
            f"{wall_clock_factor(row.acceptance, row.draft_length, row.draft_cost, 1.0):.2f}x",
            interval(possible(row)),
            f"{row.expected}x",
            f"{row.measured}x",
        )
        for row in LEVIATHAN_TABLE4
    ]
    tables = [
        Table(
            "Leviathan et al., table 1: drafts that cost nothing",
            (
                "acceptance",
                "K",
                "operations\nformula",
                "operations\npublished",
                "speed\nformula",
                "speed\npublished",
            ),
            tradeoffs,
        ),
        Table(
            f"Leviathan et al., table 4: speed-up of {LEVIATHAN.target} on {LEVIATHAN.device}",
            (
                *("task", "draft", "K", "acceptance", "c", "formula", "formula,\nany rounding"),
                *("published\nexpected", "published\nmeasured"),
            ),
            predictions,
        ),
    ]
    notes = [
        "Any rounding: what the formula gives for all acceptances and c that are printed as these.",
        f"Published: {LEVIATHAN.paper}; verification is taken to cost one pass.",
    ]
    return Report(tables, notes)


def possible(row: Measured) -> tuple[float, float]:
    """The least and the most that the formula gives for inputs which round to the printed ones."""
    low, high = (
        wall_clock_factor(
            row.acceptance + sign * HALF_DIGIT, row.draft_length, row.draft_cost - sign * HALF_DIGIT, 1.0
        )
        for sign in (-1, 1)
    )
    return low, high
