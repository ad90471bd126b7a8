"""A certificate as tables: every row, or each drafter and rule at its worst."""

from __future__ import annotations

from collections.abc import Sequence

from specjax.eval.exactness.certificate import (
    AGAIN,
    CONTROL_LEVEL,
    EXACT,
    LEVEL,
    POWER,
    SUSPECT,
    Row,
    has_failed,
    power_of,
)
from specjax.eval.tables import Report, Table

COLUMNS = (
    "drafter",
    "rule",
    "lossless",
    "warp",
    "samples",
    "chi-square",
    "degrees of\nfreedom",
    "p-value",
    "TV",
    "KL",
    "control's\np-value",
    "exact\nTV",
    "verdict",
)


def summary(rows: Sequence[Row]) -> Report:
    """A line for each drafter and rule, its worst over the warps, and every row that failed."""
    by_pair: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_pair.setdefault((row["drafter"], row["rule"]), []).append(row)
    columns = ("drafter, rule", "lossless", "warps", "least\np-value", "most\nTV", "exact\nTV", "verdict")
    lines = [
        (
            f"{drafter}, {rule}",
            _yes(own[0]["lossless"]),
            str(len(own)),
            _number(min(row["p_value"] for row in own)),
            _number(_most([row["total_variation"] for row in own])),
            _number(own[0]["exact_total_variation"]),
            # A reason stands in the table of what failed.
            "FAILED" if any(map(has_failed, own)) else own[0]["verdict"],
        )
        for (drafter, rule), own in by_pair.items()
    ]
    tables = [Table(f"Exactness: {len(rows)} rows, {len(lines)} pairs", columns, lines)]
    failed = [row for row in rows if has_failed(row)]
    if failed:
        cells = [
            (
                f"{row['drafter']}, {row['rule']}, {row['warp']}",
                _number(row["p_value"]),
                _number(row["negative_control_p_value"]),
                row["verdict"].removeprefix("FAILED: "),
            )
            for row in failed
        ]
        tables.append(Table("Failed", ("drafter, rule, warp", "p-value", "control's\np-value", "why"), cells))
    return Report(tables, notes(rows))


def full(rows: Sequence[Row]) -> Table:
    """Every row with all that was measured."""
    cells = [
        (
            row["drafter"],
            row["rule"],
            _yes(row["lossless"]),
            row["warp"],
            str(row["samples"]),
            _number(row["chi_square"]),
            str(row["degrees_of_freedom"]),
            _number(row["p_value"]),
            _number(row["total_variation"]),
            _number(row["kl"]),
            _number(row["negative_control_p_value"]),
            _number(row["exact_total_variation"]),
            row["verdict"],
        )
        for row in rows
    ]
    return Table("Every row", COLUMNS, cells)


def notes(rows: Sequence[Row]) -> list[str]:
    """What was tested, how it was judged, and what would have been found."""
    num_lossless = sum(row["lossless"] for row in rows)
    num_failed = sum(map(has_failed, rows))
    lines = [
        "Tested: the joint law of the first three new tokens, by Pearson's chi-square against its exact "
        "enumeration; cells expected fewer than 5 times are pooled.",
        f"{num_lossless} rows claim to be lossless; Holm's correction rejects any of them wrongly with a "
        f"chance of at most {LEVEL:.0%}. One with p < {SUSPECT:g} is drawn anew, "
        f"{AGAIN} times as many samples, and the new ones alone count.",
        f"Power: a total variation of {power_of(rows):.3f}, of whatever shape, is found in each of them "
        f"with a probability of at least {POWER:.0%}; where the law is more concentrated, a smaller one is.",
        f"TV and KL are those of the samples: chance gave exact rows a TV of up to {_chance(rows):.2f}. "
        "What lossy rows have beyond that is how far the rule is off.",
        "Exact TV: the rule in fractions, the worst of the rational reference's random instances; "
        "- where there is no reference.",
        f"Controls: the same drafts unverified. Each has to be rejected with p < {CONTROL_LEVEL:g}, unless "
        "at temperature 0 all of them were right.",
        f"{num_failed} of {len(rows)} rows failed." if num_failed else "No row failed.",
    ]
    if not num_failed and not any(row["verdict"] == EXACT for row in rows):
        lines.append("No rule here claims to be lossless.")
    return lines


def _chance(rows: Sequence[Row]) -> float:
    """The largest total variation of samples whose law is exact."""
    return max((row["total_variation"] for row in rows if row["verdict"] == EXACT), default=0.0)


def _most(values: Sequence[float | None]) -> float | None:
    """The largest; None if one of them is beyond measure."""
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
