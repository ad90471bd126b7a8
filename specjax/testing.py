"""Toys for which every law can be enumerated: they obey the protocols of real models, drafters and rules.

The toy target runs through the same cache code as a transformer: a wrong position, mask, compaction or a
stale slot changes its law.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from specjax import cache as kv
from specjax.proposals import next_sibling
from specjax.sampling import sample, warp_probs
from specjax.trees.descent import descend
from specjax.types import (
    NO_PARENT,
    NO_TOKEN,
    Context,
    Draft,
    Drafter,
    ForwardOutput,
    KVCache,
    Params,
    ProposalLaw,
    Target,
    Verdict,
    Verify,
)

Table = Float[Array, "V1 V V"]


def tabulated_target(table: Table) -> Target:
    """A target whose logits are `table[previous, current]`; index V says that nothing came before.

    Its one layer keeps tokens as keys and positions as values. A node's current and previous tokens are
    what stands at its own position and the one before among the slots it sees; where a previous one is
    missing or there are several, index V is read.
    """
    vocab_size = table.shape[-1]

    def forward(
        params: Params,
        tokens: Int[Array, "B N"],
        positions: Int[Array, "B N"],
        mask: Bool[Array, "B N M"],
        cache: KVCache,
        features: tuple[str, ...] = (),
    ) -> ForwardOutput:
        del params
        assert not features, "the toy target has no features"
        start = cache.length + mask.shape[-1] - tokens.shape[1]
        (keys,) = (kv.write(slots, tokens[..., None, None], start) for slots in cache.keys)
        (values,) = (kv.write(slots, positions[..., None, None], start) for slots in cache.values)
        held_tokens, held_positions = keys[:, None, :, 0], values[:, None, :, 0]
        seen = _seen(cache.length, mask, kv.capacity(cache))

        def token_at(wanted: Int[Array, "B N"]) -> Int[Array, "B N"]:
            is_there = seen & (held_positions == wanted[..., None])
            found = jnp.where(is_there, held_tokens, 0.0).sum(-1).astype(jnp.int32)
            return jnp.where((is_there.sum(-1) == 1) & (found != NO_TOKEN), found, vocab_size)

        current = jnp.minimum(token_at(positions), vocab_size - 1)
        logits = table[token_at(positions - 1), current]
        return ForwardOutput(logits, KVCache((keys,), (values,), cache.length), {})

    def init_cache(batch: int, capacity: int) -> KVCache:
        return kv.init_cache(batch, capacity, num_layers=1, num_heads=1, head_dim=1, dtype=jnp.float32)

    return Target(forward, init_cache, vocab_size, config=None, dtype=jnp.float32)


def _seen(length: Int[Array, "B"], mask: Bool[Array, "B N M"], num_slots: int) -> Bool[Array, "B N S"]:
    """The cached prefix and, from `length` on, whatever the mask says."""
    nothing = jnp.zeros((mask.shape[1], num_slots), bool)
    scratch = jax.vmap(lambda rows, at: jax.lax.dynamic_update_slice(nothing, rows, (0, at)))(mask, length)
    return scratch | (jnp.arange(num_slots)[None, None] < length[:, None, None])


def tree_drafter(table: Table, parents: tuple[int, ...], law: ProposalLaw) -> Drafter:
    """A drafter without cache that fills one static tree from its own table, as `law` says.

    Point masses are the most probable tokens of the unwarped table, best first; all other laws are
    drawn under the row's warp. A node for which no token is left holds `NO_TOKEN`.
    """
    vocab_size = table.shape[-1]
    num_nodes = len(parents)
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    is_point_mass = law is ProposalLaw.POINT_MASS
    lineage = jnp.asarray(parents, jnp.int32)

    def propose(params, keys: Key[Array, "B"], state: Any, context: Context) -> tuple[Draft, Any]:
        del params
        batch = context.length.shape[0]

        def committed(back: int, otherwise: int) -> Int[Array, "B"]:
            index = context.length - back
            found = jnp.take_along_axis(context.tokens, jnp.maximum(index, 0)[:, None], axis=1)[:, 0]
            return jnp.where(index >= 0, found, otherwise)

        def law_at(tokens: Int[Array, "B N"], node: Int[Array, ""]) -> Float[Array, "B V"]:
            parent = lineage[node]
            previous = jnp.where(parent == NO_PARENT, committed(2, vocab_size), tokens[:, parent])
            logits = table[previous, jnp.maximum(tokens[:, node], 0)]
            return (
                jax.nn.softmax(logits) if is_point_mass else warp_probs(logits[:, None], context.warp)[:, 0]
            )

        def grow(node: Int[Array, ""], carry):
            tokens, probs, left = carry
            parent = lineage[node]
            choices = left[:, parent]
            by_node = jax.vmap(lambda key: jax.random.fold_in(key, node))(keys)
            token, rest = next_sibling(by_node, choices, law)
            token = jnp.where(tokens[:, parent] == NO_TOKEN, NO_TOKEN, token)
            token = jnp.where(parent == NO_PARENT, pending, token)
            left = left.at[:, parent].set(rest)
            tokens = tokens.at[:, node].set(token)
            own = law_at(tokens, node)
            return tokens, probs.at[:, node].set(own), left.at[:, node].set(own)

        pending = committed(1, NO_TOKEN)
        tokens = jnp.full((batch, num_nodes), NO_TOKEN, jnp.int32)
        laws = jnp.zeros((batch, num_nodes, vocab_size))
        tokens, probs, _ = jax.lax.fori_loop(0, num_nodes, grow, (tokens, laws, laws))
        every_row = jnp.broadcast_to(lineage[None], (batch, num_nodes))
        return Draft(tokens, every_row, None if is_point_mass else probs), state

    return Drafter(
        init=lambda params, context, features, prompt_size: {},
        propose=propose,
        observe=lambda params, state, draft, verdict, context, features: state,
        num_nodes=num_nodes,
        max_depth=max(depths),
        law=law,
    )


def tabulated_drafter(table: Table, draft_length: int) -> Drafter:
    """A chain of `draft_length` tokens, each drawn from the table under the row's warp."""
    return tree_drafter(table, tuple(range(NO_PARENT, draft_length)), ProposalLaw.CHAIN)


