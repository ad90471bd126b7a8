"""Training goes on from published drafters: what they compute at first, what learns, and what it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from specjax import build_learned, draft_vocab
from specjax.build import LoadedTarget, build_drafter, build_target
from specjax.checkpoints.drafters import load_drafter
from specjax.checkpoints.export import save_folder
from specjax.checkpoints.names import flatten
from specjax.checkpoints.source import Checkpoint
from specjax.config import Options, run_config
from specjax.data import batches, token_store
from specjax.data.token_store import SUFFIX, Sample
from specjax.decode import generate, new_tokens, row_keys, start
from specjax.errors import ConfigError
from specjax.models.functional import unpack
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.tasks import train
from specjax.training import export, train_loop
from specjax.training.history import LINES
from specjax.training.measure import make_measure
from specjax.training.train_loop import DRAFTER
from specjax.trees.topology import chain_mask
from specjax.types import ModelParams, TrainingBatch
from specjax.verify import greedy
from tests.checkpoints import drafter_files as files
from tests.checkpoints.drafter_files import DRAFTED, HIDDEN, VOCAB, write
from tests.checkpoints.drafter_target import laws_of, load_target

pytestmark = pytest.mark.quick_compile
PROMPT = [3, 1, 4, 1, 5, 9, 2]
MEDUSA = "medusa_lm_head.safetensors"


def normed_residual() -> tuple[dict[str, Any], files.Tensors]:
    """EAGLE-3 as speculators writes it, wider than the target, with the other residual."""
    about, tensors = files.eagle3(2 * HIDDEN, norm_before_residual=True)
    return files.speculators(about), files.respelled(tensors)


# A drafter, and what of it does not learn.
VARIANTS: dict[str, tuple[Callable[[], tuple[dict[str, Any], files.Tensors]], set[str]]] = {
    "eagle": (lambda: files.eagle(embedding=True), {"embed_tokens"}),
    "eagle3": (lambda: files.eagle3(reduced=False), set()),
    "eagle3 normed residual": (normed_residual, {"d2t", "embed_tokens"}),
    "eagle3 without fusion": (files.eagle3_without_fusion, {"d2t", "embed_tokens", "fc"}),
    "medusa": (files.medusa, set()),
    "medusa legacy": (lambda: files.medusa(own=False), set()),
}


class Setting(NamedTuple):
    """A target on disk and loaded, and texts to learn from."""

    folder: Path
    loaded: LoadedTarget


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder, loaded = tmp_path_factory.mktemp("published"), load_target()
    weights = jax.tree.map(np.asarray, unpack(loaded.params, loaded.config))
    save_folder(Checkpoint(loaded.config, weights, None, "it"), folder / "target")
    (folder / "texts").mkdir()
    rng, supervised = np.random.default_rng(0), np.arange(12) >= 4
    samples = [Sample(rng.integers(0, VOCAB, 12, np.int32), supervised, 0.0, "made up") for _ in range(12)]
    token_store.write_samples(folder / "texts" / f"tokens-00000{SUFFIX}", samples)
    return Setting(folder, build_target(str(folder / "target")))


def config_of(setting: Setting, name: str, source: str, **training: Any) -> ConfigDict:
    config = run_config("train")
    config.target, config.data = str(setting.folder / "target"), (str(setting.folder / "texts"),)
    config.drafter = {"name": name, "draft_length": 2, "source": source}
    config.training = training
    config.batch_size, config.max_length, config.steps, config.warmup = 2, 12, 2, 1
    config.held_out, config.eval_prompts, config.eval_new_tokens = 2, 2, 6
    config.log_every, config.eval_every, config.save_every = 1, 2, 2
    return config


def publish(folder: Path, variant: str) -> tuple[str, str]:
    """The drafter's name, and the folder of it."""
    name, make = variant.split()[0], VARIANTS[variant][0]
    file = {"name": MEDUSA} if name == "medusa" else {}
    return name, str(write(folder / "published", *make(), **file))


def texts_of(setting: Setting, config: ConfigDict) -> list[batches.Text]:
    return batches.load_texts(config.data, config.max_length, config.supervise, VOCAB)


