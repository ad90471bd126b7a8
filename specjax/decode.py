"""Decoding from prompts to tokens: prefill, then one step function under two loops and a stream."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from specjax.errors import ConfigError
from specjax.prefill import read_prompt
from specjax.step import Method, has_ended, speculative_round, step
from specjax.types import (
    NO_PARENT,
    ROOT,
    Context,
    DecodeState,
    Drafter,
    KVCache,
    ModelParams,
    Params,
    Request,
    StepInfo,
    Target,
    Verdict,
    Warp,
)

SMALLEST_BUCKET = 64


class DecodeStats(NamedTuple):
    """Sums of `StepInfo` over a generation; [B], or [B, D] by draft depth.

    `tried_at_depth` counts passes that had a draft there and had accepted all before it;
    `accepted_at_depth` those that accepted it.
    """

    num_steps: Int[Array, "B"]
    num_emitted: Int[Array, "B"]
    tried_at_depth: Int[Array, "B D"]
    accepted_at_depth: Int[Array, "B D"]


class Trace(NamedTuple):
    """Everything about a round, stacked with the axis R in front; a plain round is a tree of one node.

    `tokens` [B, N] and `parents` [B, N] are those of the draft, the pending token first. `verdict` is the
    rule's, of which `info` leaves out what a stop token or the limit cut off. Rows that had ended have
    drafts and verdicts that mean nothing.
    """

    info: StepInfo
    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]
    verdict: Verdict


class TextStream(Protocol):
    """Turns tokens into text as they come; None while a character is incomplete."""

    def step(self, token_id: int) -> str | None: ...
    def flush(self) -> str: ...


def bucket(length: int) -> int:
    """The least of 64, 96, 128, 192, 256, 384, ... that holds `length`, so that few shapes compile."""
    size = SMALLEST_BUCKET
    while size < length:
        if size + size // 2 >= length:
            return size + size // 2
        size *= 2
    return size


def row_keys(seed: int, rows: Sequence[int]) -> Key[Array, "B"]:
    """One PRNG key for every row number, whichever rows it is decoded with."""
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.key(seed), row))(jnp.asarray(rows, jnp.uint32))


def start(
    method: Method,
    params: ModelParams,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    warp: Warp,
    keys: Key[Array, "B"],
    stop_tokens: Sequence[int] = (),
    capacity: int | None = None,
) -> tuple[Request, DecodeState]:
    """Prefill a batch of prompts of any lengths; `capacity` slots a row hold prompt, output and drafts.

    Raises ConfigError on an empty prompt, a token outside the vocabulary, `max_new_tokens` < 1, or a
    prompt that with its output exceeds the capacity or the model's positions.
    """
    if len(keys) != len(prompts):
        raise ConfigError(f"{len(keys)} keys for {len(prompts)} prompts: give one PRNG key a prompt")
    request, tokens, lengths = prepare(
        method, prompts, max_new_tokens=max_new_tokens, warp=warp, stop_tokens=stop_tokens, capacity=capacity
    )
    longest = bucket(max(len(prompt) for prompt in prompts))
    return request, prefill(method, params, request, tokens, lengths, keys, min(longest, tokens.shape[1]))


def prepare(
    method: Method,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    warp: Warp,
    stop_tokens: Sequence[int] = (),
    capacity: int | None = None,
) -> tuple[Request, Int[Array, "B T"], Int[Array, "B"]]:
    """Check the prompts and lay them out in padded rows; errors as for `start`."""
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}: ask for at least 1 new token")
    if not prompts:
        raise ConfigError("there are no prompts: give at least one")
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ConfigError(f"prompt {row} is empty: give it at least one token")
        if min(prompt) < 0 or max(prompt) >= method.target.vocab_size:
            raise ConfigError(
                f"prompt {row} has a token outside the target's vocabulary of {method.target.vocab_size}: "
                "use the tokenizer that belongs to the target"
            )
    if len(warp.temperature) != len(prompts):
        raise ConfigError(
            f"the sampling law has {len(warp.temperature)} rows for {len(prompts)} prompts: give one a prompt"
        )
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    longest = int(lengths.max())
    needed = longest + max_new_tokens + method.num_slots
    size = bucket(needed) if capacity is None else capacity
    if needed > size:
        raise ConfigError(
            f"a prompt of {longest} tokens, {max_new_tokens} new ones and {method.num_slots} of a pass "
            f"need {needed} cache slots, and the capacity is {size}: shorten the prompt or raise the capacity"
        )
    max_positions = getattr(method.target.config, "max_positions", None)
    if max_positions is not None and longest + max_new_tokens > max_positions:
        raise ConfigError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed the target's "
            f"{max_positions} positions: shorten the prompt or ask for fewer tokens"
        )
    tokens = np.zeros((len(prompts), size), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    request = Request(warp, jnp.asarray(lengths + max_new_tokens), jnp.asarray(stop_tokens, jnp.int32))
    return request, jnp.asarray(tokens), jnp.asarray(lengths)


def prefill(
    method: Method,
    params: ModelParams,
    request: Request,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    keys: Key[Array, "B"],
    prompt_size: int,
) -> DecodeState:
    """Read the prompts, the first `prompt_size` columns of `tokens`; their last tokens stay pending.

    Two programs, of which all methods of a target share the first as far as they need the same features.
    """
    names = () if method.drafter is None else method.drafter.features
    cache, features = read_prompts(method.target, names, params.target, tokens, lengths, prompt_size)
    return begin(method.drafter, params, request, tokens, lengths, keys, cache, features, prompt_size)


@functools.partial(jax.jit, static_argnames=("target", "names", "prompt_size"))
def read_prompts(
    target: Target,
    names: tuple[str, ...],
    weights: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    prompt_size: int,
) -> tuple[KVCache, dict[str, Array]]:
    """The target's cache with all but the last token of every prompt, and the named features [B, P, F]."""
    empty = target.init_cache(*tokens.shape)
    cache, features = read_prompt(target.forward, weights, tokens[:, :prompt_size], empty, names)
    return cache._replace(length=lengths - 1), features


