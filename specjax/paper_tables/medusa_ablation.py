"""What each of Medusa's techniques adds, and what its models gain (arXiv 2401.10774, tables 3 and 1)."""

from __future__ import annotations

from collections.abc import Sequence

from specjax.eval.tables import Report, Table
from specjax.paper_tables._published import MEDUSA, MEDUSA_TABLE1, MEDUSA_TABLE3
from specjax.paper_tables._runs import NOTE, Run, check_useful, our_cells, side_by_side

READS_RUNS = True
DATASET = "MT-bench"
CHAIN, FULL, OPTIMISED, _ = (technique for technique, _ in MEDUSA_TABLE3)
DYNAMIC = "with a dynamic tree"


def report(runs: Sequence[Run]) -> Report:
    """The ablation with our heads beside it, and the models."""
    useful = [run for run in runs if run.method == "Medusa" and run.metrics(DATASET)]
    check_useful(runs, useful, f"the drafter medusa on {DATASET}")
    # The tree says which technique a run stands for.
    cells = our_cells([run._replace(method=technique(run)) for run in useful], [DATASET])
    published = {name: (speedup,) for name, speedup in MEDUSA_TABLE3}
    ablation = side_by_side(
        "Medusa, table 3: speed-up, each line with what the line above has",
        MEDUSA,
        [DATASET],
        published,
        cells,
    )
    notes = [
        f"Published: {MEDUSA.paper}; table 3 gives no target, but its last lines are the 7B's of figure 3.",
        "By both: acceleration rate / overhead, of figures that were printed with two decimals.",
    ]
    ours = [NOTE, "Whether a backbone was trained jointly is not in a summary: no line of Medusa-2 is ours."]
    return Report([ablation, models()], [*(ours if runs else []), *notes])


def technique(run: Run) -> str:
    """The line of the ablation that a run's tree makes it; dynamic trees have one of their own."""
    if run.drafter.get("num_nodes"):
        return DYNAMIC
    if run.drafter.get("paths"):
        return OPTIMISED
    return FULL if any(width > 1 for width in run.drafter.get("branching", ())) else CHAIN


def models() -> Table:
    """Table 1, whose speed-up is what its rate and overhead give."""
    columns = ("model", "acceleration rate", "overhead", "speed-up\npublished", "speed-up\nby both")
    rows = [
        (
            m.model,
            f"{m.acceleration_rate:.2f}",
            f"{m.overhead:.2f}",
            f"{m.speedup}x",
            f"{m.acceleration_rate / m.overhead:.2f}x",
        )
        for m in MEDUSA_TABLE1
    ]
    return Table("Medusa, table 1: Medusa-2 on MT-bench", columns, rows)
