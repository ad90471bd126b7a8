"""A second, smaller language model as drafter (arXiv 2211.17192, arXiv 2302.01318), of chains or trees.

It is a complete model, or one that was distilled (arXiv 2310.08461) from some of the target's layers and
shares the target's embedding and head.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from specjax import cache as kv
from specjax import draft_vocab
from specjax.errors import ConfigError
from specjax.growth import Grown, Reading, grow, grow_chain
from specjax.models.functional import LAST_HIDDEN, keep_layers, make_target, pure
from specjax.models.layers import activation_dtype
from specjax.models.llama import LlamaConfig
from specjax.models.quantize import dequantize
from specjax.models.trunk import Trunk
from specjax.prefill import read_prompt
from specjax.proposals import Shape, TreeConfig
from specjax.training.foresight import check_distance, foresight
from specjax.trees.dynamic import NO_SLOT
from specjax.trees.topology import chain_mask
from specjax.types import (
    Context,
    Draft,
    Drafter,
    ForwardOutput,
    KVCache,
    ModelParams,
    Params,
    Target,
    Trainable,
    TrainingBatch,
    Verdict,
    not_offered,
)

# A source may also be a complete model: `build` then gets its architecture.
TAKES_MODELS = True
CATCH_UP = 4  # tokens that a pass reads of a text that came without this drafter


@dataclasses.dataclass(frozen=True)
class Config(TreeConfig):
    """Drafts of the model that `source` names: a complete one, a folder of learned weights, or the zoo's.

    Where that is the target itself in another type, it can read the target's keys and values (`share_cache`):
    then it keeps no cache and reads no prompt.
    """

    source: str | None = None
    share_cache: bool = False


@dataclasses.dataclass(frozen=True)
class Training:
    """The loss: `distance` to the target's law of the next token.

    The model starts as the `layers` of the target, `num_layers` in all; () takes them evenly, from the first
    to the last. Only the `draft_vocab_size` most frequent tokens are drafted.
    """

    num_layers: int = 2
    layers: tuple[int, ...] = ()
    distance: str = "forward_kl"
    draft_vocab_size: int | None = None


# Small settings that the contract tests and the certificate build it with; they make up the weights.
EXAMPLES = {
    "draft_model": Config(draft_length=2),
    "draft_model top-k": Config(draft_length=2, branching=(2, 1), proposal="point_mass"),
    "draft_model iid": Config(draft_length=2, branching=(2, 1), proposal="iid_siblings"),
    "draft_model without replacement": Config(
        draft_length=2, branching=(2, 1), proposal="siblings_without_replacement"
    ),
    "draft_model paths": Config(
        draft_length=2, paths=((0,), (1,), (0, 0), (0, 1)), proposal="siblings_without_replacement"
    ),
    "draft_model dynamic": Config(draft_length=2, branching=(2, 2), proposal="point_mass", num_nodes=5),
}


def build(config: Config, target: Target, architecture: LlamaConfig | None = None) -> Drafter:
    """Drafts of a complete model of the given architecture, or of a learned one between the target's ends.

    Raises ConfigError where the vocabularies differ, or the target has no ends or no cache to share.
    """
    if config.share_cache:
        check_shareable(config.source, architecture, target)
    if architecture is None:
        return learned_drafter(target, config.shape)
    model = complete_target(config.source, architecture, target)

    def weights_of(params: ModelParams) -> Params:
        return params.drafter

    if config.share_cache:
        return sharing_drafter(tuple(range(architecture.num_layers)), model, weights_of, config.shape)
    return model_drafter(model, weights_of, config.shape)


def check_shareable(source: str | None, architecture: LlamaConfig | None, target: Target) -> None:
    """Raise ConfigError where a model cannot read the target's keys and values."""
    if architecture != target.config:
        raise ConfigError(
            f"share_cache is for the target's own architecture, and the draft model '{source}' has another: "
            "leave it out"
        )


def complete_target(source: str | None, architecture: LlamaConfig, target: Target) -> Target:
    """A complete model in the type of the target; ConfigError where its vocabulary is another one."""
    model = draft_vocab.within(make_target(architecture, dtype=target.dtype))
    if model.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft model '{source}' has a vocabulary of {model.vocab_size} tokens and the target "
            f"one of {target.vocab_size}: choose a draft model that shares the target's tokenizer"
        )
    return model


