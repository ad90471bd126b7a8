"""Make one page of a finished run: its tables, its figures, and where every token of a few texts came from.

    python -m specjax.report runs/eagle

  DIR                the workdir of a finished run of the task compare or evaluate
  --prompt=N[,N]     the prompts that are decoded again, counted from 0 (the first three)
  --sweep=DIR        the workdir of a sweep whose heat map is to be shown, too
  --out=FILE         where the page goes (DIR/report.html)
  --help             this text

The page needs no network. Prompts are decoded as the run did, each alone, under the run's sampling law and
seed; of an evaluation, those of its first section, and the first turn of each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from specjax.analysis import plots, report
from specjax.analysis.plots import Bar, Series
from specjax.analysis.report import Page, Pass, Picture, Text
from specjax.build import build_method
from specjax.config import run_config, validate
from specjax.data.prompts import Prompt, load_prompts
from specjax.data.tokenizer import Tokenizer
from specjax.decode import Trace, prefill, trace
from specjax.errors import ConfigError, command
from specjax.eval import results, tables
from specjax.eval.compare import PLAIN, Batch, Methods, Settings, lay_out
from specjax.eval.timing import Inputs
from specjax.modules import find_module
from specjax.step import Method, has_ended
from specjax.storage import cache_folder
from specjax.tasks import compare, evaluate
from specjax.types import ModelParams

PAGE = "report.html"
HEAT_MAP = "heatmap.png"  # as the task sweep calls it
SHOWN = 3  # prompts, if none are named
ROUNDS = 16  # traced by one call
TASKS = ("compare", "evaluate")
DIFFERS = (
    "Decoded again, this is not the run's own text: its device, its versions or its batches were others."
)


class Options(NamedTuple):
    """A command line; `prompts` is None for the first few."""

    folder: Path
    prompts: list[int] | None
    sweep: Path | None
    out: Path


class Finished(NamedTuple):
    """A finished run: its config, its summary, all lines, and the settings that have a table each."""

    folder: Path
    config: ConfigDict
    stored: Mapping[str, Any]  # the config's file, with the digest of the prompts
    summary: Mapping[str, Any]
    lines: list[results.Line]
    sections: list[Mapping[str, Any]]


@command()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0, or 2 after an error of the user's, or 130 after an interruption."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help", "--helpfull", "--helpshort"} & set(arguments):
        print(__doc__)
        return 0
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    options = parse(arguments)
    results.write_whole(options.out, report.render(make_page(options)))
    print(options.out)
    return 0


def parse(arguments: Sequence[str]) -> Options:
    """Read a command line; ConfigError on what is unknown, missing or cannot be written."""
    values = flags.FlagValues()
    values.set_gnu_getopt(True)
    flags.DEFINE_list("prompt", None, "numbers of prompts", flag_values=values)
    flags.DEFINE_string("sweep", None, "workdir of a sweep", flag_values=values)
    flags.DEFINE_string("out", None, "file of the page", flag_values=values)
    try:
        folders = values(["", *arguments])[1:]
    except flags.Error as error:
        raise ConfigError(f"{error}: --help lists the flags") from error
    if len(folders) != 1:
        raise ConfigError(f"{len(folders)} folders are named: give the workdir of one finished run")
    prompts = values.prompt
    if prompts is not None and not (prompts and all(number.isdecimal() for number in prompts)):
        raise ConfigError(f"--prompt is '{','.join(prompts)}': give numbers from 0 on, with commas between")
    folder = Path(folders[0]).expanduser()
    out = Path(values.out).expanduser() if values.out else folder / PAGE
    if out.is_dir():
        raise ConfigError(f"--out is the folder {out}: name a file, such as {out / PAGE}")
    sweep = Path(values.sweep).expanduser() if values.sweep else None
    numbers = None if prompts is None else list(dict.fromkeys(map(int, prompts)))
    return Options(folder, numbers, sweep, out)


def read(folder: Path) -> Finished:
    """What a run left in its workdir; ConfigError where that is no finished run of compare or evaluate."""
    try:
        stored, summary = (
            json.loads((folder / name).read_text(encoding="utf-8"))
            for name in (results.CONFIG, results.SUMMARY)
        )
        text = (folder / results.GENERATIONS).read_text(encoding="utf-8")
        # Not splitlines: texts may hold other ends of lines than this one.
        lines = [json.loads(line) for line in text.split("\n") if line]
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be read ({error.strerror}): name the workdir of a finished run"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"a file in {folder} is damaged ({error}): run it again in another workdir"
        ) from error
    if stored.get("task") not in TASKS:
        raise ConfigError(
            f"{folder} holds a run of the task '{stored.get('task')}': name one of {' or '.join(TASKS)}"
        )
    config = _config(stored)
    sections = summary.get("sections", [{**config.to_dict(), **summary}])
    return Finished(folder, config, stored, summary, lines, sections)


def make_page(options: Options) -> Page:
    """Draw the figures, decode a few prompts again, and put everything together."""
    run = read(options.folder)
    results.check_writable(options.out.parent)
    pictures = [*_heat_map(options.sweep), *(p for section in run.sections for p in _pictures(run, section))]
    texts = list(_texts(run, options.prompts))
    config, environment = run.config, run.summary["environment"]
    if config.task == "compare":
        shown = tables.report(f"{config.target}: {tables.section_title(run.sections[0])}", run.summary)
    else:
        shown = tables.evaluation(config.target, run.summary)
    about = {"target": config.target, "dtype": config.dtype, **environment}
    flat = [
        table._replace(columns=tuple(column.replace("\n", " ") for column in table.columns))
        for table in shown.tables
    ]
    title = f"{config.target}: {', '.join(name for name in run.sections[0]['methods'] if name != PLAIN)}"
    return Page(title, about, flat, shown.notes, pictures, texts)


def record(method: Method, params: ModelParams, inputs: Inputs) -> Trace:
    """Decode one batch to its end, and return all rounds [R, B, ...] as numpy arrays."""
    state = prefill(method, params, *inputs)
    parts: list[Trace] = []
    while not bool(has_ended(state)):
        state, part = trace(method, params, inputs.request, state, ROUNDS)
        parts.append(jax.device_get(part))
    return jax.tree.map(lambda *own: np.concatenate(own), *parts)


def passes_of(rounds: Trace, row: int) -> Iterator[Pass]:
    """What a recorded row did, round by round until its end."""
    own = jax.tree.map(lambda leaf: leaf[:, row].tolist(), rounds)
    for place, is_active in enumerate(own.info.active):
        if is_active:
            yield Pass(
                tokens=own.tokens[place],
                parents=own.parents[place],
                path=own.verdict.path[place],
                next_token=own.verdict.next_token[place],
                num_accepted=own.info.num_accepted[place],
                num_emitted=own.info.num_emitted[place],
            )


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """What a token says amid a text, special ones included; its name where it is no whole character."""
    # Some decoders drop the space that a text begins with: the second of two is amid.
    once, twice = (tokenizer.decode([token] * times, skip_special_tokens=False) for times in (1, 2))
    text = twice[len(once) :]
    return (tokenizer.inner.id_to_token(token) or f"<{token}>") if not text or "\ufffd" in text else text


def _config(stored: Mapping[str, Any]) -> ConfigDict:
    """The run's config from its file; fields that came later have their defaults."""
    config = run_config(stored["task"])
    for name, field in find_module("tasks", stored["task"]).FIELDS.items():
        if stored.get(name) is not None:
            # JSON knows no tuples.
            config[name] = tuple(stored[name]) if field.kind is tuple else stored[name]
    validate(config)
    return config


