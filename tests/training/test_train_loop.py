"""The step: what it minimises, what it leaves alone, and that it is compiled once."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.functional import make_target
from specjax.models.llama import LlamaConfig
from specjax.training import train_loop
from specjax.training.train_loop import DRAFTER, TARGET, Settings
from specjax.types import Params, Target, TrainingBatch
from tests.training import toy_drafter

SETTINGS = Settings(
    optimizer="adamw",
    steps=20,
    learning_rate=0.1,
    target_learning_rate=1e-3,
    warmup=2,
    weight_decay=0.0,
    clip=1.0,
    ema=0.0,
    seed=0,
)


def make_batch(seed: int = 0, batch: int = 3, size: int = 10) -> TrainingBatch:
    draw = np.random.default_rng(seed)
    length = draw.integers(5, size + 1, size=batch)
    place = np.arange(size)[None]
    tokens = np.where(place < length[:, None], draw.integers(32, size=(batch, size)), 0)
    supervised = (place >= 2) & (place < length[:, None])
    return TrainingBatch(*map(jnp.asarray, (tokens, supervised, length)), {})


def begin(target: Target, params: Params, settings: Settings = SETTINGS, **training):
    """A trainable, its step, its first state and what does not learn."""
    trainable = toy_drafter.trainable(toy_drafter.Config(), toy_drafter.Training(**training), target)
    weights, fixed = trainable.init(jax.random.key(1), params, np.ones(target.vocab_size, int))
    learning, frozen = {DRAFTER: weights}, {DRAFTER: fixed}
    (learning if trainable.trains_target else frozen)[TARGET] = params
    step = train_loop.make_step(trainable, target, settings)
    return trainable, step, train_loop.init_state(learning, settings), frozen


def test_loss_falls_and_is_compiled_once(tiny_target: Target, tiny_params: Params) -> None:
    _, step, state, frozen = begin(tiny_target, tiny_params)
    reported = []
    for _ in range(20):
        state, metrics = step(state, frozen, make_batch())
        reported.append(jax.device_get(metrics))
    assert reported[-1]["loss"] < reported[0]["loss"] / 2
    assert reported[0].keys() == {"loss", "agreement", "gradient_norm", "learning_rate", "tokens"}
    assert reported[0]["tokens"] == make_batch().length.sum()
    assert state.step == 20
    assert step._cache_size() == 1


def test_features_that_a_batch_has_are_not_computed(tiny_target: Target, tiny_params: Params) -> None:
    batch = make_batch()
    trainable, step, state, frozen = begin(tiny_target, tiny_params)
    computed = train_loop.with_features(
        trainable, tiny_target, train_loop.model_params(state.params, frozen, jnp.float32), batch
    )
    assert computed.features["last_hidden"].shape == (3, 10, 32)
    programs = [jax.jit(step).lower(state, frozen, given).as_text() for given in (batch, computed)]
    # Only the target has norms.
    assert ["rsqrt" in text for text in programs] == [True, False]
    of_batch = jax.device_get(step(jax.tree.map(jnp.copy, state), frozen, batch)[1])
    of_computed = jax.device_get(step(state, frozen, computed)[1])
    for name, value in of_batch.items():
        np.testing.assert_allclose(value, of_computed[name], rtol=1e-5)


def test_features_are_those_of_decoding(tiny_target: Target, tiny_params: Params) -> None:
    """At every token, whatever comes behind it: the states of a pass over the text up to there."""
    batch = make_batch()
    trainable, _, state, frozen = begin(tiny_target, tiny_params)
    params = train_loop.model_params(state.params, frozen, jnp.float32)
    found = train_loop.with_features(trainable, tiny_target, params, batch).features["last_hidden"]
    cut = 4
    short = batch._replace(tokens=batch.tokens[:, :cut])
    expected = train_loop.with_features(trainable, tiny_target, params, short).features["last_hidden"]
    np.testing.assert_allclose(found[:, :cut], expected, rtol=1e-4, atol=1e-5)


def test_target_learns_at_its_own_rate_or_not_at_all(tiny_target: Target, tiny_params: Params) -> None:
    def moved(settings: Settings, **training) -> dict[str, float]:
        _, step, state, frozen = begin(tiny_target, tiny_params, settings, **training)
        before = jax.device_get(state.params)
        state, _ = step(state, frozen, make_batch())
        after = jax.device_get(state.params)
        pairs = {
            name: zip(*map(jax.tree.leaves, (before[name], after[name])), strict=True) for name in before
        }
        return {name: max(np.abs(a - b).max() for a, b in both) for name, both in pairs.items()}

    assert moved(SETTINGS).keys() == {DRAFTER}
    together = moved(SETTINGS, trains_target=True)
    # The first step of Adam moves by the rate, which is here a third of its peak.
    np.testing.assert_allclose(together[DRAFTER], 0.1 / 3, rtol=1e-2)
    np.testing.assert_allclose(together[TARGET], 1e-3 / 3, rtol=1e-2)
    # The caller's weights are as they were.
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(tiny_params))


def test_noise_differs_from_step_to_step_and_repeats_with_the_seed(
    tiny_target: Target, tiny_params: Params
) -> None:
    def losses(seed: int) -> list[float]:
        settings = SETTINGS._replace(learning_rate=1e-9, seed=seed)
        _, step, state, frozen = begin(tiny_target, tiny_params, settings, noise=1.0)
        found = []
        for _ in range(2):
            state, metrics = step(state, frozen, make_batch())
            found.append(float(metrics["loss"]))
        return found

    first = losses(0)
    assert first[0] != pytest.approx(first[1])
    assert losses(0) == first
    assert losses(1)[0] != pytest.approx(first[0])


def test_average_follows_the_weights_and_is_what_counts(tiny_target: Target, tiny_params: Params) -> None:
    _, step, state, frozen = begin(tiny_target, tiny_params, SETTINGS._replace(ema=0.5))
    expected = np.asarray(state.params[DRAFTER]["table"])
    for number in range(15):
        state, _ = step(state, frozen, make_batch())
        share = max(0.5, 9 / (10 + number))
        expected = expected + share * (np.asarray(state.params[DRAFTER]["table"]) - expected)
    np.testing.assert_allclose(train_loop.learned(state)[DRAFTER]["table"], expected, rtol=1e-5, atol=1e-6)
    assert train_loop.learned(state._replace(ema=())) is state.params


def test_weights_learn_in_float32_beside_a_target_in_half_precision(
    tiny_config: LlamaConfig, tiny_params: Params
) -> None:
    """Steps of a ten-thousandth would be lost on weights of 1 in bfloat16."""
    target = make_target(tiny_config, dtype=jnp.bfloat16)
    halved = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny_params)
    _, step, state, frozen = begin(target, halved, SETTINGS._replace(learning_rate=1e-4))
    state.params[DRAFTER]["table"] += 1
    before = np.asarray(state.params[DRAFTER]["table"])
    for _ in range(5):
        state, metrics = step(state, frozen, make_batch())
    assert np.isfinite(metrics["loss"])
    after = state.params[DRAFTER]["table"]
    assert after.dtype == jnp.float32
    assert (np.abs(after - before).max(1) > 1e-4)[make_batch().tokens[0, 1]]
    assert train_loop.model_params(state.params, frozen, target.dtype).drafter["table"].dtype == jnp.bfloat16


def test_gradients_are_clipped(tiny_target: Target, tiny_params: Params) -> None:
    """After one step Adam's first moment is a tenth of the clipped gradient."""
    _, step, state, frozen = begin(tiny_target, tiny_params, SETTINGS._replace(clip=1e-3))
    state, metrics = step(state, frozen, make_batch())
    assert metrics["gradient_norm"] > 1e-3
    moments = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state)
        if ".mu" in jax.tree_util.keystr(path)
    ]
    np.testing.assert_allclose(np.sqrt(sum(np.square(m).sum() for m in moments)), 1e-4, rtol=1e-3)


def test_learning_rate_rises_to_its_peak_and_falls_to_0() -> None:
    rate = train_loop.learning_rate(2.0, warmup=4, steps=20)
    rates = [float(rate(jnp.asarray(step))) for step in range(21)]
    np.testing.assert_allclose(rates[:5], [0.4, 0.8, 1.2, 1.6, 2.0], rtol=1e-6)
    np.testing.assert_allclose(rates[12], 1.0, rtol=1e-6)
    assert all(a > b for a, b in itertools.pairwise(rates[4:]))
    np.testing.assert_allclose(rates[20], 0, atol=1e-6)
