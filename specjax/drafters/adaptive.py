"""As much drafting as it is worth, and none while it loses: a wrapper for any drafter.

Every row keeps, by depth, a running share of drafts that were accepted. Of the lengths 0, 1, ... the next
round takes the one with the most expected tokens for its cost, as it was measured. A row that does not draft
tries again every `probe_every` rounds. With `confidence`, chains also stop where the drafter is unsure, token
by token (arXiv 2405.04304).

A round in which no row drafts is a pass over the pending token alone, and the drafter does not run: it reads
what it missed once it is asked again. What is not drafted is decided before it is drawn, so the law stays
exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from specjax.errors import ConfigError
from specjax.step import run_if
from specjax.trees.topology import ancestor_mask, chain_parents, depths
from specjax.types import (
    NO_TOKEN,
    ROOT,
    Context,
    Draft,
    Drafter,
    Effort,
    KVCache,
    ModelParams,
    Parts,
    Target,
    Verdict,
)

UNREAD = 32  # rounds without drafting after which the drafter reads what it missed


@dataclasses.dataclass(frozen=True)
class Config:
    """Drafts of `inner`, of the length that pays best.

    `costs` are those of a round with 1, 2, ... drafts, drafting included, in passes of plain decoding, and
    `context_costs` what a thousand tokens of context add to them; those of a tree go by its depth. What is
    known of the acceptance at first counts as `prior_weight` drafts of which the share `prior` was accepted,
    and a round counts half after `half_life` others. `sizes` are the numbers of nodes for which a pass of its
    own is compiled, besides the whole draft: for a chain every one, unless given.
    """

    inner: Mapping[str, Any]
    costs: tuple[float, ...]
    context_costs: tuple[float, ...] = ()
    confidence: float = 0.0
    probe_every: int = 24
    half_life: float = 12.0
    prior: float = 0.6
    prior_weight: float = 2.0
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.costs or any(not cost > 0 for cost in self.costs):
            raise ConfigError(
                f"drafter.costs is {self.costs}: give what a round of 1, 2, ... drafts costs in plain passes"
            )
        if self.context_costs and len(self.context_costs) != len(self.costs):
            raise ConfigError(
                f"drafter.context_costs has {len(self.context_costs)} numbers and drafter.costs "
                f"{len(self.costs)}: give one for each, or none"
            )
        if any(not added >= 0 for added in self.context_costs):
            raise ConfigError(f"drafter.context_costs is {self.context_costs}: give numbers of at least 0")
        for name, low, high in (("confidence", 0, 1), ("prior", 0, 1)):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"drafter.{name} is {getattr(self, name)}: give {low} to {high}")
        for name in ("probe_every", "half_life", "prior_weight"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"drafter.{name} is {getattr(self, name)}: give a number above 0")


# Small settings that the contract tests and the certificate build it with; they make up the weights.
EXAMPLES = {
    "adaptive": Config(
        {"name": "draft_model", "draft_length": 3}, (1.1, 1.5, 2.4), confidence=0.2, probe_every=2
    ),
    "adaptive eagle": Config({"name": "eagle", "draft_length": 2}, (1.5, 2.5), probe_every=3, half_life=2.0),
    "adaptive with the target's cache": Config(
        {"name": "self_speculative", "draft_length": 2, "skip_layers": (1,), "share_cache": True},
        (1.2, 1.6),
        probe_every=2,
        half_life=2.0,
    ),
}


class State(NamedTuple):
    """The inner drafter's state and each row's counts; `tried` and `accepted` [B, D] fade with time.

    `wanted` [B] is the length of the next draft, `idle` [B] the rounds since the last one. `num_unread`
    rounds, whose pending tokens had the `features` [B, W, F], came without the drafter. `cache` is there
    between a draft in the target's cache and its verification.
    """

    inner: Any
    tried: Float[Array, "B D"]
    accepted: Float[Array, "B D"]
    wanted: Int[Array, "B"]
    idle: Int[Array, "B"]
    length: Int[Array, "B"]
    num_unread: Int[Array, ""]
    features: dict[str, Float[Array, "B W F"]]
    cache: KVCache | None = None


def build(config: Config, target: Target, parts: Parts) -> Drafter:
    """Drafts of the inner drafter, cut; ConfigError where costs or sizes do not fit it."""
    inner, max_depth = parts.inner, parts.inner.max_depth
    if len(config.costs) != max_depth:
        raise ConfigError(
            f"drafter.costs has {len(config.costs)} numbers and the inner drafter drafts up to {max_depth} "
            "tokens: give one for each length"
        )
    sizes = config.sizes
    if sizes is None:
        sizes = tuple(range(1, inner.num_nodes)) if inner.is_chain else (1,)
    if any(not 1 <= size < inner.num_nodes for size in sizes):
        raise ConfigError(
            f"drafter.sizes is {sizes}: give numbers from 1 to {inner.num_nodes - 1}, below the "
            "inner drafter's nodes"
        )
    costs = jnp.asarray(config.costs)[None]
    added = jnp.asarray(config.context_costs or (0.0,) * max_depth)[None] / 1000
    fading = 0.5 ** (1 / config.half_life)

    def own(params: ModelParams) -> ModelParams:
        return params._replace(drafter=params.drafter["inner"])

    def choose(tried, accepted, idle: Int[Array, "B"], length: Int[Array, "B"]) -> Int[Array, "B"]:
        """The draft length of the most tokens for its cost, behind a context of that length."""
        known = config.prior_weight + tried
        chances = (config.prior_weight * config.prior + accepted) / known
        rates = (1 + jnp.cumsum(jnp.cumprod(chances, axis=1), axis=1)) / (costs + added * length[:, None])
        best = 1 + jnp.argmax(rates, axis=1).astype(jnp.int32)
        is_worth_it = (rates.max(1) > 1) | (idle >= config.probe_every)
        return jnp.where(is_worth_it, best, 0)

    def catch_up(params: ModelParams, state: State, context: Context) -> State:
        first = context.length - 1 - state.num_unread
        read = inner.resume(own(params), state.inner, context, state.features, first)
        return state._replace(inner=read, num_unread=jnp.zeros_like(state.num_unread))

    def init(params: ModelParams, context: Context, features, prompt_size: int) -> State:
        batch = len(context.length)
        nothing, none_yet = jnp.zeros((batch, max_depth)), jnp.zeros((batch,), jnp.int32)
        return State(
            inner.init(own(params), context, features, prompt_size),
            nothing,
            nothing,
            choose(nothing, nothing, none_yet, context.length),
            none_yet,
            context.length,
            jnp.zeros((), jnp.int32),
            {name: jnp.zeros((batch, UNREAD, f.shape[-1]), f.dtype) for name, f in features.items()},
        )

    def propose(
        params: ModelParams, keys: Key[Array, "B"], state: State, context: Context
    ) -> tuple[Draft, State]:
        batch = len(keys)
        effort = Effort(state.wanted, jnp.full((batch,), config.confidence))

        def ask(state: State) -> tuple[Draft, State]:
            state = catch_up(params, state, context)
            cache = context.cache if inner.written is None else state.cache
            asked = context._replace(effort=effort, cache=cache)
            draft, after = inner.propose(own(params), keys, state.inner, asked)
            if inner.written is not None:
                cache, after = inner.written(after)
                state = state._replace(cache=cache)
            return draft, state._replace(inner=after)

        if inner.written is not None:
            state = state._replace(cache=context.cache)
        shapes = jax.eval_shape(lambda state: ask(state)[0], state)
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)._replace(
            tokens=jnp.full(shapes.tokens.shape, NO_TOKEN, jnp.int32),
            parents=chain_parents(*shapes.parents.shape),
        )
        draft, state = run_if((state.wanted > 0).any(), lambda carry: ask(carry[1]), (nothing, state))
        depth = depths(ancestor_mask(draft.parents))
        is_cut = (depth > state.wanted[:, None]) & (depth > 0)
        return draft._replace(tokens=jnp.where(is_cut, NO_TOKEN, draft.tokens)), state

    def observe(
        params: ModelParams, state: State, draft: Draft, verdict: Verdict, context: Context, features
    ) -> State:
        has_drafted = (state.wanted > 0).any()

        def learn(state: State) -> State:
            seen = inner.observe(own(params), state.inner, draft, verdict, context, features)
            return state._replace(inner=seen)

        def miss(state: State) -> State:
            at = (0, state.num_unread, 0)
            kept = {
                name: jax.lax.dynamic_update_slice(state.features[name], f[:, ROOT : ROOT + 1], at)
                for name, f in features.items()
            }
            state = state._replace(features=kept, num_unread=state.num_unread + 1)
            return run_if(state.num_unread == UNREAD, lambda state: catch_up(params, state, context), state)

        state = run_if(has_drafted, learn, state)
        state = run_if(~has_drafted, miss, state)

        depth = depths(ancestor_mask(draft.parents))
        drafted = jnp.where(draft.tokens == NO_TOKEN, 0, depth).max(1)
        levels = jnp.arange(1, max_depth + 1)[None]
        tried = (levels <= drafted[:, None]) & (levels <= verdict.num_accepted[:, None] + 1)
        accepted = levels <= verdict.num_accepted[:, None]
        # Where nothing was tried nothing was learnt, and nothing is forgotten.
        kept = jnp.where(tried.any(1, keepdims=True), fading, 1.0)
        tried, accepted = kept * state.tried + tried, kept * state.accepted + accepted
        idle = jnp.where(drafted > 0, 0, state.idle + 1)
        # A row that has ended is not to be drafted for.
        goes_on = context.length > state.length
        wanted = jnp.where(goes_on, choose(tried, accepted, idle, context.length), 0)
        return state._replace(tried=tried, accepted=accepted, idle=idle, wanted=wanted, length=context.length)

    def resume(params: ModelParams, state: State, context: Context, features, first) -> State:
        before = context._replace(length=jnp.minimum(context.length, first + 1))
        state = catch_up(params, state, before)
        return state._replace(
            inner=inner.resume(own(params), state.inner, context, features, first), length=context.length
        )

    return Drafter(
        init,
        propose,
        observe,
        num_nodes=inner.num_nodes,
        max_depth=max_depth,
        law=inner.law,
        features=inner.features,
        resume=resume,
        sizes=sizes,
        written=None if inner.written is None else lambda state: (state.cache, state._replace(cache=None)),
        scratch=inner.scratch,
    )
