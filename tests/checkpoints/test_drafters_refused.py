"""Published drafters that are broken, of another kind or for another target are refused by name."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from specjax.build import LoadedTarget
from specjax.checkpoints.drafters import load_drafter
from specjax.checkpoints.drafters_files import fetch
from specjax.errors import CheckpointError, ConfigError
from specjax.models.functional import make_target
from tests.checkpoints import drafter_files as files
from tests.checkpoints.drafter_files import HIDDEN, KINDS, write
from tests.checkpoints.drafter_target import assert_same, load_target
from tests.checkpoints.test_huggingface import stub_hub


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    """The target."""
    return load_target()


SOME = {"eagle": "fc.weight", "eagle3": "midlayer.mlp.up_proj.weight", "medusa": "1.0.linear.weight"}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda tensors, name: tensors.pop(name), "'{}' is missing"),
        (lambda tensors, name: tensors.update({f"{name}s": tensors[name]}), "'{}s' is not part"),
        (lambda tensors, name: tensors.update({name: tensors[name][:, :-1]}), "'{}' has shape"),
        (lambda tensors, name: tensors.update({name: tensors[name].astype(float)}), "'{}' has dtype F64"),
    ],
)
def test_misfit_is_refused_by_its_tensor(
    loaded: LoadedTarget, tmp_path: Path, name: str, spoil: Callable[..., Any], words: str
) -> None:
    about, tensors = KINDS[name]()
    spoil(tensors, SOME[name])
    folder = write(tmp_path / name, about, tensors)
    with pytest.raises(CheckpointError, match=words.format(SOME[name])):
        load_drafter(folder, name, loaded.target, "it")


@pytest.mark.parametrize("name", KINDS)
def test_truncated_file_is_refused(loaded: LoadedTarget, tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / name, *KINDS[name]())
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        load_drafter(folder, name, loaded.target, "it")
    path.unlink()
    with pytest.raises(CheckpointError, match="has none of model.safetensors"):
        load_drafter(folder, name, loaded.target, "it")


@pytest.mark.parametrize("name", KINDS)
def test_drafter_of_another_kind_or_target_is_refused(
    loaded: LoadedTarget, tmp_path: Path, name: str
) -> None:
    folder = write(tmp_path / name, *KINDS[name]())
    for other in KINDS.keys() - {name}:
        with pytest.raises(ConfigError, match=f"drafter '{name}', not for '{other}'"):
            load_drafter(folder, other, loaded.target, "it")
    config = dataclasses.replace(loaded.config, hidden_size=8)
    with pytest.raises(ConfigError, match="states of size 16, and the target has states of size 8"):
        load_drafter(folder, name, make_target(config), "it")
    config = dataclasses.replace(loaded.config, vocab_size=21)
    with pytest.raises(ConfigError, match="a vocabulary of 20, and the target has a vocabulary of 21"):
        load_drafter(folder, name, make_target(config), "it")


def test_folder_of_something_else_is_refused(loaded: LoadedTarget, tmp_path: Path) -> None:
    folder = write(tmp_path / "odd", {}, {"wte.weight": np.ones((2, 2), np.float32)})
    with pytest.raises(CheckpointError, match="none of the drafters .* tensor is 'wte.weight'"):
        load_drafter(folder, "eagle", loaded.target, "it")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"d2t": [1, 2, 2, 6, 7, 13]}, "name different tokens"),
        ({"d2t": [1, 2, 1, 6, 7, 12]}, "names tokens twice or beyond"),
        ({"d2t": [1, 2, 2, 6, 7, 15]}, "names tokens twice or beyond"),
        ({"d2t": [-1, 2, 2, 6, 7, 12]}, "names tokens twice or beyond"),
        ({"d2t": None}, "'d2t' is missing"),
        ({"t2d": None}, "'t2d' is missing"),
    ],
)
def test_wrong_draft_vocabulary_is_refused(
    loaded: LoadedTarget, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    about, tensors = files.eagle3()
    tensors |= {name: np.array(value) for name, value in change.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.dtype != object}
    folder = write(tmp_path / "eagle3", about, tensors)
    with pytest.raises(CheckpointError, match=words):
        load_drafter(folder, "eagle3", loaded.target, "it")


@pytest.mark.parametrize(
    "change",
    [
        {"norm_before_residual": None},
        {"norm_before_residual": "yes"},
        {"norm_before_fc": True},
        {"fc_norm": True},
        {"norm_output": True},
        {"speculators_model_type": "dflash"},
        {"residual_scale": 0.5},
        {"eagle_aux_hidden_state_layer_ids": "all"},
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 8]},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_flag_that_changes_the_network_is_refused_by_name(
    loaded: LoadedTarget, tmp_path: Path, change: dict[str, Any]
) -> None:
    about, tensors = files.eagle3()
    folder = write(tmp_path / "eagle3", files.speculators(about, **change), files.respelled(tensors))
    with pytest.raises(CheckpointError, match=f"'{next(iter(change))}' is"):
        load_drafter(folder, "eagle3", loaded.target, "it")


def test_fusion_that_nobody_applies_is_refused(loaded: LoadedTarget, tmp_path: Path) -> None:
    """States as wide as the drafter pass as they are, whatever the file holds."""
    folder = write(tmp_path / "eagle3", *files.eagle3(3 * HIDDEN))
    with pytest.raises(CheckpointError, match="'fc.weight' is not part"):
        load_drafter(folder, "eagle3", loaded.target, "it")


@pytest.mark.parametrize(("kind", "file"), [("eagle", "pytorch_model.bin"), ("medusa", "medusa_lm_head.pt")])
def test_pickles_are_read_by_torch_alone(
    loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, file: str
) -> None:
    torch = pytest.importorskip("torch")
    about, tensors = KINDS[kind]()
    tensors = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
    expected = load_drafter(write(tmp_path / "one", about, tensors), kind, loaded.target, "it")
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(about))
    whole = {name: torch.tensor(tensor.astype(np.float32)).bfloat16() for name, tensor in tensors.items()}
    torch.save(whole, folder / file)
    assert_same(load_drafter(folder, kind, loaded.target, "it"), expected)

    (folder / file).write_bytes((folder / file).read_bytes()[:-200])
    with pytest.raises(CheckpointError, match=f"{file} is truncated or damaged"):
        load_drafter(folder, kind, loaded.target, "it")
    torch.save({"fc.weight": Path}, folder / file)  # code, which nobody is to run
    with pytest.raises(CheckpointError, match=f"{file} is truncated or damaged"):
        load_drafter(folder, kind, loaded.target, "it")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CheckpointError, match="pip install torch"):
        load_drafter(folder, kind, loaded.target, "it")


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_hub_gives_pickles_only_where_there_is_nothing_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked: list[list[str]] = []

    def download(repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        assert (repository, revision) == ("owner/name", "v1")
        asked.append(allow_patterns)
        if file in allow_patterns:
            (tmp_path / file).touch()
        return str(tmp_path)

    stub_hub(monkeypatch, download)
    assert fetch("hf:owner/name@v1") == tmp_path
    assert (tmp_path / file).exists()
    assert len(asked) == (1 if file == "model.safetensors" else 2)
