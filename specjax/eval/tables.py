"""The tables of a comparison and of an evaluation, for the terminal, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import rich.table
from rich import box
from rich.console import Console

from specjax.eval.compare import PLAIN
from specjax.eval.metrics import Metrics
from specjax.eval.timing import PARTS, STEP

# What LaTeX would take for its own.
_LATEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    "<": "$<$",
    ">": "$>$",
}


BEST = "*"


class Table(NamedTuple):
    """Cells as text: the first column is left-aligned, the others right-aligned.

    Line breaks in headers and cells are for terminals; elsewhere they are spaces.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


class Report(NamedTuple):
    """Tables and how to read them, drawn for a terminal or written as the text of a file."""

    tables: list[Table]
    notes: list[str]

    def show(self, console: Console) -> None:
        """Print everything."""
        for table in self.tables:
            console.print(to_rich(table))
        for note in self.notes:
            console.print(note, highlight=False, soft_wrap=True)

    def markdown(self) -> str:
        """Everything as the text of a Markdown file."""
        notes = "".join(f"- {note}\n" for note in self.notes)
        return "\n".join([*map(to_markdown, self.tables), notes])

    def latex(self) -> str:
        """Everything in LaTeX, which needs the package booktabs; the notes are a list after the tables."""
        items = [f"\\item {_escaped(note)}\n" for note in self.notes]
        notes = ["\\begin{itemize}\n" + "".join(items) + "\\end{itemize}\n"] if items else []
        return "\n".join([*map(to_latex, self.tables), *notes])

    def csv(self) -> str:
        """Everything as CSV; titles and notes are lines that begin with #."""
        notes = "".join(f"# {note}\n" for note in self.notes)
        return "\n".join([*map(to_csv, self.tables), notes])


def report(title: str, summary: Mapping[str, Any]) -> Report:
    """What a person sees of a summary; tasks have a table of their own where there are several."""
    tables = [comparison(title, summary["methods"])]
    if len(summary["tasks"]) > 1:
        tables += [by_task(name, summary["tasks"]) for name in summary["methods"] if name != PLAIN]
    return Report(tables, notes(summary["methods"]))


def evaluation(target: str, summary: Mapping[str, Any]) -> Report:
    """What a person sees of an evaluation: each section, the tasks at each setting, and what steps cost."""
    sections = summary["sections"]
    tables = [comparison(f"{target}: {section_title(s)}", s["methods"]) for s in sections]
    settings: dict[str, list[Mapping[str, Any]]] = {}
    for section in sections:
        settings.setdefault(_setting(section), []).append(section)
    overall = {_setting(whole): whole["methods"] for whole in summary["overall"]}
    tables += [by_task_and_method(title, own, overall.get(title)) for title, own in settings.items()]
    tables += [step_costs(f"A step: {section_title(s)}", s["methods"]) for s in sections]
    said = [*READING, *READING_SEVERAL]
    for section in sections:
        for name, m in section["methods"].items():
            said += [f"{section_title(section)}: {warning}" for warning in warnings(name, m)]
    return Report(tables, said)


def section_title(section: Mapping[str, Any]) -> str:
    """A section's prompt set and setting."""
    return f"{section['prompts']}, {_setting(section)}"


def _setting(section: Mapping[str, Any]) -> str:
    batch, length = section["batch_size"], section["max_new_tokens"]
    return f"temperature {section['temperature']:g}, batch {batch}, {length} new tokens"


def comparison(title: str, methods: Mapping[str, Metrics]) -> Table:
    """A row for each method, plain decoding first; where there are several the best is marked."""
    marks = _best if len(methods) > 2 else list
    cells = {
        "method": list(methods),
        "tokens\nper pass": marks([f"{m['tokens_per_step']:.2f}" for m in methods.values()]),
        "accepted": [_share(m["acceptance"]) for m in methods.values()],
        "tokens/s": [f"{m['tokens_per_second']:.1f}" for m in methods.values()],
        "speed-up": marks([f"{m['speedup']['value']:.2f}x" for m in methods.values()]),
        "95 %\ninterval": [interval(m["speedup"]["interval"]) for m in methods.values()],
    }
    if all("speedup_if_memory_bound" in m for m in methods.values()):
        expected = [f"{m['speedup_if_memory_bound']['value']:.2f}x" for m in methods.values()]
        cells["memory-bound\n(model)"] = marks(expected)
    cells["identical\nto greedy"] = [_identical(m["identical_to_greedy"]) for m in methods.values()]
    return Table(title, tuple(cells), list(zip(*cells.values(), strict=True)))


def by_task_and_method(
    title: str, sections: Sequence[Mapping[str, Any]], overall: Mapping[str, Metrics] | None
) -> Table:
    """A row for each task, a set of several, and all sets; a column for each method."""
    rows: dict[str, Mapping[str, Metrics]] = {}
    for section in sections:
        rows |= section["tasks"]
        rows[section["prompts"]] = section["methods"]
    if overall is not None:
        rows["all"] = overall
    names = list(sections[0]["methods"])
    cells = [
        (
            task,
            str(methods[PLAIN]["prompts"]),
            *_best([_gain(methods[name]) for name in names if name != PLAIN]),
        )
        for task, methods in rows.items()
    ]
    columns = ("task", "prompts", *(name for name in names if name != PLAIN))
    return Table(f"Speed-up (tokens per pass) by task: {title}", columns, cells)


