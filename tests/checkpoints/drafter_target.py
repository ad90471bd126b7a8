"""The target of the published drafters of the tests, and what several of them need."""

from __future__ import annotations

import functools

import jax
import numpy as np

from specjax.build import LoadedTarget
from specjax.checkpoints.drafters_found import Published
from specjax.models.functional import init_params, make_target
from specjax.models.llama import LlamaConfig
from tests.checkpoints.drafter_files import HIDDEN, VOCAB


@functools.cache
def load_target() -> LoadedTarget:
    """A random Llama of eight layers."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_layers=8,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=24,
        rope_theta=10000.0,
        rope_scaling=None,
        rms_norm_eps=1e-6,
        max_positions=64,
        tie_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
    )
    params = jax.tree.map(lambda leaf: 8 * leaf if leaf.ndim > 1 else leaf, init_params(config, 0))
    return LoadedTarget(make_target(config), params, None, config, "hf:owner/target")


def assert_same(found: Published, expected: Published) -> None:
    """Equal to the bit."""
    assert found.fields == expected.fields
    assert found.architecture == expected.architecture
    jax.tree.map(np.testing.assert_array_equal, found.weights, expected.weights)
