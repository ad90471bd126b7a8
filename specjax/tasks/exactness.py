"""Certify, for every drafter, rule and warp, that decoding keeps the target's law, or say how far it is off.

A quick certificate has every rule judge the toys, whose proposals are of every law, and one rule each drafter
of the package, both under every warp: the lossless rules that go by the law of its proposals take turns, for
a rule sees of a drafter nothing but its draft and that law. Left to --config.quick=False are all other rules
on the drafters, and 50 000 samples a row. A drafter or rule that the config names meets all in either case.

DIR receives certificate.json and certificate.md (every row and its verdict), measurements.jsonl (the rows
as they were finished) and config.json. The exit code is 1 if a row failed.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict
from rich.console import Console

from specjax.build import build_verify, check_pair
from specjax.config import Field, Options, check_at_least_1, check_seed, drafter_config, rule_options
from specjax.errors import ConfigError
from specjax.eval import results
from specjax.eval.exactness import subjects
from specjax.eval.exactness.certificate import (
    CONTROL_LEVEL,
    LEVEL,
    POWER,
    Candidate,
    Row,
    Settings,
    has_failed,
    judged,
    measure,
    pairs_of,
    power_of,
    rules_in_turn,
)
from specjax.eval.exactness.report import full, summary
from specjax.eval.exactness.subjects import Subject
from specjax.eval.progress import Progress
from specjax.eval.tables import to_markdown
from specjax.modules import find_module, module_names

FILES = results.Files(
    "measurements.partial.jsonl", "measurements.jsonl", "certificate.json", "certificate.md"
)
AT_ONCE = 2
QUICK_SAMPLES, FULL_SAMPLES = 1_500, 50_000

FIELDS = {
    "task": Field(str, "exactness", "this task"),
    "drafter": Field(
        ConfigDict, ConfigDict(), "certify only this one: its name, or your module, and its fields"
    ),
    "verify": Field(str, None, "certify only this rule (a module of specjax.verify or your own)"),
    "verify_options": Field(ConfigDict, ConfigDict(), "that rule's own fields, such as a lenience"),
    "quick": Field(
        bool,
        True,
        f"{QUICK_SAMPLES} samples a row and one rule for each packaged drafter, else {FULL_SAMPLES} and all",
    ),
    "samples": Field(
        int, None, "samples a row, whatever `quick` says; a few hundred are too few for the controls"
    ),
    "instances": Field(int, 50, "random instances of the rational reference for each rule"),
    "seed": Field(int, 0, "of the samples and the instances"),
}


def validate(config: ConfigDict) -> None:
    """Check the values of the fields; ConfigError names the field and the remedy."""
    check_at_least_1(config, ("samples", "instances"))
    check_seed(config)
    if config.drafter:
        drafter_config(config.drafter)
    if config.verify is None and config.verify_options:
        raise ConfigError("verify_options is set and verify is not: name the rule with config.verify")
    if config.verify is not None:
        rule_options(config.verify, config.verify_options)


def run(options: Options) -> int:
    """Measure what is not measured yet, write and print the certificate; 1 if a row failed, else 0."""
    config, workdir, stream = options
    if stream:
        raise ConfigError("--stream shows a text, and a certificate has none: leave it out")
    candidates = chosen_rules(config)
    chosen = chosen_subjects(config, candidates)
    judges = judges_of(config, chosen, candidates)
    samples = config.samples or (QUICK_SAMPLES if config.quick else FULL_SAMPLES)
    settings = Settings(samples, config.instances, config.seed)
    record = {
        **config.to_dict(),
        "samples": samples,
        "code_sha256": code_digest(chosen_modules(config)),
        "environment": results.environment(),
    }
    rows_of = {number: len(pairs_of(subject, judges[number])) for number, subject in enumerate(chosen)}
    lines = results.resume(workdir, record, rows_of, FILES)
    finished = {line["batch"] for line in lines}
    if finished:
        print(
            f"{len(finished)} of {len(chosen)} drafters were finished before, in {workdir}", file=sys.stderr
        )
    with Progress(len(chosen), len(finished), Console(stderr=True), "drafters", "samples") as progress:
        todo = {number: subject for number, subject in enumerate(chosen) if number not in finished}
        for number, rows in _measured(todo, judges, settings, progress.status):
            new = [{"batch": number, **row} for row in rows]
            results.append(workdir, new, FILES)
            lines += new
            progress.advance(1, sum(row["samples"] for row in rows))
    is_whole = all(len(own) == len(candidates) for own in judges)
    return _finish(workdir, record, sorted(lines, key=lambda line: line["batch"]), is_whole)


def _measured(
    todo: Mapping[int, Subject],
    judges: Sequence[list[Candidate]],
    settings: Settings,
    report: Callable[[str], None],
) -> Iterator[tuple[int, list[Row]]]:
    """The rows of each subject in turn; several are compiled at once, which takes most of a quick run."""
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        found = {n: pool.submit(measure, subject, judges[n], settings, report) for n, subject in todo.items()}
        for number, rows in found.items():
            yield number, rows.result()
    finally:
        pool.shutdown(cancel_futures=True)


def chosen_rules(config: ConfigDict) -> list[Candidate]:
    """The config's rule with its options, or every rule of the package."""

    def candidate(name: str, given: Mapping[str, Any]) -> Candidate:
        rule = build_verify(name, given)
        return Candidate(name, rule, rule_options(name, given), find_module("verify", name))

    if config.verify is not None:
        return [candidate(config.verify, config.verify_options)]
    return [candidate(name, {}) for name in module_names("verify")]


