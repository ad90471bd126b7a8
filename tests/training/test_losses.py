"""Distances against their formulas in float64, and their gradients where logits are extreme."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special
from scipy.spatial.distance import jensenshannon

from specjax.errors import ConfigError
from specjax.training import losses

V = 11
REFERENCES = {
    "forward_kl": lambda p, q: special.rel_entr(p, q).sum(-1),
    "reverse_kl": lambda p, q: special.rel_entr(q, p).sum(-1),
    "jensen_shannon": lambda p, q: jensenshannon(p, q, axis=-1) ** 2,
    "total_variation": lambda p, q: np.abs(p - q).sum(-1) / 2,
}
NAMES = list(losses.DISTANCES)


def drawn(scale: float, shape: tuple[int, ...] = (3, 5, V)) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    return scale * draw.normal(size=shape), scale * draw.normal(size=shape)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_distance_is_its_formula(name: str, scale: float) -> None:
    target, draft = drawn(scale)
    found = losses.distance_named(name)(jnp.asarray(target, jnp.float32), jnp.asarray(draft, jnp.float32))
    expected = REFERENCES[name](special.softmax(target, -1), special.softmax(draft, -1))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=3e-7 * max(scale, 1))


@pytest.mark.parametrize("name", NAMES)
def test_distance_is_0_at_equality_and_not_below(name: str) -> None:
    target, draft = (jnp.asarray(part, jnp.float32) for part in drawn(3.0))
    distance = losses.distance_named(name)
    # The same law, from other logits.
    np.testing.assert_allclose(distance(target, target + 5), 0, atol=1e-6)
    assert np.asarray(distance(target, draft)).min() > 0
    np.testing.assert_allclose(jax.grad(lambda d: distance(target, d).sum())(target), 0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_the_formulas(name: str) -> None:
    target, draft = drawn(1.0, (V,))
    found = jax.grad(losses.distance_named(name), argnums=1)(
        jnp.asarray(target, jnp.float32), jnp.asarray(draft, jnp.float32)
    )
    step, p = 1e-6, special.softmax(target)
    of = REFERENCES[name]
    expected = [
        (of(p, special.softmax(draft + step * e)) - of(p, special.softmax(draft - step * e))) / (2 * step)
        for e in np.eye(V)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("masked", [False, True])
def test_extreme_logits_keep_values_and_gradients_finite(name: str, masked: bool) -> None:
    target, draft = (np.float32(np.sign(part) * 1e4) for part in drawn(1.0))
    target[0, 0], draft[0, 0] = 0, 0
    target[0, 1, 0], draft[0, 1, 1] = 3e4, 3e4
    if masked:
        target[..., -3:] = draft[..., -3:] = -np.inf
    distance = losses.distance_named(name)
    value, gradients = jax.value_and_grad(lambda t, d: distance(t, d).sum(), argnums=(0, 1))(target, draft)
    assert np.isfinite(value)
    assert all(np.isfinite(np.asarray(gradient)).all() for gradient in gradients)


def test_half_precision_is_computed_in_single() -> None:
    target, draft = (jnp.asarray(part, jnp.bfloat16) for part in drawn(10.0))
    found = losses.forward_kl(target, draft)
    assert found.dtype == jnp.float32
    whole = losses.forward_kl(target.astype(jnp.float32), draft.astype(jnp.float32))
    np.testing.assert_array_equal(found, whole)


def test_cross_entropy_is_minus_the_log_probability() -> None:
    _, draft = drawn(2.0)
    tokens = np.random.default_rng(1).integers(V, size=draft.shape[:-1])
    expected = -np.take_along_axis(special.log_softmax(draft, -1), tokens[..., None], -1)[..., 0]
    found = losses.cross_entropy(jnp.asarray(tokens), jnp.asarray(draft, jnp.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_smooth_l1_is_quadratic_inside_and_linear_outside() -> None:
    found = losses.smooth_l1(jnp.zeros((2, 2)), jnp.asarray([[0.5, -0.5], [3.0, -1.0]]))
    np.testing.assert_allclose(found, [0.125, (2.5 + 0.5) / 2])


def test_masked_mean_counts_what_the_mask_holds() -> None:
    values = jnp.asarray([[1.0, np.nan], [5.0, np.inf]])
    mask = jnp.asarray([[True, False], [True, False]])
    assert losses.masked_mean(values, mask) == 3
    assert losses.masked_mean(values, jnp.zeros_like(mask)) == 0
    gradient = jax.grad(lambda values: losses.masked_mean(values, mask))(values)
    np.testing.assert_array_equal(gradient, [[0.5, 0], [0.5, 0]])


def test_unknown_distance_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'forward_kl'"):
        losses.distance_named("foward_kl")
