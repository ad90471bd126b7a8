"""Bytes counted from sizes, against the modules that hold the weights and by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from specjax.analysis import memory, theory
from specjax.errors import ConfigError
from specjax.models.eagle import Eagle, EagleConfig
from specjax.models.eagle3 import Eagle3, Eagle3Config
from specjax.models.llama import Llama, LlamaConfig
from specjax.models.medusa import Medusa, MedusaConfig

SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    rope_theta=1e5,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    max_positions=8192,
    tie_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
)
LLAMA_8B = dataclasses.replace(
    SMOLLM2,
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    tie_embeddings=False,
)


def held(module: Callable[[nnx.Rngs], Any]) -> int:
    """How many numbers a module's weights hold; nothing is allocated."""
    state = nnx.state(nnx.eval_shape(lambda: module(nnx.Rngs(0))), nnx.Param)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize(("model", "published"), [(SMOLLM2, 134_515_008), (LLAMA_8B, 8_030_261_248)])
def test_parameters_of_published_models(model: LlamaConfig, published: int) -> None:
    assert memory.num_parameters(memory.model_shapes(model)) == published


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_shapes_are_the_modules_own(tiny_config: LlamaConfig, tied: bool, bias: bool) -> None:
    model = dataclasses.replace(tiny_config, tie_embeddings=tied, attention_bias=bias, mlp_bias=bias)
    layer = dataclasses.replace(model, num_layers=1)
    hidden = model.hidden_size

    def llama(rngs: nnx.Rngs) -> Any:
        return Llama(model, dtype=jnp.float32, rngs=rngs)

    def eagle(rngs: nnx.Rngs) -> Any:
        return Eagle(EagleConfig(layer, fc_bias=bias), dtype=jnp.float32, rngs=rngs)

    def eagle3(rngs: nnx.Rngs) -> Any:
        return Eagle3(Eagle3Config(layer, 3 * hidden, 20, False), dtype=jnp.float32, rngs=rngs)

    def medusa(rngs: nnx.Rngs) -> Any:
        own = None if tied else model.vocab_size
        return Medusa(MedusaConfig(hidden, 3, 2, own), dtype=jnp.float32, rngs=rngs)

    for module, shapes in (
        (llama, memory.model_shapes(model)),
        (eagle, memory.eagle(model, fc_bias=bias).shapes),
        (eagle3, memory.eagle3(model, draft_vocab_size=20).shapes),
        (medusa, memory.medusa(model, 3, 2, own_unembedding=not tied).shapes),
    ):
        assert memory.num_parameters(shapes) == held(module)


def test_a_draft_vocabulary_keeps_rows_of_the_head() -> None:
    def count(**options: Any) -> int:
        return memory.num_parameters(memory.eagle(SMOLLM2, fc_bias=True, **options).shapes)

    assert count() == 4_203_648  # the packaged head's file, its map of tokens apart
    assert count(draft_vocab_size=8192) - count() == 8192 * 576


def test_bytes_of_dtypes() -> None:
    shapes = [(10, 4), (4,)]
    assert [memory.weight_bytes(shapes, dtype) for dtype in ("float32", "bfloat16")] == [176, 88]
    assert memory.weight_bytes(shapes, "int8") == 40 + 4 * 10 + 4 * 4
    per_token = 2 * 30 * 3 * 64
    for dtype, size in (("float32", 4), ("float16", 2), ("int8", 4)):
        assert memory.cache_bytes(SMOLLM2, batch=2, capacity=512, dtype=dtype) == 1024 * per_token * size


def test_footprint_by_hand() -> None:
    drafter = memory.DrafterSize(((100, 10), (10,)), cache_numbers=20, feature_numbers=7)
    found = memory.footprint(
        SMOLLM2,
        drafter,
        batch=2,
        capacity=50,
        num_nodes=5,
        dtype="bfloat16",
        draft_dtype="int8",
        has_law=True,
    )
    per_slot, law = 2 * 30 * 3 * 64 * 2, 2 * 49152 * 4
    assert found == memory.Footprint(
        target_weights=2 * 134_515_008,
        target_cache=2 * 50 * per_slot,
        plain_buffers=2 * law,
        draft_weights=1000 + 400 + 40,
        draft_cache=2 * 55 * 20 * 4,
        node_slots=2 * 5 * per_slot,
        buffers=3 * 5 * law - 2 * law + 2 * 5 * 7 * 2,
    )
    assert found.plain + found.extra == sum(found)
    assert found.share == found.extra / found.plain


def test_weightless_drafts_without_a_law_add_nodes_only() -> None:
    found = memory.footprint(
        SMOLLM2,
        memory.NO_WEIGHTS,
        batch=1,
        capacity=512,
        num_nodes=1,
        dtype="float32",
        draft_dtype="float32",
        has_law=False,
    )
    assert found.extra == found.node_slots == 2 * 30 * 3 * 64 * 4


@pytest.mark.parametrize(("extra", "warned"), [(150, False), (151, True)])
def test_warning_beyond_15_percent(extra: int, warned: bool) -> None:
    found = memory.Footprint(600, 300, 100, extra - 20, 10, 5, 5)
    sentence = memory.warning(found)
    assert (sentence is not None) == warned
    if sentence is not None:
        assert "15% more memory" in sentence and "most of it draft weights" in sentence


def test_a_tenth_of_the_target_is_within_what_is_usual_and_a_copy_is_not() -> None:
    def plan(draft: LlamaConfig) -> memory.Footprint:
        size = memory.draft_model(draft)
        return memory.footprint(
            LLAMA_8B,
            size,
            batch=1,
            capacity=2048,
            num_nodes=5,
            dtype="bfloat16",
            draft_dtype="bfloat16",
            has_law=True,
        )

    assert memory.warning(plan(SMOLLM2)) is None
    assert memory.warning(plan(LLAMA_8B)) is not None


def test_work_of_a_pass() -> None:
    read = 134_515_008 * 2
    matrices = 134_515_008 - 61 * 576  # norms are no products
    assert memory.work(SMOLLM2, "bfloat16") == theory.Work(
        read, 2 * 30 * 3 * 64 * 2, 2 * matrices, 4 * 30 * 576
    )
    untied = dataclasses.replace(SMOLLM2, tie_embeddings=False)
    assert memory.work(untied, "bfloat16") == memory.work(SMOLLM2, "bfloat16")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: memory.weight_bytes([(2, 2)], "bfloat61"), "did you mean 'bfloat16'"),
        (lambda: memory.cache_bytes(SMOLLM2, batch=0, capacity=1, dtype="float32"), "batch is 0"),
        (lambda: memory.law_bytes(1, 0, 8), "num_nodes is 0"),
    ],
)
def test_impossible_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
