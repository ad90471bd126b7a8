"""A second, smaller language model as drafter (arXiv 2211.17192, arXiv 2302.01318), of chains or trees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from specjax import cache as kv
from specjax.errors import ConfigError
from specjax.growth import Reading, grow, grow_chain
from specjax.models.functional import make_target
from specjax.prefill import read_prompt
from specjax.proposals import Shape, TreeConfig
from specjax.trees.dynamic import NO_SLOT
from specjax.trees.topology import chain_mask
from specjax.types import (
    Context,
    Draft,
    Drafter,
    KVCache,
    ModelParams,
    Params,
    Target,
    Verdict,
)


@dataclasses.dataclass(frozen=True)
class Config(TreeConfig):
    """Drafts of the model that `source` names."""

    source: str


# Small settings that the contract tests and the certificate build it with; they make up the weights.
_COPY = "a noisy copy of the target"
EXAMPLES = {
    "draft_model": Config(_COPY, draft_length=2),
    "draft_model top-k": Config(_COPY, draft_length=2, branching=(2, 1), proposal="point_mass"),
    "draft_model iid": Config(_COPY, draft_length=2, branching=(2, 1), proposal="iid_siblings"),
    "draft_model without replacement": Config(
        _COPY, draft_length=2, branching=(2, 1), proposal="siblings_without_replacement"
    ),
    "draft_model paths": Config(
        _COPY, draft_length=2, paths=((0,), (1,), (0, 0), (0, 1)), proposal="siblings_without_replacement"
    ),
    "draft_model dynamic": Config(
        _COPY, draft_length=2, branching=(2, 2), proposal="point_mass", num_nodes=5
    ),
}


def build(config: Config, target: Target, architecture: Any = None) -> Drafter:
    """Drafts of the model of the given architecture; ConfigError if its vocabulary differs."""
    model = make_target(architecture, dtype=target.dtype)
    if model.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft model '{config.source}' has a vocabulary of {model.vocab_size} tokens and the target "
            f"one of {target.vocab_size}: choose a draft model that shares the target's tokenizer"
        )
    return model_drafter(model, lambda params: params.drafter, config.shape)


class State(NamedTuple):
    """The model's cache, and where the nodes of the last draft stand in it, from the first free slot on."""

    cache: KVCache
    slots: Int[Array, "B N"]


def model_drafter(model: Target, weights_of: Callable[[ModelParams], Params], shape: Shape) -> Drafter:
    """Drafts of `model` under the row's warp; point masses are its most probable tokens, unwarped.

    What the cache lacks of the context, the tokens that were never an input, is read at the start of
    every round: one token, or two where the last accepted draft was not read.
    """

    def init(params: ModelParams, context: Context, features, prompt_size: int) -> State:
        del features
        batch, capacity = context.tokens.shape
        empty = model.init_cache(batch, capacity)
        prompt = context.tokens[:, :prompt_size]
        cache, _ = read_prompt(model.forward, weights_of(params), prompt, empty)
        slots = jnp.full((batch, shape.num_nodes), NO_SLOT, jnp.int32)
        return State(cache._replace(length=context.length - 1), slots)

    def read_missing(weights: Params, cache: KVCache, context: Context) -> Reading:
        """What comes after the context, and the cache with all of it."""
        batch = context.length.shape[0]
        missing = context.length - cache.length
        offsets = jnp.arange(2)[None, :]
        unread = jnp.take_along_axis(context.tokens, cache.length[:, None] + offsets, axis=1)
        positions = cache.length[:, None] + offsets
        out = model.forward(weights, unread, positions, chain_mask(batch, 2), cache)
        logits = jnp.take_along_axis(out.logits, (missing - 1)[:, None, None], axis=1)
        return Reading(logits, jnp.zeros((batch, 1, 0)), kv.commit(out.cache, missing))

    def propose(
        params: ModelParams, keys: Key[Array, "B"], state: State, context: Context
    ) -> tuple[Draft, State]:
        weights = weights_of(params)

        def read(tokens, carry, depth: int, seen, cache: KVCache) -> Reading:
            positions = jnp.broadcast_to(cache.length[:, None] + depth - 1, tokens.shape)
            out = model.forward(weights, tokens, positions, seen, cache)
            return Reading(out.logits, carry, out.cache)

        start = read_missing(weights, state.cache, context)
        # A whole model is compiled once for a chain, not once a token.
        grown = (grow_chain if shape.is_chain else grow)(read, shape, keys, context.warp, start)
        return grown.draft, State(grown.cache, grown.slots)

    def observe(params, state: State, draft: Draft, verdict: Verdict, context: Context, features) -> State:
        del params, draft, features
        cache = state.cache
        if not shape.is_chain:
            slots = jnp.take_along_axis(state.slots, verdict.path[:, 1:], axis=1)
            accepted = jnp.arange(shape.max_depth)[None, :] < verdict.num_accepted[:, None]
            # Only the last node of a path can be one that was never read.
            num_kept = (accepted & (slots != NO_SLOT)).sum(1, dtype=jnp.int32)
            cache = kv.commit(cache, num_kept, jnp.maximum(slots, 0))
        return state._replace(cache=kv.rollback(cache, context.length - 1))

    return Drafter(
        init, propose, observe, num_nodes=shape.num_nodes, max_depth=shape.max_depth, law=shape.law
    )
