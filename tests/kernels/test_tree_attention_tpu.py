"""The TPU kernel when interpreted and simulated, and mutants of it. On a TPU, the kernel itself."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from specjax.kernels.tree_attention import pallas_tpu
from tests.kernels.tree_attention_cases import (
    Case,
    Shape,
    check,
    make_case,
    mutant,
    poison,
    quick_jit,
    random_shape,
)

HEAD_DIMS = (64, 96, 128, 256)
ON_TPU = jax.default_backend() == "tpu"
on_cpu = pytest.mark.skipif(ON_TPU, reason="an interpreted kernel is a check for machines without the device")
# Small blocks, so that small inputs have several.
kernel = functools.partial(pallas_tpu.tree_attention, block_size=128, interpret=not ON_TPU)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("seed", range(2))
def test_equals_the_reference(seed: int, dtype: Any) -> None:
    check(kernel, make_case(seed, random_shape(seed, HEAD_DIMS, max_rows=128), dtype))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 14))
def test_equals_the_reference_on_more_shapes(seed: int) -> None:
    dtype = (jnp.float32, jnp.bfloat16)[seed % 2]
    check(kernel, make_case(seed, random_shape(seed, HEAD_DIMS, max_rows=1024), dtype))


def test_several_tiles_of_rows() -> None:
    check(kernel, make_case(0, Shape(1, 128, 128, 1, 5, 64, 300), jnp.float32))


@pytest.mark.parametrize("length", [0, 127, 128, 129, 256])
def test_one_node_at_the_edges_of_blocks(length: int) -> None:
    check(kernel, make_case(1, Shape(2, 1, 1, 1, 3, 64, 257), jnp.float32, [length, 256 - length]))


def test_a_tree_as_wide_as_several_blocks_and_an_empty_prefix() -> None:
    case = make_case(2, Shape(2, 4, 300, 1, 2, 64, 420), jnp.float32, [0, 120])
    check(kernel, case)
    # Nodes that see nothing of the first blocks must not keep weights from there.
    check(kernel, (*case[:4], case[4].at[:, :, :260].set(False)))


def test_block_size_follows_from_the_shapes() -> None:
    choose = functools.partial(pallas_tpu.tree_attention, interpret=not ON_TPU)
    check(choose, make_case(3, Shape(2, 7, 9, 2, 3, 64, 1100), jnp.float32, [1050, 3]))
    check(choose, make_case(3, Shape(1, 3, 3, 2, 1, 64, 40), jnp.float32))


def test_a_node_that_sees_nothing_gets_finite_numbers() -> None:
    queries, keys, values, _, mask = make_case(4, Shape(1, 3, 3, 1, 2, 64, 40), jnp.float32)
    case = (queries, keys, values, jnp.zeros(1, jnp.int32), mask.at[0, 1].set(False))
    assert np.isfinite(np.asarray(quick_jit(kernel)(*poison(case)))).all()


def test_a_batch_row_does_not_depend_on_the_others() -> None:
    queries, keys, values, length, mask = poison(make_case(5, Shape(3, 5, 8, 2, 2, 64, 500), jnp.float32))
    run = quick_jit(kernel)
    together = np.asarray(run(queries, keys, values, length, mask))
    for row in range(3):
        own = slice(2 * row, 2 * row + 2)
        alone = run(
            queries[row : row + 1], keys[own], values[own], length[row : row + 1], mask[row : row + 1]
        )
        np.testing.assert_array_equal(alone[0], together[row])


MUTANTS = {
    "mask ignored": ("jnp.repeat(mask, group, axis=1)", "jnp.repeat(mask | True, group, axis=1)"),
    "mask transposed": ("jnp.repeat(mask, group, axis=1)", "jnp.repeat(mask.mT, group, axis=1)"),
    "mask of another node": ("jnp.repeat(mask, group, axis=1)", "jnp.tile(mask, (1, group, 1))"),
    "length one too large": ("length.astype(jnp.int32)", "length.astype(jnp.int32) + 1"),
    "length one too small": ("length.astype(jnp.int32)", "length.astype(jnp.int32) - 1"),
    "length of another row": ("row = pl.program_id(0) // num_kv_heads", "row = 0"),
    "last block not computed": ("& (block <= last)", "& (block < last)"),
    "values not rescaled": ("rescale * mixed_ref[...]", "mixed_ref[...]"),
    "weights not rescaled": ("rescale * total_ref[...]", "total_ref[...]"),
    "padding of keys not masked": ("scores = jnp.where(seen, scores, LOWEST)", "pass"),
    "padding of values not masked": ("(slots < length) | in_any", "(slots < length) | (in_any | True)"),
    "sums not started": ("mixed_ref[...] = jnp.zeros_like(mixed_ref)", "pass"),
    "scale forgotten": ("scale=head_dim**-0.5", "scale=1.0"),
}  # fmt: skip


def mutant_case() -> Case:
    """Inputs in which every mutant differs: several blocks, rows of unlike lengths, a late first sight."""
    queries, keys, values, length, mask = make_case(
        6, Shape(2, 140, 140, 1, 2, 64, 450), jnp.float32, [300, 0]
    )
    return queries, keys, values, length, mask.at[1, 139, :139].set(False)


def test_the_kernel_passes_where_mutants_must_fail() -> None:
    check(kernel, mutant_case())


@on_cpu
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str) -> None:
    wrong = mutant(pallas_tpu, MUTANTS[name]).tree_attention
    with pytest.raises(AssertionError):
        check(functools.partial(wrong, block_size=128, interpret=True), mutant_case())


@contextlib.contextmanager
def no_races() -> Iterator[None]:
    """Raise AssertionError if the TPU interpreter recorded a race; later versions of jax raise themselves."""
    pltpu.reset_tpu_interpret_mode_state()
    try:
        yield
        races = interpret_pallas_call.races
        assert races is not None and not getattr(races, "races_found", False), "a race"
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def interpreted(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    params = pltpu.InterpretParams(detect_races=True, random_seed=0, uninitialized_memory="nan")
    return functools.partial(function, block_size=128, interpret=params)


TPU_INTERPRET_SHAPES = [
    Shape(2, 6, 6, 2, 3, 64, 400),
    Shape(3, 1, 1, 1, 4, 128, 300),
    Shape(1, 8, 40, 2, 2, 96, 257),
]


@on_cpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", TPU_INTERPRET_SHAPES)
def test_simulated_memory_and_transfers(shape: Shape, dtype: Any) -> None:
    with no_races():
        check(interpreted(pallas_tpu.tree_attention), make_case(8, shape, dtype))


@on_cpu
@pytest.mark.slow
def test_simulation_catches_a_wrongly_parallel_axis() -> None:
    # The simulator runs the blocks in a random order where they are parallel, and wants their number then.
    static = ("last_block(jnp.argmax(length), length) + 1)", "pl.cdiv(num_slots, block_size))")
    parallel = ('("parallel", "parallel", "arbitrary")', '("parallel", "parallel", "parallel")')
    case = make_case(8, TPU_INTERPRET_SHAPES[0], jnp.float32)
    with no_races():
        check(interpreted(mutant(pallas_tpu, static).tree_attention), case)
    with pytest.raises(AssertionError), no_races():
        check(interpreted(mutant(pallas_tpu, static, parallel).tree_attention), case)


@on_cpu
@pytest.mark.slow
def test_blocks_beyond_the_longest_row_are_not_visited() -> None:
    visited: list[tuple[int, ...]] = []

    def record(*arguments: Any) -> np.int32:  # the grid point and the core come last
        visited.append(tuple(map(int, arguments[-2])))
        return np.int32(0)

    params = pltpu.InterpretParams(grid_point_recorder=record)
    case = make_case(9, Shape(2, 3, 3, 1, 2, 64, 2000), jnp.float32, [200, 30])
    check(functools.partial(pallas_tpu.tree_attention, block_size=128, interpret=params), case)
    assert sorted(visited) == [(head, 0, block) for head in range(2) for block in range(2)]
