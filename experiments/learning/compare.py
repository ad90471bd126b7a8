"""What makes a drafter learn more: runs of specjax.train that differ in one thing, with an equal budget.

    python -m experiments.learning.compare losses --workdir=runs/learning --out=experiments/learning \
        --config.data='("runs/self_written",)' --config.steps=1100
    python -m experiments.learning.compare data ... --human=runs/prepared
    python -m experiments.learning.compare scaling ...

Every run has its own folder in --workdir, and the same command goes on after an interruption: what is
finished is not run again. Flags --config.FIELD=VALUE hold for all runs of a series; `scaling` takes a share
of the steps with its share of the texts. After every run --out receives the table (.json, .md) and the
figures of those there are.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.learning import curves
from experiments.learning.runs import Run, as_flags, execute, make_run, refuse_both, without
from experiments.learning.series import BASE, SERIES, Series
from specjax.analysis import plots
from specjax.config import load_config, override, validate
from specjax.errors import command
from specjax.eval import results, tables
from specjax.tasks.train import EXPORTED_DRAFTER

FURTHER = (2, 10)  # times the texts there are
FITS = 200  # draws of the prompts that a law is fitted to: a fit takes longer than a mean


@command(interrupted="")  # the run that was going on has said so
def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0, or 2 after an error of the user's, or 130 after an interruption."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("series", choices=SERIES)
    parser.add_argument("--workdir", type=Path, required=True, help="the folder of the runs' folders")
    parser.add_argument("--human", nargs="+", default=(), help="folders of people's texts, for `data`")
    parser.add_argument("--out", type=Path, help="the folder of what is written; default: the runs'")
    args, flags = parser.parse_known_args(arguments)
    workdir = args.workdir / args.series
    runs = make_runs(SERIES[args.series], workdir, args.human, flags)
    out = args.out or workdir
    for folder in (out, workdir):
        results.check_writable(folder)
    plots.blank("", "", "")  # misses matplotlib now, not after hours
    finished = [is_finished(run) for run in runs]
    for number, run in enumerate(runs):
        if not finished[number]:
            execute("specjax.train", run)
            finished[number] = True
            report(args.series, [run for run, done in zip(runs, finished, strict=True) if done], out)
    print(report(args.series, runs, out))
    return 0


def make_runs(series: Series, workdir: Path, human: Sequence[str], flags: Sequence[str]) -> list[Run]:
    """All runs of a series, their configs checked; ConfigError says what is wrong with the first that is."""
    common = [*as_flags(BASE), *flags]
    config = override(load_config(str(series.file)), common)
    validate(config)
    variants = series.variants(config, human)
    # Shares of the steps are taken from the steps in common.
    shared = {"data"} | ({"steps", "warmup"} if series.is_fitted else set())
    refuse_both(flags, ({name: part[name] for name in part.keys() - shared} for part in variants.values()))
    return [
        make_run(name, series.file, [*without(common, overrides), *as_flags(overrides)], workdir / name)
        for name, overrides in variants.items()
    ]


def is_finished(run: Run) -> bool:
    """Whether the run has left its drafter; ConfigError where the folder is another run's."""
    stored = run.folder / results.CONFIG
    if not (run.folder / EXPORTED_DRAFTER).exists() or not stored.exists():
        return False
    # What the run adds to its config is its own affair.
    results.check_same(run.folder, json.loads(stored.read_text(encoding="utf-8")) | run.config.to_dict())
    return True


def report(name: str, runs: Sequence[Run], out: Path) -> str:
    """Write the table and the figures of finished runs, and return the table in Markdown."""
    series, found = SERIES[name], {run.name: read(run) for run in runs}
    drawn = curves.resample([points[-1] for points in found.values()])
    rows = [summary(points, drawn, number) for number, points in enumerate(found.values())]
    summaries = dict(zip(found, rows, strict=True))
    content: dict[str, Any] = {"series": name, "question": series.question, "runs": summaries}
    content["config"] = {run.name: run.config.to_dict() for run in runs}
    notes = NOTES.copy()
    if drawn is None:
        notes.append("No intervals: the runs kept no counts of their prompts.")
    if series.is_fitted and len(runs) >= 3:
        content["fit"] = extrapolate(name, runs, found, drawn, out)
        notes += about_fit(content["fit"])
    table = tables.Report([as_table(series.question, summaries)], notes).markdown()
    results.write_whole(out / f"{name}.json", json.dumps(content, indent=2) + "\n")
    results.write_whole(out / f"{name}.md", table)
    draw(name, found, out)
    return table


def read(run: Run) -> list[curves.Point]:
    """The measurements of a run."""
    return curves.read_curve(run.folder, run.config.eval_draft_length or run.config.drafter.draft_length)


NOTES = [
    "Tokens per pass: of the last step's weights, new tokens per target pass on the held-out prompts, chains "
    "at temperature 0. The best measurement on the way is chosen on the same prompts, and flatters.",
    "Intervals: 95 %, bootstrap over prompts; differences are paired by prompt. Another seed of the weights "
    "and of the order would add to them.",
]


