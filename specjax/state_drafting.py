"""Drafting from the target's states: what EAGLE, EAGLE-2 and EAGLE-3 share, decoding and learning alike.

Input i of the head is token i + 1 with the state of token i; its output foresees the state of token i + 1,
and so token i + 2. States of drafted tokens are the head's own; once the target has read the accepted
ones, their inputs are read again with its states.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from specjax import cache as kv
from specjax.growth import Reading, grow
from specjax.models.llama import LlamaConfig
from specjax.prefill import CHUNK
from specjax.proposals import Shape
from specjax.trees.topology import chain_mask
from specjax.types import Context, Draft, Drafter, KVCache, ModelParams, Params, Verdict


class StateNetwork(NamedTuple):
    """A head on the target's states as pure functions of `ModelParams`.

    `encode(params, features)` makes the states [B, N, H] of what the target computed.
    `forward(params, tokens, states, positions, mask, cache)` reads N inputs as `Forward` does and returns
    their outputs, which are states too, and the cache. `logits(params, states)` are over all tokens.
    """

    features: tuple[str, ...]
    encode: Callable[[ModelParams, dict[str, jax.Array]], jax.Array]
    forward: Callable[..., tuple[jax.Array, KVCache]]
    logits: Callable[[ModelParams, jax.Array], jax.Array]
    init_cache: Callable[[int, int], KVCache]


class State(NamedTuple):
    """The head's cache, and the target's states [B, D + 1, H] of the inputs that it has not read yet."""

    cache: KVCache
    unread: Float[Array, "B D1 H"]


def one_layer_cache(layer: LlamaConfig, dtype: Any) -> Callable[[int, int], KVCache]:
    """What makes the cache of a head that is one layer of Llama's kind."""
    return functools.partial(
        kv.init_cache, num_layers=1, num_heads=layer.num_kv_heads, head_dim=layer.head_dim, dtype=dtype
    )


def adding_nothing(block: Params) -> Params:
    """A layer's weights with outputs of 0: it starts by handing its input on."""

    def silenced(part: Params, name: str) -> Params:
        return part | {name: jax.tree.map(jnp.zeros_like, part[name])}

    attention, mlp = silenced(block["self_attn"], "o_proj"), silenced(block["mlp"], "down_proj")
    return block | {"self_attn": attention, "mlp": mlp}