def step_costs(title: str, methods: Mapping[str, Metrics]) -> Table:
    """A row for each method: milliseconds of a step, the shares of its parts, and memory."""
    columns = ("method", "ms", *PARTS, "parts\nover step", "weights\nMB", "peak\nMB")
    rows = [
        (
            name,
            f"{1000 * m['step']['seconds'][STEP]:.2f}",
            *(_share(m["step"]["shares"].get(part)) for part in PARTS),
            _share(m["step"]["parts_over_step"]),
            *(_megabytes(m["memory"][kind]) for kind in ("weights", "peak")),
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


READING = (
    "Tokens per pass: new tokens per target pass, bonus included; nothing after a stop token counts.",
    "Accepted: the share of judged drafts; those behind a refused one are not judged.",
    "Tokens/s and speed-up: decoding alone, without prefill and compilation.",
)
READING_SEVERAL = (
    f"{BEST} marks the best of a column, by task the best of a row.",
    "Memory-bound is a model, not a measurement: tokens per pass / (1 + the time of a draft over that of a "
    "plain pass), for a device where a pass costs the same whatever its nodes.",
    "A step's parts are programs of their own, timed in the middle of a generation; over the whole step they "
    "should come to about 1. Peak: weights and all arrays of the larger program, as compiled.",
)


def notes(methods: Mapping[str, Metrics]) -> list[str]:
    """How to read the table, and what must not be overlooked in it."""
    lines = list(READING)
    for name, m in methods.items():
        apart = f"{m['prefill_seconds']:.2f} s of prefill and {m['compile_seconds']:.1f} s of compilation"
        lines.append(f"{name}: {apart} are apart.")
        if name == PLAIN:
            continue
        by_depth = " ".join(_share(value) for value in m["acceptance_by_depth"]["conditional"])
        lines.append(f"{name}: accepted by depth, where tried: {by_depth}")
        speedup = m["speedup"]
        if speedup["interval"] is None:
            lines.append(f"{name}: no interval, because {speedup['why_no_interval']}.")
        if not _is_in_doubt(m):
            lines.append(f"{name}: {_pass_costs(m)}.")
        lines += warnings(name, m)
    return lines


def warnings(name: str, m: Metrics) -> list[str]:
    """What must not be overlooked of a method: that it gains nothing or perhaps nothing, or is lossy."""
    lines = []
    if m["speedup"]["value"] < 1:
        lines.append(
            f"{name} was SLOWER than plain decoding ({m['speedup']['value']:.2f}x): {_pass_costs(m)}."
        )
    elif _is_in_doubt(m):
        lines.append(f"{name}: {_pass_costs(m)}; the interval includes 1: no clear gain.")
    if not m["lossless"]:
        lines.append(f"{name} is LOSSY: its rule changes the target's output law.")
    return lines


def _is_in_doubt(m: Metrics) -> bool:
    """Whether a method was slower than plain decoding, or may be."""
    interval = m["speedup"]["interval"]
    return m["speedup"]["value"] < 1 or (interval is not None and interval[0] <= 1)


def _pass_costs(m: Metrics) -> str:
    needed = m["break_even_tokens_per_step"]
    return f"a pass costs {needed:.2f} plain ones and gave {m['tokens_per_step']:.2f} tokens"


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
    columns, *rows = _in_one_line(table)
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows)]
    return f"**{table.title}**\n\n" + "\n".join(lines) + "\n"


def to_latex(table: Table) -> str:
    """The table in LaTeX, its title as caption."""
    head, *rows = [" & ".join(map(_escaped, cells)) + r" \\" for cells in _in_one_line(table)]
    alignment = "l" + "r" * (len(table.columns) - 1)
    lines = [
        r"\begin{table}",
        rf"\caption{{{_escaped(table.title)}}}",
        rf"\begin{{tabular}}{{{alignment}}}",
        *(r"\toprule", head, r"\midrule", *rows, r"\bottomrule"),
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def to_csv(table: Table) -> str:
    """The table as CSV under its title."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(_in_one_line(table))
    return f"# {table.title}\n{text.getvalue()}"


def interval(bounds: Sequence[float] | None) -> str:
    """Two bounds as text, "-" for none."""
    return "-" if bounds is None else f"{bounds[0]:.2f}-{bounds[1]:.2f}"


def _in_one_line(table: Table) -> list[list[str]]:
    """The header and the rows without line breaks."""
    return [[cell.replace("\n", " ") for cell in cells] for cells in (table.columns, *table.rows)]


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _identical(counts: dict[str, Any] | None) -> str:
    return "-" if counts is None else f"{counts['identical']} of {counts['of']}"


def _gain(m: Metrics) -> str:
    return f"{m['speedup']['value']:.2f}x ({m['tokens_per_step']:.2f})"


def _best(texts: list[str]) -> list[str]:
    """The same texts, the largest of their leading numbers marked."""
    values = [float(text.split("x")[0]) for text in texts]
    return [
        f"{text}{BEST}" if value == max(values) else text for text, value in zip(texts, values, strict=True)
    ]


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:.0f}"