def summary(points: list[curves.Point], drawn: np.ndarray | None, number: int) -> dict[str, Any]:
    """The figures of one run, the `number`-th; its intervals from all runs' draws, where there are some."""
    last, own, change = points[-1], None, None
    if drawn is not None:
        own = curves.interval(drawn[:, number])
        change = curves.interval(drawn[:, number] - drawn[:, 0]) if number else None
    return {
        "steps": last.step,
        "training_tokens": last.tokens,
        "tokens_per_step": last.tokens_per_step,
        "interval": own,
        "over_first": change,
        "best": max(point.tokens_per_step for point in points),
        "acceptance": last.acceptance,
        "curve": [[point.step, point.tokens, point.tokens_per_step] for point in points],
    }


def as_table(title: str, summaries: dict[str, dict[str, Any]]) -> tables.Table:
    """A row for each run."""
    columns = ("run", "steps", "training tokens", "tokens per pass", "95 %", "over the first, 95 %", "best")
    rows = [
        (
            name,
            str(row["steps"]),
            str(row["training_tokens"]),
            f"{row['tokens_per_step']:.3f}",
            between(row["interval"]),
            between(row["over_first"], "+"),
            f"{row['best']:.3f}",
            " ".join("-" if share is None else f"{share:.2f}" for share in row["acceptance"]),
        )
        for name, row in summaries.items()
    ]
    return tables.Table(title, (*columns, "accepted by depth, where tried"), rows)


def between(bounds: list[float] | None, sign: str = "") -> str:
    """The bounds of an interval for a table."""
    return "-" if bounds is None else " to ".join(f"{bound:{sign}.3f}" for bound in bounds)


def draw(name: str, found: dict[str, list[curves.Point]], out: Path) -> None:
    """Tokens per pass over training tokens, and the last measurement's acceptance by depth."""
    learning = {
        run: plots.Series(
            [point.tokens for point in points], [point.tokens_per_step for point in points], errors(points)
        )
        for run, points in found.items()
    }
    figure = plots.lines(learning, x_label="training tokens", y_label="held-out tokens per target pass")
    plots.save(figure, out / f"{name}.png")
    by_depth = {
        run: plots.Series(
            range(1, len(points[-1].acceptance) + 1),
            [np.nan if share is None else share for share in points[-1].acceptance],
        )
        for run, points in found.items()
    }
    figure = plots.lines(by_depth, x_label="depth", y_label="drafts accepted, where tried")
    plots.save(figure, out / f"{name}_by_depth.png")


def errors(points: Sequence[curves.Point]) -> np.ndarray | None:
    """Half the width of each measurement's interval."""
    drawn = curves.resample(points)
    return None if drawn is None else np.ptp(np.quantile(drawn, curves.PERCENT_95, axis=0), axis=0) / 2


def extrapolate(
    name: str,
    runs: Sequence[Run],
    found: dict[str, list[curves.Point]],
    drawn: np.ndarray | None,
    out: Path,
) -> dict[str, Any]:
    """Fit tokens per pass to the tokens learned from, draw the law, and say what it expects of more."""
    tokens, last = [run.config.max_tokens for run in runs], [found[run.name][-1] for run in runs]
    values = np.array([point.tokens_per_step for point in last])
    length = len(last[0].acceptance)
    law = curves.fit(tokens, values, length)
    others = None if drawn is None else [curves.fit(tokens, row, length) for row in drawn[:FITS]]
    x = np.geomspace(min(tokens), FURTHER[-1] * law.unit, 60)
    expected = {}
    for times in FURTHER:
        at = np.array(times * law.unit)
        bounds = None if others is None else curves.interval(np.array([other.at(at) for other in others]))
        about = {"tokens": float(at), "tokens_per_step": float(law.at(at)), "interval": bounds}
        expected[str(times)] = about

    shown = {"measured": plots.Series(tokens, values, errors(last))}
    figure = plots.scatter(shown, x_label="tokens to learn from", y_label="held-out tokens per target pass")
    axes = figure.axes[0]
    axes.plot(x, law.at(x), label="fitted")
    if others is not None:
        low, high = np.quantile([other.at(x) for other in others], curves.PERCENT_95, axis=0)
        axes.fill_between(x, low, high, alpha=0.2)
    axes.set_xscale("log")
    axes.minorticks_off()
    marks = [*tokens, *(times * law.unit for times in FURTHER)]
    axes.set_xticks(marks, [f"{mark / 1000:.0f}k" for mark in marks])
    axes.legend(frameon=False)
    plots.save(figure, out / f"{name}_fit.png")
    return {**law._asdict(), "expected": expected}


def about_fit(found: dict[str, Any]) -> list[str]:
    """The fitted law in words."""
    law = f"{found['limit']:.2f} - {found['gap']:.2f} (n / {found['unit']:.0f})^-{found['exponent']:.2f}"
    expected = "; ".join(
        f"{times} times the texts: {at['tokens_per_step']:.2f} ({between(at['interval'])})"
        for times, at in found["expected"].items()
    )
    return [
        f"Fitted to the last measurements: {law} tokens per pass after learning from n tokens. {expected}.",
        "More texts mean as many epochs. The intervals are over prompts alone, and a handful of runs hardly "
        "says where the curve ends.",
    ]


if __name__ == "__main__":
    sys.exit(main())
