"""Tokens per target pass over acceptance and draft length (arXiv 2211.17192, equation 1)."""

from __future__ import annotations

from collections.abc import Sequence

from specjax.analysis.theory import expected_tokens
from specjax.eval.tables import Report, Table
from specjax.paper_tables._runs import Run

READS_RUNS = False
ACCEPTANCES = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
DRAFT_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 16)


def report(runs: Sequence[Run]) -> Report:
    """A row for each acceptance, a column for each number K of drafts."""
    del runs
    rows = [
        (f"{acceptance:.2f}", *(f"{expected_tokens(acceptance, length):.2f}" for length in DRAFT_LENGTHS))
        for acceptance in ACCEPTANCES
    ]
    columns = ("acceptance", *(f"K = {length}" for length in DRAFT_LENGTHS))
    note = "(1 - a^(K+1)) / (1 - a): K drafts, each accepted with probability a; the bonus token is included."
    return Report([Table("Tokens per target pass", columns, rows)], [note])
