"""Arithmetic per token over acceptance and draft length (arXiv 2211.17192, theorem 3.11)."""

from __future__ import annotations

from collections.abc import Sequence

from specjax.analysis.theory import operations_factor
from specjax.eval.tables import Report, Table
from specjax.paper_tables._runs import Run

READS_RUNS = False
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
DRAFT_LENGTHS = (1, 2, 3, 4, 5, 7, 10)
DRAFT_OPERATIONS = (0.0, 0.1)


def report(runs: Sequence[Run]) -> Report:
    """A table for drafts without arithmetic, and one for a draft model of a tenth of the target's."""
    del runs
    columns = ("acceptance", *(f"K = {length}" for length in DRAFT_LENGTHS))
    tables = [
        Table(
            f"Operations per token in plain decoding's, a draft step doing {share:.0%} of the target's",
            columns,
            [
                (f"{a:.2f}", *(f"{operations_factor(a, length, share):.2f}" for length in DRAFT_LENGTHS))
                for a in ACCEPTANCES
            ],
        )
        for share in DRAFT_OPERATIONS
    ]
    note = (
        "Time falls where arithmetic lies idle; these are the operations it costs, refused drafts included."
    )
    return Report(tables, [note])
