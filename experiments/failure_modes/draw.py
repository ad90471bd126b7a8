"""Speed-up along every axis of config.py, and where plain decoding wins: pictures, tables and the numbers.

    python -m experiments.failure_modes.draw --runs=runs/failure --out=experiments/failure_modes

Takes the runs that there are: `runs/failure/AXIS` holds what config.py:AXIS gave.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.failure_modes.config import VARIANTS
from specjax.analysis import plots
from specjax.errors import ConfigError, command
from specjax.eval import results, tables
from specjax.eval.compare import PLAIN
from specjax.eval.metrics import Metrics, summarize_lines
from specjax.storage import replacing
from specjax.tasks.evaluate import Section

AXES = {"temperature": "temperature", "length": "max_new_tokens", "batch": "batch_size"}
LABELS = {
    "temperature": "temperature",
    "length": "new tokens",
    "batch": "prompts decoded together",
    "drafter": "time of a draft of 3, in plain passes",
    "domain": "Spec-Bench task",
}
ALL = "all"  # tasks together
Point = dict[str, Any]


@command()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0, or 2 after an error of the user's, or 130 after an interruption."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="the folder of the runs' folders")
    parser.add_argument("--out", type=Path, required=True, help="the folder of what is written")
    args = parser.parse_args(arguments)
    results.check_writable(args.out)
    found = {axis: read(args.runs / axis, axis) for axis in VARIANTS if (args.runs / axis).exists()}
    if not found:
        raise ConfigError(f"{args.runs} holds none of {', '.join(VARIANTS)}: run config.py first")
    for axis, series in found.items():
        draw(axis, series, args.out / f"{axis}.png")
    results.write_whole(args.out / "results.json", json.dumps(found, indent=1) + "\n")
    report = tables.Report([made for item in found.items() for made in as_tables(*item)], NOTES)
    results.write_whole(args.out / "tables.md", report.markdown())
    return 0


NOTES = [
    "Speed-up over plain decoding, of decoding alone; with prefill counted; tokens per pass. By task: tokens "
    "per pass; speed-up; with prefill. Intervals of 95 % are by bootstrap over prompts, or batches of them.",
    "**Bold** where plain decoding wins, that is, where the whole interval beside it is below 1.",
]


def read(folder: Path, axis: str) -> dict[str, list[Point]]:
    """By method its points along the axis; ConfigError where the run has not ended."""
    try:
        summary = json.loads((folder / results.SUMMARY).read_text(encoding="utf-8"))
        text = (folder / results.GENERATIONS).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} holds no finished run: give its command once more") from error
    lines = [json.loads(line) for line in text.splitlines()]
    found: dict[str, list[Point]] = {}
    for section in summary["sections"]:
        for at, methods, with_prefill in places(axis, section, count_prefill(section, lines)):
            for name in (name for name in methods if name != PLAIN):
                point = {
                    "at": drafting(section, name) if axis == "drafter" else at,
                    "temperature": section["temperature"],
                    "speedup": gained(methods[name]),
                    "with_prefill": gained(with_prefill[name]),
                    "tokens_per_pass": methods[name]["tokens_per_step"],
                    "identical": methods[name]["identical_to_greedy"],
                }
                found.setdefault(name, []).append(point)
    return found


def places(
    axis: str, section: Mapping[str, Any], whole: Mapping[str, Any]
) -> list[tuple[Any, Mapping[str, Metrics], Mapping[str, Metrics]]]:
    """Where a section lies on the axis, or all its tasks do, with its methods and those of `whole`."""
    if axis == "domain":
        tasks = [
            (task.rpartition("/")[2], methods, whole["tasks"][task])
            for task, methods in section["tasks"].items()
        ]
        return [(ALL, section["methods"], whole["methods"]), *tasks]
    return [(section.get(AXES.get(axis, "")), section["methods"], whole["methods"])]


def drafting(section: Mapping[str, Any], name: str) -> float:
    """What a draft takes, in plain passes."""
    return section["methods"][name]["speedup_if_memory_bound"]["drafting_cost"]


def count_prefill(section: Mapping[str, Any], lines: Sequence[results.Line]) -> dict[str, Any]:
    """The section's methods and tasks, timed from the first token of the prompt on.

    An answer that ended early, as at temperatures above 0 another one may not, counts as much of its prefill
    as it has of the tokens that were asked for.
    """
    own = [line for line in lines if all(line[field] == section[field] for field in Section._fields)]
    most = section["max_new_tokens"]
    whole = [
        line
        | {"decode_seconds": line["decode_seconds"] + line["prefill_seconds"] * len(line["tokens"]) / most}
        for line in own
    ]
    lossless = dict.fromkeys(section["methods"], True)
    return summarize_lines(whole, greedy=section["temperature"] == 0, lossless=lossless)


def gained(metrics: Metrics) -> dict[str, Any]:
    """The speed-up and its interval."""
    return {part: metrics["speedup"][part] for part in ("value", "interval")}


def wins(gain: Mapping[str, Any]) -> bool:
    """Whether plain decoding is faster beyond doubt."""
    return gain["interval"] is not None and gain["interval"][1] < 1


def draw(axis: str, found: Mapping[str, Sequence[Point]], path: Path) -> None:
    """A line for every method over the axis, or bars by task, and the region where plain decoding wins."""
    kind, counted = ("with_prefill", ", prefill counted") if axis == "length" else ("speedup", "")
    if axis == "domain":
        bars = {
            name: {
                p["at"]: plots.Bar(p[kind]["value"], p[kind]["interval"])
                for p in points
                if p["at"] != ALL and p["temperature"] == 0
            }
            for name, points in found.items()
        }
        figure = plots.bars(bars, y_label="speed-up", reference=1.0)
    else:
        series = {name: as_series([(p["at"], p[kind]) for p in points]) for name, points in found.items()}
        make = plots.scatter if axis == "drafter" else plots.lines
        figure = make(series, x_label=LABELS[axis], y_label=f"speed-up over plain decoding{counted}")
    (axes,) = figure.axes
    if axis in ("length", "batch"):
        axes.set_xscale("log", base=2)
    axes.axhspan(min(0.0, axes.get_ylim()[0]), 1.0, color="0.92", zorder=0)
    axes.set_ylim(bottom=0)
    axes.text(0.01, 0.02, "plain decoding wins", transform=axes.transAxes, color="0.4", fontsize=8)
    with replacing(path) as draft:
        draft.write_bytes(plots.png(figure))


def as_series(points: Sequence[tuple[float, Mapping[str, Any]]]) -> plots.Series:
    """Points with their intervals; one batch has none."""
    values = [gain["value"] for _, gain in points]
    bounds = [gain["interval"] or [gain["value"]] * 2 for _, gain in points]
    return plots.Series([at for at, _ in points], values, np.abs(np.array(bounds).T - values))


def as_tables(axis: str, found: Mapping[str, Sequence[Point]]) -> list[tables.Table]:
    """A row for every place on the axis, or for every method by task or where each has its own place."""
    if axis == "domain":
        temperatures = dict.fromkeys(p["temperature"] for points in found.values() for p in points)
        return [by_task(found, temperature) for temperature in temperatures]
    rows: list[tuple[str, ...]]
    if axis == "drafter":
        rows = [(spoken(name), f"{p['at']:.2f}", *shown(p)) for name, (p,) in found.items()]
        columns = ("drafter", LABELS[axis], "speed-up (95 %)", "with prefill (95 %)", "tokens per pass")
        return [tables.Table("Drafters of every size", columns, rows)]
    at = [point["at"] for point in next(iter(found.values()))]
    rows = [(f"{x:g}", *("; ".join(shown(points[i])) for points in found.values())) for i, x in enumerate(at)]
    return [tables.Table(f"By {axis}", (LABELS[axis], *map(spoken, found)), rows)]


def by_task(found: Mapping[str, Sequence[Point]], temperature: float) -> tables.Table:
    """A row for every method, the fastest with prefill first; tasks have too few prompts for intervals."""
    own = {
        name: {p["at"]: p for p in points if p["temperature"] == temperature}
        for name, points in found.items()
    }
    names = sorted(own, key=lambda name: own[name][ALL]["with_prefill"]["value"], reverse=True)
    tasks = [at for at in own[names[0]] if at != ALL]
    rows = []
    for name in names:
        cells = [
            f"{p['tokens_per_pass']:.2f}; {p['speedup']['value']:.2f}; {p['with_prefill']['value']:.2f}"
            for p in map(own[name].__getitem__, tasks)
        ]
        rows.append((spoken(name), *shown(own[name][ALL])[:2], *cells))
    columns = ("method", "speed-up (95 %)", "with prefill (95 %)", *map(spoken, tasks))
    return tables.Table(f"By domain, temperature {temperature:g}", columns, rows)


def shown(point: Point) -> tuple[str, str, str]:
    """Cells: the speed-up, that with prefill, and tokens per pass."""
    return marked(point["speedup"]), marked(point["with_prefill"]), f"{point['tokens_per_pass']:.2f}"


def marked(gain: Mapping[str, Any]) -> str:
    """A speed-up with its interval, bold where plain decoding wins."""
    text = f"{gain['value']:.2f} ({tables.interval(gain['interval'])})"
    return f"**{text}**" if wins(gain) else text


def spoken(name: str) -> str:
    """A name as people read it."""
    return name.replace("_", " ")


if __name__ == "__main__":
    sys.exit(main())
