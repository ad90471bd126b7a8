"""Three levels: a drafter drafts for a model, and what that model lets pass is the draft for the target.

The model decodes speculatively under a lossless rule, so its tokens have its own law, and that is the law
that the target's rule is told (staged speculation, arXiv 2308.04623; cascades, arXiv 2312.11462). Any drafter
may be the inner one, a cascade too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specjax import cache as kv
from specjax.drafters.draft_model import check_shareable
from specjax.errors import ConfigError
from specjax.prefill import read_prompt
from specjax.step import speculative_round
from specjax.trees.topology import chain_mask, chain_parents
from specjax.types import (
    Context,
    DecodeState,
    Draft,
    Drafter,
    KVCache,
    ModelParams,
    Parts,
    ProposalLaw,
    Request,
    Target,
)

CATCH_UP = 4  # tokens that a pass of the model reads of a text that came without this drafter


@dataclasses.dataclass(frozen=True)
class Config:
    """Chains of `draft_length` tokens of the model in `source`, for which `inner` drafts, judged by `verify`.

    `source` is whatever the drafter `draft_model` takes. Where it is the target itself in another type, the
    model can read the target's keys and values (`share_cache`): then it keeps no cache and reads no prompt,
    and the features that the inner drafter gets of the prompt are the target's.
    """

    inner: Mapping[str, Any]
    source: str | None
    draft_length: int
    verify: str = "rejection"
    share_cache: bool = False


# Small settings that the contract tests and the certificate build it with; they make up the weights.
EXAMPLES = {
    "cascade": Config({"name": "ngram", "draft_length": 2, "max_ngram": 2}, None, 2),
    "cascade of eagle": Config({"name": "eagle", "draft_length": 2}, None, 3, "block"),
    "cascade in the target's cache": Config({"name": "eagle", "draft_length": 2}, None, 3, share_cache=True),
}


class State(NamedTuple):
    """The model's `cache`, the inner drafter's state, and the model's features of the last draft.

    `features` [B, W, F] are those at the positions from `first` [B] on. A cache that is the target's is there
    between a draft and its verification.
    """

    cache: KVCache | None
    draft_state: Any
    features: dict[str, Float[Array, "B W F"]]
    first: Int[Array, "B"]


def build(config: Config, target: Target, parts: Parts) -> Drafter:
    """Drafts of the model, with its law; ConfigError where no token is drafted or no cache can be shared."""
    inner, model, verify = parts
    assert model is not None and verify is not None
    length = config.draft_length
    if length < 1:
        raise ConfigError(f"drafter.draft_length is {length}: draft at least 1 token a pass")
    if config.share_cache:
        check_shareable(config.source, model.config, target)
    # One token more than is drafted: then the model has read all that is.
    num_new = length + 1
    width = num_new + inner.max_depth + 1
    room = inner.num_nodes + inner.scratch

    def own(params: ModelParams) -> ModelParams:
        return ModelParams(params.drafter["model"], params.drafter["inner"])

    def with_room(context: Context) -> Context:
        """The model writes further than the target does."""
        return context._replace(tokens=jnp.pad(context.tokens, ((0, 0), (0, room))), effort=None)

    def init(params: ModelParams, context: Context, features, prompt_size: int) -> State:
        params, context = own(params), with_room(context)
        batch, capacity = context.tokens.shape
        cache, read = None, features
        if not config.share_cache:
            prompt, empty = context.tokens[:, :prompt_size], model.init_cache(batch, capacity)
            cache, read = read_prompt(model.forward, params.target, prompt, empty, inner.features)
            cache = cache._replace(length=context.length - 1)
        buffers = {
            name: jnp.zeros((batch, width, values.shape[-1]), values.dtype) for name, values in read.items()
        }
        return State(cache, inner.init(params, context, read, prompt_size), buffers, context.length - 1)

    def propose(
        params: ModelParams, keys: Key[Array, "B"], state: State, context: Context
    ) -> tuple[Draft, State]:
        params, context = own(params), with_room(context)
        batch, first = len(keys), context.length - 1
        no_stops = jnp.zeros((0,), jnp.int32)
        cache = kv.layer_by_layer(_given(context.cache)) if config.share_cache else _given(state.cache)
        request = Request(context.warp, context.length + num_new, no_stops)

        def extend(carry):
            text, laws, features = carry
            at = text.length - context.length
            text, _, _, judged = speculative_round(model, inner, verify, params, request, text)
            path = judged.verdict.path[..., None]
            on_path = {n: jnp.take_along_axis(f, path, axis=1) for n, f in judged.features.items()}
            return text, _put(laws, judged.law, at), {n: _put(features[n], f, at) for n, f in on_path.items()}

        nobody = jnp.zeros((batch,), bool)
        text = DecodeState(context.tokens, context.length, nobody, keys, cache, state.draft_state)
        laws = jnp.zeros((batch, width, target.vocab_size))
        text, laws, features = jax.lax.while_loop(
            lambda carry: ~carry[0].done.all(), extend, (text, laws, state.features)
        )
        places = first[:, None] + jnp.arange(num_new)[None]
        tokens = jnp.take_along_axis(text.tokens, places, axis=1)
        draft = Draft(tokens, chain_parents(batch, num_new), laws[:, :num_new])
        after = text.cache._replace(length=cache.length) if config.share_cache else text.cache
        return draft, State(after, text.draft_state, features, first)

    def follow(params: ModelParams, state: State, context: Context, features, first) -> State:
        """The inner drafter brought to the context."""
        return state._replace(draft_state=inner.resume(params, state.draft_state, context, features, first))

    def settle(params: ModelParams, state: State, context: Context) -> State:
        """Forget what the target refused."""
        if not config.share_cache:
            cache = kv.rollback(_given(state.cache), context.length - 1)
            state, context = state._replace(cache=cache), context._replace(length=cache.length + 1)
        return follow(params, state, context, state.features, state.first)

    def observe(params: ModelParams, state: State, draft, verdict, context: Context, features) -> State:
        del draft, verdict, features
        return settle(own(params), state, with_room(context))

    def resume(params: ModelParams, state: State, context: Context, features, first) -> State:
        params, context = own(params), with_room(context)
        batch = len(context.length)
        if config.share_cache:
            return follow(params, state, context, features, first)

        def lacks_more(state: State) -> Bool[Array, ""]:
            return (_given(state.cache).length < context.length - 1).any()

        def catch_up(state: State) -> State:
            cache, end = _given(state.cache), context.tokens.shape[1] - 1
            start = cache.length
            places = jnp.minimum(start[:, None] + jnp.arange(CATCH_UP)[None], end)
            tokens = jnp.take_along_axis(context.tokens, places, axis=1)
            mask = chain_mask(batch, CATCH_UP)
            out = model.forward(params.target, tokens, places, mask, cache, inner.features)
            cache = kv.commit(out.cache, jnp.clip(context.length - 1 - start, 0, CATCH_UP))
            there = context._replace(length=cache.length + 1)
            return follow(params, state._replace(cache=cache), there, out.features, start)

        return jax.lax.while_loop(lacks_more, catch_up, settle(params, state, context))

    return Drafter(
        init,
        propose,
        observe,
        num_nodes=num_new,
        max_depth=length,
        law=ProposalLaw.CHAIN,
        features=inner.features if config.share_cache else (),
        resume=resume,
        written=(lambda state: (state.cache, state._replace(cache=None))) if config.share_cache else None,
        scratch=room - 1 if config.share_cache else 0,
    )


def _given(cache: KVCache | None) -> KVCache:
    """The cache, where there is one."""
    assert cache is not None
    return cache


def _put(rows: Float[Array, "B W F"], new: Float[Array, "B D1 F"], at: Int[Array, "B"]):
    """Rows with `new` from `at` on; the next piece overwrites what of it was not kept."""
    return jax.vmap(lambda row, piece, start: jax.lax.dynamic_update_slice(row, piece, (start, 0)))(
        rows, new.astype(rows.dtype), at
    )
