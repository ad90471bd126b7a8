"""Drafters written in their published formats come back the same, to the bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax.build import LoadedTarget, build_drafter, export_drafter
from specjax.checkpoints.drafters import load_drafter
from specjax.checkpoints.drafters_export import to_published
from specjax.config import drafter_config
from specjax.errors import CheckpointError, ConfigError
from specjax.modules import find_module
from specjax.training.export import write_drafter
from tests.checkpoints import drafter_files as files
from tests.checkpoints.drafter_files import HIDDEN, VOCAB, write
from tests.checkpoints.drafter_target import assert_same, load_target


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    """The target."""
    return load_target()


def with_output_bias() -> tuple[dict[str, Any], files.Tensors]:
    """Biases everywhere in the attention, as Llama's `attention_bias` means it."""
    about, tensors = files.eagle()
    bias = np.ones(HIDDEN, np.float32)
    return about | {"attention_bias": True}, tensors | {"layers.0.self_attn.o_proj.bias": bias}


VARIANTS = {
    "eagle": files.eagle,
    "eagle with all biases": with_output_bias,
    "eagle without biases": lambda: files.eagle(bias=False, embedding=True),
    "eagle3": files.eagle3,
    "eagle3 full": lambda: files.eagle3(reduced=False),
    "eagle3 normed residual": lambda: files.eagle3(norm_before_residual=True),
    "eagle3 as wide as its states": files.eagle3_without_fusion,
    "eagle3 wider": lambda: files.eagle3(2 * HIDDEN),
    "medusa": files.medusa,
    "medusa legacy": lambda: files.medusa(own=False),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_export_of_an_import_is_the_same_file(
    loaded: LoadedTarget, tmp_path: Path, variant: str, dtype: Any
) -> None:
    name, (about, tensors) = variant.split()[0], VARIANTS[variant]()
    tensors = {k: t.astype(dtype) if t.dtype == np.float32 else t for k, t in tensors.items()}
    target = loaded.target._replace(dtype=dtype)
    found = load_drafter(write(tmp_path / "in", about, tensors), name, target, "it")
    layers = found.fields.get("state_layers", ())
    to_published(
        tmp_path / "out", found.weights, found.architecture, base="owner/target", state_layers=layers
    )
    (path,) = (tmp_path / "out").glob("*.safetensors")
    written = load_file(path)
    assert written.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert written[key].dtype == tensor.dtype
        np.testing.assert_array_equal(written[key], tensor)
    assert_same(load_drafter(tmp_path / "out", name, target, "it"), found)
    with pytest.raises(CheckpointError, match="exists already"):
        to_published(tmp_path / "out", found.weights, found.architecture, base="", state_layers=layers)


TRAINED = {
    "eagle": ({"draft_length": 2}, {}),
    "eagle reduced": ({"draft_length": 2}, {"draft_vocab_size": 6}),
    "eagle3": ({"draft_length": 2}, {}),
    "eagle3 reduced": ({"draft_length": 2, "draft_vocab_size": 6, "state_layers": (1, 5)}, {}),
    "medusa": ({"draft_length": 2, "own_unembedding": True, "num_layers": 2}, {}),
    "medusa reduced": ({"draft_length": 2}, {"draft_vocab_size": 6}),
}


def write_trained(
    folder: Path, loaded: LoadedTarget, name: str, fields: dict[str, Any], training: dict[str, Any]
) -> dict[str, Any]:
    """Write random weights of a drafter as specjax.train does, and return the fields that name them."""
    module, config = find_module("drafters", name), drafter_config({"name": name, **fields})
    settings = module.Training(**training)
    trainable = module.trainable(config, settings, loaded.target)
    weights, fixed = trainable.init(jax.random.key(0), loaded.params, np.arange(VOCAB))
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda w: w + rng.normal(size=w.shape).astype(w.dtype), weights)
    about = {"config": dataclasses.asdict(config), "training": dataclasses.asdict(settings)}
    write_drafter(folder, weights | fixed, {"drafter": name, **about})
    return {"name": name, "source": str(folder), "draft_length": 2}


@pytest.mark.parametrize("variant", TRAINED)
def test_trained_drafter_is_the_same_after_export_and_import(
    loaded: LoadedTarget, tmp_path: Path, variant: str
) -> None:
    name, (fields, training) = variant.split()[0], TRAINED[variant]
    module, config = find_module("drafters", name), drafter_config({"name": name, **fields})
    own = write_trained(tmp_path / "own", loaded, name, fields, training)
    export_drafter(own, loaded, tmp_path / "published")
    published = own | {"source": str(tmp_path / "published")}
    first, second = (build_drafter(fields, loaded) for fields in (own, published))
    jax.tree.map(np.testing.assert_array_equal, first[1], second[1])
    assert first[0].features == second[0].features
    found = load_drafter(tmp_path / "published", name, loaded.target, "it").architecture
    likes = {
        "eagle": lambda: module.like(loaded.target),
        "eagle3": lambda: module.like(config, loaded.target),
    }
    assert found == likes.get(name, lambda: None)()


@pytest.mark.parametrize("size", [None, 6])
def test_head_that_the_target_shares_goes_along(
    loaded: LoadedTarget, tmp_path: Path, size: int | None
) -> None:
    fields = {"draft_length": 2, "draft_vocab_size": size, "own_unembedding": False}
    own = write_trained(tmp_path / "own", loaded, "eagle3", fields, {})
    export_drafter(own, loaded, tmp_path / "published")
    shares, has_own = (
        build_drafter(own | {"source": str(tmp_path / name)}, loaded)[1] for name in ("own", "published")
    )
    drafted = shares.get("d2t", np.arange(VOCAB))
    rows = has_own.pop("lm_head")["weight"]
    np.testing.assert_array_equal(rows, loaded.target.head_rows(loaded.params, drafted))
    shares.pop("head", None)
    jax.tree.map(np.testing.assert_array_equal, shares, has_own)


def test_state_that_enters_the_head_is_no_layer_of_the_format(loaded: LoadedTarget, tmp_path: Path) -> None:
    last = loaded.target.config.num_layers
    own = write_trained(
        tmp_path / "own", loaded, "eagle3", {"draft_length": 2, "state_layers": (0, last)}, {}
    )
    with pytest.raises(CheckpointError, match=f"state_layers are \\(0, {last}\\)"):
        export_drafter(own, loaded, tmp_path / "published")
    assert not (tmp_path / "published").exists()


def test_drafter_without_weights_is_not_exported(loaded: LoadedTarget, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no weights of its own"):
        export_drafter({"name": "ngram", "draft_length": 2, "max_ngram": 2}, loaded, tmp_path / "out")
