"""EAGLE-3's comparison of methods on five datasets at temperatures 0 and 1 (arXiv 2503.01840, table 1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specjax.eval.tables import Report
from specjax.paper_tables._published import EAGLE3, EAGLE3_DATASETS, EAGLE3_TABLE1
from specjax.paper_tables._runs import (
    NOTE,
    RECALLED,
    Cell,
    Cells,
    Run,
    check_useful,
    columns_of,
    our_cells,
    side_by_side,
)

READS_RUNS = True
MEAN = "mean"


def report(runs: Sequence[Run]) -> Report:
    """A table for each target and temperature, with speed-up / tokens per pass."""
    temperatures = {temperature for _, temperature in EAGLE3_TABLE1}
    useful = [
        run
        for run in runs
        if run.temperature in temperatures and any(run.metrics(dataset) for dataset in EAGLE3_DATASETS)
    ]
    check_useful(runs, useful, f"one of {', '.join(EAGLE3_DATASETS)} at temperature 0 or 1")
    tables = []
    for (target, temperature), published in EAGLE3_TABLE1.items():
        cells = our_cells([run for run in useful if run.temperature == temperature], EAGLE3_DATASETS)
        title = f"EAGLE-3, table 1: {target}, temperature {temperature}, speed-up / tokens per pass"
        columns = (*EAGLE3_DATASETS, MEAN)
        tables.append(side_by_side(title, EAGLE3[target], columns, published, cells | means(cells)))
    notes = [
        "Spec-Bench's mathematics is drawn from GSM8K, its summarization from CNN/DM: they stand there.",
        "The paper's text says RTX 3090 for these targets, a later version's caption A100.",
    ]
    return Report(tables, [*([NOTE, *notes[:1]] if runs else []), notes[1], RECALLED])


def means(cells: Cells) -> Cells:
    """The mean over the datasets, as the paper has it, of the methods that have all of them."""
    found: Cells = {}
    for row in dict.fromkeys(row for row, _, _ in cells):
        for column in columns_of(cells):
            own = [cells.get((row, column, dataset)) for dataset in EAGLE3_DATASETS]
            complete = [cell for cell in own if cell is not None]
            if len(complete) == len(own):
                found[row, column, MEAN] = Cell(
                    float(np.mean([cell.speedup for cell in complete])),
                    float(np.mean([cell.tokens_per_pass for cell in complete])),
                    None,
                    all(cell.lossless for cell in complete),
                )
    return found
