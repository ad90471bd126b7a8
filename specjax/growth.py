"""Growing a draft, node by node, with whatever reads nodes: a language model, or a head on states."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from specjax import cache as kv
from specjax.proposals import Shape, draw_children
from specjax.sampling import split_keys, warp_probs
from specjax.trees import dynamic
from specjax.trees.dynamic import NO_SLOT
from specjax.trees.topology import repeat_parents
from specjax.types import NO_TOKEN, Draft, Effort, ProposalLaw, Warp


class Reading(NamedTuple):
    """What reading W nodes gave: `logits` [B, W, V] after each, what each hands its children, the `cache`.

    Where they are the same after every node, `logits` are [B, 1, V]. `carry` [B, W, F] is a state that a
    child's reading starts from; a language model has none (F = 0).
    """

    logits: Float[Array, "B #W V"]
    carry: Float[Array, "B W F"]
    cache: Any


class Read(Protocol):
    """Reads W nodes `depth` levels below the context, whose length is the cache's.

    `carry` is that of their parents; `seen` [B, W, M] says which of the M slots behind the context each
    node sees, of which the nodes take the last W.
    """

    def __call__(
        self,
        tokens: Int[Array, "B W"],
        carry: Float[Array, "B W F"],
        depth: int,
        seen: Bool[Array, "B W M"],
        cache: Any,
    ) -> Reading: ...


class Grown(NamedTuple):
    """A draft, the cache after it, and the slot of each node behind the context, `NO_SLOT` for the unread."""

    draft: Draft
    cache: Any
    slots: Int[Array, "B N"]


def grow(
    read: Read,
    shape: Shape,
    keys: Key[Array, "B"],
    warp: Warp,
    context: Reading,
    effort: Effort | None = None,
) -> Grown:
    """The draft of `shape` after a context; point masses are the likeliest tokens, unwarped.

    A chain grows as far as `effort` goes, and the cache has then advanced; a tree grows whole.
    """
    if shape.budget is not None:
        return grow_dynamic(read, shape, context)
    if shape.is_chain and effort is not None:
        return grow_while(read, shape, keys, warp, context, effort)
    return grow_static(read, shape, keys, warp, context)


class _Chain(NamedTuple):
    """A chain so far: `growing` rows have `depth` tokens, and may get more."""

    depth: Int[Array, ""]
    growing: Bool[Array, "B"]
    out: Reading
    tokens: Int[Array, "B N"]
    probs: Float[Array, "B N V"]


def grow_while(
    read: Read, shape: Shape, keys: Key[Array, "B"], warp: Warp, context: Reading, effort: Effort
) -> Grown:
    """The chain that `grow_static` gives, up to where each row's effort ends; the cache has advanced."""
    batch, is_point_mass = keys.shape[0], shape.law is ProposalLaw.POINT_MASS
    by_depth = jnp.stack(split_keys(keys, shape.max_depth))
    own = jnp.ones((batch, 1, 1), bool)

    def extend(chain: _Chain) -> _Chain:
        depth, logits = chain.depth, chain.out.logits
        _, log_prob = dynamic.likeliest(logits, 1)
        growing = chain.growing & (depth < effort.length)
        growing &= log_prob[:, 0, 0] >= jnp.log(effort.confidence)
        token, law = _children(by_depth[depth], logits, 1, 1, shape.law, warp)
        token = jnp.where(growing[:, None], token, NO_TOKEN)
        tokens = jax.lax.dynamic_update_slice(chain.tokens, token, (0, depth + 1))
        probs = jax.lax.dynamic_update_slice(chain.probs, law, (0, depth, 0))
        return chain._replace(growing=growing, tokens=tokens, probs=probs)

    def read_on(chain: _Chain) -> _Chain:
        last = jax.lax.dynamic_slice_in_dim(chain.tokens, chain.depth + 1, 1, axis=1)
        # One token deeper each time, and so is the context.
        out = read(jnp.maximum(last, 0), chain.out.carry, 1, own, chain.out.cache)
        cache = kv.commit(out.cache, jnp.ones((batch,), jnp.int32))
        return extend(chain._replace(depth=chain.depth + 1, out=out._replace(cache=cache)))

    def goes_on(chain: _Chain) -> Bool[Array, ""]:
        deeper = chain.depth + 1
        return (deeper < shape.max_depth) & (chain.growing & (deeper < effort.length)).any()

    logits = context.logits
    laws = jnp.zeros((batch, shape.num_nodes, 0 if is_point_mass else logits.shape[-1]))
    tokens = jnp.full((batch, shape.num_nodes), NO_TOKEN, jnp.int32)
    started = _Chain(jnp.zeros((), jnp.int32), jnp.ones((batch,), bool), context, tokens, laws)
    chain = jax.lax.while_loop(goes_on, read_on, extend(started))
    draft = Draft(
        chain.tokens, repeat_parents(shape.tree.parents, batch), None if is_point_mass else chain.probs
    )
    return Grown(draft, chain.out.cache, repeat_parents(_chain_slots(shape), batch))


