"""Evaluate several methods on several prompt sets, temperatures, batch sizes and lengths, in one run.

Every combination of a set, a temperature, a batch size and a length is a section, in which all methods and
plain decoding answer the same prompts in turns. DIR receives summary.json and table.md, generations.jsonl
(every text, with its counts and seconds), costs.jsonl (for every section, what a step takes, its parts and
its memory) and config.json. A run that was killed goes on after its last finished batch.
"""

from __future__ import annotations

import itertools
import resource
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
from rich.console import Console

from specjax.analysis import theory
from specjax.build import LoadedTarget, build_on, build_target, build_verify
from specjax.config import Field, Options, check_at_least_1, check_seed, check_type
from specjax.data.prompts import PROMPT_SETS, PUBLISHED, Prompt, load_prompts
from specjax.data.tokenizer import Tokenizer
from specjax.errors import ConfigError, nearest
from specjax.eval import results, tables
from specjax.eval.compare import PLAIN, Batch, Methods, Settings, decode_batch, lay_out, make_batches
from specjax.eval.metrics import Metrics, chain_acceptance, step_shares, summarize_lines
from specjax.eval.progress import Progress
from specjax.eval.timing import PARTS, STEP, Parts, Programs, time_parts
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.tasks import compare
from specjax.tasks.compare import Message, encode_chat, user
from specjax.types import ModelParams, Params

COSTS = results.Files("costs.partial.jsonl", "costs.jsonl", results.SUMMARY, results.TABLE)
MOST_PROGRAMS = 120  # kept: one of 30 layers takes some 250 of the 65530 memory maps that Linux allows
AXES = ("temperatures", "batch_sizes", "max_new_tokens", "prompts")
NEEDED = ("drafter", "verify")
WANTED = ("verify_options", "drafter_dtype", "draft_vocab_size", "draft_vocab_from")
MODEL = "tokens_per_step / (1 + drafting_cost): what a device would gain where a pass over any draft costs 1"


def _shared(*names: str) -> dict[str, Field]:
    return {name: compare.FIELDS[name] for name in names}


FIELDS = {
    "task": Field(str, "evaluate", "this task"),
    **_shared("target"),
    "methods": Field(
        ConfigDict,
        ConfigDict(),
        f"by a name of yours: {', '.join(NEEDED)} and, where wanted, {', '.join(WANTED)}",
    ),
    "prompts": Field(tuple, ("default",), f"names of sets ({', '.join(PROMPT_SETS[:-1])}) or paths of files"),
    "prompts_path": Field(str, None, "the folder with the files of the sets, other than the default one"),
    "limit": Field(int, None, "use only so many prompts of each set"),
    **_shared("per_category", "chat"),
    "multi_turn": Field(bool, False, "ask all turns, each after the method's own answers to those before"),
    "max_new_tokens": Field(tuple, (64,), "the most tokens to write for a turn"),
    "batch_sizes": Field(tuple, (1,), "prompts decoded together"),
    "temperatures": Field(tuple, (0.0,), "0 is argmax"),
    **_shared("top_k", "top_p", "min_p", "seed", "repeats", "stacked_layers", "dtype"),
}


class Section(NamedTuple):
    """What has a table of its own; `prompts` is the name of the set."""

    temperature: float
    batch_size: int
    max_new_tokens: int
    prompts: str


class Piece(NamedTuple):
    """Prompts decoded together; `rows` number the first turn of each, the further turns follow."""

    section: Section
    prompts: tuple[Prompt, ...]
    rows: tuple[int, ...]

    @property
    def num_questions(self) -> int:
        """All turns of all prompts."""
        return sum(len(prompt.turns) for prompt in self.prompts)


class Engine(NamedTuple):
    """The methods with their weights, plain decoding first, and what was compiled of them."""

    tokenizer: Tokenizer
    methods: Methods
    programs: dict[str, Programs]
    parts: dict[str, Parts]

    def forget(self) -> None:
        """Keep nothing that was compiled."""
        for program in self.programs.values():
            program.forget()
        jax.clear_caches()


def validate(config: ConfigDict) -> None:
    """Check the values of the fields; ConfigError names the field and the remedy."""
    check_at_least_1(config, ("repeats", "limit", "per_category"))
    check_seed(config)
    compare.check_dtype(config.dtype)
    for axis, kind in zip(AXES, (float, int, int, str), strict=True):
        if not config[axis]:
            raise ConfigError(f"{axis} is empty: give at least one")
        for value in config[axis]:
            check_type(f"one of {axis}", value, kind)
            if kind is int and value < 1:
                raise ConfigError(f"one of {axis} is {value}: give at least 1")
        names = [set_name(value) if kind is str else value for value in config[axis]]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"{axis} has {twice[0]!r} twice: name each once")
    for temperature in config.temperatures:
        make_warp(1, temperature, config.top_k, config.top_p, config.min_p)
    if not config.methods:
        raise ConfigError("methods is empty: name at least one, with its drafter and its rule (verify)")
    for name, fields in config.methods.items():
        check_type(f"methods.{name}", fields, ConfigDict)
        _check_method(name, fields, config)


