"""A tiny model, texts that it wrote and a config to train on them: what the tests of training share."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specjax.build import build_target
from specjax.data import feature_store, token_store
from specjax.data.features import recording
from specjax.data.self_written import Job, Settings, write
from specjax.data.token_store import SUFFIX, Sample
from specjax.types import ModelParams
from tests.model_folder import write_model

NUM_TEXTS, NEW_TOKENS = 40, 12
CONFIG = """
from specjax.config import run_config

def get_config():
    config = run_config("train")
    config.target = {target!r}
    config.drafter = {{"name": "tests.training.toy_drafter"}}
    config.data = ({texts!r},)
    config.batch_size, config.max_length = 8, 24
    config.steps, config.warmup, config.learning_rate = 12, 2, 0.3
    config.log_every, config.save_every, config.eval_every = 2, 4, 6
    config.held_out, config.eval_prompts, config.eval_new_tokens = 6, 4, 8
    config.eval_draft_length = 4
    return config
"""


def write_experiment(folder: Path) -> Path:
    """The path of a config, which trains the toy drafter."""
    target = write_model(folder / "target")
    texts = folder / "texts"
    texts.mkdir()
    write_texts(texts, target)
    config = folder / "config.py"
    config.write_text(CONFIG.format(target=str(target), texts=str(texts)))
    return config


def write_texts(folder: Path, target: Path, count: int = NUM_TEXTS) -> None:
    """Two files of what the model writes after random prompts, with its features beside them."""
    loaded = build_target(str(target))
    draw = np.random.default_rng(0)
    prompts = [tuple(draw.integers(3, 300, size=draw.integers(2, 8)).tolist()) for _ in range(count)]
    jobs = [Job(number, prompt, 0.0) for number, prompt in enumerate(prompts)]
    method = recording(loaded.target, ("last_hidden",))
    settings = Settings(16, 32, NEW_TOKENS, 1.0, 0, loaded.tokenizer.stop_tokens)
    written = sorted(write(method, ModelParams(loaded.params, {}), jobs, settings), key=lambda one: one.job)
    for number, part in enumerate((written[: count // 2], written[count // 2 :])):
        path = folder / f"tokens-{number:05d}{SUFFIX}"
        features = {"last_hidden": [one.features["last_hidden"] for one in part]}
        feature_store.write_features(feature_store.features_path(path), features)
        token_store.write_samples(path, [_sample(one) for one in part])


def _sample(one) -> Sample:
    tokens = np.asarray(one.tokens, np.int32)
    return Sample(tokens, np.arange(len(tokens)) >= len(one.job.prompt), 0.0, "made up")