def learned_drafter(target: Target, shape: Shape) -> Drafter:
    """Drafts of a model that shares the target's ends; its weights say how many layers it has."""

    def of_depth(num_layers: int) -> Drafter:
        return model_drafter(between_ends(target, num_layers), lambda params: params, shape)

    def of(params: ModelParams) -> Drafter:
        return of_depth(len(params.drafter["layers"]))

    return of_depth(1)._replace(
        init=lambda params, *rest: of(params).init(params, *rest),
        propose=lambda params, *rest: of(params).propose(params, *rest),
        resume=lambda params, *rest: of(params).resume(params, *rest),
    )


def between_ends(target: Target, num_layers: int) -> Target:
    """The learned model, a function of `ModelParams`: layers between the target's embedding and its head.

    Its one feature is `LAST_HIDDEN`. ConfigError where the target offers no embedding.
    """
    if target.embed is not_offered:
        not_offered()
    config = dataclasses.replace(target.config, num_layers=num_layers)
    dtype = activation_dtype(target.dtype)
    run = pure(lambda rngs: Trunk(config, dtype=dtype, rngs=rngs))

    def forward(params: ModelParams, tokens, positions, mask, cache: KVCache, features=()) -> ForwardOutput:
        weights = {name: params.drafter[name] for name in ("layers", "norm")}
        states, cache = run(weights, target.embed(params.target, tokens), positions, mask, cache)
        scores = draft_vocab.scores(target, params, states)
        logits = draft_vocab.in_target_vocab(scores, params, target.vocab_size)
        known = {LAST_HIDDEN: states}
        return ForwardOutput(logits, cache, {name: known[name] for name in features})

    init_cache = functools.partial(
        kv.init_cache,
        num_layers=num_layers,
        num_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )
    return Target(forward, init_cache, target.vocab_size, config, target.dtype)


def trainable(config: Config, training: Training, target: Target) -> Trainable:
    """How it learns: the target's law at every token of a text, read as decoding reads a prompt."""
    del config
    dtype, kept = activation_dtype(target.dtype), first_layers(training, target)
    check_distance(training.distance)

    def init(key: Key[Array, ""], target_params: Params, token_counts: Int[np.ndarray, "V"]):
        del key
        kept_params = keep_layers(target_params, kept)
        weights = dequantize({name: kept_params[name] for name in ("layers", "norm")})
        weights = jax.tree.map(lambda leaf: leaf.astype(dtype), weights)
        return weights, draft_vocab.choose(token_counts, training.draft_vocab_size)

    def loss(params: ModelParams, batch: TrainingBatch, key: Key[Array, ""]):
        del key
        of_draft = text_scores(target, params, batch.tokens)
        of_target = draft_vocab.scores(target, params, batch.features[LAST_HIDDEN].astype(dtype))
        vocab = params.drafter.get(draft_vocab.TOKENS)
        law, overlap = foresight(of_draft, of_target, batch, 0, training.distance, vocab)
        return law, {"law": law, "overlap": overlap}

    return Trainable(init, loss, (LAST_HIDDEN,))


def text_scores(target: Target, params: ModelParams, tokens: Int[Array, "B T"]) -> Float[Array, "B T K"]:
    """The learned model's logits after every token of whole texts, over the tokens that may be drafted."""
    model = between_ends(target, len(params.drafter["layers"]))
    # Nobody reads the logits of this pass, so the compiler leaves them out.
    _, read = read_prompt(
        model.forward, params, tokens, model.init_cache(*tokens.shape), features=(LAST_HIDDEN,)
    )
    return draft_vocab.scores(target, params, read[LAST_HIDDEN])


def first_layers(training: Training, target: Target) -> tuple[int, ...]:
    """The target's layers that the model starts as; ConfigError where there are no such layers."""
    most, count, layers = target.config.num_layers, training.num_layers, training.layers
    if not 1 <= count <= most:
        raise ConfigError(f"training.num_layers is {count}: give 1 to {most}, the target's layers")
    if layers and len(layers) != count:
        raise ConfigError(
            f"training.layers names {len(layers)} layers and training.num_layers is {count}: give as many"
        )
    if not all(0 <= layer < most for layer in layers):
        raise ConfigError(f"training.layers are {layers}: the target has layers 0 to {most - 1}")
    return layers or tuple(np.linspace(0, most - 1, count).round().astype(int).tolist())


