"""A drafter with a cache of its own: what it proposes is its model's law, after any number of rounds."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode import row_keys, start
from specjax.drafters import draft_model, self_speculative
from specjax.errors import ConfigError
from specjax.models.functional import init_params, keep_layers, make_target
from specjax.models.llama import LlamaConfig
from specjax.sampling import make_warp, warp_probs
from specjax.step import Method, step
from specjax.types import Context, Drafter, ModelParams, Params, Target
from specjax.verify import rejection

PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7], [9, 8]]
WARP = make_warp(3, temperature=0.8, top_k=20)


def fresh_laws(model: Target, params: Params, texts: np.ndarray) -> jax.Array:
    """The model's warped law after every token of the texts [B, T], read in one pass."""
    batch, size = texts.shape
    positions = jnp.broadcast_to(jnp.arange(size), (batch, size))
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (batch, size, size))
    out = model.forward(params, jnp.asarray(texts), positions, causal, model.init_cache(batch, size))
    return warp_probs(out.logits, WARP)


def check_drafts_over_rounds(
    target: Target, drafter: Drafter, params: ModelParams, model: Target, weights: Params
) -> set[int]:
    """Every draft law equals that of a fresh reading of context and draft; returns the accepted lengths."""
    method = Method(target, drafter, rejection.verify)
    keys = row_keys(0, range(3))
    request, state = start(method, params, PROMPTS, max_new_tokens=40, warp=WARP, keys=keys, capacity=64)
    propose, advance = jax.jit(drafter.propose), jax.jit(step, static_argnums=0)
    read = jax.jit(lambda texts: fresh_laws(model, weights, texts))
    accepted = set()
    for _ in range(7):
        context = Context(state.tokens, state.length, WARP)
        draft, _ = propose(params, state.keys, state.draft_state, context)
        texts, lengths = np.array(state.tokens), np.asarray(state.length)
        for row, length in enumerate(lengths):
            texts[row, length : length + 3] = draft.tokens[row, 1:]
        laws = read(texts)
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(
                draft.probs[row, :3], laws[row, length - 1 : length + 2], atol=2e-4, err_msg=f"row {row}"
            )
        state, info = advance(method, params, request, state)
        accepted |= set(info.num_accepted.tolist())
    return accepted


def test_law_of_a_draft_model_after_any_number_accepted(
    tiny_config: LlamaConfig, tiny_target: Target, tiny_params: Params
) -> None:
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda w: w * (1 + 0.1 * rng.normal(size=w.shape).astype(w.dtype)), tiny_params)
    drafter = draft_model.build(draft_model.Config("a noisy copy", 3), tiny_target, tiny_config)
    params = ModelParams(tiny_params, weights)
    accepted = check_drafts_over_rounds(tiny_target, drafter, params, make_target(tiny_config), weights)
    assert accepted == {0, 1, 2, 3}  # all, too: then two tokens are missing from its cache


def test_law_of_the_thinned_target(tiny_config: LlamaConfig) -> None:
    config = dataclasses.replace(tiny_config, num_layers=3)
    target, weights = make_target(config), init_params(config, seed=1)
    weights = jax.tree.map(lambda leaf: 6 * leaf if leaf.ndim > 1 else leaf, weights)
    drafter = self_speculative.build(self_speculative.Config(3, (1,)), target)
    thinned = make_target(dataclasses.replace(config, num_layers=2))
    kept = keep_layers(weights, (0, 2))
    check_drafts_over_rounds(target, drafter, ModelParams(weights, {}), thinned, kept)


def test_another_vocabulary_is_refused(tiny_config: LlamaConfig, tiny_target: Target) -> None:
    other = dataclasses.replace(tiny_config, vocab_size=33)
    with pytest.raises(
        ConfigError, match="'elsewhere' has a vocabulary of 33 tokens and the target one of 32"
    ):
        draft_model.build(draft_model.Config("elsewhere", 2), tiny_target, other)


@pytest.mark.parametrize(
    ("skipped", "named"),
    [((2,), r"layers \[2\]: the target has layers 0 to 1"), ((), "0 of 2 layers"), ((0, 1), "2 of 2 layers")],
)
def test_layers_that_cannot_be_skipped_are_named(
    tiny_target: Target, skipped: tuple[int, ...], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        self_speculative.build(self_speculative.Config(2, skipped), tiny_target)
