"""What a sweep found: a line for each trial, the best of them, and what mattered."""

from __future__ import annotations

import ast
import csv
import io
import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from matplotlib.figure import Figure
from optuna.trial import FrozenTrial

from specjax.analysis import plots
from specjax.eval.metrics import Metrics
from specjax.eval.results import write_whole
from specjax.eval.tables import Report, Table, interval, warnings
from specjax.storage import replacing
from specjax.sweeps.bench import OBJECTIVES, objective_of
from specjax.sweeps.ledger import COMPLETE, COPIED, REASON, place_of
from specjax.sweeps.space import Axis, Value, flags

TRIALS, HEAT_MAP, IMPORTANCE = "trials.csv", "heatmap.png", "importance.png"
BEST_SHOWN = 10
ENOUGH = 8  # trials, below which importances are those of chance

READING = (
    "Tokens per pass: new tokens per target pass, bonus included. Speed-up: that of the seconds a token, "
    "without prefill and compilation.",
    "The best of many noisy measurements is flattered by its noise: measure it again before it is quoted.",
)


def best(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The trials that were measured, the best first, those of one value in their order."""
    measured = [trial for trial in trials if trial.state == COMPLETE and COPIED not in trial.user_attrs]
    return sorted(measured, key=lambda trial: -_value(trial))


def best_by_task(trials: Sequence[FrozenTrial], objective: str) -> dict[str, tuple[FrozenTrial, Metrics]]:
    """For every task the trial that is best at it, with its metrics there."""
    found: dict[str, tuple[FrozenTrial, Metrics]] = {}
    for trial in best(trials):
        for task, metrics in trial.user_attrs["tasks"].items():
            value = objective_of(metrics, objective)
            before = objective_of(found[task][1], objective) if task in found else None
            if value is not None and (before is None or value > before):
                found[task] = trial, metrics
    return found


def importances(study: optuna.Study, axes: Sequence[Axis]) -> dict[str, float]:
    """What share each axis has in the objective, by PED-ANOVA (arXiv 2304.10255); {} after too few trials."""
    values = [trial.value for trial in study.get_trials(deepcopy=False, states=(COMPLETE,))]
    if len(axes) < 2 or len(values) < ENOUGH or len(set(values)) < 2:
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    return optuna.importance.get_param_importances(study, evaluator=evaluator)


def summary(trials: Sequence[FrozenTrial], objective: str) -> dict[str, Any]:
    """Counts and the best, overall and by task, as it goes into JSON."""
    counts = Counter(trial.state.name.lower() for trial in trials)
    reasons = Counter(trial.user_attrs[REASON] for trial in trials if REASON in trial.user_attrs)
    ranked = best(trials)
    return {
        "objective": objective,
        "trials": {**counts, "copied": sum(COPIED in trial.user_attrs for trial in trials)},
        "pruned_because": dict(reasons),
        "best": _about(ranked[0], ranked[0].user_attrs["metrics"]) if ranked else None,
        "best_by_task": {
            task: _about(trial, metrics) for task, (trial, metrics) in best_by_task(trials, objective).items()
        },
    }


def report(
    title: str,
    trials: Sequence[FrozenTrial],
    axes: Sequence[Axis],
    objective: str,
    shares: Mapping[str, float],
) -> Report:
    """The tables of the best trials, overall and by task, and what has to be known about them."""
    ranked, by_task = best(trials), best_by_task(trials, objective)
    names = [_short(axis.name, axes) for axis in axes]
    measured = ("tokens\nper pass", "tokens/s", "speed-up", "95 %\ninterval")
    rows = [_row(trial, trial.user_attrs["metrics"], axes) for trial in ranked[:BEST_SHOWN]]
    tables = [Table(f"Best by {OBJECTIVES[objective]}: {title}", ("trial", *names, *measured), rows)]
    if len(by_task) > 1:
        rows = [(task, *_row(trial, metrics, axes)) for task, (trial, metrics) in by_task.items()]
        tables.append(Table("Best by task", ("task", "trial", *names, *measured), rows))
    notes = [*READING]
    if ranked:
        arguments = shlex.join(flags(ranked[0].params))
        notes.append(f"The best again: python -m specjax.run with the base config and {arguments}")
    for trial in ranked[:1]:
        notes += warnings(f"trial {place_of(trial)}", trial.user_attrs["metrics"])
    if shares:
        parts = ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
        notes.append(f"What it depends on (PED-ANOVA, shares): {parts}.")
    pruned = [trial for trial in trials if trial.state != COMPLETE]
    if pruned:
        first = pruned[0].user_attrs[REASON]
        notes.append(f"{len(pruned)} of {len(trials)} trials were pruned, the first for: {first}")
    return Report(tables, notes)


def trials_csv(trials: Sequence[FrozenTrial], axes: Sequence[Axis]) -> str:
    """A line for each trial, its metrics by task included."""
    tasks = sorted({task for trial in trials for task in trial.user_attrs.get("tasks", {})})
    rows = [_flat(trial, axes, tasks) for trial in trials]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def heat_map(
    trials: Sequence[FrozenTrial], down: Axis, across: Axis, objective: str, others: bool
) -> Figure | None:
    """The objective over two axes, the best over all `others`; None where an axis has no values listed."""
    measured = best(trials)
    if not (measured and down.listed and across.listed):
        return None
    cells = np.full((len(down.listed), len(across.listed)), np.nan)
    for trial in measured:
        place = _number(down, trial), _number(across, trial)
        cells[place] = np.fmax(cells[place], _value(trial))
    return plots.heat_map(
        cells,
        rows=[_text(value) for value in down.listed],
        columns=[_text(value) for value in across.listed],
        x_label=across.name,
        y_label=down.name,
        title=OBJECTIVES[objective] + (", best over the others" if others else ""),
    )


def write(
    folder: Path,
    trials: Sequence[FrozenTrial],
    axes: Sequence[Axis],
    pair: Sequence[Axis],
    objective: str,
    shares: Mapping[str, float],
) -> None:
    """Write the trials and the figures, each file whole; a figure that has nothing to show is left out."""
    write_whole(folder / TRIALS, trials_csv(trials, axes))
    figures: dict[str, Figure | None] = {}
    if len(pair) == 2:
        figures[HEAT_MAP] = heat_map(trials, pair[0], pair[1], objective, others=len(axes) > 2)
    if shares:
        figures[IMPORTANCE] = plots.shares(shares, x_label=f"share in {OBJECTIVES[objective]}")
    for name, figure in figures.items():
        if figure is not None:
            with replacing(folder / name) as draft:
                # The format is that of the name.
                picture = draft.with_suffix(".png")
                plots.save(figure, picture)
                os.replace(picture, draft)


def _value(trial: FrozenTrial) -> float:
    assert trial.value is not None
    return trial.value


def _about(trial: FrozenTrial, metrics: Metrics) -> dict[str, Any]:
    return {"trial": place_of(trial), "params": trial.params, "metrics": metrics}


def _row(trial: FrozenTrial, m: Metrics, axes: Sequence[Axis]) -> tuple[str, ...]:
    lossy = "" if trial.user_attrs["metrics"]["lossless"] else " LOSSY"
    return (
        f"{place_of(trial)}{lossy}",
        *(_text(trial.params[axis.name]) for axis in axes),
        f"{m['tokens_per_step']:.2f}",
        f"{m['tokens_per_second']:.1f}",
        f"{m['speedup']['value']:.2f}x",
        interval(m["speedup"]["interval"]),
    )


def _flat(trial: FrozenTrial, axes: Sequence[Axis], tasks: Sequence[str]) -> dict[str, Any]:
    attributes = trial.user_attrs
    m = attributes.get("metrics", {})
    low, high = m.get("speedup", {}).get("interval") or (None, None)
    by_task = {
        f"{task}.{name}": objective_of(attributes["tasks"][task], name) if "tasks" in attributes else None
        for task in tasks
        for name in OBJECTIVES
    }
    return {
        "trial": place_of(trial),
        "state": trial.state.name.lower(),
        **{axis.name: trial.params[axis.name] for axis in axes},
        **{name: objective_of(m, name) if m else None for name in OBJECTIVES},
        "speedup_low": low,
        "speedup_high": high,
        **{name: m.get(name) for name in ("break_even_tokens_per_step", "tokens", "steps", "lossless")},
        "identical_to_greedy": (m.get("identical_to_greedy") or {}).get("identical"),
        **by_task,
        COPIED: attributes.get(COPIED),
        REASON: attributes.get(REASON),
    }


def _number(axis: Axis, trial: FrozenTrial) -> int:
    """Which of the axis's listed values the trial has; steps may be off by rounding."""
    value = trial.params[axis.name]
    return axis.values.index(value) if axis.values else round((value - axis.low) / (axis.step or 1))


def _text(value: Value) -> str:
    """A value for a person: of a whole drafter its name and, line by line, its fields."""
    if isinstance(value, str) and value.startswith("{"):
        fields = ast.literal_eval(value)
        return "\n".join([fields.pop("name", ""), *(f"{name} {given}" for name, given in fields.items())])
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _short(name: str, axes: Sequence[Axis]) -> str:
    """The last part of a field's name, where no other axis has the same."""
    last = name.rpartition(".")[2]
    return last if sum(axis.name.rpartition(".")[2] == last for axis in axes) == 1 else name
