"""The papers' tables, one a module, found by its name; modules that begin with _ serve the others.

A table's module has a docstring whose first line says what it is, `READS_RUNS`, whether results of one's own
can stand beside the published figures, and `report(runs)`, which returns a `specjax.eval.tables.Report`.
"""
