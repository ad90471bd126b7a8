"""Small models as drafters for T5-XXL on translation and summarization (arXiv 2211.17192, table 2)."""

from __future__ import annotations

from collections.abc import Sequence

from specjax.eval.tables import Report, Table
from specjax.paper_tables._published import LEVIATHAN, LEVIATHAN_TABLE4
from specjax.paper_tables._runs import NOTE, Column, Run, check_useful, our_header

READS_RUNS = True


def report(runs: Sequence[Run]) -> Report:
    """The published rows, and for each task and temperature ours below them."""
    tasks = list(dict.fromkeys((row.task, row.temperature) for row in LEVIATHAN_TABLE4))
    useful = [
        run
        for run in runs
        if run.method == "small LM"
        and any(run.metrics(task) and run.temperature == temperature for task, temperature in tasks)
    ]
    check_useful(runs, useful, "the drafter draft_model on EnDe or CNN/DM at temperature 0 or 1")
    ours = list(dict.fromkeys(run.column for run in useful))
    rows: list[tuple[str, ...]] = []
    for task, temperature in tasks:
        rows += [
            (
                f"{task}, T={temperature}",
                row.draft,
                str(row.draft_length),
                f"{row.acceptance:.2f}",
                f"{row.measured}x",
                *["-"] * len(ours),
            )
            for row in LEVIATHAN_TABLE4
            if (row.task, row.temperature) == (task, temperature)
        ]
        rows += [
            our_row(run, task, ours) for run in useful if run.temperature == temperature and run.metrics(task)
        ]
    columns = ("task", "draft", "K", "acceptance", f"speed-up\n{LEVIATHAN.target}\n{LEVIATHAN.device}")
    table = Table(
        f"Leviathan et al., table 2: batch 1, target {LEVIATHAN.target}",
        (*columns, *(our_header(column, "speed-up") for column in ours)),
        rows,
    )
    notes = [f"Published: {LEVIATHAN.paper}, table 2."]
    if ours:
        notes = [NOTE, "Our acceptance is the share of the judged drafts that was accepted.", *notes]
    return Report([table], notes)


def our_row(run: Run, task: str, columns: Sequence[Column]) -> tuple[str, ...]:
    """A run in the paper's columns, its speed-up in the one of its target and device."""
    metrics = run.metrics(task)
    assert metrics is not None
    acceptance = metrics["acceptance"]
    return (
        f"{task}, T={run.temperature:g}",
        f"ours: {run.drafter.get('source')}",
        str(run.drafter.get("draft_length")),
        "-" if acceptance is None else f"{acceptance:.2f}",
        "-",
        *(str(run.cell(task)) if column == run.column else "-" for column in columns),
    )
