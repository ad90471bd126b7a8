"""The target of the published drafters of the tests, and what several of them need."""

from __future__ import annotations

import functools

import jax
import numpy as np

from specjax.build import LoadedTarget
from specjax.checkpoints.drafters_found import Published
from specjax.decode import row_keys, start
from specjax.models.functional import init_params, make_target
from specjax.models.llama import LlamaConfig
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.types import Context, Drafter, ModelParams, Params
from specjax.verify import rejection
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


def laws_of(
    loaded: LoadedTarget, drafter: Drafter, weights: Params, prompt: list[int]
) -> tuple[np.ndarray, int]:
    """The laws [2, V] that a drafter drafts two tokens after a prompt by, and the first of them."""
    params, warp = ModelParams(loaded.params, weights), make_warp(1, temperature=1.0)
    method, keys = Method(loaded.target, drafter, rejection.verify), row_keys(0, range(1))
    _, state = start(method, params, [prompt], max_new_tokens=4, warp=warp, keys=keys)
    context = Context(state.tokens, state.length, warp)
    draft, _ = jax.jit(drafter.propose)(params, state.keys, state.draft_state, context)
    assert draft.probs is not None
    return np.asarray(draft.probs[0, :2]), int(draft.tokens[0, 1])


def assert_same(found: Published, expected: Published) -> None:
    """Equal to the bit."""
    assert found.fields == expected.fields
    assert found.architecture == expected.architecture
    jax.tree.map(np.testing.assert_array_equal, found.weights, expected.weights)