def grow_chain(read: Read, shape: Shape, keys: Key[Array, "B"], warp: Warp, context: Reading) -> Grown:
    """What `grow` gives for a chain, in one loop, for what takes long to compile; the cache has advanced."""
    batch, is_point_mass = keys.shape[0], shape.law is ProposalLaw.POINT_MASS
    own = jnp.ones((batch, 1, 1), bool)
    by_depth = jax.vmap(lambda key: jax.random.split(key, shape.max_depth))(keys).T

    def choose(keys, logits: Float[Array, "B 1 V"]) -> tuple[Int[Array, "B 1"], Float[Array, "B 1 V"]]:
        return _children(keys, logits, 1, 1, shape.law, warp)

    def extend(carry, keys):
        cache, token, state = carry
        # One token deeper each time, and so is the context.
        out = read(token, state, 1, own, cache)
        token, law = choose(keys, out.logits)
        return (kv.commit(out.cache, jnp.ones((batch,), jnp.int32)), token, out.carry), (token, law)

    first, first_law = choose(by_depth[0], context.logits)
    (cache, _, _), (rest, laws) = jax.lax.scan(extend, (context.cache, first, context.carry), by_depth[1:])
    tokens = jnp.concatenate((jnp.full_like(first, NO_TOKEN), first, rest[..., 0].T), axis=1)
    every_law = jnp.concatenate((first_law[None], laws, jnp.zeros_like(first_law)[None]))
    probs = None if is_point_mass else every_law[:, :, 0].swapaxes(0, 1)
    draft = Draft(tokens, repeat_parents(shape.tree.parents, batch), probs)
    return Grown(draft, cache, repeat_parents(_chain_slots(shape), batch))


def _chain_slots(shape: Shape) -> list[int]:
    """Where the nodes of a chain stand behind the context: all are read but the last."""
    nodes = np.arange(shape.num_nodes)
    return np.where((nodes > 0) & (nodes < shape.max_depth), nodes - 1, NO_SLOT).tolist()


def grow_static(read: Read, shape: Shape, keys: Key[Array, "B"], warp: Warp, context: Reading) -> Grown:
    """The nodes of a static tree, level by level; only those that have children are read."""
    batch, is_point_mass = keys.shape[0], shape.law is ProposalLaw.POINT_MASS
    plan = _plan(shape)
    by_depth = split_keys(keys, shape.max_depth)
    tokens, laws = [jnp.full((batch, 1), NO_TOKEN, jnp.int32)], []
    out, parent_tokens = context, None
    for depth, level in enumerate(plan.levels, start=1):
        num_parents = out.carry.shape[1]
        children, law = _children(
            by_depth[depth - 1], out.logits, num_parents, level.num_children, shape.law, warp
        )
        laws.append(law)
        chosen = children[:, level.parent * level.num_children + level.rank]
        if parent_tokens is not None:
            chosen = jnp.where(parent_tokens[:, level.parent] == NO_TOKEN, NO_TOKEN, chosen)
        tokens.append(chosen)
        if depth == shape.max_depth:
            break
        parent_tokens = chosen[:, level.read]
        carry = out.carry[:, level.parent[level.read]]
        seen = jnp.broadcast_to(jnp.asarray(level.seen)[None], (batch, *level.seen.shape))
        out = read(jnp.maximum(parent_tokens, 0), carry, depth, seen, out.cache)
    probs = None
    if not is_point_mass:
        # The laws of the nodes that were read, and nothing for the leaves.
        probs = jnp.concatenate((*laws, jnp.zeros_like(laws[0][:, :1])), axis=1)[:, plan.law_of]
    draft = Draft(jnp.concatenate(tokens, axis=1), repeat_parents(shape.tree.parents, batch), probs)
    return Grown(draft, out.cache, repeat_parents(plan.slots, batch))


