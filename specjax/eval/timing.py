"""Compiling ahead of time, so that what is timed afterwards is decoding and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Int, Key

from specjax.decode import DecodeStats, generate, prefill
from specjax.step import Method
from specjax.types import DecodeState, ModelParams, Request


class Inputs(NamedTuple):
    """What `decode.prefill` takes besides the method, its weights and the prompt's size."""

    request: Request
    tokens: Int[Array, "B T"]
    lengths: Int[Array, B]
    keys: Key[Array, B]


class Compiled(NamedTuple):
    """Both halves of decoding for one shape of inputs, and the seconds that compiling them took."""

    prefill: Callable[..., DecodeState]
    generate: Callable[..., tuple[DecodeState, DecodeStats]]
    seconds: float


class Timed(NamedTuple):
    """The end of a generation, its sums, and the seconds of its two halves."""

    state: DecodeState
    stats: DecodeStats
    prefill_seconds: float
    decode_seconds: float


def compile_method(method: Method, params: ModelParams, inputs: Inputs, prompt_size: int) -> Compiled:
    """Compile a method for the shapes of `inputs` and run it once for two tokens, to warm it up."""
    started = time.perf_counter()
    read = prefill.lower(method, params, *inputs, prompt_size).compile()
    seconds = time.perf_counter() - started
    short = inputs._replace(request=inputs.request._replace(limit=inputs.lengths + 2))
    state = read(params, *short)
    started = time.perf_counter()
    write = generate.lower(method, params, short.request, state).compile()
    seconds += time.perf_counter() - started
    jax.block_until_ready(write(params, short.request, state))
    return Compiled(read, write, seconds)


def run_timed(compiled: Compiled, params: ModelParams, inputs: Inputs) -> Timed:
    """Decode once; every clock is read after the device has finished."""
    started = time.perf_counter()
    state: Any = jax.block_until_ready(compiled.prefill(params, *inputs))
    read = time.perf_counter()
    state, stats = jax.block_until_ready(compiled.generate(params, inputs.request, state))
    return Timed(state, stats, read - started, time.perf_counter() - read)