@functools.partial(jax.jit, static_argnames=("drafter", "prompt_size"), donate_argnames=("cache",))
def begin(
    drafter: Drafter | None,
    params: ModelParams,
    request: Request,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    keys: Key[Array, "B"],
    cache: KVCache,
    features: dict[str, Array],
    prompt_size: int,
) -> DecodeState:
    """The state in which decoding starts, from what `read_prompts` found; `cache` is used up."""
    context = Context(tokens, lengths, request.warp)
    draft_state = {} if drafter is None else drafter.init(params, context, features, prompt_size)
    return DecodeState(tokens, lengths, jnp.zeros(lengths.shape, bool), keys, cache, draft_state)


@functools.partial(jax.jit, static_argnames=("method",), donate_argnames=("state",))
def generate(
    method: Method, params: ModelParams, request: Request, state: DecodeState
) -> tuple[DecodeState, DecodeStats]:
    """Decode until every row has met a stop token or its limit; `state` is used up."""
    nothing = jnp.zeros_like(state.length)
    by_depth = jnp.zeros((*state.length.shape, method.max_depth), jnp.int32)

    def body(carry: tuple[DecodeState, DecodeStats]) -> tuple[DecodeState, DecodeStats]:
        state, info = step(method, params, request, carry[0])
        return state, accumulate(carry[1], info)

    stats = DecodeStats(nothing, nothing, by_depth, by_depth)
    return jax.lax.while_loop(lambda carry: ~has_ended(carry[0]), body, (state, stats))


@functools.partial(jax.jit, static_argnames=("method", "num_rounds"), donate_argnames=("state",))
def rollout(
    method: Method, params: ModelParams, request: Request, state: DecodeState, num_rounds: int
) -> tuple[DecodeState, StepInfo]:
    """A fixed number of rounds; the infos come stacked [R, B]; `state` is used up."""
    return jax.lax.scan(lambda carry, _: step(method, params, request, carry), state, length=num_rounds)


@functools.partial(jax.jit, static_argnames=("method", "num_rounds"), donate_argnames=("state",))
def trace(
    method: Method, params: ModelParams, request: Request, state: DecodeState, num_rounds: int
) -> tuple[DecodeState, Trace]:
    """`rollout` with all that was drafted and what became of it, stacked [R, ...]; `state` is used up."""
    return jax.lax.scan(
        lambda carry, _: _traced_round(method, params, request, carry), state, length=num_rounds
    )


def _traced_round(
    method: Method, params: ModelParams, request: Request, state: DecodeState
) -> tuple[DecodeState, Trace]:
    if method.drafter is not None:
        assert method.verify is not None
        done = speculative_round(method.target, method.drafter, method.verify, params, request, state)
        return done.state, Trace(done.info, done.draft.tokens, done.draft.parents, done.judged.verdict)
    after, info = step(method, params, request, state)
    pending, emitted = (
        jnp.take_along_axis(after.tokens, place[:, None], axis=1)
        for place in (state.length - 1, state.length)
    )
    root = jnp.full_like(pending, ROOT)
    verdict = Verdict(root, jnp.zeros_like(state.length), emitted[:, 0])
    return after, Trace(info, pending, jnp.full_like(root, NO_PARENT), verdict)


_one_step = functools.partial(jax.jit, static_argnames=("method",), donate_argnames=("state",))(step)


def stream(
    method: Method, params: ModelParams, request: Request, state: DecodeState
) -> Iterator[list[list[int]]]:
    """The new tokens of every row, round by round; `state` is used up."""
    while not bool(has_ended(state)):
        before = np.asarray(state.length)
        state, info = _one_step(method, params, request, state)
        tokens, num_new = np.asarray(state.tokens), np.asarray(info.num_emitted)
        yield [row[at : at + count].tolist() for row, at, count in zip(tokens, before, num_new, strict=True)]


def stream_text(rounds: Iterator[list[list[int]]], streams: Sequence[TextStream]) -> Iterator[list[str]]:
    """The new text of every row, round by round, through one `TextStream` a row."""
    for new_tokens in rounds:
        yield [
            "".join(text.step(token) or "" for token in row)
            for row, text in zip(new_tokens, streams, strict=True)
        ]
    yield [text.flush() for text in streams]


def accumulate(stats: DecodeStats, info: StepInfo) -> DecodeStats:
    """`stats` with one more round added."""
    depth = jnp.arange(1, stats.tried_at_depth.shape[1] + 1)[None, :]
    tried = (info.num_drafted[:, None] >= depth) & (info.num_accepted[:, None] >= depth - 1)
    tried &= info.active[:, None]
    return DecodeStats(
        stats.num_steps + info.active,
        stats.num_emitted + info.num_emitted,
        stats.tried_at_depth + tried,
        stats.accepted_at_depth + (info.num_accepted[:, None] >= depth),
    )


def new_tokens(state: DecodeState, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What each row wrote after its prompt, its stop token included."""
    tokens, length = np.asarray(state.tokens), np.asarray(state.length)
    return [row[len(prompt) : end].tolist() for row, prompt, end in zip(tokens, prompts, length, strict=True)]
