"""The accuracies of Medusa's heads are those of reading every place by itself."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.medusa_tree import measure
from specjax import draft_vocab
from specjax.data.feature_store import features_path, write_features
from specjax.data.token_store import Sample, write_samples
from specjax.drafters import medusa
from specjax.models.functional import LAST_HIDDEN, init_module, pure
from specjax.types import ModelParams, Params, Target


@pytest.mark.parametrize("drafted", [32, 20])
def test_ranks_are_those_of_single_places(
    tiny_target: Target, tiny_params: Params, tmp_path: Path, drafted: int
) -> None:
    config = medusa.Config(draft_length=2)
    make = medusa.module_of(config, tiny_target)
    weights = init_module(make, jax.random.key(0))
    weights = jax.tree.map(lambda leaf: leaf + jax.random.normal(jax.random.key(1), leaf.shape), weights)
    if drafted < 32:
        weights |= draft_vocab.choose(np.arange(32), drafted)
    params = ModelParams(tiny_params, weights)
    rng = np.random.default_rng(0)
    samples, states = [], []
    for temperature, length in ((0.0, 200), (1.0, 30), (0.0, 9)):
        tokens = rng.integers(0, 32, length).astype(np.int32)
        samples.append(Sample(tokens, np.arange(length) >= 4, temperature, "test"))
        states.append(rng.standard_normal((length - 1, 32)).astype(np.float32))
    path = tmp_path / "tokens-00000.array_record"
    write_samples(path, samples)
    write_features(features_path(path), {LAST_HIDDEN: states})

    wanted = np.zeros((2, measure.NUM_RANKS + 1), int)
    for sample, own in ((samples[0], states[0]), (samples[2], states[2])):
        outputs = pure(make)(medusa.heads_of(params), own[None])
        for head in range(2):
            scores = medusa.scores_of(tiny_target, params, outputs[head])
            scores = np.asarray(draft_vocab.in_target_vocab(scores, params, 32))[0]
            for place in range(len(own)):
                foreseen = place + 2 + head
                if place + 1 >= 4 and foreseen < len(sample.tokens):
                    rank = (scores[place] > scores[place, sample.tokens[foreseen]]).sum()
                    wanted[head, -1] += 1
                    if rank < measure.NUM_RANKS:
                        wanted[head, rank] += 1
    found = measure.count(config, tiny_target, params, [path])
    assert (found == wanted).all() and wanted[:, -1].tolist() == [195 + 4, 194 + 3]