def subject_of(setting: Setting, config: ConfigDict) -> train.Subject:
    return train.make_subject(config, setting.loaded, texts_of(setting, config))


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_learns_what_was_published_and_all_of_it(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """Its loss sees the laws that the published drafter drafts by, and has a gradient for every weight."""
    name, source = publish(tmp_path, variant)
    quiet = {"noise": 0.0} if name == "eagle" else {}
    subject, loaded = subject_of(setting, config_of(setting, name, source, **quiet)), setting.loaded
    fields = {"name": name, "source": source, "draft_length": 2}
    laws, first = laws_of(loaded, *build_drafter(fields, loaded), PROMPT)
    texts = jnp.asarray([[*PROMPT, first, 0]])
    size, seen = texts.shape[1], []
    foresight = subject.module.foresight

    def spying(logits, *rest):
        seen.append(logits)
        return foresight(logits, *rest)

    monkeypatch.setattr(subject.module, "foresight", spying)

    @jax.jit
    def learn(learned):
        params = train_loop.model_params(learned, subject.frozen, jnp.float32)
        empty, place = loaded.target.init_cache(1, size), jnp.arange(size)[None]
        names = subject.trainable.features
        read = loaded.target.forward(params.target, texts, place, chain_mask(1, size), empty, names)
        everywhere = jnp.ones(texts.shape, bool)
        batch = TrainingBatch(texts, everywhere, jnp.full(1, size), read.features)
        seen.clear()
        loss, _ = subject.trainable.loss(params, batch, jax.random.key(0))
        return loss, [draft_vocab.in_target_vocab(logits, params, VOCAB) for logits in seen]

    gradients, logits = jax.grad(learn, has_aux=True)(subject.learning)
    last = len(PROMPT) - 2  # the place before the pending token
    for depth, law in enumerate(laws):
        found = jax.nn.softmax(logits[depth][0, last + (0 if name == "medusa" else depth)])
        np.testing.assert_allclose(found, law, atol=1e-5)
    assert subject.fixed.keys() == VARIANTS[variant][1]
    for weight, gradient in flatten(gradients[DRAFTER]).items():
        assert np.isfinite(gradient).all() and np.any(gradient), weight


@pytest.mark.parametrize("variant", ["eagle3 normed residual", "medusa"])
def test_what_training_leaves_is_published_again_and_decodes(
    setting: Setting, tmp_path: Path, variant: str
) -> None:
    name, source = publish(tmp_path, variant)
    config, loaded = config_of(setting, name, source), setting.loaded
    fields = {"name": name, "source": source, "draft_length": 2}
    (tmp_path / "run").mkdir()
    assert train.run(Options(config, tmp_path / "run", False)) == 0
    first, *_ = map(json.loads, (tmp_path / "run" / LINES).read_text().splitlines())
    _, held_out = batches.split(texts_of(setting, config), config.held_out, config.seed)
    drafter, weights = build_drafter(fields, loaded)
    method = Method(loaded.target, drafter, greedy.verify)
    prompts = [batches.prompt(text) for text in held_out]
    measure = make_measure(method, prompts, max_new_tokens=6, stop_tokens=())
    expected = measure(ModelParams(loaded.params, weights))
    assert first["held_out/tokens_per_step"] == expected.tokens_per_step

    folder = tmp_path / "run" / "drafter"
    before, after = (load_drafter(Path(f), name, loaded.target, "it") for f in (source, folder))
    assert (after.architecture, after.fields) == (before.architecture, before.fields)
    for weight, leaf in flatten(after.weights).items():
        np.testing.assert_allclose(leaf, flatten(before.weights)[weight], rtol=0.01, atol=0.01)
    assert json.loads((folder / export.ABOUT_PUBLISHED).read_text())["config"]["source"] == source

    drafter, weights = build_drafter(fields | {"source": str(folder)}, loaded)
    texts = []
    for method in (Method(loaded.target), Method(loaded.target, drafter, greedy.verify)):
        params, keys, warp = ModelParams(loaded.params, weights), row_keys(0, range(2)), make_warp(2)
        request, state = start(method, params, [PROMPT, [7]], max_new_tokens=12, warp=warp, keys=keys)
        texts.append(new_tokens(generate(method, params, request, state)[0], [PROMPT, [7]]))
    assert texts[0] == texts[1]
    # A finished run that is called again writes the same over it.
    assert train.run(Options(config, tmp_path / "run", False)) == 0
    assert sorted(path.name for path in folder.parent.iterdir() if path.name.startswith(".")) == []


def test_a_head_without_a_draft_vocabulary_may_be_given_one(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, source = publish(tmp_path, "eagle")
    monkeypatch.setattr(build_learned, "fetch", {"hf:owner/name": Path(source)}.get)
    subject = subject_of(setting, config_of(setting, name, "hf:owner/name", draft_vocab_size=6))
    assert subject.fixed["d2t"].shape == (6,) and subject.frozen[DRAFTER]["head"]["weight"].shape == (
        6,
        HIDDEN,
    )


@pytest.mark.parametrize("is_published", [False, True])
def test_vocabulary_is_that_of_the_source_whatever_the_texts(
    setting: Setting, tmp_path: Path, is_published: bool
) -> None:
    """A map chosen anew would give the rows of the head other tokens."""
    name, source = publish(tmp_path, "eagle3 normed residual")
    config = config_of(setting, name, source)
    if not is_published:
        config.drafter = {"name": name, "draft_length": 2, "draft_vocab_size": len(DRAFTED)}
        own = subject_of(setting, config)
        assert own.fixed["d2t"].tolist() != list(DRAFTED)  # what the texts would choose
        weights = own.learning[DRAFTER] | {"d2t": jnp.asarray(DRAFTED, jnp.int32)}
        export.write_drafter(tmp_path / "own", weights, {"drafter": name})
        config.drafter.source = str(tmp_path / "own")
    subject = subject_of(setting, config)
    assert np.asarray(subject.fixed["d2t"]).tolist() == list(DRAFTED)


@pytest.mark.parametrize(
    ("variant", "name", "drafter", "training", "words"),
    [
        ("medusa", "eagle", {}, {}, "weights for the drafter 'medusa', not for 'eagle'"),
        (
            "eagle3",
            "eagle3",
            {"state_layers": (0, 1)},
            {},
            r"state_layers is \(0, 1\) and .* leave the field",
        ),
        ("eagle3", "eagle3", {"draft_vocab_size": 5}, {}, "drafter.draft_vocab_size is 5 and .* has 20"),
        (
            "eagle reduced",
            "eagle",
            {},
            {"draft_vocab_size": 5},
            "training.draft_vocab_size is 5 and .* 6 tok",
        ),
    ],
)
def test_settings_that_the_files_contradict_are_refused(
    setting: Setting,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    name: str,
    drafter: dict[str, Any],
    training: dict[str, Any],
    words: str,
) -> None:
    about, tensors = files.eagle()
    tensors["d2t"] = np.array(DRAFTED) - np.arange(len(DRAFTED))
    monkeypatch.setitem(VARIANTS, "eagle reduced", (lambda: (about, tensors), set()))
    _, source = publish(tmp_path, variant)
    config = config_of(setting, name, source, **training)
    config.drafter.update(drafter)
    with pytest.raises(ConfigError, match=words):
        subject_of(setting, config)
