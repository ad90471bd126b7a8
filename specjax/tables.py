"""Print a table of a paper: computed, or as published with results of one's own beside it.

    python -m specjax.tables --table=spec_bench --results=runs/eagle,runs/ngram --format=md

  --table=NAME          the table; --list names them
  --results=DIR[,DIR]   workdirs of finished runs (python -m specjax.run, task "compare")
  --format=FORMAT       text, md, latex or csv (text)
  --list                what tables there are
  --help                this text

Everything goes to standard output. Published figures are not measured here: each names its source, and the
device and model that it was measured on.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from absl import flags
from rich.console import Console

from specjax import paper_tables
from specjax.errors import ConfigError, command, nearest
from specjax.eval.tables import Report
from specjax.paper_tables._runs import read_runs

FORMATS = ("text", "md", "latex", "csv")
WIDTH = 400  # characters of a table at most: a narrower terminal wraps lines and loses nothing


class Options(NamedTuple):
    """A command line."""

    table: ModuleType
    results: list[Path]
    format: str


@command()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0, or 2 after an error of the user's, or 130 after an interruption."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help", "--helpfull", "--helpshort"} & set(arguments):
        print(__doc__)
        return 0
    options = parse(arguments)
    if options is None:
        print(list_text())
        return 0
    write(options.table.report(read_runs(options.results)), options.format)
    return 0


def parse(arguments: Sequence[str]) -> Options | None:
    """Read a command line, None for --list; ConfigError on what is unknown or does not go together."""
    values = flags.FlagValues()
    flags.DEFINE_string("table", None, "table", flag_values=values)
    flags.DEFINE_list("results", [], "workdirs of runs", flag_values=values)
    flags.DEFINE_string("format", "text", "format", flag_values=values)
    flags.DEFINE_boolean("list", False, "list the tables", flag_values=values)
    try:
        rest = values(["", *arguments])[1:]
    except flags.Error as error:
        raise ConfigError(f"{error}: --help lists the flags") from error
    if rest:
        raise ConfigError(f"'{rest[0]}' is no flag: --help lists them")
    if values.list:
        return None
    if not values.table:
        raise ConfigError("--table is missing: --list names the tables")
    if values.format not in FORMATS:
        raise ConfigError(f"--format is '{values.format}': choose one of {', '.join(FORMATS)}")
    table = find_table(values.table)
    if values.results and not table.READS_RUNS:
        raise ConfigError(f"the table '{values.table}' is computed: leave --results out")
    return Options(table, [Path(folder).expanduser() for folder in values.results], values.format)


def table_names() -> list[str]:
    """The tables: modules of `specjax.paper_tables` but for those that begin with _."""
    names = [module.name for module in pkgutil.iter_modules(paper_tables.__path__)]
    return [name for name in names if not name.startswith("_")]


def find_table(name: str) -> ModuleType:
    """A table by its module's name; ConfigError if there is none."""
    known = table_names()
    if name not in known:
        raise ConfigError(f"there is no table '{name}'{nearest(name, known)} (known: {', '.join(known)})")
    return importlib.import_module(f"specjax.paper_tables.{name}")


def list_text() -> str:
    """A line for every table: its name and what it is."""
    names = table_names()
    width = max(map(len, names))
    return "\n".join(f"{name:<{width}}  {str(find_table(name).__doc__).splitlines()[0]}" for name in names)


def write(report: Report, form: str) -> None:
    """Print a report in one of `FORMATS`."""
    if form == "text":
        report.show(Console(width=WIDTH))
    else:
        text = {"md": report.markdown, "latex": report.latex, "csv": report.csv}[form]()
        print(text, end="")


if __name__ == "__main__":
    sys.exit(main())
