"""The Hopper kernel when interpreted, and mutants of it. On a Hopper GPU, the kernel itself."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from specjax.kernels.tree_attention import api, pallas_gpu
from tests.kernels.tree_attention_cases import (
    Shape,
    check,
    make_case,
    mutant,
    poison,
    quick_jit,
    random_shape,
)

ON_GPU = jax.default_backend() == "gpu"
on_cpu = pytest.mark.skipif(ON_GPU, reason="an interpreted kernel is a check for machines without the device")
INTERPRET = None if ON_GPU else InterpretGPUParams()
kernel = functools.partial(pallas_gpu.tree_attention, num_splits=2, interpret=INTERPRET)

pytestmark = [
    pytest.mark.skipif(ON_GPU and not api._is_hopper(), reason="not a Hopper GPU"),
    pytest.mark.skipif(
        not ON_GPU and jax.version.__version_info__ < (0, 12),
        reason="this version's interpreter of GPU kernels knows no transposed operands",
    ),
]


def fitting(shape: Shape) -> Shape:
    """The shape with slots that fit the kernel's tiles."""
    return shape._replace(num_slots=-(-shape.num_slots // 8) * 8)


def test_equals_the_reference() -> None:
    check(kernel, make_case(0, Shape(2, 6, 9, 1, 3, 64, 200), jnp.bfloat16, [180, 3]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_equals_the_reference_on_more_shapes(seed: int) -> None:
    shape = fitting(random_shape(seed, pallas_gpu.HEAD_DIMS, max_rows=128))
    check(kernel, make_case(seed, shape, pallas_gpu.DTYPES[seed % 2]))


@pytest.mark.slow
@pytest.mark.parametrize("length", [0, 1, 63, 64, 127])
def test_one_node_at_the_edges_of_blocks(length: int) -> None:
    check(kernel, make_case(1, Shape(2, 1, 1, 1, 3, 64, 136), jnp.bfloat16, [length, 135 - length]))


@pytest.mark.slow
def test_more_parts_than_blocks_and_a_tree_as_wide_as_several() -> None:
    check(
        functools.partial(kernel, num_splits=7),
        make_case(2, Shape(2, 3, 130, 1, 2, 64, 264), jnp.bfloat16, [0, 130]),
    )


@pytest.mark.slow
def test_a_node_that_sees_nothing_gets_finite_numbers() -> None:
    queries, keys, values, _, mask = make_case(4, Shape(1, 3, 3, 1, 2, 64, 40), jnp.bfloat16)
    case = (queries, keys, values, jnp.zeros(1, jnp.int32), mask.at[0, 1].set(False))
    assert np.isfinite(np.asarray(quick_jit(kernel)(*poison(case)), np.float32)).all()


MUTANTS = {
    "mask ignored": ("jnp.repeat(tree, group, axis=1)", "jnp.repeat(tree | True, group, axis=1)"),
    "mask transposed": ("_tree_blocks(mask, ", "_tree_blocks(mask.mT, "),
    "mask of another node": ("jnp.repeat(tree, group, axis=1)", "jnp.tile(tree, (1, group, 1))"),
    "length one too large": ("length.astype(jnp.int32)", "length.astype(jnp.int32) + 1"),
    "length one too small": ("length.astype(jnp.int32)", "length.astype(jnp.int32) - 1"),
    "length of another row": ("row = head // num_kv_heads", "row = 0 * head"),
    "last block not computed": ("last = jnp.minimum(", "last = -1 + jnp.minimum("),
    "values not rescaled": ("jax.lax.broadcast_in_dim(rescale, part.shape, [0]) * part", "part"),
    "weights not rescaled": ("rescale * total", "total"),
    "parts joined as equals": (
        "jnp.exp(highest - highest.max(1, keepdims=True)) * total",
        "jnp.ones_like(total)",
    ),
    "padding of keys not masked": (
        "jnp.where(tree_smem[...].astype(jnp.float32) > 0, scores, LOWEST)",
        "scores",
    ),
    "padding of values not masked": ("jnp.where(here, part, ", "jnp.where(here | True, part, "),
    "keys taken for values": ("copy_gmem_to_smem(values_ref.at", "copy_gmem_to_smem(keys_ref.at"),
    "scale forgotten": ("scale=head_dim**-0.5", "scale=1.0"),
}


@on_cpu
@pytest.mark.slow
@pytest.mark.parametrize("name", [None, *MUTANTS])
def test_mutants_are_caught_and_the_kernel_is_not(name: str | None) -> None:
    case = make_case(6, Shape(2, 30, 30, 1, 2, 64, 448), jnp.bfloat16, [400, 7])
    if name is None:
        check(kernel, case)
        return
    wrong = mutant(pallas_gpu, MUTANTS[name]).tree_attention
    with pytest.raises(AssertionError):
        check(functools.partial(wrong, num_splits=2, interpret=InterpretGPUParams()), case)


@on_cpu
@pytest.mark.slow
def test_transfers_do_not_race_and_one_too_early_is_caught() -> None:
    params = InterpretGPUParams(detect_races=True)  # raises where it finds one
    case = make_case(0, Shape(1, 5, 5, 1, 4, 64, 504), jnp.bfloat16, [490])
    check(functools.partial(kernel, num_splits=1, interpret=params), case)
    early = mutant(
        pallas_gpu,
        ("pl.when(block + stages < last)", "pl.when(block + stages - 1 < last)"),
        ("functools.partial(fetch, block + stages)", "functools.partial(fetch, block + stages - 1)"),
    )
    with pytest.raises(Exception, match="[Bb]arrier|race"):
        check(functools.partial(early.tree_attention, num_splits=1, interpret=params), case)
