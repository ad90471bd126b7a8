"""A layer that starts by copying names what followed the present token before."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax import cache as kv
from specjax.models.eagle3 import Eagle3, Eagle3Config
from specjax.models.functional import init_module, pure
from specjax.models.llama import LlamaConfig
from specjax.state_drafting import adding_nothing
from specjax.training.copying import start_copying
from specjax.trees.topology import chain_mask
from specjax.types import Params

HIDDEN, LENGTH, VOCAB = 256, 160, 400


@pytest.fixture(scope="module")
def config(tiny_config: LlamaConfig) -> Eagle3Config:
    """A head of the usual proportions, over states of two kinds, that shares the target's unembedding."""
    layer = dataclasses.replace(
        tiny_config, hidden_size=HIDDEN, num_heads=4, num_kv_heads=2, head_dim=64, num_layers=1
    )
    return Eagle3Config(layer, 2 * HIDDEN, VOCAB, norm_before_residual=False, own_unembedding=False)


@pytest.fixture(scope="module")
def weights(config: Eagle3Config) -> Params:
    """First weights that copy nothing."""
    weights = init_module(lambda rngs: Eagle3(config, dtype=jnp.float32, rngs=rngs), jax.random.key(0))
    return weights | {"midlayer": adding_nothing(weights["midlayer"])}


def copying(config: Eagle3Config, weights: Params, first: int) -> Params:
    """The same with a layer that copies; the embeddings are at `first` of the states."""
    fc, block = start_copying(
        weights["fc"]["weight"], weights["midlayer"], config.layer, first, jax.random.key(1)
    )
    return weights | {"fc": {"weight": fc}, "midlayer": block}


def share_found(config: Eagle3Config, weights: Params, first: int) -> float:
    """How often what the layer adds is nearest to what followed when its token stood there before, once."""

    def make(rngs: nnx.Rngs) -> Eagle3:
        return Eagle3(config, dtype=jnp.float32, rngs=rngs)

    run, fuse = (pure(make, name) for name in ("__call__", "fuse"))
    rng = np.random.default_rng(3)
    embeddings = rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    half = rng.permutation(VOCAB)[: LENGTH // 2]
    tokens = np.concatenate((half, half))
    own = embeddings[tokens]
    other = rng.normal(size=own.shape).astype(np.float32)
    states = np.concatenate((own, other) if first == 0 else (other, own), axis=-1)[None]
    cache = kv.init_cache(
        1, LENGTH, num_layers=1, num_heads=config.layer.num_kv_heads, head_dim=64, dtype=jnp.float32
    )
    following = jnp.asarray(np.roll(own, -1, axis=0))[None]
    positions = jnp.arange(LENGTH)[None]
    mask = chain_mask(1, LENGTH)
    fused = fuse(weights, jnp.asarray(states))
    out, _ = run(weights, following, fused, positions, mask, cache)
    named = np.argmax(np.asarray(out - fused)[0] @ embeddings.T, axis=-1)
    # Input t has token t + 1, and is to name token t + 2.
    again = np.arange(LENGTH // 2, LENGTH - 2)
    return float(np.mean(named[again] == tokens[again + 2]))


@pytest.mark.parametrize("first", [0, HIDDEN])
def test_what_followed_before_is_named(config: Eagle3Config, weights: Params, first: int) -> None:
    assert share_found(config, copying(config, weights, first), first) > 0.9
    assert share_found(config, weights, first) < 0.1
    # It hangs on the place where the embeddings are.
    assert share_found(config, copying(config, weights, HIDDEN - first), first) < 0.5


def test_what_is_not_attention_stays(config: Eagle3Config, weights: Params) -> None:
    before, after = weights["midlayer"], copying(config, weights, 0)["midlayer"]
    assert jax.tree.map(jnp.shape, before) == jax.tree.map(jnp.shape, after)
    for name in before.keys() - {"self_attn"}:
        jax.tree.map(np.testing.assert_array_equal, before[name], after[name])
