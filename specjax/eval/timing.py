"""Compiling ahead of time, so that what is timed afterwards is decoding and nothing else; a step's parts."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from specjax.decode import DecodeStats, begin, generate, read_prompts
from specjax.step import Method, step
from specjax.types import DecodeState, ModelParams, Request

PARTS = ("draft", "verify", "accept", "commit")
STEP = "step"  # all of them in one program
ROUNDS = 15  # timed, after one that compiles


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


class Reading(NamedTuple):
    """`decode.prefill` as its two compiled programs."""

    of_target: jax.stages.Compiled
    of_drafter: jax.stages.Compiled

    def __call__(self, params: ModelParams, inputs: Inputs) -> DecodeState:
        """The state in which decoding starts."""
        request, tokens, lengths, keys, _ = inputs
        found = self.of_target(params.target, tokens, lengths)
        return self.of_drafter(params, request, tokens, lengths, keys, *found)


class Programs:
    """A method, compiled once for each shape that comes: to read by (B, T, P), to write by (B, T)."""

    def __init__(self, method: Method, params: ModelParams) -> None:
        self.method, self.params = method, params
        self._prefill: dict[tuple[int, ...], Reading] = {}
        self._generate: dict[tuple[int, ...], jax.stages.Compiled] = {}

    def __len__(self) -> int:
        """The number of programs that are kept."""
        return len(Reading._fields) * len(self._prefill) + len(self._generate)

    def forget(self) -> None:
        """Keep none of the programs: whatever comes is compiled anew."""
        self._prefill.clear()
        self._generate.clear()

    def knows(self, inputs: Inputs) -> bool:
        """Whether nothing would have to be compiled for `inputs`."""
        return (*inputs.tokens.shape, inputs.prompt_size) in self._prefill

    def compile(self, inputs: Inputs) -> float:
        """Compile what `inputs` need, run it for two tokens to warm it up, and return compiling's seconds."""
        if self.knows(inputs):
            return 0.0
        shape = inputs.tokens.shape
        inputs = inputs._replace(request=inputs.request._replace(limit=inputs.lengths + 2))
        started = time.perf_counter()
        read = self._compile_reading(inputs)
        seconds = time.perf_counter() - started
        state = read(self.params, inputs)
        if shape not in self._generate:
            started = time.perf_counter()
            write = generate.lower(self.method, self.params, inputs.request, state).compile()
            seconds += time.perf_counter() - started
            self._generate[shape] = write
        jax.block_until_ready(self._generate[shape](self.params, inputs.request, state))
        self._prefill[*shape, inputs.prompt_size] = read
        return seconds

    def _compile_reading(self, inputs: Inputs) -> Reading:
        target, drafter, _ = self.method
        names, size = () if drafter is None else drafter.features, inputs.prompt_size
        first = read_prompts.lower(target, names, self.params.target, inputs.tokens, inputs.lengths, size)
        second = begin.lower(drafter, self.params, *inputs[:-1], *first.out_info, size)
        return Reading(first.compile(), second.compile())

    def run(self, inputs: Inputs) -> Timed:
        """Decode once, compiled already; every clock is read after the device has finished."""
        shape = inputs.tokens.shape
        read, write = self._prefill[*shape, inputs.prompt_size], self._generate[shape]
        started = time.perf_counter()
        state = jax.block_until_ready(read(self.params, inputs))
        between = time.perf_counter()
        state, stats = jax.block_until_ready(write(self.params, inputs.request, state))
        return Timed(state, stats, between - started, time.perf_counter() - between)

    def step(self, request: Request, state: DecodeState) -> tuple[DecodeState, dict[str, float]]:
        """Decode until there is a token more, which takes one step, and its seconds; `state` is used up."""
        request, state = _going_on(request, state)
        clock = _Clock()
        state, _ = clock.time(STEP, self._generate[state.tokens.shape], self.params, request, state)
        return state, clock.seconds

    def memory(self, inputs: Inputs) -> dict[str, int | None]:
        """Bytes that decoding `inputs`, compiled already, needs at its `peak`, its `weights` among them.

        The peak is that of the largest of the programs; None where the device's compiler does not tell.
        """
        weights = sum({id(leaf): leaf.nbytes for leaf in jax.tree.leaves(self.params)}.values())
        shape = inputs.tokens.shape
        given = sum(leaf.nbytes for leaf in jax.tree.leaves((inputs.request, *inputs[1:-1])))
        peak = held = 0
        for program in (*self._prefill[*shape, inputs.prompt_size], self._generate[shape]):
            needs = program.memory_analysis()
            if needs is None:
                return {"weights": weights, "peak": None}
            # What the program before it found is there still, and some of that is written over.
            new = needs.output_size_in_bytes - needs.alias_size_in_bytes
            peak = max(peak, held + new + needs.temp_size_in_bytes)
            held = needs.output_size_in_bytes
        return {"weights": weights, "peak": weights + given + peak}


