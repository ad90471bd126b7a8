"""One round of decoding, speculative or plain. It knows no drafter, no model and no rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from specjax import cache as kv
from specjax.sampling import sample, split_keys, warp_probs
from specjax.trees.topology import ancestor_mask, chain_mask, depths
from specjax.types import (
    NO_TOKEN,
    Context,
    DecodeState,
    Draft,
    Drafter,
    KVCache,
    ModelParams,
    Request,
    StepInfo,
    Target,
    Verdict,
    Verify,
)


class Method(NamedTuple):
    """How to decode: a target alone (plain), or with a drafter and a rule. Static: functions and numbers."""

    target: Target
    drafter: Drafter | None = None
    verify: Verify | None = None

    @property
    def num_nodes(self) -> int:
        """Nodes of one target pass, the pending token included."""
        return 1 if self.drafter is None else self.drafter.num_nodes

    @property
    def num_slots(self) -> int:
        """Cache slots behind the context that a round may write."""
        return 1 if self.drafter is None else self.drafter.num_nodes + self.drafter.scratch

    @property
    def max_depth(self) -> int:
        """The most draft tokens one pass can accept."""
        return 0 if self.drafter is None else self.drafter.max_depth


def step(
    method: Method, params: ModelParams, request: Request, state: DecodeState
) -> tuple[DecodeState, StepInfo]:
    """One round of `method`: one target pass, at least one new token for every row that has not ended."""
    if method.drafter is None:
        return autoregressive_step(method.target, params, request, state)
    assert method.verify is not None
    return speculative_step(method.target, method.drafter, method.verify, params, request, state)


def autoregressive_step(
    target: Target, params: ModelParams, request: Request, state: DecodeState
) -> tuple[DecodeState, StepInfo]:
    """Plain decoding: feed the pending token, draw the next one from the target's warped law."""
    next_keys, keys = split_keys(state.keys, 2)
    pending = _pending(state)[:, None]
    own = jnp.ones((*pending.shape, 1), bool)
    out = target.forward(params.target, pending, state.cache.length[:, None], own, state.cache)
    emitted = sample(keys, warp_probs(out.logits, request.warp)[:, 0])[:, None]
    nothing = jnp.zeros_like(state.length)
    state = state._replace(keys=next_keys, cache=out.cache)
    return _emit(request, state, emitted, nothing, nothing, path=None)


def speculative_step(
    target: Target,
    drafter: Drafter,
    verify: Verify,
    params: ModelParams,
    request: Request,
    state: DecodeState,
) -> tuple[DecodeState, StepInfo]:
    """Draft, verify in one target pass, accept, commit (arXiv 2211.17192; trees: arXiv 2305.09781)."""
    done = speculative_round(target, drafter, verify, params, request, state)
    return done.state, done.info


class Judged(NamedTuple):
    """A pass and its verdict; `law` [B, D + 1, V] is the target's after each node of the path.

    `features` are those of every node; nodes that the pass left out have 0.
    """

    verdict: Verdict
    cache: KVCache
    law: Float[Array, "B D1 V"]
    features: dict[str, Float[Array, "B N F"]]


class Round(NamedTuple):
    """All of a speculative step: what goes on, what is reported, what was drafted and what became of it."""

    state: DecodeState
    info: StepInfo
    draft: Draft
    judged: Judged


def speculative_round(
    target: Target,
    drafter: Drafter,
    verify: Verify,
    params: ModelParams,
    request: Request,
    state: DecodeState,
) -> Round:
    """`speculative_step` with everything that it knows, for drafters made of drafters and for traces."""
    next_keys, draft_keys, verify_keys = split_keys(state.keys, 3)
    context = Context(state.tokens, state.length, request.warp, cache=state.cache)
    draft, draft_state = drafter.propose(params, draft_keys, state.draft_state, context)
    cache = state.cache
    if drafter.written is not None:
        cache, draft_state = drafter.written(draft_state)
    draft = draft._replace(tokens=draft.tokens.at[:, 0].set(_pending(state)))

    mask = chain_mask(*draft.tokens.shape) if drafter.is_chain else ancestor_mask(draft.parents)
    depth = depths(mask)

    def judge(cache: KVCache, num_nodes: int) -> Judged:
        return _judge(target, drafter, verify, params, request, cache, verify_keys, draft, mask, num_nodes)

    judged = (
        judge(cache, drafter.num_nodes)
        if not drafter.sizes
        else _smallest(judge, drafter, draft, ~state.done, cache)
    )
    verdict = judged.verdict

    # Along the path: the accepted tokens, then the one that follows them.
    on_path = jnp.take_along_axis(draft.tokens, verdict.path, axis=1)[:, 1:]
    emitted = jnp.append(on_path, verdict.next_token[:, None], axis=1)
    place = jnp.arange(drafter.max_depth + 1)[None, :] == verdict.num_accepted[:, None]
    emitted = jnp.where(place, verdict.next_token[:, None], emitted)

    num_drafted = jnp.where(draft.tokens == NO_TOKEN, 0, depth).max(-1)
    state = state._replace(keys=next_keys, cache=judged.cache)
    state, info = _emit(
        request, state, emitted, num_drafted, verdict.num_accepted, None if drafter.is_chain else verdict.path
    )
    context = Context(state.tokens, state.length, request.warp)
    draft_state = drafter.observe(params, draft_state, draft, verdict, context, judged.features)
    return Round(state._replace(draft_state=draft_state), info, draft, judged)


