"""Inputs of tree attention and the comparison that every kernel must pass, and every mutant fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.kernels.tree_attention import reference


class Shape(NamedTuple):
    """The axes of B rows, N nodes, M scratch slots, Hkv heads of a group, head size Dh and S slots."""

    batch: int
    num_nodes: int
    num_scratch: int
    num_kv_heads: int
    group: int
    head_dim: int
    num_slots: int


# An interpreted kernel runs for milliseconds and compiles for a second: leave it slow.
QUICK_COMPILE = {"xla_backend_optimization_level": 0}

Case = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def random_shape(seed: int, head_dims: tuple[int, ...], max_rows: int) -> Shape:
    """A shape of whatever sizes a decoder may ask for, at most `max_rows` nodes x group."""
    generator = np.random.default_rng(seed)
    group = int(generator.integers(1, 9))
    num_nodes = int(generator.integers(1, max_rows // group + 1))
    num_scratch = num_nodes + int(generator.integers(0, 40))
    return Shape(
        batch=int(generator.integers(1, 4)),
        num_nodes=num_nodes,
        num_scratch=num_scratch,
        num_kv_heads=int(generator.integers(1, 3)),
        group=group,
        head_dim=int(generator.choice(head_dims)),
        num_slots=num_scratch + int(generator.integers(1, 900)),
    )


def make_case(seed: int, shape: Shape, dtype: Any, length: list[int] | None = None) -> Case:
    """Random queries, keys, values, lengths and masks; each node sees itself, at its own slot."""
    generator = np.random.default_rng(seed)
    batch, num_nodes, num_scratch, num_kv_heads, group, head_dim, num_slots = shape

    def normal(*size: int) -> jax.Array:
        return jnp.asarray(generator.standard_normal(size, np.float32), dtype)

    if length is None:
        length = list(generator.integers(0, num_slots - num_scratch + 1, batch))
    nodes = np.arange(num_nodes)
    mask = generator.random((batch, num_nodes, num_scratch)) < 0.3
    mask[:, nodes, nodes + num_scratch - num_nodes] = True
    return (
        normal(batch, num_nodes, num_kv_heads * group, head_dim),
        normal(batch * num_kv_heads, num_slots, head_dim),
        normal(batch * num_kv_heads, num_slots, head_dim),
        jnp.asarray(length, jnp.int32),
        jnp.asarray(mask),
    )


def poison(case: tuple[jax.Array, ...]) -> Case:
    """The same inputs with NaN in the even slots that no node of the row sees, 1e30 in the odd ones.

    NaN alone would not do: XLA's max on a CPU may drop it.
    """
    queries, keys, values, length, mask = case
    seen = reference.visible_slots(length, mask, keys.shape[1]).any(1)
    seen = jnp.repeat(seen, keys.shape[0] // seen.shape[0], axis=0)[..., None]
    rubbish = jnp.where(jnp.arange(keys.shape[1]) % 2, 1e30, jnp.nan).astype(keys.dtype)[None, :, None]
    return queries, jnp.where(seen, keys, rubbish), jnp.where(seen, values, rubbish), length, mask


def check(kernel: Callable[..., jax.Array], case: Case) -> None:
    """Raise AssertionError unless `kernel`, given poisoned inputs, says what the reference says.

    The reference runs on the CPU. With float32 the largest difference may be 2e-6, 2e-5 on an accelerator,
    whose exponential is coarser; with bfloat16 2e-2 of the largest entry.
    """
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        expected, poisoned = jax.device_get(
            jax.jit(_expected, compiler_options=QUICK_COMPILE)(*map(np.asarray, case))
        )
    expected = expected.astype(np.float32)
    found = np.asarray(quick_jit(kernel)(*poisoned), np.float32)
    assert np.isfinite(found).all(), "not finite"
    if case[0].dtype == jnp.float32:
        tolerance = 2e-6 if jax.default_backend() == "cpu" else 2e-5
    else:
        tolerance = 2e-2 * np.abs(expected).max()
    assert np.abs(found - expected).max() <= tolerance


def quick_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.jit`, on a CPU without optimisation."""
    options = QUICK_COMPILE if jax.default_backend() == "cpu" else None
    return jax.jit(function, compiler_options=options)


def _expected(*case: jax.Array) -> tuple[jax.Array, Case]:
    return reference.tree_attention(*case), poison(case)


def mutant(module: ModuleType, *changes: tuple[str, str]) -> SimpleNamespace:
    """The names of `module` with places of its source replaced, each `(before, after)`."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    for before, after in changes:
        assert source.count(before) == 1, f"{before!r} stands {source.count(before)} times in the source"
        source = source.replace(before, after)
    names: dict[str, Any] = {"__name__": f"{module.__name__}_mutant"}
    exec(compile(source, module.__file__, "exec"), names)
    return SimpleNamespace(**names)
