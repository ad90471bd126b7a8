"""Compiling ahead of time, so that what is timed afterwards is decoding and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array, Int, Key

from specjax.decode import DecodeStats, generate, prefill
from specjax.step import Method
from specjax.types import DecodeState, ModelParams, Request


class Inputs(NamedTuple):
    """What `decode.prefill` takes besides the method and its weights; P is `prompt_size`."""

    request: Request
    tokens: Int[Array, "B T"]
    lengths: Int[Array, "B"]
    keys: Key[Array, "B"]
    prompt_size: int


class Timed(NamedTuple):
    """The end of a generation, its sums, and the seconds of its two halves."""

    state: DecodeState
    stats: DecodeStats
    prefill_seconds: float
    decode_seconds: float


class Programs:
    """A method, compiled once for each shape that comes: to read by (B, T, P), to write by (B, T)."""

    def __init__(self, method: Method, params: ModelParams) -> None:
        self._method, self._params = method, params
        self._prefill: dict[tuple[int, ...], Callable[..., DecodeState]] = {}
        self._generate: dict[tuple[int, ...], Callable[..., tuple[DecodeState, DecodeStats]]] = {}

    def knows(self, inputs: Inputs) -> bool:
        """Whether nothing would have to be compiled for `inputs`."""
        return (*inputs.tokens.shape, inputs.prompt_size) in self._prefill

    def compile(self, inputs: Inputs) -> float:
        """Compile what `inputs` need, run it for two tokens to warm it up, and return compiling's seconds."""
        if self.knows(inputs):
            return 0.0
        shape = inputs.tokens.shape
        *arguments, prompt_size = inputs._replace(request=inputs.request._replace(limit=inputs.lengths + 2))
        started = time.perf_counter()
        read = prefill.lower(self._method, self._params, *arguments, prompt_size).compile()
        seconds = time.perf_counter() - started
        state = read(self._params, *arguments)
        if shape not in self._generate:
            started = time.perf_counter()
            write = generate.lower(self._method, self._params, arguments[0], state).compile()
            seconds += time.perf_counter() - started
            self._generate[shape] = write
        jax.block_until_ready(self._generate[shape](self._params, arguments[0], state))
        self._prefill[*shape, prompt_size] = read
        return seconds

    def run(self, inputs: Inputs) -> Timed:
        """Decode once, compiled already; every clock is read after the device has finished."""
        shape = inputs.tokens.shape
        read, write = self._prefill[*shape, inputs.prompt_size], self._generate[shape]
        started = time.perf_counter()
        state = jax.block_until_ready(read(self._params, *inputs[:-1]))
        between = time.perf_counter()
        state, stats = jax.block_until_ready(write(self._params, inputs.request, state))
        return Timed(state, stats, between - started, time.perf_counter() - between)