def complete_model(weights: Params, target: Target, target_params: Params) -> tuple[LlamaConfig, Params]:
    """A learned model with the target's ends as its own; as such it drafts every token."""
    ends = {name: target_params[name] for name in ("embed_tokens", "lm_head") if name in target_params}
    layers = {name: weights[name] for name in ("layers", "norm")}
    config = dataclasses.replace(target.config, num_layers=len(weights["layers"]))
    return config, dequantize(ends) | layers


class State(NamedTuple):
    """The model's cache, and where the nodes of the last draft stand in it, from the first free slot on."""

    cache: KVCache
    slots: Int[Array, "B N"]


def grow_model(
    model: Target, weights: Params, shape: Shape, keys: Key[Array, "B"], context: Context, start: Reading
) -> Grown:
    """The draft of `model` after a context that it has read; a chain's cache has advanced."""

    def read(tokens, carry, depth: int, seen, cache: KVCache) -> Reading:
        positions = jnp.broadcast_to(cache.length[:, None] + depth - 1, tokens.shape)
        out = model.forward(weights, tokens, positions, seen, cache)
        return Reading(out.logits, carry, out.cache)

    if shape.is_chain and context.effort is None:
        # A whole model is compiled once for a chain, not once a token.
        return grow_chain(read, shape, keys, context.warp, start)
    return grow(read, shape, keys, context.warp, start, context.effort)


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
        start = read_missing(weights, state.cache, context)
        grown = grow_model(model, weights, shape, keys, context, start)
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

    def resume(params: ModelParams, state: State, context: Context, features, first) -> State:
        del features, first
        weights, batch = weights_of(params), context.length.shape[0]

        def lacks_more(cache: KVCache) -> Bool[Array, ""]:
            return (context.length - cache.length > 2).any()

        def catch_up(cache: KVCache) -> KVCache:
            places = jnp.minimum(cache.length[:, None] + jnp.arange(CATCH_UP)[None], kv.capacity(cache) - 1)
            tokens = jnp.take_along_axis(context.tokens, places, axis=1)
            out = model.forward(weights, tokens, places, chain_mask(batch, CATCH_UP), cache)
            # What is pending is read with the next draft.
            return kv.commit(out.cache, jnp.clip(context.length - 1 - cache.length, 0, CATCH_UP))

        cache = kv.rollback(state.cache, context.length - 1)
        return state._replace(cache=jax.lax.while_loop(lacks_more, catch_up, cache))

    return Drafter(
        init,
        propose,
        observe,
        num_nodes=shape.num_nodes,
        max_depth=shape.max_depth,
        law=shape.law,
        resume=resume,
    )


def sharing_drafter(
    kept: tuple[int, ...], model: Target, weights_of: Callable[[ModelParams], Params], shape: Shape
) -> Drafter:
    """Drafts of `model`, the `kept` layers of the target, in the target's cache; it has no state.

    What it writes there, the verifying pass writes over. Raises ConfigError where the layers are stacked.
    """

    def propose(
        params: ModelParams, keys: Key[Array, "B"], state: Any, context: Context
    ) -> tuple[Draft, KVCache]:
        del state
        assert context.cache is not None
        whole, weights = kv.layer_by_layer(context.cache), weights_of(params)
        own = KVCache(
            tuple(whole.keys[layer] for layer in kept),
            tuple(whole.values[layer] for layer in kept),
            whole.length,
        )

        batch = len(keys)
        pending = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)
        out = model.forward(weights, pending, own.length[:, None], chain_mask(batch, 1), own)
        read = kv.commit(out.cache, jnp.ones((batch,), jnp.int32))
        start = Reading(out.logits, jnp.zeros((batch, 1, 0)), read)
        grown = grow_model(model, weights, shape, keys, context, start)
        # Layer by layer, what was written and what was skipped; as long as it was.
        new = dict(zip(kept, zip(grown.cache.keys, grown.cache.values, strict=True), strict=True))
        old = enumerate(zip(whole.keys, whole.values, strict=True))
        all_keys, all_values = zip(*(new.get(layer, slots) for layer, slots in old), strict=True)
        return grown.draft, KVCache(all_keys, all_values, whole.length)

    return Drafter(
        init=lambda params, context, features, prompt_size: {},
        propose=propose,
        observe=lambda params, state, draft, verdict, context, features: {},
        num_nodes=shape.num_nodes,
        max_depth=shape.max_depth,
        law=shape.law,
        written=lambda state: (state, {}),
    )