def _check_method(name: str, fields: ConfigDict, config: ConfigDict) -> None:
    if name == PLAIN:
        raise ConfigError(f"plain decoding is evaluated always: give methods.{PLAIN} another name")
    for field in fields:
        if field not in NEEDED + WANTED:
            raise ConfigError(f"methods.{name} has no field '{field}'{nearest(field, NEEDED + WANTED)}")
    for field in NEEDED:
        if field not in fields:
            raise ConfigError(f"methods.{name} misses '{field}': give its {' and '.join(NEEDED)}")
    try:
        compare.check_method(fields, max(config.temperatures), config.dtype)
    except ConfigError as error:
        raise ConfigError(f"methods.{name}: {error}") from error


def run(options: Options, load_engine: Callable[[ConfigDict], Engine] | None = None) -> int:
    """Evaluate all methods in all sections, print the tables, and return 0.

    Where answers are missing, the methods are those of `load_engine`, by default `load`.
    """
    config, workdir, stream = options
    if stream:
        raise ConfigError("--stream shows the text of one method, and here are several: leave it out")
    sets = load_sets(config)
    sections, pieces = plan(config, sets)
    names = [PLAIN, *config.methods]
    asked = {
        **config.to_dict(),
        "prompts_sha256": compare.digest(sets),
        "environment": results.environment(),
    }
    expected = {number: len(names) * piece.num_questions for number, piece in enumerate(pieces)}
    lines = results.resume(workdir, asked, expected)
    costs = results.resume(workdir, asked, dict.fromkeys(range(len(sections)), len(names)), COSTS)
    finished = {line["batch"] for line in lines}
    if finished:
        compare.tell(f"{len(finished)} of {len(pieces)} batches were finished before, in {workdir}")
    if len(lines) < sum(expected.values()) or len(costs) < len(sections) * len(names):
        compare.tell(f"loading {config.target}")
        _decode((load_engine or load)(config), config, workdir, sections, pieces, lines, costs)

    rules = {name: build_verify(f.verify, f.get("verify_options", {})) for name, f in config.methods.items()}
    lossless = {PLAIN: True} | {name: rule.lossless for name, rule in rules.items()}
    summary = {
        "config": config.to_dict(),
        **summarize(sections, lines, costs, lossless),
        "environment": results.environment(),
    }
    report = tables.evaluation(config.target, summary)
    results.seal(workdir, COSTS)
    results.finish(workdir, summary, report.markdown())
    compare.show(report)
    return 0


def set_name(name: str) -> str:
    """What a prompt set is called in tables: its name, or its file's."""
    return name if name in PROMPT_SETS else Path(name).stem


def load_sets(config: ConfigDict) -> dict[str, list[Prompt]]:
    """The prompts of each set, their tasks named after it, and only the first turn without `multi_turn`."""
    sets = {}
    for name in config.prompts:
        path = config.prompts_path if name in PUBLISHED else None
        prompts = load_prompts(name, path, config.limit, config.per_category)
        label, is_one_task = set_name(name), len({prompt.task for prompt in prompts}) == 1
        sets[label] = [
            prompt._replace(
                task=label if is_one_task else f"{label}/{prompt.task}",
                turns=prompt.turns if config.multi_turn else prompt.turns[:1],
            )
            for prompt in prompts
        ]
    return sets


def plan(config: ConfigDict, sets: Mapping[str, Sequence[Prompt]]) -> tuple[list[Section], list[Piece]]:
    """All sections in the order of their tables, and all batches; a turn has one row in all sections."""
    lengths = [len(prompt.turns) for prompts in sets.values() for prompt in prompts]
    rows = iter(itertools.accumulate(lengths, initial=0))
    rows_of = {name: [next(rows) for _ in prompts] for name, prompts in sets.items()}
    sections = list(
        itertools.starmap(
            Section, itertools.product(config.temperatures, config.batch_sizes, config.max_new_tokens, sets)
        )
    )
    pieces = [
        Piece(
            section,
            tuple(sets[section.prompts][i] for i in batch.rows),
            tuple(rows_of[section.prompts][i] for i in batch.rows),
        )
        for section in sections
        for batch in make_batches([()] * len(sets[section.prompts]), section.batch_size)
    ]
    return sections, pieces


