"""Several methods on the same prompts, interleaved so that a machine's drift falls on all alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from specjax.decode import DecodeStats, bucket, new_tokens, prepare, row_keys
from specjax.eval.timing import Inputs, Programs
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.types import ModelParams

PLAIN = "plain"  # the method that the others are compared with
SMALLEST_CAPACITY = 512

Methods = Mapping[str, tuple[Method, ModelParams]]
Report = Callable[[str], None]


class Settings(NamedTuple):
    """How to decode, the same for every method and prompt; `repeats` medians make a time."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repeats: int
    stop_tokens: tuple[int, ...]


class Batch(NamedTuple):
    """Prompts decoded together: their `rows` number them among all prompts and decide their draws."""

    rows: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]


class Generation(NamedTuple):
    """What one method wrote for one prompt; its seconds are its share of those of its `batch`."""

    row: int
    batch: int
    method: str
    tokens: list[int]
    num_steps: int
    tried_at_depth: list[int]
    accepted_at_depth: list[int]
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float


def make_batches(prompts: Sequence[Sequence[int]], batch_size: int) -> list[Batch]:
    """The prompts in their order; the last batch may be smaller, which costs a compilation of its own."""
    rows = range(len(prompts))
    groups = [rows[start : start + batch_size] for start in range(0, len(prompts), batch_size)]
    return [Batch(tuple(group), tuple(tuple(prompts[row]) for row in group)) for group in groups]


def compare(
    methods: Methods,
    batches: Mapping[int, Batch],
    settings: Settings,
    report: Report = lambda what: None,
) -> Iterator[list[Generation]]:
    """Decode every batch with every method and yield its generations; `report` hears what is going on.

    ConfigError, before any decoding, on a prompt that does not fit.
    """
    same = {number: dict.fromkeys(methods, batch) for number, batch in batches.items()}
    laid_out = {number: lay_out(methods, own, settings) for number, own in same.items()}
    programs = {name: Programs(*method) for name, method in methods.items()}
    for number, own in same.items():
        yield decode_batch(programs, number, own, laid_out.pop(number), settings.repeats, report)


def decode_batch(
    programs: Mapping[str, Programs],
    number: int,
    batches: Mapping[str, Batch],
    inputs: Mapping[str, Inputs],
    repeats: int,
    report: Report = lambda what: None,
) -> list[Generation]:
    """Decode one batch with every method, each its own prompts of the same rows, laid out by `lay_out`.

    The order of the methods alternates with the `number` and the repeats.
    """
    compile_seconds = {}
    for name, program in programs.items():
        if not program.knows(inputs[name]):
            report(f"compiling {name} for {inputs[name].prompt_size} prompt tokens")
        compile_seconds[name] = program.compile(inputs[name])

    written: dict[str, tuple[list[list[int]], DecodeStats]] = {}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for repeat in range(repeats):
        for name in sorted(programs, key=list(programs).index, reverse=(number + repeat) % 2 == 1):
            report(f"decoding {name}")
            run = programs[name].run(inputs[name])
            seconds[name].append((run.prefill_seconds, run.decode_seconds))
            written[name] = new_tokens(run.state, batches[name].prompts), jax.device_get(run.stats)
            del run  # its caches, before the next ones are made
    return [
        generation
        for name in programs
        for generation in _generations(
            name, number, batches[name], *written[name], seconds[name], compile_seconds[name]
        )
    ]


def lay_out(methods: Methods, batches: Mapping[str, Batch], settings: Settings) -> dict[str, Inputs]:
    """The same rows, capacity and keys for every method; ConfigError on a prompt that does not fit."""
    longest = max(len(prompt) for batch in batches.values() for prompt in batch.prompts)
    widest = max((method for method, _ in methods.values()), key=lambda method: method.num_slots)
    # Few capacities, so that few shapes compile: attention's share of a pass hardly notices.
    needed = longest + settings.max_new_tokens + widest.num_slots
    capacity = max(SMALLEST_CAPACITY, 2 ** math.ceil(math.log2(needed)))

    def inputs(batch: Batch) -> Inputs:
        size = len(batch.rows)
        request, tokens, lengths = prepare(
            widest,
            batch.prompts,
            max_new_tokens=settings.max_new_tokens,
            warp=make_warp(size, settings.temperature, settings.top_k, settings.top_p, settings.min_p),
            stop_tokens=settings.stop_tokens,
            capacity=capacity,
        )
        return Inputs(request, tokens, lengths, row_keys(settings.seed, batch.rows), bucket(longest))

    distinct = {batch: inputs(batch) for batch in set(batches.values())}
    return {name: distinct[batch] for name, batch in batches.items()}


def _generations(
    name: str,
    number: int,
    batch: Batch,
    tokens: list[list[int]],
    stats: DecodeStats,
    seconds: list[tuple[float, float]],
    compile_seconds: float,
) -> Iterator[Generation]:
    size = len(batch.rows)
    prefill_seconds, decode_seconds = (statistics.median(half) / size for half in zip(*seconds, strict=True))
    for place, row in enumerate(batch.rows):
        yield Generation(
            row=row,
            batch=number,
            method=name,
            tokens=tokens[place],
            num_steps=int(stats.num_steps[place]),
            tried_at_depth=stats.tried_at_depth[place].tolist(),
            accepted_at_depth=stats.accepted_at_depth[place].tolist(),
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            compile_seconds=compile_seconds / size,
        )