def _judge(
    target: Target,
    drafter: Drafter,
    verify: Verify,
    params: ModelParams,
    request: Request,
    cache: KVCache,
    keys: Key[Array, "B"],
    draft: Draft,
    mask: Bool[Array, "B N N"],
    num_nodes: int,
) -> Judged:
    """Run the first `num_nodes` nodes and judge them; the others hold no token."""
    left_out = drafter.num_nodes - num_nodes
    tokens, mask = draft.tokens[:, :num_nodes], mask[:, :num_nodes, :num_nodes]
    positions = cache.length[:, None] + depths(mask)
    out = target.forward(params.target, tokens, positions, mask, cache, drafter.features)
    target_probs = warp_probs(out.logits, request.warp)
    max_depth = drafter.max_depth
    if left_out:
        # A rule judges one draft at least, and be it none.
        seen = max(num_nodes, 2)
        target_probs = _pad(target_probs, seen)
        draft = jax.tree.map(lambda part: part[:, :seen], draft)
        max_depth = min(max_depth, seen - 1)
    verdict = verify(keys, draft, target_probs, max_depth=max_depth)
    law = jnp.take_along_axis(target_probs, verdict.path[..., None], axis=1)
    if left_out:
        verdict = verdict._replace(path=_pad(verdict.path, drafter.max_depth + 1))
        law = _pad(law, drafter.max_depth + 1)
    features = {name: _pad(values, drafter.num_nodes) for name, values in out.features.items()}
    return Judged(verdict, out.cache, law, features)


def _smallest(
    judge: Callable[[KVCache, int], Judged],
    drafter: Drafter,
    draft: Draft,
    active: Bool[Array, "B"],
    cache: KVCache,
) -> Judged:
    """The judged pass of the smallest size that holds all drafts of active rows."""
    sizes = sorted({*drafter.sizes, drafter.num_nodes})
    place = jnp.arange(1, drafter.num_nodes + 1)[None]
    needed = jnp.where(active[:, None] & (draft.tokens != NO_TOKEN), place, 1).max()
    chosen = jnp.searchsorted(jnp.asarray(sizes), needed)
    shapes = jax.eval_shape(lambda cache: judge(cache, drafter.num_nodes), cache)
    judged = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)._replace(cache=cache)
    for number, size in enumerate(sizes):

        def run(judged: Judged, size: int = size) -> Judged:
            return judge(judged.cache, size)

        judged = run_if(chosen == number, run, judged)
    return judged


def run_if(condition: Bool[Array, ""], then: Callable[[Any], Any], carry: Any) -> Any:
    """`then(carry)` where the condition holds, else `carry`.

    It is a loop of one round or none: a conditional would copy the caches.
    """
    _, carry = jax.lax.while_loop(
        lambda todo: todo[0], lambda todo: (jnp.zeros((), bool), then(todo[1])), (condition, carry)
    )
    return carry


def _pad(rows: Shaped[Array, "B K *rest"], size: int) -> Shaped[Array, "B N *rest"]:
    """Zeros behind what there is, up to `size`."""
    missing = size - rows.shape[1]
    return jnp.pad(rows, ((0, 0), (0, missing), *((0, 0),) * (rows.ndim - 2))) if missing else rows


def _pending(state: DecodeState) -> Int[Array, "B"]:
    return jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)[:, 0]


def _emit(
    request: Request,
    state: DecodeState,
    emitted: Int[Array, "B D1"],
    num_drafted: Int[Array, "B"],
    num_accepted: Int[Array, "B"],
    path: Int[Array, "B D1"] | None,
) -> tuple[DecodeState, StepInfo]:
    """Append the accepted tokens and the next one, cut at a stop token or the limit; keep their keys."""
    active = ~state.done
    place = jnp.arange(emitted.shape[1])[None, :]
    offered = place <= num_accepted[:, None]
    stops = offered & (emitted[:, :, None] == request.stop_tokens[None, None]).any(-1)
    before_stop = jnp.cumsum(stops, axis=1) - stops == 0
    fits = state.length[:, None] + place < request.limit[:, None]
    num_emitted = (offered & before_stop & fits & active[:, None]).sum(1, dtype=jnp.int32)

    has_stopped = (stops & (place < num_emitted[:, None])).any(1)
    length = state.length + num_emitted
    tokens = _append(state.tokens, emitted, state.length)
    cache = kv.commit(state.cache, num_emitted, path)
    done = state.done | has_stopped | (length >= request.limit)
    state = state._replace(tokens=tokens, length=length, done=done, cache=cache)
    # Drafts behind a cut were neither accepted nor refused.
    was_cut = num_emitted <= num_accepted
    num_drafted = jnp.where(was_cut, jnp.minimum(num_drafted, num_emitted), num_drafted)
    info = StepInfo(active, num_drafted, jnp.minimum(num_accepted, num_emitted), num_emitted)
    return state, info


def _append(tokens: Int[Array, "B T"], new: Int[Array, "B D1"], at: Int[Array, "B"]) -> Int[Array, "B T"]:
    return jax.vmap(lambda row, piece, start: jax.lax.dynamic_update_slice(row, piece, (start,)))(
        tokens, new, at
    )


def has_ended(state: DecodeState) -> Bool[Array, ""]:
    """Whether every row has met a stop token or its limit."""
    return jnp.all(state.done)