class Parts:
    """A speculative step as four programs, one for each of `PARTS`, compiled at their first use.

    Every program is the step itself, handed what the programs before it found out: what it does not need is
    never computed. A drafter of several sizes is taken at its largest.
    """

    def __init__(self, method: Method) -> None:
        assert method.drafter is not None, "plain decoding has no parts"
        method = method._replace(drafter=method.drafter._replace(sizes=()))
        compiled = functools.partial(jax.jit, donate_argnames=("state",))

        def draft(params: ModelParams, request: Request, state: DecodeState) -> Any:
            drafted, draft_state = _seen(method, params, request, state, {})["draft"]
            return state._replace(draft_state=draft_state), drafted

        def verify(params: ModelParams, request: Request, state: DecodeState, drafted: Any) -> Any:
            seen = _seen(method, params, request, state, {"draft": (drafted, state.draft_state)})
            return state._replace(cache=seen["pass"].cache), seen["pass"]._replace(cache=None), seen["judge"]

        def accept(judge: Any) -> Any:
            assert method.verify is not None
            return method.verify(*judge, max_depth=method.max_depth)

        def commit(params: ModelParams, request: Request, state: DecodeState, *found: Any) -> DecodeState:
            drafted, passed, verdict = found
            passed = passed._replace(cache=state.cache)
            known = {"draft": (drafted, state.draft_state), "pass": passed, "verdict": verdict}
            return _seen(method, params, request, state, known)["state"]

        self._draft, self._verify, self._commit = compiled(draft), compiled(verify), compiled(commit)
        self._accept = jax.jit(accept)

    def step(
        self, params: ModelParams, request: Request, state: DecodeState
    ) -> tuple[DecodeState, dict[str, float]]:
        """One step, and the seconds of its parts; `state` is used up."""
        request, state = _going_on(request, state)
        clock = _Clock()
        state, drafted = clock.time("draft", self._draft, params, request, state)
        state, passed, judge = clock.time("verify", self._verify, params, request, state, drafted)
        verdict = clock.time("accept", self._accept, judge)
        state = clock.time("commit", self._commit, params, request, state, drafted, passed, verdict)
        return state, clock.seconds


def time_parts(
    programs: Mapping[str, Programs],
    parts: Mapping[str, Parts],
    inputs: Mapping[str, Inputs],
    num_rounds: int = ROUNDS,
) -> dict[str, dict[str, float]]:
    """Median seconds of a step and of its parts for each method, from the middle of a generation on.

    The methods take turns, and each goes on twice, by steps and by their parts. Plain decoding, and whatever
    else `parts` leaves out, has steps only.
    """
    whole, apart = ({name: middle(programs[name], inputs[name]) for name in own} for own in (programs, parts))
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in programs}
    for number in range(num_rounds + 1):
        for name in sorted(programs, reverse=number % 2 == 1):
            program, request = programs[name], inputs[name].request
            whole[name], found = program.step(request, whole[name])
            if name in parts:
                apart[name], of_parts = parts[name].step(program.params, request, apart[name])
                found |= of_parts
            for part, value in found.items() if number else ():  # the first round compiles
                seconds[name].setdefault(part, []).append(value)
    return {
        name: {part: statistics.median(own[part]) for part in (*PARTS, STEP) if part in own}
        for name, own in seconds.items()
    }


def middle(program: Programs, inputs: Inputs) -> DecodeState:
    """The state after half of the tokens that may be written, going on whatever was met."""
    request = inputs.request._replace(limit=(inputs.lengths + inputs.request.limit + 1) // 2)
    state = program.run(inputs._replace(request=request)).state
    return state._replace(done=jnp.zeros_like(state.done))


def _going_on(request: Request, state: DecodeState) -> tuple[Request, DecodeState]:
    """One step from here, whatever was met: a drafter may spare itself the rows that have ended."""
    return request._replace(limit=state.length + 1), state._replace(done=jnp.zeros_like(state.done))


class _Clock:
    """Seconds of programs by name, each waited for before and after."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, name: str, program: Callable[..., Any], *arguments: Any) -> Any:
        jax.block_until_ready(arguments)
        started = time.perf_counter()
        result = jax.block_until_ready(program(*arguments))
        self.seconds[name] = time.perf_counter() - started
        return result


def _seen(
    method: Method, params: ModelParams, request: Request, state: DecodeState, known: Mapping[str, Any]
) -> dict[str, Any]:
    """What a step comes by: "draft", "pass", what the rule is to "judge", its "verdict", the new "state".

    Whatever is `known` is not computed again.
    """
    seen: dict[str, Any] = {}
    assert method.drafter is not None and method.verify is not None

    def once(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            seen[name] = known[name] if name in known else compute(*arguments, **options)
            return seen[name]

        return call

    rule = once("verdict", method.verify)

    def judge(keys: Any, draft: Any, target_probs: Any, *, max_depth: int) -> Any:
        seen["judge"] = keys, draft, target_probs
        return rule(keys, draft, target_probs, max_depth=max_depth)

    watched = method._replace(
        target=method.target._replace(forward=once("pass", method.target.forward)),
        drafter=method.drafter._replace(propose=once("draft", method.drafter.propose)),
        verify=judge,
    )
    seen["state"], _ = step(watched, params, request, state)
    return seen
