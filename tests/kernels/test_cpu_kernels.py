"""The C++ kernels against their references, and their promise: a row's bits do not depend on the others."""

from __future__ import annotations

import subprocess
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels import cpu_library
from specjax.kernels.small_matmul import api as matmul
from specjax.kernels.small_matmul import reference as matmul_reference
from specjax.kernels.tree_attention import api as attention
from specjax.kernels.tree_attention import reference as attention_reference
from specjax.trees.topology import ancestor_mask


@pytest.fixture(autouse=True)
def kernels_are_built() -> None:
    if not cpu_library.is_available():
        pytest.skip("no C++ compiler")


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


@pytest.mark.parametrize(("in_size", "out_size"), [(64, 200), (7, 5), (19, 1), (1536, 577)])
def test_product_equals_the_reference_and_rows_do_not_depend_on_each_other(
    in_size: int, out_size: int
) -> None:
    x, weight = normal(0, 20, in_size), normal(1, out_size, in_size)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    together = np.asarray(jax.jit(matmul.small_matmul)(x, weight))
    np.testing.assert_allclose(together, exact, atol=2e-6 * np.abs(exact).max())
    for rows in (1, 2, 3, 4, 5, 6, 7, 12, 19):
        alone = np.asarray(jax.jit(matmul.small_matmul)(x[:rows], weight))
        np.testing.assert_array_equal(alone, together[:rows])


def test_many_rows_and_other_types_go_to_xla() -> None:
    weight = normal(1, 8, 16)
    for x in (normal(0, matmul.MAX_ROWS + 1, 16), normal(0, 3, 16).astype(jnp.float16)):
        text = jax.jit(matmul.small_matmul).lower(x, weight.astype(x.dtype)).as_text()
        assert "specjax_small_matmul" not in text
    assert "specjax_small_matmul" in jax.jit(matmul.small_matmul).lower(normal(0, 3, 16), weight).as_text()


def attention_case(batch: int, num_nodes: int, earlier: int = 0) -> tuple[jax.Array, ...]:
    generator = np.random.default_rng(num_nodes)
    size, kv_heads, group, dim = 40, 2, 3, 20
    slots = num_nodes + earlier
    parents = [[-1, *(generator.integers(0, i) for i in range(1, slots))] for _ in range(batch)]
    mask = ancestor_mask(jnp.asarray(parents, jnp.int32))[:, earlier:]
    length = jnp.asarray(generator.integers(0, size - slots, batch), jnp.int32)
    queries = normal(2, batch, num_nodes, kv_heads * group, dim)
    keys, values = normal(3, batch * kv_heads, size, dim), normal(4, batch * kv_heads, size, dim)
    return queries, keys, values, length, mask


@pytest.mark.parametrize(("batch", "num_nodes", "earlier"), [(1, 1, 0), (1, 5, 0), (3, 16, 0), (2, 4, 3)])
def test_attention_equals_the_reference(batch: int, num_nodes: int, earlier: int) -> None:
    case = attention_case(batch, num_nodes, earlier)
    ours = np.asarray(jax.jit(attention.tree_attention)(*case))
    assert np.isfinite(ours).all()
    np.testing.assert_allclose(ours, attention_reference.tree_attention(*case), atol=2e-6)
    queries, keys, values, length, mask = case
    everything = jnp.ones_like(mask)
    unmasked = np.asarray(attention.tree_attention(queries, keys, values, length, everything))
    assert num_nodes == 1 or not np.allclose(ours, unmasked, atol=1e-3), "the mask must matter"


def test_attention_reads_nothing_that_is_not_seen_and_nodes_do_not_depend_on_each_other() -> None:
    queries, keys, values, length, mask = attention_case(2, 6)
    run = jax.jit(attention.tree_attention)
    together = np.asarray(run(queries, keys, values, length, mask))
    seen = attention_reference.visible_slots(length, mask, keys.shape[1]).any(1)
    poison = jnp.where(jnp.repeat(seen, 2, axis=0)[..., None], 0.0, jnp.nan)
    np.testing.assert_array_equal(run(queries, keys + poison, values + poison, length, mask), together)
    for node in range(6):
        one = run(queries[:1, node : node + 1], keys[:2], values[:2], length[:1], mask[:1, node : node + 1])
        # Alone, its mask still names the slots of all six.
        np.testing.assert_array_equal(one[0, 0], together[0, node])


def test_gradients_are_those_of_the_references() -> None:
    x, weight = normal(0, 3, 16), normal(1, 8, 16)
    for ours, theirs in zip(
        jax.grad(lambda *a: jnp.sin(matmul.small_matmul(*a)).sum(), (0, 1))(x, weight),
        jax.grad(lambda *a: jnp.sin(matmul_reference.small_matmul(*a)).sum(), (0, 1))(x, weight),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    queries, keys, values, length, mask = attention_case(2, 4)

    def loss(function):
        return lambda q, k, v: jnp.sin(function(q, k, v, length, mask)).sum()

    for ours, theirs in zip(
        jax.grad(loss(attention.tree_attention), (0, 1, 2))(queries, keys, values),
        jax.grad(loss(attention_reference.tree_attention), (0, 1, 2))(queries, keys, values),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_wrong_shapes_raise_and_do_not_crash() -> None:
    result = jax.ShapeDtypeStruct((2, 5), jnp.float32)
    call = jax.ffi.ffi_call("specjax_small_matmul", result)
    with pytest.raises(Exception, match="do not fit"):
        jax.block_until_ready(jax.jit(call)(normal(0, 2, 7), normal(1, 5, 8)))
    with pytest.raises(Exception, match="takes x"):
        jax.block_until_ready(jax.jit(call)(normal(0, 2, 7, 1), normal(1, 5, 7)))
    queries, keys, values, length, mask = attention_case(2, 4)
    call = jax.ffi.ffi_call("specjax_tree_attention", jax.ShapeDtypeStruct(queries.shape, jnp.float32))
    with pytest.raises(Exception, match="do not fit"):
        jax.block_until_ready(jax.jit(call)(queries, keys[:3], values, length, mask))


def test_without_a_working_compiler_it_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(compiler: str) -> None:
        raise subprocess.CalledProcessError(1, compiler, stderr="no such header")

    monkeypatch.setattr(cpu_library, "build", fail)
    uncached = cpu_library.is_available.__wrapped__
    with pytest.warns(UserWarning, match="cannot be built.*no such header"):
        assert not uncached()
    monkeypatch.setattr(cpu_library, "is_available", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x, weight = normal(0, 3, 16), normal(1, 8, 16)
        np.testing.assert_allclose(
            matmul.small_matmul(x, weight), matmul_reference.small_matmul(x, weight), atol=1e-6
        )
