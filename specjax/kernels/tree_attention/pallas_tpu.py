"""Tree attention on TPUs: one online softmax over the cached prefix and the scratch slots."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

LANES = 128
MAX_ROWS = 512  # more rows to a tile than this are bound by arithmetic: keys may as well be read again
MAX_BLOCK = 1024  # slots
MAX_SCORES = 1 << 19  # elements of the temporaries, float32 each, that a block of slots makes
LOWEST = -1e30  # finite: what a row weighs before it has seen anything is no NaN, and rescaled to 0 later


def tree_attention(
    queries: Float[Array, "B N Hq Dh"],
    keys: Float[Array, "BH S Dh"],
    values: Float[Array, "BH S Dh"],
    length: Int[Array, "B"],
    mask: Bool[Array, "B N M"],
    *,
    block_size: int | None = None,
    interpret: Any = False,
) -> Float[Array, "B N Hq Dh"]:
    """Grouped-query attention of N nodes, as `reference.tree_attention` defines it.

    Slots that no node sees may hold anything, NaN too. A node that sees nothing gets some finite
    numbers. Keys and values are read `block_size` slots at a time, a multiple of 128, chosen unless given.
    """
    batch, num_nodes, num_query_heads, head_dim = queries.shape
    num_heads, num_slots, _ = keys.shape
    num_kv_heads = num_heads // batch
    group = num_query_heads // num_kv_heads
    num_scratch = mask.shape[-1]

    # The queries that share a head's keys become the rows of one matrix, cut into equal tiles.
    num_rows = num_nodes * group
    num_tiles = pl.cdiv(num_rows, MAX_ROWS)
    tile = num_rows if num_tiles == 1 else _round_up(pl.cdiv(num_rows, num_tiles), 16)
    rows = queries.reshape(batch, num_nodes, num_kv_heads, group, head_dim)
    rows = rows.transpose(0, 2, 1, 3, 4).reshape(num_heads, num_rows, head_dim)
    rows = _pad(rows, 1, tile * num_tiles)
    # The mask meets the slots in a matrix product, hence its type and its padding.
    scratch_mask = jnp.repeat(mask, group, axis=1).astype(jnp.bfloat16)
    scratch_mask = _pad(_pad(scratch_mask, 2, _round_up(num_scratch, LANES)), 1, tile * num_tiles)
    if block_size is None:
        fits = MAX_SCORES // (tile + scratch_mask.shape[-1]) // LANES * LANES
        block_size = min(max(fits, LANES), MAX_BLOCK, _round_up(num_slots, LANES))

    def last_block(row: Any, length: Any) -> Any:
        return (jnp.clip(length[row] + num_scratch, 1, num_slots) - 1) // block_size

    # Blocks beyond the row's last are not computed, and naming the last again reads nothing new.
    def slots_index(head: Any, tile: Any, block: Any, length: Any) -> tuple[Any, ...]:
        return head, jnp.minimum(block, last_block(head // num_kv_heads, length)), 0

    rows_spec = pl.BlockSpec((1, tile, head_dim), lambda head, tile, block, length: (head, tile, 0))
    slots_spec = pl.BlockSpec((1, block_size, head_dim), slots_index)
    mask_spec = pl.BlockSpec(
        (1, tile, scratch_mask.shape[-1]),
        lambda head, tile, block, length: (head // num_kv_heads, tile, 0),
    )
    length = length.astype(jnp.int32)
    mixed = pl.pallas_call(
        functools.partial(
            _kernel,
            last_block=last_block,
            num_kv_heads=num_kv_heads,
            num_scratch=num_scratch,
            num_slots=num_slots,
            scale=head_dim**-0.5,
        ),
        out_shape=jax.ShapeDtypeStruct(rows.shape, queries.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            # As many blocks as the longest row has: a long cache costs nothing until it is filled.
            grid=(num_heads, num_tiles, last_block(jnp.argmax(length), length) + 1),
            in_specs=[rows_spec, slots_spec, slots_spec, mask_spec],
            out_specs=rows_spec,
            scratch_shapes=[
                pltpu.VMEM((tile, 1), jnp.float32),
                pltpu.VMEM((tile, 1), jnp.float32),
                pltpu.VMEM((tile, head_dim), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="tree_attention",
    )(length, rows, keys, values, scratch_mask)
    mixed = mixed[:, :num_rows].reshape(batch, num_kv_heads, num_nodes, group, head_dim)
    return mixed.transpose(0, 2, 1, 3, 4).reshape(queries.shape)


def _kernel(
    length_ref: Any,  # [B]
    queries_ref: Any,  # [1, tile, Dh]
    keys_ref: Any,  # [1, block, Dh]
    values_ref: Any,  # [1, block, Dh]
    mask_ref: Any,  # [1, tile, M]
    out_ref: Any,  # [1, tile, Dh]
    highest_ref: Any,  # [tile, 1], the largest score so far
    total_ref: Any,  # [tile, 1], the sum of the weights
    mixed_ref: Any,  # [tile, Dh], the sum of the weighted values
    *,
    last_block: Any,
    num_kv_heads: int,
    num_scratch: int,
    num_slots: int,
    scale: float,
) -> None:
    row = pl.program_id(0) // num_kv_heads
    block = pl.program_id(2)
    length = jnp.minimum(length_ref[row], num_slots)
    last = last_block(row, length_ref)
    block_size = keys_ref.shape[1]
    start = block * block_size

    @pl.when(block == 0)
    def _start() -> None:
        highest_ref[...] = jnp.full_like(highest_ref, LOWEST)
        total_ref[...] = jnp.zeros_like(total_ref)
        mixed_ref[...] = jnp.zeros_like(mixed_ref)

    def add(values: jax.Array, seen: jax.Array | None) -> None:
        scores = _dot(queries_ref[0], keys_ref[0], ((1,), (1,))) * scale
        if seen is not None:
            scores = jnp.where(seen, scores, LOWEST)
        before = highest_ref[...]
        highest = jnp.maximum(before, scores.max(1, keepdims=True))
        rescale = jnp.exp(before - highest)
        weights = jnp.exp(scores - highest)
        highest_ref[...] = highest
        total_ref[...] = rescale * total_ref[...] + weights.sum(1, keepdims=True)
        mixed_ref[...] = rescale * mixed_ref[...] + _dot(weights.astype(values.dtype), values, ((1,), (0,)))

    inside = start + block_size <= length

    @pl.when(inside)
    def _prefix() -> None:
        add(values_ref[0], None)

    @pl.when(jnp.logical_not(inside) & (block <= last))
    def _boundary() -> None:
        in_tree, in_any = _tree_slots(mask_ref[0], start - length, block_size, num_slots - length)
        columns = start + jax.lax.broadcasted_iota(jnp.int32, in_tree.shape, 1)
        slots = start + jax.lax.broadcasted_iota(jnp.int32, in_any.shape, 0)
        # 0 * NaN is NaN: weights of 0 do not keep out what stands in slots that nobody sees.
        values = jnp.where((slots < length) | in_any, values_ref[0], jnp.zeros_like(values_ref[0]))
        add(values, (columns < length) | in_tree)

    @pl.when(block == last)
    def _finish() -> None:
        out_ref[0] = (mixed_ref[...] / total_ref[...]).astype(out_ref.dtype)


def _tree_slots(
    mask: Float[Array, "R M"], first: Int[Array, ""], block_size: int, num_left: Int[Array, ""]
) -> tuple[Bool[Array, "R K"], Bool[Array, "K 1"]]:
    """Which slots of a block, from scratch slot `first` on, each row sees in the tree, and which any does."""
    size = mask.shape[1]
    # A shift by a number known only at run time, as a product with a one-hot matrix.
    at_scratch = first + jax.lax.broadcasted_iota(jnp.int32, (size, block_size), 1)
    here = (at_scratch == jax.lax.broadcasted_iota(jnp.int32, (size, block_size), 0)) & (
        at_scratch < num_left
    )
    moved = _dot(mask, here.astype(jnp.float32).astype(mask.dtype), ((1,), (0,)))
    some = mask.astype(jnp.float32).max(0, keepdims=True)
    at_scratch = first + jax.lax.broadcasted_iota(jnp.int32, (block_size, size), 0)
    here = (at_scratch == jax.lax.broadcasted_iota(jnp.int32, (block_size, size), 1)) & (
        at_scratch < num_left
    )
    return moved > 0, jnp.where(here, some, 0.0).max(1, keepdims=True) > 0


def _dot(a: jax.Array, b: jax.Array, axes: tuple[tuple[int], tuple[int]]) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        a, b, (axes, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _round_up(size: int, multiple: int) -> int:
    return pl.cdiv(size, multiple) * multiple


def _pad(array: jax.Array, axis: int, size: int) -> jax.Array:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, size - array.shape[axis])
    return jnp.pad(array, widths)
