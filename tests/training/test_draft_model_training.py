"""A draft model from its first step to a folder that decodes, and to a complete model for other engines."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import run
from specjax.build import LoadedTarget, build_drafter, build_target, export_drafter
from specjax.checkpoints.source import load
from specjax.decode import generate, new_tokens, row_keys, start
from specjax.drafters import draft_model
from specjax.errors import CheckpointError, ConfigError
from specjax.models.functional import make_target, pack
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.training.export import read_drafter
from specjax.training.history import LINES
from specjax.trees.topology import chain_mask
from specjax.types import ModelParams
from specjax.verify import greedy
from tests.training.experiment import write_experiment

pytestmark = pytest.mark.quick_compile

VOCAB = 300
FIELDS = {"name": "draft_model", "draft_length": 2}
FLAGS = [
    f"--config.drafter={FIELDS}",
    f"--config.training={{'layers': (1,), 'num_layers': 1, 'draft_vocab_size': {VOCAB}}}",
    "--config.learning_rate=0.02",
    "--config.steps=24",
    "--config.eval_every=24",
    "--config.save_every=24",
]
PROMPTS = [[5, 9, 20], [7, 8, 9, 10, 11, 12], [40]]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a draft model was trained, beside its target."""
    folder = tmp_path_factory.mktemp("draft_model")
    config = write_experiment(folder)
    before = jax.config.jax_compilation_cache_dir
    with pytest.MonkeyPatch.context() as patch:
        # What is compiled here stays out of the user's cache.
        patch.setenv("SPECJAX_CACHE", str(folder / "cache"))
        assert run.main([f"--config={config}", f"--workdir={folder / 'run'}", *FLAGS]) == 0
    jax.config.update("jax_compilation_cache_dir", before)
    return folder


@pytest.fixture(scope="module")
def loaded(workdir: Path) -> LoadedTarget:
    """Its target."""
    return build_target(str(workdir / "target"))


@pytest.fixture(scope="module")
def fields(workdir: Path) -> dict:
    """A drafter of the trained weights."""
    return FIELDS | {"source": str(workdir / "run" / "drafter")}


def texts_of(loaded: LoadedTarget, method: Method, weights) -> list[list[int]]:
    """What the method writes at temperature 0."""
    params = ModelParams(loaded.params, weights)
    warp, keys = make_warp(len(PROMPTS)), row_keys(0, range(len(PROMPTS)))
    request, state = start(method, params, PROMPTS, max_new_tokens=16, warp=warp, keys=keys)
    return new_tokens(generate(method, params, request, state)[0], PROMPTS)


def test_a_few_steps_lower_the_loss(workdir: Path) -> None:
    lines = [json.loads(line) for line in (workdir / "run" / LINES).read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert np.mean(losses[-3:]) < 0.8 * losses[0]
    assert lines[-1]["overlap"] > lines[1]["overlap"]


def test_only_layers_norm_and_vocabulary_are_stored(workdir: Path) -> None:
    weights, about = read_drafter(workdir / "run" / "drafter")
    assert weights.keys() == {"layers", "norm", "d2t"}
    assert list(weights["layers"]) == [0] and weights["d2t"].shape == (VOCAB,)
    assert about["training"]["layers"] == [1]


def test_trained_weights_decode_the_greedy_text(loaded: LoadedTarget, fields: dict) -> None:
    drafter, weights = build_drafter(fields, loaded)
    assert weights["head"]["weight"].shape == (VOCAB, 32)
    method = Method(loaded.target, drafter, greedy.verify)
    assert texts_of(loaded, method, weights) == texts_of(loaded, Method(loaded.target), {})


def test_export_is_a_complete_model_with_the_same_logits(
    loaded: LoadedTarget, fields: dict, tmp_path: Path
) -> None:
    folder = tmp_path / "complete"
    export_drafter(fields, loaded, folder)
    checkpoint, (_, weights) = load(str(folder)), build_drafter(fields, loaded)
    texts = jnp.asarray(np.random.default_rng(0).integers(0, 320, (2, 10)), jnp.int32)
    model, positions = make_target(checkpoint.config), jnp.broadcast_to(jnp.arange(10)[None], (2, 10))
    empty, forward = model.init_cache(2, 10), jax.jit(model.forward)
    out = forward(pack(checkpoint.params), texts, positions, chain_mask(2, 10), empty)
    score = jax.jit(functools.partial(draft_model.text_scores, loaded.target))
    scores = score(ModelParams(loaded.params, weights), texts)
    drafted = out.logits[..., weights["d2t"]]
    np.testing.assert_allclose(drafted, scores, atol=1e-4 * float(jnp.abs(scores).max()))
    assert np.abs(drafted[:, 1:] - scores[:, :-1]).max() > 0.1, "all positions are alike"

    drafter, own = build_drafter(fields | {"source": str(folder)}, loaded)
    assert {"embed_tokens", "layers", "norm"} <= own.keys()
    method = Method(loaded.target, drafter, greedy.verify)
    assert texts_of(loaded, method, own) == texts_of(loaded, Method(loaded.target), {})
    with pytest.raises(CheckpointError, match="exists already"):
        export_drafter(fields, loaded, folder)
    with pytest.raises(ConfigError, match="no weights of its own to export"):
        export_drafter(fields | {"source": str(folder)}, loaded, tmp_path / "again")


def test_weights_of_another_kind_are_refused(loaded: LoadedTarget, fields: dict) -> None:
    with pytest.raises(ConfigError, match="weights for the drafter 'draft_model', not for 'eagle'"):
        build_drafter(fields | {"name": "eagle"}, loaded)
    with pytest.raises(ConfigError, match="weights for the drafter 'eagle', not for 'draft_model'"):
        build_drafter(FIELDS | {"source": "zoo:eagle_smollm2"}, loaded)
    with pytest.raises(ConfigError, match="the zoo has no drafter 'eagle_smollm'"):
        build_drafter(FIELDS | {"source": "zoo:eagle_smollm"}, loaded)
    with pytest.raises(ConfigError, match="'draft_model' needs weights: set drafter.source"):
        build_drafter(FIELDS, loaded)