def _heat_map(sweep: Path | None) -> list[Picture]:
    if sweep is None:
        return []
    try:
        content = (sweep / HEAT_MAP).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{sweep / HEAT_MAP} cannot be read ({error.strerror}): name the workdir of a sweep of two fields"
        ) from error
    return [report.picture(content, "image/png", f"Heat map of the sweep in {sweep.name}")]


def _pictures(run: Finished, section: Mapping[str, Any]) -> Iterator[Picture]:
    """Acceptance by depth, speed-ups by task, and what a token cost over what a pass gave."""
    title, methods = tables.section_title(section), section["methods"]
    drafting = [name for name in methods if name != PLAIN]
    by_depth = {
        f"{name}, {kind}": Series(*zip(*known, strict=True))
        for name in drafting
        for kind, values in methods[name]["acceptance_by_depth"].items()
        if (known := [(depth, v) for depth, v in enumerate(values, start=1) if v is not None])
    }
    if by_depth:
        figure = plots.lines(by_depth, x_label="depth of the draft", y_label="accepted", title=title)
        (axes,) = figure.axes
        axes.set_ylim(-0.02, 1.02)
        axes.set_xticks(sorted({depth for own in by_depth.values() for depth in own.x}))
        yield _svg(figure, f"Acceptance by depth: {title}")
    tasks = {**section["tasks"], "all": methods} if len(section["tasks"]) > 1 else {"all": methods}
    speedups = {
        name: {
            task: Bar(own[name]["speedup"]["value"], own[name]["speedup"]["interval"])
            for task, own in tasks.items()
        }
        for name in drafting
    }
    figure = plots.bars(speedups, y_label="speed-up over plain", title=title, reference=1.0)
    yield _svg(figure, f"Speed-up by task with 95 % intervals: {title}")
    points = {
        name: Series(
            [len(line["tokens"]) / line["num_steps"] for line in own],
            [1000 * line["decode_seconds"] / len(line["tokens"]) for line in own],
        )
        for name in methods
        if (own := [line for line in _lines(run, section) if line["method"] == name])
    }
    figure = plots.scatter(points, x_label="tokens per pass of a text", y_label="ms per token", title=title)
    yield _svg(figure, f"Tokens per pass against time: {title}")


