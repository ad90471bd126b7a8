"""What Chinchilla gained, and the acceptance that this implies (arXiv 2302.01318, table 1)."""

from __future__ import annotations

from collections.abc import Sequence

from specjax.analysis.theory import acceptance_for, costs
from specjax.eval.tables import Report, Table
from specjax.paper_tables._published import (
    CHEN,
    CHEN_DRAFT_LENGTH,
    CHEN_DRAFT_MS,
    CHEN_TABLE1,
    CHEN_TARGET_MS,
)
from specjax.paper_tables._runs import Run

READS_RUNS = False


def report(runs: Sequence[Run]) -> Report:
    """The milliseconds a token, their ratio, and what follows from it and the draft's cost."""
    del runs
    cost, verify = costs(CHEN_TARGET_MS / 1e3, CHEN_DRAFT_MS / 1e3, CHEN_TARGET_MS / 1e3)
    pass_cost = CHEN_DRAFT_LENGTH * cost + verify
    rows = []
    for row in CHEN_TABLE1:
        ratio = CHEN_TARGET_MS / row.milliseconds
        tokens = ratio * pass_cost
        rows.append(
            (
                row.benchmark,
                f"{CHEN_TARGET_MS:.1f}",
                f"{row.milliseconds:.2f}",
                f"{row.speedup}x",
                f"{ratio:.2f}x",
                f"{tokens:.2f}",
                f"{acceptance_for(tokens, CHEN_DRAFT_LENGTH):.2f}",
            )
        )
    columns = (
        *("benchmark", "plain\nms a token", "speculative\nms a token", "speed-up\npublished"),
        *("speed-up\nof the times", "tokens per pass\nimplied", "acceptance\nimplied"),
    )
    title = f"Chen et al., table 1: {CHEN.target} on {CHEN.device}, K = {CHEN_DRAFT_LENGTH}, batch 1"
    notes = [
        f"Implied: a draft step costs c = {CHEN_DRAFT_MS} / {CHEN_TARGET_MS} = {cost:.3f} passes and "
        f"verification one, so a pass costs {pass_cost:.2f}; if verification costs more, more was accepted.",
        "The first published speed-up is not the ratio of its printed times.",
        f"Published: {CHEN.paper}.",
    ]
    return Report([Table(title, columns, rows)], notes)
