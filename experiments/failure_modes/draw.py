"""Speed-up along every axis of config.py, and where plain decoding wins: pictures, a table and the numbers.

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
from specjax.errors import ConfigError, SpecjaxError
from specjax.eval import results, tables
from specjax.eval.compare import PLAIN
from specjax.eval.metrics import summarize_lines

AXES = {"temperature": "temperature", "length": "max_new_tokens", "batch": "batch_size"}
LABELS = {
    "temperature": "temperature",
    "length": "new tokens, prefill counted",
    "batch": "prompts decoded together",
    "drafter": "time of a draft of 3, in plain passes",
    "domain": "Spec-Bench task",
}
Point = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0, or 2 after an error of the user's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="the folder of the runs' folders")
    parser.add_argument("--out", type=Path, required=True, help="the folder of what is written")
    args = parser.parse_args(arguments)
    try:
        results.check_writable(args.out)
        found = {axis: read(args.runs / axis, axis) for axis in VARIANTS if (args.runs / axis).exists()}
        if not found:
            raise ConfigError(f"{args.runs} holds none of {', '.join(VARIANTS)}: run config.py first")
        for axis, series in found.items():
            draw(axis, series, args.out / f"{axis}.png")
        results.write_whole(args.out / "results.json", json.dumps(found, indent=1) + "\n")
        report = tables.Report([as_table(axis, series) for axis, series in found.items()], [NOTE])
        results.write_whole(args.out / "tables.md", report.markdown())
    except SpecjaxError as error:
        print(f"specjax: error: {error}", file=sys.stderr)
        return 2
    return 0


NOTE = (
    "Speed-up over plain decoding with its 95 % interval by bootstrap over prompts, and tokens per pass; "
    "**bold** where plain decoding wins, that is, where the whole interval is below 1."
)


def read(folder: Path, axis: str) -> dict[str, list[Point]]:
    """By method its points along the axis; ConfigError where the run has not ended."""
    try:
        summary = json.loads((folder / results.SUMMARY).read_text(encoding="utf-8"))
        lines = (folder / results.GENERATIONS).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{folder} holds no finished run: give its command once more") from error
    found: dict[str, list[Point]] = {}
    for section in summary["sections"]:
        if axis == "length":
            section = section | with_prefill(section, [json.loads(line) for line in lines])
        for at, methods in places(axis, section):
            for name, metrics in methods.items():
                if name != PLAIN:
                    x = drafting(section, name) if axis == "drafter" else at
                    found.setdefault(name, []).append(
                        {
                            "at": x,
                            "speedup": metrics["speedup"]["value"],
                            "interval": metrics["speedup"]["interval"],
                            "tokens_per_pass": metrics["tokens_per_step"],
                        }
                    )
    return found


def places(axis: str, section: Mapping[str, Any]) -> list[tuple[Any, Mapping[str, Any]]]:
    """Where a section lies on the axis, once or once a task, with its methods."""
    if axis == "domain":
        end = "" if section["temperature"] == 0 else f", T={section['temperature']:g}"
        return [(task.partition("/")[2] + end, methods) for task, methods in section["tasks"].items()]
    return [(section.get(AXES.get(axis, "")), section["methods"])]


def drafting(section: Mapping[str, Any], name: str) -> float:
    """What a draft takes, in plain passes."""
    return section["methods"][name]["speedup_if_memory_bound"]["drafting_cost"]


def with_prefill(section: Mapping[str, Any], lines: Sequence[results.Line]) -> dict[str, Any]:
    """The section's methods, timed from the first token of the prompt on."""
    own = [line for line in lines if line["max_new_tokens"] == section["max_new_tokens"]]
    whole = [line | {"decode_seconds": line["decode_seconds"] + line["prefill_seconds"]} for line in own]
    lossless = dict.fromkeys(section["methods"], True)
    return summarize_lines(whole, greedy=section["temperature"] == 0, lossless=lossless)


def wins(point: Point) -> bool:
    """Whether plain decoding is faster beyond doubt."""
    return point["interval"] is not None and point["interval"][1] < 1


def draw(axis: str, found: Mapping[str, Sequence[Point]], path: Path) -> None:
    """A line for every method over the axis, or bars by task, and the region where plain decoding wins."""
    label = LABELS[axis]
    if axis == "domain":
        bars = {
            name: {p["at"]: plots.Bar(p["speedup"], p["interval"]) for p in points if "T=" not in p["at"]}
            for name, points in found.items()
        }
        figure = plots.bars(bars, y_label="speed-up", reference=1.0)
    else:
        series = {
            name: plots.Series(
                [p["at"] for p in points],
                [p["speedup"] for p in points],
                np.abs(np.array([p["interval"] for p in points]).T - [p["speedup"] for p in points]),
            )
            for name, points in found.items()
        }
        make = plots.scatter if axis == "drafter" else plots.lines
        figure = make(series, x_label=label, y_label="speed-up over plain decoding")
    (axes,) = figure.axes
    if axis in ("length", "batch"):
        axes.set_xscale("log", base=2)
    axes.axhspan(min(0.0, axes.get_ylim()[0]), 1.0, color="0.92", zorder=0)
    axes.set_ylim(bottom=0)
    axes.text(0.01, 0.02, "plain decoding wins", transform=axes.transAxes, color="0.4", fontsize=8)
    plots.save(figure, path)


def as_table(axis: str, found: Mapping[str, Sequence[Point]]) -> tables.Table:
    """A row for every place on the axis; one for every method where each has a place of its own."""
    if axis == "drafter":
        rows = [(name, f"{p['at']:.2f}", shown(p)) for name, (p,) in found.items()]
        return tables.Table("Drafters of every size", ("drafter", LABELS[axis], "speed-up"), rows)
    at = [point["at"] for point in next(iter(found.values()))]
    rows = [
        (x if isinstance(x, str) else f"{x:g}", *(shown(points[i]) for points in found.values()))
        for i, x in enumerate(at)
    ]
    return tables.Table(f"By {axis}", (LABELS[axis], *found), rows)


def shown(point: Point) -> str:
    """A cell: speed-up, interval, tokens per pass."""
    text = f"{point['speedup']:.2f} {tables.interval(point['interval'])}; {point['tokens_per_pass']:.2f}"
    return f"**{text}**" if wins(point) else text


if __name__ == "__main__":
    sys.exit(main())