def _svg(figure: Any, alt: str) -> Picture:
    return report.picture(plots.svg(figure).encode(), "image/svg+xml", alt)


def _lines(run: Finished, section: Mapping[str, Any]) -> list[results.Line]:
    """A section's lines; those of a comparison name no section."""
    axes = evaluate.Section._fields
    return [
        line for line in run.lines if all(line.get(axis, section[axis]) == section[axis] for axis in axes)
    ]


def _texts(run: Finished, numbers: Sequence[int] | None) -> Iterator[Text]:
    """The chosen prompts, decoded again by every method; ConfigError before anything is loaded."""
    section = run.sections[0]
    prompts = _prompts(run)
    rows = list(prompts)
    for number in numbers or ():
        if number >= len(rows):
            raise ConfigError(f"there is no prompt {number}: the run has {len(rows)}, counted from 0")
    chosen = rows[:SHOWN] if numbers is None else [rows[number] for number in numbers]
    compare.tell(f"loading {run.config.target}")
    tokenizer, methods = _load(run)
    told = {**run.config.to_dict(), **section}
    settings = Settings(
        **{name: told[name] for name in Settings._fields if name in told}, stop_tokens=tokenizer.stop_tokens
    )
    before = {(line["row"], line["method"]): line["tokens"] for line in _lines(run, section)}
    for row in chosen:
        prompt = prompts[row]
        (tokens,) = compare.encode([prompt], tokenizer, run.config.chat)
        inputs = lay_out(methods, dict.fromkeys(methods, Batch((row,), (tuple(tokens),))), settings)
        for name, (method, params) in methods.items():
            compare.tell(f"decoding {prompt.id} with {name}")
            passes = list(passes_of(record(method, params, inputs[name]), 0))
            written = [token for done in passes for token in done.emitted]
            yield Text(
                f"{prompt.id} ({prompt.task}): {name}",
                tokenizer.decode(tokens, skip_special_tokens=False),
                *report.explain(passes, lambda token: token_text(tokenizer, token)),
                remark="" if written == before.get((row, name)) else DIFFERS,
            )


def _prompts(run: Finished) -> dict[int, Prompt]:
    """The first section's prompts by their rows; ConfigError where they are not what the run read."""
    config = run.config
    if config.task == "compare":
        asked: Any = load_prompts(config.prompts, config.prompts_path, config.limit, config.per_category)
        prompts = dict(enumerate(asked))
    else:
        asked = evaluate.load_sets(config)
        sections, pieces = evaluate.plan(config, asked)
        own = [piece for piece in pieces if piece.section == sections[0]]
        prompts = {
            row: prompt for piece in own for row, prompt in zip(piece.rows, piece.prompts, strict=True)
        }
    if compare.digest(asked) != run.stored.get("prompts_sha256"):
        raise ConfigError(
            f"the prompts are not those that {run.folder} has the answers to: put their files back, or run "
            "it again"
        )
    return prompts


def _load(run: Finished) -> tuple[Tokenizer, Methods]:
    """The tokenizer, and all methods by the names that the run gave them."""
    if run.config.task == "evaluate":
        engine = evaluate.load(run.config)
        return engine.tokenizer, engine.methods
    built = build_method(run.config)
    (speculative,) = (name for name in run.summary["methods"] if name != PLAIN)
    methods = {
        PLAIN: (Method(built.method.target), ModelParams(built.loaded.params, {})),
        speculative: (built.method, built.params),
    }
    return compare.load_tokenizer(built.loaded), methods


if __name__ == "__main__":
    sys.exit(main())
