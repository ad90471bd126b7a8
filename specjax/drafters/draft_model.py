"""A second, smaller language model as drafter (arXiv 2211.17192, arXiv 2302.01318), of chains or trees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from specjax import cache as kv
from specjax.errors import ConfigError
from specjax.models.functional import make_target
from specjax.prefill import read_prompt
from specjax.proposals import Shape, draw_children, level_sizes, make_shape
from specjax.sampling import split_keys, warp_probs
from specjax.trees import dynamic
from specjax.trees.dynamic import NO_SLOT
from specjax.trees.topology import ancestor_mask, chain_mask, level_parents
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
    chosen: a value of `ProposalLaw`. With `num_nodes` the tree grows where the model is confident, at each
    depth `branching` wide, and the best so many nodes are kept (EAGLE-2's trees, arXiv 2406.16858).
    """

    source: str
    draft_length: int
    branching: tuple[int, ...] = ()
    proposal: str = ProposalLaw.CHAIN.value
    num_nodes: int | None = None

    def __post_init__(self) -> None:
        shape_of(self)


def shape_of(config: Config) -> Shape:
    """The trees that a config asks for."""
    return make_shape(config.draft_length, config.branching, config.proposal, config.num_nodes)


# Small settings that the contract tests and the certificate build it with; they make up the weights.
EXAMPLES = {
    "draft_model": Config("a noisy copy of the target", 2),
    "draft_model top-k": Config("a noisy copy of the target", 2, (2, 1), ProposalLaw.POINT_MASS.value),
    "draft_model iid": Config("a noisy copy of the target", 2, (2, 1), ProposalLaw.IID_SIBLINGS.value),
    "draft_model without replacement": Config(
        "a noisy copy of the target", 2, (2, 1), ProposalLaw.SIBLINGS_WITHOUT_REPLACEMENT.value
    ),
    "draft_model dynamic": Config(
        "a noisy copy of the target", 2, (2, 2), ProposalLaw.POINT_MASS.value, num_nodes=5
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


class State(NamedTuple):
    """The model's cache, and where the nodes of the last draft stand in it, from the first free slot on."""

    cache: KVCache
    slots: Int[Array, "B N"]


def model_drafter(model: Target, weights_of: Callable[[ModelParams], Params], shape: Shape) -> Drafter:
    """Drafts of `model` under the row's warp; point masses are its most probable tokens, unwarped.

    What the cache lacks of the context, the tokens that were never an input, is read at the start of
    every round: one token, or two where the last accepted draft was not read.
    """
    is_point_mass = shape.law is ProposalLaw.POINT_MASS
    branching, max_depth = shape.branching, len(shape.branching)
    parents = level_parents(branching)
    num_nodes = shape.budget or len(parents)
    mask = ancestor_mask(jnp.asarray([parents]))[0]
    # The deepest level is never an input; node 1 stands in the first slot behind the context.
    num_read = len(parents) - level_sizes(branching)[-1]
    static_slots = [node - 1 if 0 < node < num_read else NO_SLOT for node in range(len(parents))]

    def init(params: ModelParams, context: Context, features, prompt_size: int) -> State:
        del features
        batch, capacity = context.tokens.shape
        empty = model.init_cache(batch, capacity)
        prompt = context.tokens[:, :prompt_size]
        cache, _ = read_prompt(model.forward, weights_of(params), prompt, empty)
        slots = jnp.full((batch, num_nodes), NO_SLOT, jnp.int32)
        return State(cache._replace(length=context.length - 1), slots)

    def law_of(logits: Float[Array, "B N V"], warp: Warp) -> Float[Array, "B N V"]:
        return jax.nn.softmax(logits) if is_point_mass else warp_probs(logits, warp)

    def read_missing(
        weights: Params, cache: KVCache, context: Context
    ) -> tuple[Float[Array, "B 1 V"], KVCache]:
        """The logits after the context, and the cache with all of it."""
        batch = context.length.shape[0]
        missing = context.length - cache.length
        offsets = jnp.arange(2)[None, :]
        unread = jnp.take_along_axis(context.tokens, cache.length[:, None] + offsets, axis=1)
        positions = cache.length[:, None] + offsets
        out = model.forward(weights, unread, positions, chain_mask(batch, 2), cache)
        logits = jnp.take_along_axis(out.logits, (missing - 1)[:, None, None], axis=1)
        return logits, kv.commit(out.cache, missing)

    def propose(
        params: ModelParams, keys: Key[Array, "B"], state: State, context: Context
    ) -> tuple[Draft, State]:
        weights = weights_of(params)
        logits, cache = read_missing(weights, state.cache, context)
        if shape.budget is not None:
            ranked, cache = grow_dynamic(weights, logits, cache)
            return Draft(ranked.tokens, ranked.parents, None), State(cache, ranked.slots)
        grow = grow_chain if shape.is_chain else grow_tree
        tokens, laws, cache = grow(weights, keys, law_of(logits, context.warp), cache, context.warp)
        every_row, slots = (
            jnp.broadcast_to(jnp.asarray(row, jnp.int32)[None], tokens.shape)
            for row in (parents, static_slots)
        )
        return Draft(tokens, every_row, None if is_point_mass else laws), State(cache, slots)

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

    def read_level(weights: Params, tokens: Int[Array, "B W"], seen, depth: int, cache: KVCache):
        """Pass the nodes of one level; their keys stand behind those of the levels above."""
        positions = jnp.broadcast_to(cache.length[:, None] + depth - 1, tokens.shape)
        return model.forward(weights, jnp.maximum(tokens, 0), positions, seen, cache)

    def grow_tree(weights: Params, keys, law: Float[Array, "B 1 V"], cache: KVCache, warp: Warp):
        batch = keys.shape[0]
        by_depth = split_keys(keys, max_depth)
        tokens = [jnp.full((batch, 1), NO_TOKEN, jnp.int32)]
        laws = [law]
        first = 1
        for depth, size in enumerate(level_sizes(branching)[1:], start=1):
            level = draw_children(by_depth[depth - 1], laws[-1], branching[depth - 1], shape.law)
            parent_is_none = jnp.repeat(tokens[-1] == NO_TOKEN, branching[depth - 1], axis=1)
            tokens.append(jnp.where(parent_is_none & (depth > 1), NO_TOKEN, level))
            if depth == max_depth:
                laws.append(jnp.zeros((batch, size, law.shape[-1])))
                break
            seen = mask[first : first + size, 1 : first + size]
            every_row = jnp.broadcast_to(seen[None], (batch, *seen.shape))
            out = read_level(weights, tokens[-1], every_row, depth, cache)
            cache = out.cache
            laws.append(law_of(out.logits, warp))
            first += size
        return jnp.concatenate(tokens, axis=1), jnp.concatenate(laws, axis=1), cache

    def grow_dynamic(
        weights: Params, logits: Float[Array, "B 1 V"], cache: KVCache
    ) -> tuple[dynamic.RankedTree, KVCache]:
        tree = dynamic.start(logits.shape[0])
        for depth, width in enumerate(branching, start=1):
            tree = dynamic.expand(tree, *dynamic.likeliest(logits, width), width)
            if depth < max_depth:
                out = read_level(weights, tree.tokens, tree.seen, depth, cache)
                logits, cache = out.logits, out.cache
        return dynamic.rerank(tree, num_nodes), cache

    def observe(params, state: State, draft: Draft, verdict: Verdict, context: Context, features) -> State:
        del params, draft, features
        cache = state.cache
        if not shape.is_chain:
            slots = jnp.take_along_axis(state.slots, verdict.path[:, 1:], axis=1)
            accepted = jnp.arange(max_depth)[None, :] < verdict.num_accepted[:, None]
            # Only the last node of a path can be one that was never read.
            num_kept = (accepted & (slots != NO_SLOT)).sum(1, dtype=jnp.int32)
            cache = kv.commit(cache, num_kept, jnp.maximum(slots, 0))
        return state._replace(cache=kv.rollback(cache, context.length - 1))

    return Drafter(init, propose, observe, num_nodes=num_nodes, max_depth=max_depth, law=shape.law)
