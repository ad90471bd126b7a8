"""Spec-Bench's leaderboard: speed-ups of methods on its six tasks (arXiv 2401.07851)."""

from __future__ import annotations

from collections.abc import Sequence

from specjax.eval.tables import Report, Table
from specjax.paper_tables._published import (
    SPEC_BENCH,
    SPEC_BENCH_3090,
    SPEC_BENCH_A100,
    SPEC_BENCH_TASKS,
)
from specjax.paper_tables._runs import NOTE, OVERALL, RECALLED, Run, check_useful, our_cells, side_by_side

READS_RUNS = True


def report(runs: Sequence[Run]) -> Report:
    """The leaderboard, and the same methods on another device; ours is overall where a run has all tasks."""
    useful = [
        run
        for run in runs
        if run.temperature == 0 and any(run.metrics(dataset) for dataset in SPEC_BENCH_TASKS)
    ]
    check_useful(runs, useful, "one of Spec-Bench's tasks at temperature 0")
    columns = (*SPEC_BENCH_TASKS, OVERALL)
    cells = our_cells(useful, columns)
    title = "Spec-Bench, greedy: speed-up by task, overall with tokens per pass"
    return Report(
        [side_by_side(title, SPEC_BENCH, columns, SPEC_BENCH_3090, cells), devices()],
        [*([NOTE] if runs else []), f"Published: {SPEC_BENCH.paper}.", RECALLED],
    )


def devices() -> Table:
    """More tokens per pass are not always more speed: the overall figures on two devices."""
    header = ("method", f"{OVERALL}\n{SPEC_BENCH.target}\n{SPEC_BENCH.device}")
    rows = [
        (method, str(figures[-1]), str(SPEC_BENCH_A100[method][0]))
        for method, figures in SPEC_BENCH_3090.items()
    ]
    columns = (*header, f"{OVERALL}\n{SPEC_BENCH.target}\nA100")
    return Table("Spec-Bench, greedy: overall speed-up / tokens per pass on two devices", columns, rows)
