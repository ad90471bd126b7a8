"""One list of names and shapes; whatever departs from it is refused by the tensor's name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import numpy as np
import pytest

from specjax.checkpoints.validate import check_and_nest, expected_shapes
from specjax.errors import CheckpointError, nearest
from tests.checkpoints.files import TINY

Tensors = dict[str, np.ndarray]


def make() -> Tensors:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in expected_shapes(TINY).items()}


def test_tree_has_integer_layers_and_every_tensor() -> None:
    tensors = make()
    params = check_and_nest(tensors, TINY, "here")
    assert list(params["layers"]) == [0, 1]
    assert set(params) == {"embed_tokens", "layers", "norm"}
    np.testing.assert_array_equal(
        params["layers"][1]["self_attn"]["k_proj"]["weight"], tensors["layers.1.self_attn.k_proj.weight"]
    )


def test_biases_and_head_follow_the_config() -> None:
    config = dataclasses.replace(TINY, attention_bias=True, mlp_bias=True, tie_embeddings=False)
    extra = set(expected_shapes(config)) - set(expected_shapes(TINY))
    projections = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    projections += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    biases = {f"layers.{i}.{name}.bias" for i in range(2) for name in projections}
    assert extra == biases | {"lm_head.weight"}


def test_dtype_is_the_callers() -> None:
    params = check_and_nest(make(), TINY, "here", dtype=np.float16)
    assert params["norm"]["weight"].dtype == np.float16


def test_tied_duplicate_and_rotary_buffers_are_allowed() -> None:
    tensors = make()
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"].copy()
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(32, np.float32)
    assert "lm_head" not in check_and_nest(tensors, TINY, "here")


def drop(tensors: Tensors) -> None:
    del tensors["layers.1.mlp.up_proj.weight"]


def add(tensors: Tensors) -> None:
    tensors["layers.0.self_attn.q_norm.weight"] = np.zeros(64, np.float32)


def add_layer(tensors: Tensors) -> None:
    tensors["layers.2.input_layernorm.weight"] = np.zeros(256, np.float32)


def transpose(tensors: Tensors) -> None:
    tensors["layers.0.self_attn.k_proj.weight"] = tensors["layers.0.self_attn.k_proj.weight"].T


def integers(tensors: Tensors) -> None:
    tensors["norm.weight"] = np.ones(256, np.int64)


def other_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"] + 1


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (drop, "'layers.1.mlp.up_proj.weight' is missing"),
        (add, "'layers.0.self_attn.q_norm.weight' is not part"),
        (add_layer, "'layers.2.input_layernorm.weight' is not part"),
        (
            transpose,
            "'layers.0.self_attn.k_proj.weight' has shape (256, 128), but the config makes it (128, 256)",
        ),
        (integers, "'norm.weight' has dtype int64"),
        (other_head, "'lm_head.weight' differs from 'embed_tokens.weight'"),
    ],
)
def test_misfit_is_refused_by_name(spoil: Callable[[Tensors], None], words: str) -> None:
    tensors = make()
    spoil(tensors)
    with pytest.raises(CheckpointError, match=f"here: .*{re.escape(words)}"):
        check_and_nest(tensors, TINY, "here")


def test_absurd_number_of_layers_is_refused_at_once() -> None:
    config = dataclasses.replace(TINY, num_layers=10**12)
    with pytest.raises(CheckpointError, match="counts 1000000000000 layers, but there are only 20 tensors"):
        check_and_nest(make(), config, "here")


def test_nearest_suggests_only_what_is_near() -> None:
    assert nearest("ngramm", ["ngram", "eagle"]) == "; did you mean 'ngram'?"
    assert nearest("zzz", ["ngram", "eagle"]) == ""