def grow_dynamic(read: Read, shape: Shape, context: Reading) -> Grown:
    """A tree that grows where the drafter is confident (arXiv 2406.16858)."""
    tree, out = dynamic.start(context.logits.shape[0]), context
    for depth, width in enumerate(shape.widths, start=1):
        tokens, log_probs = (
            jnp.broadcast_to(part, (*tree.tokens.shape, width))
            for part in dynamic.likeliest(out.logits, width)
        )
        tree = dynamic.expand(tree, tokens, log_probs, width)
        if depth < shape.max_depth:
            carry = jnp.take_along_axis(out.carry, tree.origin[..., None], axis=1)
            out = read(jnp.maximum(tree.tokens, 0), carry, depth, tree.seen, out.cache)
    ranked = dynamic.rerank(tree, shape.num_nodes)
    return Grown(Draft(ranked.tokens, ranked.parents, None), out.cache, ranked.slots)


class _Level(NamedTuple):
    """One level of a static tree: for each node its parent among the nodes read above, and its rank there.

    `read` lists those of its nodes that have children, and `seen` their mask over the slots so far.
    """

    parent: np.ndarray
    rank: np.ndarray
    num_children: int
    read: np.ndarray
    seen: np.ndarray


class _Plan(NamedTuple):
    levels: tuple[_Level, ...]
    slots: list[int]
    law_of: np.ndarray


def _plan(shape: Shape) -> _Plan:
    """The order in which a static tree is read, all of it known before anything is drafted."""
    tree = shape.tree
    has_children = {path[:-1] for path in tree.paths if path}
    read: list[tuple[int, ...]] = [()]  # every node that is read, the root first
    above: list[tuple[int, ...]] = [()]
    levels = []
    for depth in range(1, tree.max_depth + 1):
        level = [path for path in tree.paths if len(path) == depth]
        expanded = [path for path in level if path in has_children]
        read += expanded
        seen = [[path[: len(other)] == other for other in read[1:]] for path in expanded]
        levels.append(
            _Level(
                parent=np.array([above.index(path[:-1]) for path in level]),
                rank=np.array([path[-1] for path in level]),
                num_children=1 + max(path[-1] for path in level),
                read=np.array([level.index(path) for path in expanded], int),
                seen=np.array(seen, bool).reshape(len(expanded), len(read) - 1),
            )
        )
        above = expanded
    place = {path: number for number, path in enumerate(read)}
    slots = [place[path] - 1 if path and path in place else NO_SLOT for path in tree.paths]
    law_of = np.array([place.get(path, len(read)) for path in tree.paths])
    return _Plan(tuple(levels), slots, law_of)


def _children(
    keys: Key[Array, "B"],
    logits: Float[Array, "B #N V"],
    num_nodes: int,
    num_children: int,
    law: ProposalLaw,
    warp: Warp,
) -> tuple[Int[Array, "B NC"], Float[Array, "B N V"]]:
    """`num_children` for each of N nodes, the first node's first, and the law that they were drawn from.

    Point masses have none, [B, N, 0].
    """
    batch, _, vocab_size = logits.shape
    if law is ProposalLaw.POINT_MASS:
        tokens, _ = dynamic.likeliest(logits, num_children)
        tokens = jnp.broadcast_to(tokens, (batch, num_nodes, num_children))
        return tokens.reshape(batch, -1), logits[..., :0]
    probs = jnp.broadcast_to(warp_probs(logits, warp), (batch, num_nodes, vocab_size))
    return draw_children(keys, probs, num_children, law), probs