def load(config: ConfigDict, loaded: LoadedTarget | None = None) -> Engine:
    """The target, once, or as it was `loaded`, and all methods; drafters with equal weights share them."""
    if loaded is None:
        loaded = build_target(config.target, jnp.dtype(config.dtype), config.stacked_layers)
    tokenizer = compare.load_tokenizer(loaded)
    methods = {PLAIN: (Method(loaded.target), ModelParams(loaded.params, {}))}
    for name, fields in config.methods.items():
        method, params = build_on(loaded, fields)[1:3]
        weights = next((p.drafter for _, p in methods.values() if _equal(p.drafter, params.drafter)), None)
        methods[name] = method, params if weights is None else params._replace(drafter=weights)
    programs = {name: Programs(*method) for name, method in methods.items()}
    parts = {name: Parts(method) for name, (method, _) in methods.items() if name != PLAIN}
    return Engine(tokenizer, methods, programs, parts)


def _equal(one: Params, other: Params) -> bool:
    def shapes(tree: Params) -> Any:
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)

    return shapes(one) == shapes(other) and all(
        a is b or bool(jnp.array_equal(a, b))
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def _decode(
    engine: Engine,
    config: ConfigDict,
    workdir: Path,
    sections: Sequence[Section],
    pieces: Sequence[Piece],
    lines: list[results.Line],
    costs: list[results.Line],
) -> None:
    """Add to `lines` and `costs` what is missing in them, keeping each batch as it is finished."""
    finished, measured = ({line["batch"] for line in kept} for kept in (lines, costs))
    todo = {number: piece for number, piece in enumerate(pieces) if number not in finished}
    for piece in todo.values():
        _check_fit(engine, config, piece)
    total = sum(piece.num_questions for piece in pieces)
    done = total - sum(piece.num_questions for piece in todo.values())
    num_parts = 0  # programs that are kept besides the engine's
    with Progress(total, done, Console(stderr=True), "answers") as progress:
        for place, section in enumerate(sections):
            for number in (n for n, piece in todo.items() if piece.section == section):
                if num_parts + sum(map(len, engine.programs.values())) > MOST_PROGRAMS:
                    engine.forget()
                    num_parts = 0
                new = _converse(engine, config, number, pieces[number], progress.status)
                results.append(workdir, new)
                lines += new
                progress.advance(len(new) // len(engine.methods), sum(len(line["tokens"]) for line in new))
            if place not in measured:
                progress.status(f"compiling and timing the parts of a step for {_title(section)}")
                own = [piece for piece in pieces if piece.section == section]
                new = _measure(engine, config, place, section, own)
                results.append(workdir, new, COSTS)
                costs += new
                num_parts += len(PARTS) * len(engine.parts)


def _settings(config: ConfigDict, section: Section, tokenizer: Tokenizer) -> Settings:
    return Settings(
        max_new_tokens=section.max_new_tokens,
        temperature=section.temperature,
        **{name: config[name] for name in ("top_k", "top_p", "min_p", "seed", "repeats")},
        stop_tokens=tokenizer.stop_tokens,
    )


def _check_fit(engine: Engine, config: ConfigDict, piece: Piece) -> None:
    """ConfigError, before any decoding, where a conversation with answers of the full length does not fit."""
    section = piece.section
    prompts = []
    for prompt in piece.prompts:
        said: list[Message] = [user(prompt.turns[0])]
        for turn in prompt.turns[1:]:
            said += [{"role": "assistant", "content": "."}, user(turn)]
        tokens = encode_chat(said, engine.tokenizer, config.chat)
        prompts.append((*tokens, *tokens[-1:] * (section.max_new_tokens * (len(prompt.turns) - 1))))
    batch = Batch(piece.rows, tuple(prompts))
    try:
        lay_out(engine.methods, {PLAIN: batch}, _settings(config, section, engine.tokenizer))
    except ConfigError as error:
        ids = ", ".join(prompt.id for prompt in piece.prompts)
        raise ConfigError(f"{section.prompts}, {ids}: {error}") from error


def _converse(
    engine: Engine, config: ConfigDict, number: int, piece: Piece, report: Callable[[str], None]
) -> list[results.Line]:
    """Ask all turns of a batch's prompts; every method goes on from its own answers."""
    settings = _settings(config, piece.section, engine.tokenizer)
    said: dict[str, list[list[Message]]] = {name: [[] for _ in piece.prompts] for name in engine.methods}
    lines = []
    for turn in range(max(len(prompt.turns) for prompt in piece.prompts)):
        asked = {
            row + turn: (place, prompt)
            for place, (row, prompt) in enumerate(zip(piece.rows, piece.prompts, strict=True))
            if turn < len(prompt.turns)
        }
        batches = {}
        for name, own in said.items():
            for place, prompt in asked.values():
                own[place].append(user(prompt.turns[turn]))
            encoded = (encode_chat(own[place], engine.tokenizer, config.chat) for place, _ in asked.values())
            batches[name] = Batch(tuple(asked), tuple(map(tuple, encoded)))
        inputs = lay_out(engine.methods, batches, settings)
        for generation in decode_batch(engine.programs, number, batches, inputs, settings.repeats, report):
            place, prompt = asked[generation.row]
            line = compare.line(generation, prompt, engine.tokenizer)
            said[generation.method][place].append({"role": "assistant", "content": line["text"]})
            lines.append({**piece.section._asdict(), "turn": turn, **line})
    return lines


def _measure(
    engine: Engine, config: ConfigDict, number: int, section: Section, pieces: Sequence[Piece]
) -> list[results.Line]:
    """What a step costs each method: time at a prompt of middling length, memory at the longest."""
    settings = _settings(config, section, engine.tokenizer)
    whole = [piece for piece in pieces if len(piece.prompts) == len(pieces[0].prompts)]
    batches = [
        Batch(piece.rows, tuple(map(tuple, compare.encode(piece.prompts, engine.tokenizer, config.chat))))
        for piece in whole
    ]
    batches.sort(key=lambda batch: max(map(len, batch.prompts)))
    middle, longest = (
        lay_out(engine.methods, dict.fromkeys(engine.methods, batch), settings)
        for batch in (batches[len(batches) // 2], batches[-1])
    )
    for name, program in engine.programs.items():
        program.compile(middle[name])
        program.compile(longest[name])
    seconds = time_parts(engine.programs, engine.parts, middle)
    # Linux counts it in KiB, macOS in bytes.
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return [
        {
            "batch": number,
            **section._asdict(),
            "method": name,
            "num_nodes": method.num_nodes,
            "max_depth": method.max_depth,
            "seconds": seconds[name],
            "memory": engine.programs[name].memory(longest[name]) | {"process_peak": resident},
        }
        for name, (method, _) in engine.methods.items()
    ]


def summarize(
    sections: Sequence[Section],
    lines: Sequence[results.Line],
    costs: Sequence[results.Line],
    lossless: Mapping[str, bool],
) -> dict[str, Any]:
    """`sections`, each with its `methods` and `tasks`, and `overall`: several sets together."""

    def summary(own: Sequence[results.Line], places: Sequence[int]) -> dict[str, Any]:
        found = summarize_lines(own, greedy=own[0]["temperature"] == 0, lossless=lossless)
        spent = {line["method"]: line for line in costs if line["batch"] in places}
        drafting = {name: _drafting_cost(costs, places, name) for name in spent}
        for methods in (found["methods"], *found["tasks"].values()):
            for name, metrics in methods.items():
                metrics |= _beyond_time(metrics, spent[name], drafting[name])
        return found

    found = []
    for place, section in enumerate(sections):
        own = [line for line in lines if _section_of(line) == section]
        part = summary(own, [place])
        for line in costs:
            if line["batch"] == place:
                part["methods"][line["method"]] |= {
                    "step": step_shares(line["seconds"]),
                    "memory": line["memory"],
                }
        found.append({**section._asdict(), **part})
    overall = []
    for setting in dict.fromkeys(section[:-1] for section in sections):
        places = [place for place, section in enumerate(sections) if section[:-1] == setting]
        if len(places) > 1:
            own = [line for line in lines if _section_of(line)[:-1] == setting]
            about = dict(zip(Section._fields, setting, strict=False))
            overall.append({**about, "methods": summary(own, places)["methods"]})
    return {"sections": found, "overall": overall}


def _drafting_cost(costs: Sequence[results.Line], places: Sequence[int], name: str) -> float:
    """The seconds of a draft over those of a plain pass, the mean over sections."""
    seconds = {(line["batch"], line["method"]): line["seconds"] for line in costs}
    return statistics.mean(
        seconds[place, name].get("draft", 0.0) / seconds[place, PLAIN][STEP] for place in places
    )


def _beyond_time(metrics: Metrics, cost: results.Line, drafting: float) -> Metrics:
    """What chains accept by depth, and the gain under a model of a memory-bound device."""
    is_chain = 0 < cost["max_depth"] == cost["num_nodes"] - 1
    expected = theory.speedup(metrics["tokens_per_step"], 1, drafting, verify_cost=1.0)
    return {
        **chain_acceptance(metrics, is_chain),
        "speedup_if_memory_bound": {"value": expected, "drafting_cost": drafting, "model": MODEL},
    }


def _section_of(line: results.Line) -> Section:
    return Section(**{field: line[field] for field in Section._fields})


def _title(section: Section) -> str:
    return tables.section_title(section._asdict())
