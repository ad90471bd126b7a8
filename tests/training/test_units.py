"""Learning in units: the very steps that weights would take whose inputs all have the size 1."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax.training import train_loop
from specjax.training.train_loop import DRAFTER, OPTIMIZERS, TARGET
from specjax.training.units import SETTLED, complete, feature_sizes, in_units, root_mean_square
from tests.training.test_train_loop import SETTINGS

SIZES = np.array([[0.1, 1.0, 20.0, 3.0]], np.float32)
ROWS = jax.random.normal(jax.random.key(0), (64, 4))
WANTED = jax.random.normal(jax.random.key(1), (4, 3))


def learn(inputs: jax.Array, weight: jax.Array, optimizer: optax.GradientTransformation) -> jax.Array:
    """A matrix [3, 4] after some steps towards what it should make of the inputs."""

    def loss(weight: jax.Array) -> jax.Array:
        return jnp.square(inputs @ weight.T - ROWS @ WANTED).mean()

    @jax.jit
    def step(carry: tuple) -> tuple:
        weight, state = carry
        updates, state = optimizer.update(jax.grad(loss)(weight), state, weight)
        return optax.apply_updates(weight, updates), state

    carry = (weight, optimizer.init(weight))
    for _ in range(5):
        carry = step(carry)
    return carry[0]


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_steps_are_those_of_inputs_of_size_1(name: str) -> None:
    make = {"sgd": optax.sgd, "adamw": optax.adamw, "muon": optax.contrib.muon}[name]
    first = jax.random.normal(jax.random.key(2), (3, 4))
    expected = learn(ROWS, first, make(0.1)) / SIZES
    found = learn(ROWS * SIZES, first / SIZES, in_units(make(0.1), 1 / SIZES))
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-5)
    without = learn(ROWS * SIZES, first / SIZES, make(0.1))
    assert np.abs(np.asarray(without - expected) * SIZES).max() > 0.05


def test_sizes_are_of_tokens_that_are_known_and_settled() -> None:
    length, draw = np.array([SETTLED + 5, 3]), np.random.default_rng(0)
    states = draw.normal(size=(2, SETTLED + 9, 6)).astype(np.float32)
    counted = states[0, SETTLED : SETTLED + 4]
    found = feature_sizes({"last_hidden": states}, length)["last_hidden"]
    np.testing.assert_allclose(found, np.sqrt((counted**2).mean(0)), rtol=1e-6)
    # Of short texts all there is.
    short = feature_sizes({"last_hidden": states[1:]}, length[1:])["last_hidden"]
    np.testing.assert_allclose(short, np.sqrt((states[1, :2] ** 2).mean(0)), rtol=1e-6)


def test_sizes_are_weighted_and_never_0() -> None:
    rows = np.array([[3.0, 0.0], [4.0, 0.0], [100.0, 0.0]])
    np.testing.assert_allclose(root_mean_square(rows, np.array([1, 1, 0])), [np.sqrt(12.5), 1.0])


def test_a_unit_for_every_weight() -> None:
    weights = {
        "fc": {"weight": np.ones((2, 4)), "bias": np.ones(2)},
        "layers": {0: {"weight": np.ones((2, 2))}},
    }
    units = complete({"fc": {"weight": SIZES}}, weights)
    assert jax.tree.structure(units) == jax.tree.structure(weights)
    assert units["fc"]["weight"] is SIZES and units["fc"]["bias"] == units["layers"][0]["weight"] == 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_muon_is_for_the_drafters_matrices_but_its_head(optimizer: str) -> None:
    """The singular values of its steps are alike; Adam's first steps are signs."""
    draw = np.random.default_rng(0)
    matrix = np.outer(draw.normal(size=6), draw.normal(size=8)) + 0.1 * draw.normal(size=(6, 8))
    weights = {"fc": {"weight": matrix, "bias": draw.normal(size=6)}, "lm_head": {"weight": matrix}}
    params = jax.tree.map(jnp.float32, {DRAFTER: weights, TARGET: {"fc": {"weight": matrix}}})
    settings = SETTINGS._replace(optimizer=optimizer, clip=1e9)
    rule = train_loop.make_optimizer(settings, complete({}, params))
    updates, _ = rule.update(params, rule.init(params), params)

    def spread(update: jax.Array) -> float:
        values = np.linalg.svd(update, compute_uv=False)
        return float(values[0] / values[-1])

    by_muon = spread(updates[DRAFTER]["fc"]["weight"]) < 3
    assert by_muon == (optimizer == "muon")
    for update in (updates[DRAFTER]["lm_head"]["weight"], updates[TARGET]["fc"]["weight"]):
        assert spread(update) > 3
        assert np.unique(np.abs(update).round(6)).size == 1
