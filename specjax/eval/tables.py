"""One table of a comparison, for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import rich.table
from rich import box
from rich.console import Console

from specjax.eval.compare import PLAIN
from specjax.eval.metrics import Metrics


class Table(NamedTuple):
    """Cells as text: the first column is left-aligned, the others right-aligned."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


class Report(NamedTuple):
    """The tables of a run and how to read them, drawn for a terminal or written in Markdown."""

    tables: list[Table]
    notes: list[str]

    def show(self, console: Console) -> None:
        """Print everything."""
        for table in self.tables:
            console.print(to_rich(table))
        for note in self.notes:
            console.print(note, highlight=False, soft_wrap=True)

    def markdown(self) -> str:
        """Everything as the text of a file."""
        notes = "".join(f"- {note}\n" for note in self.notes)
        return "\n".join([*map(to_markdown, self.tables), notes])


def report(title: str, summary: Mapping[str, Any]) -> Report:
    """What a person sees of a summary; tasks have a table of their own where there are several."""
    tables = [comparison(title, summary["methods"])]
    if len(summary["tasks"]) > 1:
        tables += [by_task(name, summary["tasks"]) for name in summary["methods"] if name != PLAIN]
    return Report(tables, notes(summary["methods"]))


def comparison(title: str, methods: Mapping[str, Metrics]) -> Table:
    """A row for each method, plain decoding first."""
    last = ("speed-up", "95 %\ninterval", "identical\nto greedy")
    columns = ("method", "tokens\nper pass", "accepted", "tokens/s", *last)
    rows = [
        (
            name,
            f"{m['tokens_per_step']:.2f}",
            _share(m["acceptance"]),
            f"{m['tokens_per_second']:.1f}",
            f"{m['speedup']['value']:.2f}x",
            _interval(m["speedup"]["interval"]),
            _identical(m["identical_to_greedy"]),
        )
        for name, m in methods.items()
    ]
    return Table(title, columns, rows)


def by_task(name: str, tasks: Mapping[str, Mapping[str, Metrics]]) -> Table:
    """A row for each task; intervals over so few prompts would say little."""
    columns = (
        "task",
        "prompts",
        "tokens\nper pass",
        "accepted",
        "tokens/s",
        "speed-up",
        "identical\nto greedy",
    )
    rows = [
        (
            task,
            str(methods[name]["prompts"]),
            f"{methods[name]['tokens_per_step']:.2f}",
            _share(methods[name]["acceptance"]),
            f"{methods[name]['tokens_per_second']:.1f}",
            f"{methods[name]['speedup']['value']:.2f}x",
            _identical(methods[name]["identical_to_greedy"]),
        )
        for task, methods in tasks.items()
    ]
    return Table(f"{name} by task", columns, rows)


def notes(methods: Mapping[str, Metrics]) -> list[str]:
    """How to read the table, and what must not be overlooked in it."""
    lines = [
        "Tokens per pass: new tokens per target pass, bonus included; nothing after a stop token counts.",
        "Accepted: the share of judged drafts; those behind a refused one are not judged.",
        "Tokens/s and speed-up: decoding alone, without prefill and compilation.",
    ]
    for name, m in methods.items():
        apart = f"{m['prefill_seconds']:.2f} s of prefill and {m['compile_seconds']:.1f} s of compilation"
        lines.append(f"{name}: {apart} are apart.")
        if name == PLAIN:
            continue
        by_depth = " ".join(_share(value) for value in m["acceptance_by_depth"]["conditional"])
        lines.append(f"{name}: accepted by depth, where tried: {by_depth}")
        speedup, needed = m["speedup"], m["break_even_tokens_per_step"]
        if speedup["interval"] is None:
            lines.append(f"{name}: no interval, because {speedup['why_no_interval']}.")
        costs = f"a pass costs {needed:.2f} plain ones and gave {m['tokens_per_step']:.2f} tokens"
        if speedup["value"] < 1:
            lines.append(f"{name} was SLOWER than plain decoding ({speedup['value']:.2f}x): {costs}.")
        else:
            unsure = speedup["interval"] is not None and speedup["interval"][0] <= 1
            lines.append(
                f"{name}: {costs}" + ("; the interval includes 1: no clear gain." if unsure else ".")
            )
        if not m["lossless"]:
            lines.append(f"{name} is LOSSY: its rule changes the target's output law.")
    return lines


def to_rich(table: Table) -> rich.table.Table:
    """The table for a terminal."""
    drawn = rich.table.Table(
        title=table.title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False, collapse_padding=True
    )
    for place, column in enumerate(table.columns):
        if place:
            drawn.add_column(column, justify="right", no_wrap=True)
        else:
            drawn.add_column(column, overflow="fold")
    for row in table.rows:
        drawn.add_row(*row)
    return drawn


def to_markdown(table: Table) -> str:
    """The table in Markdown, under its title."""
    rule = [":---"] + ["---:"] * (len(table.columns) - 1)
    columns = [column.replace("\n", " ") for column in table.columns]
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, rule, *table.rows)]
    return f"**{table.title}**\n\n" + "\n".join(lines) + "\n"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _interval(bounds: list[float] | None) -> str:
    return "-" if bounds is None else f"{bounds[0]:.2f}-{bounds[1]:.2f}"


def _identical(counts: dict[str, Any] | None) -> str:
    return "-" if counts is None else f"{counts['identical']} of {counts['of']}"
