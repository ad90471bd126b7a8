"""The best draft length over acceptance and draft cost, and its speed-up (arXiv 2211.17192, section 3.5)."""

from __future__ import annotations

from collections.abc import Sequence

from specjax.analysis.theory import optimal_draft_length, speedup
from specjax.eval.tables import Report, Table
from specjax.paper_tables._runs import Run

READS_RUNS = False
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
DRAFT_COSTS = (0.01, 0.02, 0.05, 0.1, 0.25)
MAX_DRAFT_LENGTH = 100
# A block of 4 drafts without a bonus, of which so many tokens were kept a pass.
KEPT, BLOCK = 3.6292, 4
KEPT_COSTS = (0.02, 0.05, 0.10, 0.25)


def report(runs: Sequence[Run]) -> Report:
    """The best K for every cost, and what a block of four with a known yield gains net."""
    del runs
    rows = []
    for acceptance in ACCEPTANCES:
        best = [
            optimal_draft_length(acceptance, cost, lambda length: 1.0, MAX_DRAFT_LENGTH)
            for cost in DRAFT_COSTS
        ]
        rows.append(
            (f"{acceptance:.2f}", *(f"{choice.draft_length}: {choice.factor:.2f}x" for choice in best))
        )
    columns = ("acceptance", *(f"c = {cost:.2f}" for cost in DRAFT_COSTS))
    net = tuple(f"{speedup(KEPT, BLOCK, cost, 1.0):.2f}x" for cost in KEPT_COSTS)
    tables = [
        Table("Best number K of drafts and its speed-up", columns, rows),
        Table(
            f"Net speed-up of {KEPT:.2f} kept tokens with {BLOCK} drafts",
            ("", *(f"c = {cost:.0%}" for cost in KEPT_COSTS)),
            [("speed-up", *net)],
        ),
    ]
    notes = [
        "c: the cost of a draft step in target passes; verifying all drafts costs one, as in the papers. "
        "Where verification costs more, measure it: specjax.analysis.theory.optimal_draft_length takes it.",
        f"The kept tokens are those measured ({KEPT}) of a worked example with a vocabulary of 8.",
    ]
    return Report(tables, notes)
