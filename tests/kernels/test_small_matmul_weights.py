"""Products with weights in float32, bfloat16 and int8: values, and bits that do not depend on other rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels import cpu_library
from specjax.kernels.small_matmul import api, reference, row_sums
from specjax.models.functional import init_params, make_target
from specjax.models.llama import LlamaConfig
from specjax.trees.topology import chain_mask
from specjax.types import KVCache, Params

NODES, BATCHES = (1, 2, 3, 5, 8, 13, 16, 17, 24, 33, 48, 64), (1, 2, 4, 8)


@pytest.fixture(autouse=True)
def kernels_are_built() -> None:
    if not cpu_library.is_available():
        pytest.skip("no C++ compiler")


def case(dtype: str, rows: int, in_size: int, out_size: int) -> tuple[jax.Array, ...]:
    generator = np.random.default_rng(0)
    x = jnp.asarray(generator.standard_normal((rows, in_size), np.float32))
    if dtype == "int8":
        weight = jnp.asarray(generator.integers(-127, 128, (out_size, in_size)), jnp.int8)
        return x, weight, jnp.asarray(generator.uniform(0.001, 0.01, out_size), jnp.float32)
    weight = jnp.asarray(generator.standard_normal((out_size, in_size), np.float32))
    return x.astype(dtype), weight.astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(
    ("rows", "in_size", "out_size"), [(1, 64, 200), (5, 7, 5), (9, 43, 1), (70, 100, 37)]
)
def test_products_equal_the_references(dtype: str, rows: int, in_size: int, out_size: int) -> None:
    x, weight, *scale = case(dtype, rows, in_size, out_size)
    assert "specjax" in jax.jit(api.small_matmul).lower(x, weight, *scale).as_text()
    ours = np.asarray(jax.jit(api.small_matmul)(x, weight, *scale))
    assert ours.dtype == x.dtype
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    exact = exact * np.asarray(scale[0], np.float64) if scale else exact
    tolerance = 4e-3 if dtype == "bfloat16" else 2e-6
    np.testing.assert_allclose(ours.astype(np.float64), exact, atol=tolerance * np.abs(exact).max())
    theirs = np.asarray(reference.small_matmul(x, weight, *scale), np.float64)
    np.testing.assert_allclose(ours.astype(np.float64), theirs, atol=2 * tolerance * np.abs(exact).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_rows_do_not_depend_on_how_many_there_are(dtype: str) -> None:
    x, *weights = case(dtype, 512, 1536, 576)
    product = jax.jit(api.small_matmul)
    alone = np.concatenate([product(x[i : i + 1], *weights) for i in range(512)])
    for rows in (*range(2, 9), 13, 16, 17, 24, 33, 48, 64, 128, 197, 256, 384, 512):
        np.testing.assert_array_equal(product(x[:rows], *weights), alone[:rows])


def test_sums_of_rows_do_not_depend_on_how_many_there_are() -> None:
    x = case("float32", 512, 576, 1)[0]
    sums = jax.jit(row_sums)
    alone = np.concatenate([sums(x[i : i + 1]) for i in range(512)])
    np.testing.assert_allclose(alone[:, 0], np.asarray(x, np.float64).sum(-1), atol=1e-4)
    for rows in (2, 7, 64, 512):
        np.testing.assert_array_equal(sums(x[:rows]), alone[:rows])


def test_gradients_of_int8_products_are_those_of_the_reference() -> None:
    x, weight, scale = case("int8", 3, 16, 8)
    for ours, theirs in zip(
        jax.grad(lambda x, scale: jnp.sin(api.small_matmul(x, weight, scale)).sum(), (0, 1))(x, scale),
        jax.grad(lambda x, scale: jnp.sin(reference.small_matmul(x, weight, scale)).sum(), (0, 1))(x, scale),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=160,
    rope_theta=10000.0,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    max_positions=256,
    tie_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
)


@pytest.mark.parametrize(
    ("dtype", "sizes", "batches"),
    [
        ("float32", (2, 7, 64), (1, 8)),
        ("int8", (5, 64), (1, 8)),
        pytest.param("float32", NODES, BATCHES, marks=pytest.mark.slow),
    ],
)
def test_logits_of_a_node_do_not_depend_on_tree_or_batch(
    dtype: str, sizes: tuple[int, ...], batches: tuple[int, ...]
) -> None:
    params: Params = init_params(CONFIG, 0, dtype=jnp.dtype(dtype))
    # Larger matrices, so that outputs vary.
    params = jax.tree.map(lambda leaf: 5 * leaf if leaf.dtype != jnp.int8 else leaf, params)
    target = make_target(CONFIG, dtype=jnp.dtype(dtype))
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (max(BATCHES), max(NODES)))

    @jax.jit
    def forward(params: Params, part: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        batch, size = part.shape
        positions = cache.length[:, None] + jnp.arange(size)[None]
        out = target.forward(params, part, positions, chain_mask(batch, size), cache)
        return out.logits, out.cache._replace(length=cache.length + size)

    def read(rows: slice, nodes: slice, cache: KVCache) -> tuple[np.ndarray, KVCache]:
        logits, cache = forward(params, tokens[rows, nodes], cache)
        return np.asarray(logits), cache

    alone = []
    for row in range(max(BATCHES)):
        cache, logits = target.init_cache(1, 72), []
        for node in range(max(NODES)):
            one, cache = read(slice(row, row + 1), slice(node, node + 1), cache)
            logits.append(one[0, 0])
        alone.append(logits)
    wanted = np.asarray(alone)
    assert wanted.std() > 0.1
    for size in sizes:
        for batch in batches:
            together, _ = read(slice(batch), slice(size), target.init_cache(batch, 72))
            np.testing.assert_array_equal(together, wanted[:batch, :size])
