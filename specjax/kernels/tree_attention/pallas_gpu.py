"""Tree attention on Hopper GPUs: an online softmax over each part of a head's slots, joined in jnp."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

TILE = 64  # rows of one product of a warpgroup
BLOCK = 64  # slots
STAGES = 3  # blocks under way; two of head size 256, which fill the shared memory
COLUMNS = 128  # of the sums that one product makes: more of them would not fit the registers
NUM_BLOCKS = 132  # of the grid, one for each processor of an H100
LOWEST = -1e30  # finite: what a row weighs before it has seen anything is no NaN, and rescaled to 0 later
HEAD_DIMS = (64, 96, 128, 256)
DTYPES = (jnp.bfloat16, jnp.float16)  # the matrix unit has no full float32


def supports(queries: jax.Array, keys: jax.Array, values: jax.Array) -> bool:
    """Whether the kernel takes such arrays: 16-bit numbers and sizes that fit the tiles."""
    num_slots, head_dim = keys.shape[1:]
    one_type = queries.dtype == keys.dtype == values.dtype
    return one_type and queries.dtype in DTYPES and head_dim in HEAD_DIMS and num_slots % 8 == 0


def tree_attention(
    queries: Float[Array, "B N Hq Dh"],
    keys: Float[Array, "BH S Dh"],
    values: Float[Array, "BH S Dh"],
    length: Int[Array, "B"],
    mask: Bool[Array, "B N M"],
    *,
    num_splits: int | None = None,
    interpret: Any = None,
) -> Float[Array, "B N Hq Dh"]:
    """Grouped-query attention of N nodes, as `reference.tree_attention` defines it, of arrays it `supports`.

    Slots that no node sees may hold anything, NaN too. A node that sees nothing gets some finite numbers.
    The slots of each head are cut into `num_splits` parts, chosen by the shapes unless given.
    """
    batch, num_nodes, num_query_heads, head_dim = queries.shape
    num_heads, num_slots, _ = keys.shape
    num_kv_heads = num_heads // batch
    group = num_query_heads // num_kv_heads
    num_rows = num_nodes * group
    num_tiles = pl.cdiv(num_rows, TILE)
    dtype = queries.dtype
    if num_splits is None:
        num_splits = max(1, min(NUM_BLOCKS // (num_heads * num_tiles), pl.cdiv(num_slots, 4 * BLOCK)))

    rows = queries.reshape(batch, num_nodes, num_kv_heads, group, head_dim)
    rows = rows.transpose(0, 2, 1, 3, 4).reshape(num_heads, num_rows, head_dim)
    rows = jnp.pad(rows, ((0, 0), (0, num_tiles * TILE - num_rows), (0, 0)))
    length = length.astype(jnp.int32)
    tree, seen = _tree_blocks(mask, length, num_slots)
    tree = jnp.repeat(tree, group, axis=1).astype(dtype)
    tree = jnp.pad(tree, ((0, 0), (0, num_tiles * TILE - num_rows), (0, 0)))
    # Whole lines of the same number, of which the kernel takes the maximum: a tile like any other.
    seen = jnp.broadcast_to(seen[:, :, None].astype(dtype), (*seen.shape, BLOCK))

    transforms = _transforms(head_dim, dtype)
    stages = STAGES if head_dim <= COLUMNS else 2
    slots = plgpu.SMEM((stages, BLOCK, head_dim), dtype, transforms=transforms)
    square = plgpu.SMEM((TILE, BLOCK), dtype, transforms=_transforms(BLOCK, dtype))
    vector = plgpu.SMEM((TILE,), jnp.float32)
    split_rows = (num_heads, num_splits, num_tiles * TILE)
    mixed, highest, total = plgpu.kernel(
        functools.partial(
            _kernel, num_kv_heads=num_kv_heads, num_scratch=mask.shape[-1], scale=head_dim**-0.5
        ),
        out_type=(
            jax.ShapeDtypeStruct((*split_rows, head_dim), dtype),
            jax.ShapeDtypeStruct(split_rows, jnp.float32),
            jax.ShapeDtypeStruct(split_rows, jnp.float32),
        ),
        scratch_types=dict(
            queries_smem=plgpu.SMEM((TILE, head_dim), dtype, transforms=transforms),
            keys_smem=slots,
            values_smem=slots,
            tree_smem=square,
            seen_smem=square,
            weights_smem=plgpu.SMEM((TILE, BLOCK), dtype, transforms=transforms),
            highest_smem=vector,
            total_smem=vector,
            once=plgpu.Barrier(),
            arrived=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            tree_arrived=plgpu.Barrier(num_arrivals=2),
        ),
        grid=(num_tiles, num_splits, num_heads),
        grid_names=("tile", "split", "head"),
        interpret=interpret,
    )(length, rows, keys, values, tree, seen)

    # Each part's average weighs as much as all its slots beside those of the others.
    weight = jnp.exp(highest - highest.max(1, keepdims=True)) * total
    weight = weight / weight.sum(1, keepdims=True)
    mixed = (weight[..., None] * mixed.astype(jnp.float32)).sum(1)
    mixed = mixed[:, :num_rows].astype(dtype).reshape(batch, num_kv_heads, num_nodes, group, head_dim)
    return mixed.transpose(0, 2, 1, 3, 4).reshape(queries.shape)


def _tree_blocks(
    mask: Bool[Array, "B N M"], length: Int[Array, "B"], num_slots: int
) -> tuple[Bool[Array, "B N K"], Bool[Array, "B K"]]:
    """What each node sees, and what any does, of the blocks from the one that holds slot `length` on."""
    num_scratch = mask.shape[-1]
    size = (pl.cdiv(num_scratch - 1, BLOCK) + 1) * BLOCK
    slots = length[:, None] // BLOCK * BLOCK + jnp.arange(size)[None]
    scratch = slots - length[:, None]
    inside = (scratch >= 0) & (scratch < num_scratch) & (slots < num_slots)
    index = jnp.clip(scratch, 0, num_scratch - 1)[:, None]
    moved = jnp.take_along_axis(mask, jnp.broadcast_to(index, (*mask.shape[:2], size)), axis=2)
    visible = (scratch < 0)[:, None] | (inside[:, None] & moved)
    return visible, visible.any(1)


def _kernel(
    length_ref: Any,  # [B]
    rows_ref: Any,  # [B * Hkv, R, Dh]
    keys_ref: Any,  # [B * Hkv, S, Dh]
    values_ref: Any,  # [B * Hkv, S, Dh]
    tree_ref: Any,  # [B, R, K]
    seen_ref: Any,  # [B, K, BLOCK]
    mixed_ref: Any,  # [B * Hkv, splits, R, Dh], weighted averages of the values
    highest_ref: Any,  # [B * Hkv, splits, R], the largest scores
    total_ref: Any,  # [B * Hkv, splits, R], sums of weights
    *,
    queries_smem: Any,
    keys_smem: Any,
    values_smem: Any,
    tree_smem: Any,
    seen_smem: Any,
    weights_smem: Any,
    highest_smem: Any,
    total_smem: Any,
    once: Any,
    arrived: Any,
    tree_arrived: Any,
    num_kv_heads: int,
    num_scratch: int,
    scale: float,
) -> None:
    tile, split, head = (jax.lax.axis_index(name) for name in ("tile", "split", "head"))
    row = head // num_kv_heads
    rows = pl.ds(tile * TILE, TILE)
    stages, _, head_dim = keys_smem.shape
    num_slots = keys_ref.shape[1]
    width = min(COLUMNS, head_dim)
    cuts = [pl.ds(first, width) for first in range(0, head_dim, width)]

    length = jnp.minimum(length_ref[row], num_slots)
    num_blocks = pl.cdiv(jnp.minimum(length + num_scratch, num_slots), BLOCK)
    num_prefix = length // BLOCK
    per_split = pl.cdiv(num_blocks, mixed_ref.shape[1])
    first = jnp.minimum(split * per_split, num_blocks)
    last = jnp.minimum(first + per_split, num_blocks)

    def fetch(block: Any) -> None:
        stage = jax.lax.rem(block - first, stages)
        slots = pl.ds(block * BLOCK, BLOCK)
        plgpu.copy_gmem_to_smem(keys_ref.at[head, slots], keys_smem.at[stage], arrived.at[stage])
        plgpu.copy_gmem_to_smem(values_ref.at[head, slots], values_smem.at[stage], arrived.at[stage])

    plgpu.copy_gmem_to_smem(rows_ref.at[head, rows], queries_smem, once)
    for stage in range(stages):
        pl.when(first + stage < last)(functools.partial(fetch, first + stage))
    plgpu.barrier_wait(once)

    def add(block: Any, carry: tuple[Any, ...], masked: bool) -> tuple[Any, ...]:
        highest, total, mixed = carry
        stage = jax.lax.rem(block - first, stages)
        if masked:
            columns = pl.ds((block - num_prefix) * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(tree_ref.at[row, rows, columns], tree_smem, tree_arrived)
            plgpu.copy_gmem_to_smem(seen_ref.at[row, columns], seen_smem, tree_arrived)
        plgpu.barrier_wait(arrived.at[stage])

        def score(sums: Any) -> Any:
            plgpu.wgmma(sums, queries_smem, keys_smem.at[stage].transpose((1, 0)))
            return sums[...]

        scores = pl.run_scoped(score, plgpu.ACC((TILE, BLOCK), jnp.float32)) * scale
        if masked:
            plgpu.barrier_wait(tree_arrived)
            scores = jnp.where(tree_smem[...].astype(jnp.float32) > 0, scores, LOWEST)
            # 0 * NaN is NaN: weights of 0 do not keep out what stands in slots that nobody sees.
            seen = seen_smem[...].astype(jnp.float32).max(1)
            for cut in cuts:
                part = values_smem[stage, :, cut]
                here = jax.lax.broadcast_in_dim(seen, part.shape, [0]) > 0
                values_smem[stage, :, cut] = jnp.where(here, part, jnp.zeros_like(part))
        new_highest = jnp.maximum(highest, scores.max(1))
        rescale = jnp.exp(highest - new_highest)
        weights = jnp.exp(scores - jax.lax.broadcast_in_dim(new_highest, scores.shape, [0]))
        total = rescale * total + weights.sum(1)
        weights_smem[...] = weights.astype(weights_smem.dtype)
        plgpu.commit_smem()

        def mix(sums: Any, cut: Any) -> Any:
            plgpu.wgmma(sums, weights_smem, values_smem.at[stage, :, cut])
            return sums[...]

        mixed = tuple(
            jax.lax.broadcast_in_dim(rescale, part.shape, [0]) * part
            + pl.run_scoped(functools.partial(mix, cut=cut), plgpu.ACC(part.shape, jnp.float32))
            for cut, part in zip(cuts, mixed, strict=True)
        )
        pl.when(block + stages < last)(functools.partial(fetch, block + stages))
        return new_highest, total, mixed

    # Sums of nothing are zeros in the registers where later sums will be.
    mixed = tuple(pl.run_scoped(lambda sums: sums[...], plgpu.ACC((TILE, width), jnp.float32)) for _ in cuts)
    total = mixed[0].max(1)
    carry = (total + LOWEST, total, mixed)
    middle = jnp.clip(num_prefix, first, last)
    carry = jax.lax.fori_loop(first, middle, functools.partial(add, masked=False), carry)
    carry = jax.lax.fori_loop(middle, last, functools.partial(add, masked=True), carry)
    highest, total, mixed = carry

    highest_smem[...] = highest
    total_smem[...] = total
    average = 1.0 / jnp.maximum(total, 1e-30)  # of a part without slots, 0
    for cut, part in zip(cuts, mixed, strict=True):
        part = part * jax.lax.broadcast_in_dim(average, part.shape, [0])
        queries_smem[:, cut] = part.astype(queries_smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(highest_smem, highest_ref.at[head, split, rows])
    plgpu.copy_smem_to_gmem(total_smem, total_ref.at[head, split, rows])
    plgpu.copy_smem_to_gmem(queries_smem, mixed_ref.at[head, split, rows])
    plgpu.wait_smem_to_gmem(0)


def _transforms(minor: int, dtype: Any) -> tuple[Any, ...]:
    """How the matrix unit wants a tile whose lines are `minor` long."""
    bits = jnp.finfo(dtype).bits
    swizzle = plgpu.find_swizzle(math.gcd(minor, 64) * bits)
    return plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle)