def chosen_subjects(config: ConfigDict, candidates: list[Candidate]) -> list[Subject]:
    """The config's drafter, or toys and every drafter of the package; only those that a rule may judge."""
    if config.drafter:
        name = config.drafter.name
        module = find_module("drafters", name)
        (subject,) = subjects.modules({name: (module, drafter_config(config.drafter))}).values()
        for candidate in candidates:
            if config.verify is not None:
                check_pair(name, subject.drafter, candidate.name, candidate.module)
        found = [subject]
    else:
        found = [*subjects.toys().values(), *subjects.modules(subjects.examples()).values()]
    return [subject for subject in found if pairs_of(subject, candidates)]


def judges_of(
    config: ConfigDict, chosen: Sequence[Subject], candidates: list[Candidate]
) -> list[list[Candidate]]:
    """The rules for each subject: all of them, or for the package's drafters one in turn, as `quick` says."""
    if not config.quick or config.drafter or config.verify is not None:
        return [candidates] * len(chosen)
    toys = [subject for subject in chosen if subject.name in subjects.TOYS]
    return [candidates] * len(toys) + rules_in_turn(chosen[len(toys) :], candidates)


def chosen_modules(config: ConfigDict) -> list[ModuleType]:
    """The modules of yours that the config names."""
    named = (("drafters", config.drafter.get("name")), ("verify", config.verify))
    return [find_module(room, name) for room, name in named if name is not None and "." in name]


def code_digest(modules: Iterable[ModuleType]) -> str:
    """A hash of the package's source and that of `modules`: what was measured with other code is stale."""
    package = Path(__file__).parent.parent
    texts = [path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))]
    return hashlib.sha256("".join([*texts, *map(inspect.getsource, modules)]).encode()).hexdigest()


def _finish(workdir: Path, record: Mapping[str, Any], lines: list[Row], is_whole: bool) -> int:
    """Write and print the certificate; it says so where not every rule judged every drafter."""
    rows = judged([{name: value for name, value in line.items() if name != "batch"} for line in lines])
    has_any_failed = any(map(has_failed, rows))
    certificate = {
        "rows": rows,
        "passed": not has_any_failed,
        "settings": {
            **{name: value for name, value in record.items() if name != "environment"},
            "level": LEVEL,
            "control_level": CONTROL_LEVEL,
            "power": {"probability": POWER, "smallest_total_variation": power_of(rows)},
        },
        "environment": record["environment"],
    }
    report = summary(rows)
    if not is_whole:
        report.notes.append("Each drafter of the package had one rule; --config.quick=False gives it all.")
    results.finish(workdir, certificate, f"{report.markdown()}\n{to_markdown(full(rows))}", FILES)
    # A file or a pipe has no width of its own.
    report.show(Console() if sys.stdout.isatty() else Console(width=100))
    return int(has_any_failed)
