"""A target in int8 against the float32 weights that its own stand for."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import build
from specjax.config import run_config
from specjax.models.functional import init_params, keep_layers, make_target, pack, stack_layers, unpack
from specjax.models.llama import LlamaConfig
from specjax.models.quantize import dequantize, quantize
from specjax.trees.topology import chain_mask
from specjax.types import Params, Target
from tests.model_folder import write_model


def read(target: Target, params: Params) -> np.ndarray:
    """The logits of one causal pass."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 12)))
    positions = jnp.broadcast_to(jnp.arange(12), (2, 12))
    return np.asarray(
        jax.jit(target.forward)(params, tokens, positions, chain_mask(2, 12), target.init_cache(2, 12)).logits
    )


def test_every_weight_is_within_half_a_step_of_its_own(tiny_params: Params) -> None:
    narrow = quantize(tiny_params)
    again = dequantize(narrow)
    assert jax.tree.structure(again) == jax.tree.structure(tiny_params)
    matrix = narrow["layers"][0]["mlp"]["down_proj"]
    assert matrix["weight"].dtype == np.int8 and np.abs(matrix["weight"]).max() == 127
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(tiny_params), strict=True):
        theirs = np.asarray(theirs)
        step = np.abs(theirs).max(-1, keepdims=True) / 127 if theirs.ndim == 2 else 0
        assert (np.abs(ours - theirs) <= step / 2 + 1e-6).all()


def test_outputs_without_weights_stay_nothing() -> None:
    part = quantize({"weight": np.zeros((2, 3), np.float32)})
    assert not part["weight"].any() and (part["scale"] == 1).all()


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_the_dequantised_weights(tied: bool, tiny_config: LlamaConfig) -> None:
    config = tiny_config.__class__(
        **{**vars(tiny_config), "tie_embeddings": tied, "attention_bias": True, "mlp_bias": True}
    )
    wide = jax.tree.map(lambda leaf: 6 * leaf if leaf.ndim > 1 else leaf + 0.1, init_params(config, seed=0))
    narrow = quantize(wide)
    target = make_target(config, dtype=jnp.int8)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(target.init_cache(1, 4).keys))
    template = init_params(config, 0, dtype=jnp.int8)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), narrow) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), template
    )
    ours = read(target, narrow)
    theirs = read(make_target(config), dequantize(narrow))
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())
    exact = read(make_target(config), wide)
    assert np.abs(ours - exact).max() > 1e-3 * np.abs(exact).max(), "the weights must have been rounded"

    stacked = read(make_target(config, dtype=jnp.int8, stacked=True), stack_layers(narrow))
    np.testing.assert_allclose(stacked, ours, atol=1e-5 * np.abs(ours).max())
    again = pack(unpack(narrow, config))
    jax.tree.map(np.testing.assert_array_equal, again, narrow)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    "drafter",
    [
        {"name": "draft_model", "draft_length": 2},
        {"name": "self_speculative", "draft_length": 2, "skip_layers": [1]},
    ],
)
def test_drafters_of_an_int8_target_are_int8_too(drafter: dict, stacked: bool, tmp_path: Path) -> None:
    folder = str(write_model(tmp_path / "target"))
    config = run_config()
    config.target, config.dtype, config.stacked_layers = folder, "int8", stacked
    config.drafter = drafter | ({"source": folder} if drafter["name"] == "draft_model" else {})
    built = build.build_method(config)
    assert built.loaded.target.dtype == jnp.int8
    matrices = [leaf for leaf in jax.tree.leaves(built.params) if leaf.dtype == jnp.int8]
    assert len(matrices) > 4
    if not stacked:
        thin = keep_layers(built.params.target, (0,))
        assert thin["layers"][0]["mlp"]["down_proj"]["weight"].dtype == jnp.int8
