"""A second, smaller language model as drafter (arXiv 2211.17192, arXiv 2302.01318), of chains or trees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from specjax import cache as kv
from specjax.errors import ConfigError
from specjax.models.functional import make_target
from specjax.prefill import read_prompt
from specjax.proposals import Shape, draw_children, level_sizes, make_shape
from specjax.sampling import warp_probs
from specjax.trees.topology import ancestor_mask, level_parents
from specjax.types import (
    NO_TOKEN,
    Context,
    Draft,
    Drafter,
    KVCache,
    ModelParams,
    Params,
    ProposalLaw,
    Target,
    Verdict,
    Warp,
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Trees of depth `draft_length` from the model that `source` names.

    `branching` is the number of children at each depth (missing ones are 1) and `proposal` how they are
    chosen: a value of `ProposalLaw`.
    """

    source: str
    draft_length: int
    branching: tuple[int, ...] = ()
    proposal: str = ProposalLaw.CHAIN.value

    def __post_init__(self) -> None:
        shape_of(self)


def shape_of(config: Config) -> Shape:
    """The trees that a config asks for."""
    return make_shape(config.draft_length, config.branching, config.proposal)


# Small settings that the contract tests and the certificate build it with; they make up the weights.
EXAMPLES = {
    "draft_model": Config("a noisy copy of the target", 2),
    "draft_model top-k": Config("a noisy copy of the target", 2, (2, 1), ProposalLaw.POINT_MASS.value),
    "draft_model iid": Config("a noisy copy of the target", 2, (2, 1), ProposalLaw.IID_SIBLINGS.value),
    "draft_model without replacement": Config(
        "a noisy copy of the target", 2, (2, 1), ProposalLaw.SIBLINGS_WITHOUT_REPLACEMENT.value
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
    return model_drafter(model, lambda params: params.drafter, shape_of(config))


def model_drafter(model: Target, weights_of: Callable[[ModelParams], Params], shape: Shape) -> Drafter:
    """Drafts of `model` under the row's warp; point masses are its most probable tokens, unwarped.

    The state is the model's cache. What it lacks of the context, the tokens that were never an input, is
    read at the start of every round: one token, or two where the deepest draft was accepted.
    """
    is_point_mass = shape.law is ProposalLaw.POINT_MASS
    branching = shape.branching
    parents = level_parents(branching)
    num_nodes, max_depth = len(parents), len(branching)
    mask = ancestor_mask(jnp.asarray([parents]))[0]

    def init(params: ModelParams, context: Context, features, prompt_size: int) -> KVCache:
        del features
        batch, capacity = context.tokens.shape
        empty = model.init_cache(batch, capacity)
        prompt = context.tokens[:, :prompt_size]
        cache, _ = read_prompt(model.forward, weights_of(params), prompt, empty)
        return cache._replace(length=context.length - 1)

    def law_of(logits: Float[Array, "B N V"], warp: Warp) -> Float[Array, "B N V"]:
        return jax.nn.softmax(logits) if is_point_mass else warp_probs(logits, warp)

    def read_missing(weights: Params, cache: KVCache, context: Context):
        """The law after the context, and the cache with all of it."""
        batch = context.length.shape[0]
        missing = context.length - cache.length
        offsets = jnp.arange(2)[None, :]
        unread = jnp.take_along_axis(context.tokens, cache.length[:, None] + offsets, axis=1)
        causal = jnp.broadcast_to(jnp.tril(jnp.ones((2, 2), bool)), (batch, 2, 2))
        out = model.forward(weights, unread, cache.length[:, None] + offsets, causal, cache)
        logits = jnp.take_along_axis(out.logits, (missing - 1)[:, None, None], axis=1)
        return law_of(logits, context.warp), kv.commit(out.cache, missing)

    def propose(
        params: ModelParams, keys: Key[Array, "B"], cache: KVCache, context: Context
    ) -> tuple[Draft, KVCache]:
        weights = weights_of(params)
        law, cache = read_missing(weights, cache, context)
        grow = grow_chain if shape.is_chain else grow_tree
        tokens, laws, cache = grow(weights, keys, law, cache, context.warp)
        batch = tokens.shape[0]
        every_row = jnp.broadcast_to(jnp.asarray(parents, jnp.int32)[None], (batch, num_nodes))
        return Draft(tokens, every_row, None if is_point_mass else laws), cache

    def grow_chain(weights: Params, keys, law: Float[Array, "B 1 V"], cache: KVCache, warp: Warp):
        batch = keys.shape[0]
        own = jnp.ones((batch, 1, 1), bool)
        by_depth = jax.vmap(lambda key: jax.random.split(key, max_depth))(keys).T

        def draw(keys, law: Float[Array, "B 1 V"]):
            return draw_children(keys, law, 1, shape.law)

        def extend(carry, keys):
            cache, token = carry
            out = model.forward(weights, token, cache.length[:, None], own, cache)
            law = law_of(out.logits, warp)
            token = draw(keys, law)
            return (kv.commit(out.cache, jnp.ones_like(cache.length)), token), (token[:, 0], law[:, 0])

        first = draw(by_depth[0], law)
        (cache, _), (rest, rest_laws) = jax.lax.scan(extend, (cache, first), by_depth[1:])
        tokens = jnp.concatenate((jnp.full_like(first, NO_TOKEN), first, rest.T), axis=1)
        laws = jnp.concatenate((law, rest_laws.swapaxes(0, 1), jnp.zeros_like(law)), axis=1)
        return tokens, laws, cache

    def grow_tree(weights: Params, keys, law: Float[Array, "B 1 V"], cache: KVCache, warp: Warp):
        """Level by level; the nodes' keys and values stand behind the context, in their order."""
        batch = keys.shape[0]
        by_depth = jax.vmap(lambda key: jax.random.split(key, max_depth))(keys)
        tokens = [jnp.full((batch, 1), NO_TOKEN, jnp.int32)]
        laws = [law]
        first = 1
        for depth, size in enumerate(level_sizes(branching)[1:], start=1):
            level = draw_children(by_depth[:, depth - 1], laws[-1], branching[depth - 1], shape.law)
            parent_is_none = jnp.repeat(tokens[-1] == NO_TOKEN, branching[depth - 1], axis=1)
            tokens.append(jnp.where(parent_is_none & (depth > 1), NO_TOKEN, level))
            if depth == max_depth:
                laws.append(jnp.zeros((batch, size, law.shape[-1])))
                break
            seen = jnp.broadcast_to(
                mask[None, first : first + size, 1 : first + size], (batch, size, first + size - 1)
            )
            positions = jnp.broadcast_to(cache.length[:, None] + depth - 1, (batch, size))
            out = model.forward(weights, jnp.maximum(tokens[-1], 0), positions, seen, cache)
            cache = out.cache
            laws.append(law_of(out.logits, warp))
            first += size
        return jnp.concatenate(tokens, axis=1), jnp.concatenate(laws, axis=1), cache

    def observe(
        params, cache: KVCache, draft: Draft, verdict: Verdict, context: Context, features
    ) -> KVCache:
        del params, draft, features
        if not shape.is_chain:
            # The deepest level was never an input; node 1 stands in the first slot behind the context.
            slots = jnp.maximum(verdict.path[:, 1:max_depth] - 1, 0)
            cache = kv.commit(cache, jnp.minimum(verdict.num_accepted, max_depth - 1), slots)
        return kv.rollback(cache, context.length - 1)

    return Drafter(init, propose, observe, num_nodes=num_nodes, max_depth=max_depth, law=shape.law)
