"""The warped law against transformers' own chain of warpers, and draws against the law they come from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from specjax import sampling
from specjax.decode import row_keys
from specjax.errors import ConfigError
from specjax.sampling import make_warp, prob_of, residual, split_keys
from specjax.types import NO_TOKEN, Warp

warp_probs = jax.jit(sampling.warp_probs)
sample = jax.jit(sampling.sample)

# temperature, top_k, top_p, min_p: each alone, then together, then at their ends.
SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.5, 0, 1.0, 0.0),
    (1.7, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.0, 5000, 1.0, 0.0),
    (1.0, 0, 0.1, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.0, 0, 0.999, 0.0),
    (1.0, 0, 1.0, 0.2),
    (1.0, 0, 1.0, 1.0),
    (0.7, 6, 0.8, 0.0),
    (1.5, 7, 0.95, 0.1),
    (0.001, 0, 1.0, 0.0),
    (0.001, 3, 0.9, 0.1),
]


def rows_of(settings: list[tuple[float, int, float, float]]) -> Warp:
    temperature, top_k, top_p, min_p = (jnp.asarray(column) for column in zip(*settings, strict=True))
    return Warp(temperature, top_k, top_p, min_p)


def by_transformers(logits: np.ndarray, setting: tuple[float, int, float, float]) -> np.ndarray:
    """The law [N, V] that `generate` of transformers would sample from."""
    torch = pytest.importorskip("torch")
    from transformers import generation

    temperature, top_k, top_p, min_p = setting
    warpers = [generation.TemperatureLogitsWarper(temperature)]
    warpers += [generation.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [generation.TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [generation.MinPLogitsWarper(min_p)] if min_p else []
    scores = torch.tensor(logits)
    for warper in warpers:
        scores = warper(None, scores)
    return torch.softmax(scores, -1).numpy()


@pytest.mark.parametrize("vocab_size", [8, 1000])
def test_mixed_rows_equal_transformers_with_argmax_rows_beside(vocab_size: int) -> None:
    settings = [*SETTINGS, (0.0, 0, 1.0, 0.0), (0.0, 3, 0.5, 0.1)]
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(scale=3.0, size=(len(settings), 4, vocab_size)).astype(np.float32)
    probs = np.asarray(warp_probs(logits, rows_of(settings)))
    for row, setting in enumerate(SETTINGS):
        wanted = by_transformers(logits[row], setting)
        np.testing.assert_array_equal(probs[row] > 0, wanted > 0, err_msg=str(setting))
        np.testing.assert_allclose(probs[row], wanted, atol=2e-6, err_msg=str(setting))
    argmax = np.eye(vocab_size, dtype=np.float32)[logits.argmax(-1)]
    np.testing.assert_array_equal(probs[len(SETTINGS) :], argmax[len(SETTINGS) :])


def test_a_row_does_not_depend_on_the_settings_beside_it() -> None:
    logits = np.random.default_rng(1).normal(size=(1, 2, 8)).astype(np.float32)
    every = warp_probs(jnp.tile(logits, (len(SETTINGS), 1, 1)), rows_of(SETTINGS))
    for row, setting in enumerate(SETTINGS):
        alone = warp_probs(jnp.asarray(logits), rows_of([setting]))
        np.testing.assert_allclose(every[row], alone[0], atol=1e-7, err_msg=str(setting))


def test_thresholds_are_exact_at_neighbouring_floats() -> None:
    # Two laws that differ in the last bit: top-1 must keep the larger only.
    larger = np.float32(0.25)
    smaller = np.nextafter(larger, np.float32(0))
    logits = np.log(np.array([[[0.2, larger, smaller, 0.1]]], np.float64)).astype(np.float32)
    logits[0, 0, 2] = np.nextafter(logits[0, 0, 1], np.float32(-10))
    probs = warp_probs(jnp.asarray(logits), make_warp(1, 1.0, top_k=1))[0, 0]
    assert np.flatnonzero(np.asarray(probs)).tolist() == [1]


def test_top_p_keeps_the_token_that_reaches_the_mass() -> None:
    logits = jnp.log(jnp.asarray([[[0.5, 0.25, 0.125, 0.125]]]))
    for top_p, kept in [(0.4, 1), (0.6, 2), (0.75, 2), (0.76, 4)]:  # the last two tie: both are kept
        probs = warp_probs(logits, make_warp(1, 1.0, top_p=top_p))
        assert int((probs > 0).sum()) == kept, top_p


@pytest.mark.parametrize("temperature", [1e-3, 1.0, 1e3])
def test_huge_logits_stay_finite(temperature: float) -> None:
    logits = jnp.asarray([[[1e4, 2e4, -3e4, 0.0], [-1e30, -1e30, 0.0, -1e30]]])
    probs = warp_probs(logits, make_warp(1, temperature, top_k=2, top_p=0.9, min_p=0.1))
    np.testing.assert_allclose(probs.sum(-1), 1.0, rtol=1e-6)
    assert jnp.argmax(probs, -1).tolist() == [[1, 2]]


def test_argmax_of_equal_logits_is_the_first() -> None:
    probs = warp_probs(jnp.zeros((1, 1, 5)), make_warp(1, 0.0))
    assert probs[0, 0].tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": 1.0, "top_k": -1}, "top_k"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p"),
        ({"temperature": 1.0, "top_p": float("nan")}, "top_p"),
        ({"temperature": 1.0, "min_p": -0.1}, "min_p"),
        ({"temperature": 1.0, "min_p": 1.1}, "min_p"),
    ],
)
def test_invalid_settings_are_named(settings: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named} is "):
        make_warp(2, **settings)


def test_draws_follow_the_law_and_not_another() -> None:
    # A total variation of 0.02 is found at p < 1e-3 with a power above 0.99, and is found.
    law = np.array([0.4, 0.0, 0.3, 0.2, 0.1])
    rows = 50_000
    draws = sample(row_keys(0, range(rows)), jnp.broadcast_to(jnp.asarray(law, jnp.float32), (rows, 5)))
    counts = np.bincount(np.asarray(draws), minlength=5)
    assert counts[1] == 0
    held = law > 0
    assert stats.chisquare(counts[held], rows * law[held]).pvalue > 1e-3
    other = law[held] + [0.02, -0.02, 0.0, 0.0]
    assert stats.chisquare(counts[held], rows * other).pvalue < 1e-3
    noncentrality = rows * (0.02**2 / law[0] + 0.02**2 / law[2])
    assert stats.ncx2.sf(stats.chi2.isf(1e-3, 3), 3, noncentrality) > 0.99


def test_seed_and_row_number_both_matter_and_batch_mates_do_not() -> None:
    law = jnp.full((4, 1000), 1e-3)
    first = sample(row_keys(0, range(4)), law)
    assert len(set(first.tolist())) > 1
    assert first.tolist() != sample(row_keys(1, range(4)), law).tolist()
    assert sample(row_keys(0, [2]), law[:1])[0] == first[2]
    again, other = split_keys(row_keys(0, range(4)), 2)
    assert sample(again, law).tolist() != sample(other, law).tolist()


def test_residual_is_what_the_draft_lacks() -> None:
    target = jnp.asarray([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5], [1.0, 0.0, 0.0]])
    draft = jnp.asarray([[1.0, 0.0, 0.0], [0.2, 0.3, 0.5], [0.0, 0.0, 0.0]])
    left = residual(target, draft)
    # Where the laws agree the target's own is returned, and a draft of nothing takes nothing away.
    np.testing.assert_allclose(left, [[0.0, 1.0, 0.0], [0.2, 0.3, 0.5], [1.0, 0.0, 0.0]])


def test_residual_of_a_rounding_error_is_a_law() -> None:
    target = jnp.asarray([[0.25, 0.75]])
    draft = jnp.asarray([[np.nextafter(np.float32(0.25), np.float32(0)), 0.75]])
    np.testing.assert_allclose(residual(target, draft), [[1.0, 0.0]])


def test_no_token_has_no_probability() -> None:
    probs = jnp.asarray([[[0.0, 0.0, 1.0], [0.2, 0.3, 0.5]]])
    found = prob_of(probs, jnp.asarray([[NO_TOKEN, 1]]))
    np.testing.assert_allclose(found, [[0.0, 0.3]])