def point_mass_drafter(table: Table, draft_length: int) -> Drafter:
    """The chain of the table's most probable tokens."""
    return tree_drafter(table, tuple(range(NO_PARENT, draft_length)), ProposalLaw.POINT_MASS)


def unverified(
    keys: Key[Array, "B"], draft: Draft, target_probs: Float[Array, "B N V"], *, max_depth: int
) -> Verdict:
    """The negative control: first children are accepted whatever the target says; it draws where they end."""

    def choose(depth: Int[Array, ""], node: Int[Array, "B"]) -> Int[Array, "B"]:
        is_child = (draft.parents == node[:, None]) & (draft.tokens != NO_TOKEN)
        first = jnp.take_along_axis(draft.tokens, jnp.argmax(is_child, axis=1)[:, None], axis=1)[:, 0]
        law = jnp.take_along_axis(target_probs, node[:, None, None], axis=1)[:, 0]
        drawn = sample(jax.vmap(lambda key: jax.random.fold_in(key, depth))(keys), law)
        return jnp.where(is_child.any(1), first, drawn)

    return descend(draft, choose, max_depth)


def side_by_side(rules: Sequence[Verify], rule_of_row: Sequence[int]) -> Verify:
    """A rule that judges every row by its own one of `rules`, so that all of them share one compilation."""
    own_rows = [np.flatnonzero(np.asarray(rule_of_row) == number) for number in range(len(rules))]
    order = np.argsort(np.concatenate(own_rows))

    def verify(
        keys: Key[Array, "B"], draft: Draft, target_probs: Float[Array, "B N V"], *, max_depth: int
    ) -> Verdict:
        verdicts = []
        for rule, rows in zip(rules, own_rows, strict=True):
            own = jax.tree.map(lambda part, rows=rows: part[rows], (keys, draft, target_probs))
            verdicts.append(rule(*own, max_depth=max_depth))
        return jax.tree.map(lambda *parts: jnp.concatenate(parts)[order], *verdicts)

    return verify
