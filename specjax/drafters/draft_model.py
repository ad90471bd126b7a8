"""A second, smaller language model as drafter (arXiv 2211.17192, arXiv 2302.01318)."""

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
from specjax.sampling import sample, warp_probs
from specjax.trees.topology import chain_parents
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
)


@dataclasses.dataclass(frozen=True)
class Config:
    """A chain of `draft_length` tokens from the model that `source` names."""

    source: str
    draft_length: int


def build(config: Config, target: Target, architecture: Any = None) -> Drafter:
    """A chain drawn from the model of the given architecture; ConfigError if its vocabulary differs."""
    model = make_target(architecture, dtype=target.dtype)
    if model.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft model '{config.source}' has a vocabulary of {model.vocab_size} tokens and the target "
            f"one of {target.vocab_size}: choose a draft model that shares the target's tokenizer"
        )
    return chain_drafter(model, lambda params: params.drafter, config.draft_length)


def chain_drafter(model: Target, weights_of: Callable[[ModelParams], Params], draft_length: int) -> Drafter:
    """A chain of `draft_length` tokens, each drawn from `model`'s own law under the row's warp.

    The state is the model's cache. The last draft is never an input, so after a round in which all
    were accepted one more token is missing: every round starts by reading the one or two that are.
    """

    def init(params: ModelParams, context: Context, features, prompt_size: int) -> KVCache:
        del features
        batch, capacity = context.tokens.shape
        empty = model.init_cache(batch, capacity)
        prompt = context.tokens[:, :prompt_size]
        cache, _ = read_prompt(model.forward, weights_of(params), prompt, empty)
        return cache._replace(length=context.length - 1)

    def propose(
        params: ModelParams, keys: Key[Array, "B"], cache: KVCache, context: Context
    ) -> tuple[Draft, KVCache]:
        weights = weights_of(params)
        batch = context.length.shape[0]

        def draw(depth, logits: Float[Array, "B V"]):
            law = warp_probs(logits[:, None], context.warp)[:, 0]
            return sample(jax.vmap(lambda key: jax.random.fold_in(key, depth))(keys), law), law

        missing = context.length - cache.length
        offsets = jnp.arange(2)[None, :]
        unread = jnp.take_along_axis(context.tokens, cache.length[:, None] + offsets, axis=1)
        causal = jnp.broadcast_to(jnp.tril(jnp.ones((2, 2), bool)), (batch, 2, 2))
        out = model.forward(weights, unread, cache.length[:, None] + offsets, causal, cache)
        logits = jnp.take_along_axis(out.logits, (missing - 1)[:, None, None], axis=1)[:, 0]
        cache = kv.commit(out.cache, missing)

        def extend(carry, depth):
            cache, token = carry
            own = jnp.ones((batch, 1, 1), bool)
            out = model.forward(weights, token[:, None], cache.length[:, None], own, cache)
            token, law = draw(depth, out.logits[:, 0])
            return (kv.commit(out.cache, jnp.ones_like(cache.length)), token), (token, law)

        first, first_law = draw(0, logits)
        (cache, _), (rest, rest_laws) = jax.lax.scan(extend, (cache, first), jnp.arange(1, draft_length))
        root = jnp.full_like(first, NO_TOKEN)
        tokens = jnp.concatenate((root[None], first[None], rest)).T
        laws = jnp.concatenate((first_law[None], rest_laws, jnp.zeros_like(first_law)[None]))
        return Draft(tokens, chain_parents(batch, draft_length + 1), laws.swapaxes(0, 1)), cache

    def observe(
        params, cache: KVCache, draft: Draft, verdict: Verdict, context: Context, features
    ) -> KVCache:
        del params, draft, verdict, features
        return kv.rollback(cache, context.length - 1)

    return Drafter(
        init, propose, observe, num_nodes=draft_length + 1, max_depth=draft_length, law=ProposalLaw.CHAIN
    )
