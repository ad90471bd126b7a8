"""EAGLE: the states that it unrolls, and what it learns of a few texts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import draft_vocab
from specjax.decode import generate, new_tokens, row_keys, start
from specjax.drafters import eagle
from specjax.errors import ConfigError
from specjax.sampling import make_warp
from specjax.state_drafting import unroll, unroll_mask
from specjax.step import Method
from specjax.trees.topology import chain_mask
from specjax.types import ModelParams, Params, Target, TrainingBatch, not_offered
from specjax.verify import rejection

pytestmark = pytest.mark.quick_compile


def make_weights(target: Target, target_params: Params, **training) -> Params:
    """Random weights that matter: nothing is zero."""
    trainable = eagle.trainable(eagle.Config(draft_length=1), eagle.Training(**training), target)
    weights, fixed = trainable.init(jax.random.key(1), target_params, np.arange(target.vocab_size))
    rng = np.random.default_rng(0)
    noisy = jax.tree.map(lambda w: w + 0.2 * rng.normal(size=w.shape).astype(w.dtype), weights)
    return draft_vocab.complete(noisy | fixed, target, target_params)


def read(target: Target, params: Params, texts: np.ndarray):
    """The target's last states and logits over whole texts [B, T]."""
    batch, size = texts.shape
    positions = jnp.broadcast_to(jnp.arange(size)[None], (batch, size))
    cache, forward = target.init_cache(batch, size), jax.jit(target.forward, static_argnums=5)
    return forward(params, jnp.asarray(texts), positions, chain_mask(batch, size), cache, ("last_hidden",))


def test_states_off_by_one_are_found(tiny_target: Target, tiny_params: Params) -> None:
    """The negative control: with each token's own state in place of the one before, the laws differ."""
    params = ModelParams(tiny_params, make_weights(tiny_target, tiny_params))
    network = eagle.make_network(tiny_target, eagle.like(tiny_target))
    texts = np.random.default_rng(0).integers(0, tiny_target.vocab_size, (1, 12))
    states = read(tiny_target, tiny_params, texts).features["last_hidden"]
    laws = jax.jit(lambda states: unroll(network, params, jnp.asarray(texts), states, 1)[0])
    right, wrong = (laws(s) for s in (states, jnp.roll(states, -1, 1)))
    assert np.abs(right - wrong)[:, 2:9].max() > 0.05


def test_mask_of_unrolled_steps() -> None:
    seen = unroll_mask(4, 2)
    # Input 3 of the third step: the target's states 0 and 1, then its own chain of drafts.
    assert np.flatnonzero(seen[3]).tolist() == [0, 1, 4 + 2, 8 + 3]
    assert (unroll_mask(4, 0) == np.tril(np.ones((4, 4), bool))).all()


def test_a_perfect_head_is_accepted_as_learned(tiny_target: Target, tiny_params: Params) -> None:
    """Trained on a few texts until it knows them, it drafts them: loss falls, acceptance rises."""
    import optax

    config = eagle.Config(draft_length=2)
    trainable = eagle.trainable(config, eagle.Training(noise=0.0), tiny_target)
    weights, fixed = trainable.init(jax.random.key(0), tiny_params, np.ones(tiny_target.vocab_size))
    plain = Method(tiny_target)
    keys = row_keys(0, range(4))
    prompts = [[i + 1, i + 2] for i in range(4)]
    warp = make_warp(4)
    request, state = start(
        plain, ModelParams(tiny_params, {}), prompts, max_new_tokens=30, warp=warp, keys=keys
    )
    state, _ = generate(plain, ModelParams(tiny_params, {}), request, state)
    written = new_tokens(state, prompts)
    texts = np.array([prompt + text for prompt, text in zip(prompts, written, strict=True)], np.int32)
    features = read(tiny_target, tiny_params, texts).features
    everywhere = jnp.ones(texts.shape, bool)
    batch = TrainingBatch(jnp.asarray(texts), everywhere, jnp.full((4,), texts.shape[1]), features)
    optimizer = optax.adam(3e-3)

    @jax.jit
    def learn(weights, moments, key):
        def of(weights):
            return trainable.loss(ModelParams(tiny_params, weights | fixed), batch, key)[0]

        value, gradient = jax.value_and_grad(of)(weights)
        updates, moments = optimizer.update(gradient, moments)
        return optax.apply_updates(weights, updates), moments, value

    moments, values = optimizer.init(weights), []
    for number in range(150):
        weights, moments, value = learn(weights, moments, jax.random.key(number))
        values.append(float(value))
    assert values[-1] < 0.2 * values[0]

    drafter = eagle.build(config, tiny_target)
    method = Method(tiny_target, drafter, rejection.verify)
    params = ModelParams(tiny_params, weights | fixed)
    request, state = start(method, params, prompts, max_new_tokens=30, warp=warp, keys=keys)
    state, stats = generate(method, params, request, state)
    assert new_tokens(state, prompts) == written
    assert stats.num_emitted.sum() / stats.num_steps.sum() > 2.5


def test_impossible_draft_vocabulary_is_refused(tiny_target: Target, tiny_params: Params) -> None:
    training = eagle.Training(draft_vocab_size=10**6)
    trainable = eagle.trainable(eagle.Config(draft_length=1), training, tiny_target)
    with pytest.raises(ConfigError, match="draft_vocab_size is 1000000: give 1 to 32"):
        trainable.init(jax.random.key(0), tiny_params, np.ones(tiny_target.vocab_size))


def test_a_target_without_states_is_refused(tiny_target: Target) -> None:
    bare = tiny_target._replace(embed=not_offered)
    with pytest.raises(ConfigError, match="embedding"):
        eagle.build(eagle.Config(draft_length=1), bare)
    assert dataclasses.is_dataclass(eagle.Training)
