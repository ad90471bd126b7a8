"""Text that a model writes itself, many rows at once: a row that ends makes room for the next prompt."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax.data.features import Record, features_of_text
from specjax.decode import rollout, row_keys, start
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.types import DecodeState, ModelParams, Request

# Rounds between two looks at which rows have ended, and rows that are then filled together.
ROUNDS = 16
GROUP = 8


class Job(NamedTuple):
    """A prompt to go on with; `number` decides its draws, whatever is decoded beside it."""

    number: int
    prompt: tuple[int, ...]
    temperature: float


class Written(NamedTuple):
    """What became of a job: all its `tokens`, the prompt's too, and features [T - 1, F] by name."""

    job: Job
    tokens: list[int]
    features: dict[str, np.ndarray]


class Settings(NamedTuple):
    """How to write, the same for every job; `capacity` slots hold prompt, output and one node more."""

    batch_size: int
    capacity: int
    max_new_tokens: int
    top_p: float
    seed: int
    stop_tokens: tuple[int, ...]


def write(method: Method, params: ModelParams, jobs: Sequence[Job], settings: Settings) -> Iterator[Written]:
    """Yield every job's text as it ends; free rows are filled a group at a time, longest prompts first.

    `method` decodes plainly, or is `features.recording`. ConfigError on a prompt that does not fit.
    """
    waiting = deque(sorted(jobs, key=lambda job: (-len(job.prompt), job.number)))
    rows: list[Job | None] = [None] * settings.batch_size
    group = min(GROUP, settings.batch_size)
    request, state = None, None
    while waiting or any(rows):
        free = deque(row for row, job in enumerate(rows) if job is None)
        while waiting and len(free) >= group:
            chosen = [free.popleft() for _ in range(group)]
            taken = [waiting.popleft() for _ in range(min(group, len(waiting)))]
            fresh = _read(method, params, taken, group, settings)
            if state is None:
                request, state = _blank(*fresh, settings.batch_size)
            request, state = _insert(request, state, *fresh, jnp.asarray(chosen))
            for row, taken_job in zip(chosen, taken, strict=False):
                rows[row] = taken_job
        state, _ = rollout(method, params, request, state, ROUNDS)
        has_ended = np.asarray(state.done)
        for row, job in enumerate(rows):
            if job is not None and has_ended[row]:
                yield _written(job, row, state)
                rows[row] = None


def _read(
    method: Method, params: ModelParams, jobs: Sequence[Job], group: int, settings: Settings
) -> tuple[Request, DecodeState]:
    """Prefill the jobs, and as many rows that have ended as make up the group."""
    padded = [*jobs, *[jobs[-1]] * (group - len(jobs))]
    warp = make_warp(group, 0.0, 0, settings.top_p)
    request, state = start(
        method,
        params,
        [job.prompt for job in padded],
        max_new_tokens=settings.max_new_tokens,
        warp=warp._replace(temperature=jnp.asarray([job.temperature for job in padded], jnp.float32)),
        keys=row_keys(settings.seed, [job.number for job in padded]),
        stop_tokens=settings.stop_tokens,
        capacity=settings.capacity,
    )
    return request, state._replace(done=jnp.arange(group) >= len(jobs))


def _blank(request: Request, state: DecodeState, batch: int) -> tuple[Request, DecodeState]:
    """A batch of rows that have all ended, with the shapes of a smaller one."""
    times = -(-batch // len(state.done))

    def tile(leaf: Array) -> Array:
        size = leaf.shape[0] // len(state.done) * batch
        # A copy at any rate: what is donated must not share its memory.
        return jnp.copy(jnp.concatenate([leaf] * times)[:size])

    warp, limit, state = jax.tree.map(tile, (request.warp, request.limit, state))
    return Request(warp, limit, request.stop_tokens), state._replace(done=jnp.ones((batch,), bool))


@functools.partial(jax.jit, donate_argnames=("request", "state"))
def _insert(
    request: Request, state: DecodeState, new_request: Request, new_state: DecodeState, rows: Int[Array, "G"]
) -> tuple[Request, DecodeState]:
    """The batch with some of its rows replaced, in place; a row may take several entries of a leaf."""
    batch, group = len(state.done), len(rows)

    def put(old: Array, new: Array) -> Array:
        by_row = old.reshape(batch, -1, *old.shape[1:])
        return by_row.at[rows].set(new.reshape(group, -1, *new.shape[1:])).reshape(old.shape)

    warp, limit, state = jax.tree.map(
        put, (request.warp, request.limit, state), (new_request.warp, new_request.limit, new_state)
    )
    return Request(warp, limit, request.stop_tokens), state


def _written(job: Job, row: int, state: DecodeState) -> Written:
    length = int(state.length[row])
    record = state.draft_state
    features = record.features if isinstance(record, Record) else {}
    return Written(
        job,
        np.asarray(state.tokens[row])[:length].tolist(),
        features_of_text(features, row, length),
    )
