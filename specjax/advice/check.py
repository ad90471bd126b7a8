"""Predicted against measured: settings that sweeps and runs measured, foreseen from other prompts."""

from __future__ import annotations

import ast
import csv
import dataclasses
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax.advice.candidates import Question
from specjax.advice.measure import Measured
from specjax.advice.predict import Candidate, Prediction, predictions
from specjax.config import drafter_config
from specjax.data.prompts import load_prompts
from specjax.errors import ConfigError
from specjax.eval.compare import PLAIN

TRIALS, SUMMARY = "trials.csv", "summary.json"  # what specjax.sweep and specjax.run write
MOST_ERROR = 0.15  # of the median setting


class Setting(NamedTuple):
    """A drafter's fields, where they were measured, under which other fields, and the speed-up they gave."""

    where: str
    drafter: Mapping[str, Any]
    others: Mapping[str, Any]
    speedup: float


class Checked(NamedTuple):
    """A setting and what was predicted of it."""

    setting: Setting
    prediction: Prediction

    @property
    def error(self) -> float:
        """By how much the prediction is off, as a share of what was measured."""
        return abs(self.prediction.factor / self.setting.speedup - 1)


def check(folders: Sequence[Path], question: Question, measured: Measured) -> tuple[list[Checked], list[str]]:
    """All settings of sweeps and runs that the measurement speaks of, and why others are left out.

    Prompts that are in both are taken out of the measurement. ConfigError where nothing is left to compare.
    """
    found, left_out = [], []
    for folder in folders:
        settings = list(read_settings(folder))
        candidates = [_without(c, measured, _texts(settings)) for c in measured.candidates]
        for setting in settings:
            reason, prediction = _predict(setting, question, measured, candidates)
            if prediction is None:
                left_out.append(f"{setting.where}: {reason}")
            else:
                found.append(Checked(setting, prediction))
    if not found:
        raise ConfigError(
            "--check found no setting to compare with: " + "; ".join(left_out or ["there are none in there"])
        )
    return found, left_out


def median_error(found: Sequence[Checked]) -> float:
    """The error of the median setting."""
    return statistics.median(checked.error for checked in found)


def read_settings(folder: Path) -> Iterator[Setting]:
    """The settings of a sweep, or of a run of `compare` or `evaluate`; ConfigError if it is neither."""
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        config = summary["config"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"--check names {folder}, which holds no finished run or sweep: give the --workdir of one"
        ) from error
    if "base" in config:
        yield from _trials(folder, config["base"])
    elif "sections" in summary:
        for section in summary["sections"]:
            for name, method in config["methods"].items():
                others = {**section, **config, **method}
                speedup = section["methods"][name]["speedup"]["value"]
                yield Setting(f"{folder.name}, {name}", method["drafter"], others, speedup)
    else:
        for name, metrics in summary["methods"].items():
            if name != PLAIN:
                speedup = metrics["speedup"]["value"]
                yield Setting(f"{folder.name}, {name}", config["drafter"], config, speedup)


def _trials(folder: Path, base: Mapping[str, Any]) -> Iterator[Setting]:
    with (folder / TRIALS).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["state"] != "complete" or row["copied_from"]:
                continue
            drafter = dict(base["drafter"])
            if "drafter" in row:
                drafter = ast.literal_eval(row["drafter"])
            drafter |= {
                name.removeprefix("drafter."): _value(text)
                for name, text in row.items()
                if name.startswith("drafter.")
            }
            others = {name: _value(text) for name, text in row.items() if name in base}
            where = f"{folder.name}, trial {row['trial']}"
            yield Setting(where, drafter, {**base, **others}, float(row["speedup"]))


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text or None


def _predict(
    setting: Setting, question: Question, measured: Measured, candidates: Sequence[Candidate | None]
) -> tuple[str, Prediction | None]:
    """The prediction, or why there is none."""
    for name in ("target", "dtype", "temperature", "batch_size"):
        there, here = setting.others.get(name), getattr(question, name)
        if there != here:
            return f"its {name} is {there!r}, and {here!r} was measured here", None
    for candidate, known in zip(candidates, measured.candidates, strict=True):
        method = measured.methods[known.name]
        if _is_like(setting.drafter, method["drafter"], known):
            if _weights(setting.others, question.dtype) != _weights(method, question.dtype):
                return "its drafter has other weights than the one measured here", None
            if candidate is None:
                return "it has the very prompts that were measured here: measure on others", None
            if setting.drafter["draft_length"] not in known.lengths:
                return f"its draft length is none of {known.lengths}", None
            found = predictions(candidate, measured.plain_seconds, question.max_new_tokens)
            return "", next(p for p in found if p.draft_length == setting.drafter["draft_length"])
    return f"its drafter {dict(setting.drafter)} was not measured here", None


def _is_like(fields: Mapping[str, Any], known: Mapping[str, Any], candidate: Candidate) -> bool:
    """Whether they are the same drafter, for chains at any length."""
    if fields["name"] != known["name"]:
        return False
    own, other = (dataclasses.asdict(drafter_config(given)) for given in (known, fields))
    if candidate.num_nodes is None:
        own["draft_length"] = other["draft_length"]
    return own == other


def _weights(method: Mapping[str, Any], dtype: str) -> tuple[Any, ...]:
    """What a drafter's weights are made of: their type, and the tokens that it drafts."""
    tokens_from = tuple(method.get("draft_vocab_from") or ())
    return method.get("drafter_dtype") or dtype, method.get("draft_vocab_size"), tokens_from


def _texts(settings: Sequence[Setting]) -> set[str]:
    """The prompts of a folder's settings, where they can still be read."""
    if not settings:
        return set()
    c = settings[0].others
    names = c["prompts"] if isinstance(c["prompts"], (tuple, list)) else [c["prompts"]]
    texts = set()
    for name in names:
        try:
            found = load_prompts(name, c.get("prompts_path"), c.get("limit"), c.get("per_category"))
        except ConfigError:
            continue
        texts |= {prompt.turns[0] for prompt in found}
    return texts


def _without(candidate: Candidate, measured: Measured, texts: set[str]) -> Candidate | None:
    """The candidate without the prompts of these texts; None where none is left."""
    rows = [row for row, prompt in enumerate(measured.prompts) if prompt.turns[0] not in texts]
    if not rows:
        return None
    return candidate._replace(num_steps=candidate.num_steps[rows], accepted=candidate.accepted[rows])