def state_drafter(network: StateNetwork, shape: Shape) -> Drafter:
    """Drafts of a head on the target's states; the cache holds inputs whose states are the target's."""
    max_depth = shape.max_depth

    def init(params: ModelParams, context: Context, features, prompt_size: int) -> State:
        batch, capacity = context.tokens.shape
        states = network.encode(params, features)
        cache = read_prompt(params, context.tokens, states, network.init_cache(batch, capacity))
        # The last input is read again, for what comes after it; a prompt of one token has none.
        last = jnp.maximum(context.length - 2, 0)
        first = jnp.take_along_axis(states, last[:, None, None], axis=1)
        unread = jnp.pad(first, ((0, 0), (0, max_depth), (0, 0)))
        return State(cache._replace(length=last), unread)

    def read_prompt(params: ModelParams, tokens, states: Float[Array, "B P H"], cache: KVCache) -> KVCache:
        batch, size, _ = states.shape
        following = jnp.roll(tokens, -1, axis=1)[:, :size]
        for start in range(0, size, CHUNK):
            piece = slice(start, min(start + CHUNK, size))
            width = piece.stop - piece.start
            positions = jnp.broadcast_to(jnp.arange(piece.start, piece.stop)[None], (batch, width))
            mask = chain_mask(batch, width)
            _, cache = network.forward(params, following[:, piece], states[:, piece], positions, mask, cache)
            cache = kv.commit(cache, jnp.full((batch,), width, jnp.int32))
        return cache

    def read_inputs(params: ModelParams, context: Context, states: Float[Array, "B D1 H"], cache: KVCache):
        """The next D + 1 inputs of the context, from the cache's end on, whose states these are."""
        inputs = cache.length[:, None] + jnp.arange(max_depth + 1)[None]
        beyond = context.tokens.shape[1] - 1
        tokens = jnp.take_along_axis(context.tokens, jnp.minimum(inputs + 1, beyond), axis=1)
        mask = chain_mask(*inputs.shape)
        return network.forward(params, tokens, states, inputs, mask, cache)

    def read_missing(params: ModelParams, state: State, context: Context) -> Reading:
        """What comes after the context, and the cache with all of it."""
        cache = state.cache
        missing = jnp.maximum(context.length - 1 - cache.length, 0)
        out, cache = read_inputs(params, context, state.unread, cache)
        last = jnp.take_along_axis(out, jnp.maximum(missing - 1, 0)[:, None, None], axis=1)
        return Reading(network.logits(params, last), last, kv.commit(cache, missing))

    def propose(
        params: ModelParams, keys: Key[Array, "B"], state: State, context: Context
    ) -> tuple[Draft, State]:
        def read(tokens, carry, depth: int, seen, cache: KVCache) -> Reading:
            positions = jnp.broadcast_to(cache.length[:, None] + depth - 1, tokens.shape)
            out, cache = network.forward(params, tokens, carry, positions, seen, cache)
            return Reading(network.logits(params, out), out, cache)

        start = read_missing(params, state, context)
        grown = grow(read, shape, keys, context.warp, start, context.effort)
        # What a draft adds to the cache has states of the head's own.
        return grown.draft, state._replace(cache=kv.rollback(grown.cache, start.cache.length))

    def observe(params, state: State, draft: Draft, verdict: Verdict, context: Context, features) -> State:
        del draft
        # The root's input follows those that were read; its state, and those of the accepted, are known now.
        on_path = {
            name: jnp.take_along_axis(values, verdict.path[..., None], axis=1)
            for name, values in features.items()
        }
        # Rows that have ended stay where they are.
        return State(kv.rollback(state.cache, context.length - 1), network.encode(params, on_path))

    def resume(params: ModelParams, state: State, context: Context, features, first) -> State:
        known_from = state.cache.length
        known = jnp.concatenate((state.unread, network.encode(params, features)), axis=1)
        last_input = jnp.maximum(context.length - 2, 0)

        def states_from(position: Int[Array, "B"]) -> Float[Array, "B D1 H"]:
            wanted = position[:, None] + jnp.arange(max_depth + 1)[None]
            unread, seen = wanted - known_from[:, None], wanted - first[:, None]
            place = jnp.where(seen < 0, unread, max_depth + 1 + seen)
            return jnp.take_along_axis(known, place[..., None], axis=1, mode="clip")

        def lacks_more(cache: KVCache) -> Bool[Array, ""]:
            return (last_input - cache.length > max_depth).any()

        def catch_up(cache: KVCache) -> KVCache:
            _, written = read_inputs(params, context, states_from(cache.length), cache)
            return kv.commit(written, jnp.clip(last_input - cache.length, 0, max_depth + 1))

        cache = jax.lax.while_loop(lacks_more, catch_up, kv.rollback(state.cache, last_input))
        return State(cache, states_from(cache.length))

    return Drafter(
        init,
        propose,
        observe,
        num_nodes=shape.num_nodes,
        max_depth=max_depth,
        law=shape.law,
        features=network.features,
        resume=resume,
    )


def unroll(
    network: StateNetwork,
    params: ModelParams,
    tokens: Int[Array, "B T"],
    states: Float[Array, "B T H"],
    num_steps: int,
) -> list[Float[Array, "B T H"]]:
    """The outputs of every input t, when the last 0, 1, ... of the states up to it are the head's own.

    That is what decoding computes at depth 1, 2, ...: input t of step k takes the output of input t - 1 of
    step k - 1, sees the target's states up to t - k and behind them its own chain of drafts. The first
    k inputs of step k mean nothing.
    """
    batch, size = tokens.shape
    following = jnp.roll(tokens, -1, axis=1)
    positions = jnp.broadcast_to(jnp.arange(size)[None], (batch, size))
    cache = network.init_cache(batch, num_steps * size)
    outputs = []
    for step in range(num_steps):
        mask = jnp.broadcast_to(jnp.asarray(unroll_mask(size, step))[None], (batch, size, (step + 1) * size))
        out, cache = network.forward(params, following, states, positions, mask, cache)
        outputs.append(out)
        states = jnp.roll(out, 1, axis=1)
    return outputs


def unroll_mask(size: int, step: int) -> Bool[np.ndarray, "T M"]:
    """What input t of a step sees of the inputs of this step and those before it."""
    query, key = np.arange(size)[:, None], np.arange(size)[None]
    own = [key <= query - step] + [key == query - step + i for i in range(1, step + 1)]
    return np.concatenate(own, axis=1)
