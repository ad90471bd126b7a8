"""Drafts that end where the thinned model is unsure: which tokens they hold, and what they lead to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode import generate, new_tokens, row_keys, start
from specjax.drafters import ngram, self_speculative
from specjax.drafters.self_speculative import Config, layers_left, while_sure
from specjax.errors import ConfigError
from specjax.models.functional import keep_layers, make_target
from specjax.models.llama import LlamaConfig
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.trees.topology import chain_mask
from specjax.types import (
    NO_TOKEN,
    Context,
    DecodeState,
    Draft,
    Drafter,
    Effort,
    ModelParams,
    Params,
    Request,
    Target,
)
from specjax.verify import rejection

pytestmark = pytest.mark.quick_compile

LENGTH, CONFIDENCE = 4, 0.1
NEW_TOKENS, CAPACITY = 20, 64
PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7], [9, 8], [3, 3, 3], [30, 2, 11], [17, 4]]
ROWS = len(PROMPTS)
KEYS = row_keys(0, range(ROWS))
# Half of the rows at temperature 0, half of them drawn.
WARP = make_warp(ROWS)._replace(temperature=jnp.arange(ROWS) % 2 * 1.0)


def drafter_of(target: Target, **fields: Any) -> Drafter:
    return self_speculative.build(Config(draft_length=LENGTH, skip_layers=(1,), **fields), target)


class Begun(NamedTuple):
    """Prompts that were read: how each drafter would go on, and the thinned model's own best probability."""

    params: ModelParams
    request: Request
    state: DecodeState
    best_probs: Callable[[np.ndarray], np.ndarray]

    def draft(self, drafter: Drafter, effort: Effort | None = None) -> Draft:
        context = Context(self.state.tokens, self.state.length, WARP, effort)
        return jax.device_get(jax.jit(drafter.propose)(self.params, KEYS, self.state.draft_state, context)[0])


@pytest.fixture(scope="module")
def begun(tiny_config: LlamaConfig, tiny_target: Target, tiny_params: Params) -> Begun:
    params = ModelParams(tiny_params, {})
    method = Method(tiny_target, drafter_of(tiny_target), rejection.verify)
    options = {"warp": WARP, "keys": KEYS, "capacity": CAPACITY}
    request, state = start(method, params, PROMPTS, max_new_tokens=NEW_TOKENS, **options)
    thinned = make_target(dataclasses.replace(tiny_config, num_layers=1))

    @jax.jit
    def best_probs(texts: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(texts.shape[1]), texts.shape)
        cache = thinned.init_cache(*texts.shape)
        weights = keep_layers(tiny_params, (0,))
        out = thinned.forward(weights, texts, positions, chain_mask(*texts.shape), cache)
        return jax.nn.softmax(out.logits).max(-1)

    return Begun(params, request, state, lambda texts: np.asarray(best_probs(texts)))


@pytest.mark.parametrize("proposal", ["chain", "point_mass"])
def test_a_draft_ends_before_the_first_token_that_is_unsure(
    begun: Begun, tiny_target: Target, proposal: str
) -> None:
    whole = begun.draft(drafter_of(tiny_target, proposal=proposal))
    cut = begun.draft(drafter_of(tiny_target, proposal=proposal, confidence=CONFIDENCE))
    texts, lengths = np.array(begun.state.tokens), np.asarray(begun.state.length)
    for row, length in enumerate(lengths):
        texts[row, length : length + LENGTH] = whole.tokens[row, 1:]
    best, kept = begun.best_probs(texts), []
    for row, length in enumerate(lengths):
        is_sure = best[row, length - 1 : length - 1 + LENGTH] >= CONFIDENCE
        kept.append(int(np.cumprod(is_sure).sum()))
        expected = [*whole.tokens[row, 1 : 1 + kept[-1]], *[NO_TOKEN] * (LENGTH - kept[-1])]
        assert cut.tokens[row, 1:].tolist() == expected, f"row {row}"
        if whole.probs is not None:
            np.testing.assert_allclose(cut.probs[row, : kept[-1]], whole.probs[row, : kept[-1]], atol=1e-5)
    # Some end early, some late: if all were alike the test would show little.
    assert len(set(kept)) > 2


def test_text_at_temperature_0_is_the_targets(begun: Begun, tiny_target: Target, tiny_params: Params) -> None:
    method = Method(tiny_target, drafter_of(tiny_target, confidence=CONFIDENCE), rejection.verify)
    # A copy, for decoding uses the state up.
    state, stats = generate(method, begun.params, begun.request, jax.tree.map(jnp.copy, begun.state))
    positions = jnp.broadcast_to(jnp.arange(CAPACITY), (ROWS, CAPACITY))
    cache = tiny_target.init_cache(ROWS, CAPACITY)
    forward, mask = jax.jit(tiny_target.forward), chain_mask(ROWS, CAPACITY)
    following = np.asarray(forward(tiny_params, state.tokens, positions, mask, cache).logits).argmax(-1)
    for row, text in list(enumerate(new_tokens(state, PROMPTS)))[::2]:
        begin = len(PROMPTS[row]) - 1
        assert text == following[row, begin : begin + NEW_TOKENS].tolist()
    accepted, tried = int(stats.accepted_at_depth.sum()), int(stats.tried_at_depth.sum())
    assert 0 < accepted < tried < LENGTH * int(stats.num_steps.sum())


def test_an_effort_that_the_context_asks_for_holds_too(begun: Begun, tiny_target: Target) -> None:
    drafter = drafter_of(tiny_target, confidence=1e-6)
    lengths, unsure = jnp.asarray([0, 1, 2, 3, 4, 9]), jnp.asarray([0.0, 0.0, 0.0, 0.0, 1.0, 0.0])
    draft = begun.draft(drafter, Effort(lengths, unsure))
    assert (draft.tokens != NO_TOKEN).sum(1).tolist() == [0, 1, 2, 3, 0, 4]


def test_it_wraps_any_drafter(tiny_target: Target) -> None:
    plain = ngram.build(ngram.Config(draft_length=2, max_ngram=2), tiny_target)
    wrapped = while_sure(plain, 0.5)
    assert wrapped._replace(propose=plain.propose) == plain


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"confidence": -0.1}, "confidence is -0.1: give a probability below 1"),
        ({"confidence": 1.0}, "confidence is 1.0: give a probability below 1"),
        (
            {"confidence": 0.5, "branching": (2,), "proposal": "point_mass"},
            "confidence is 0.5 and the draft is a tree: leave out one",
        ),
    ],
)
def test_confidence_that_cannot_be_is_named(fields: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Config(draft_length=2, skip_layers=(1,), **fields)


@pytest.mark.parametrize(
    ("skipped", "named"),
    [((2,), r"layers \[2\]: the target has layers 0 to 1"), ((), "0 of 2"), ((0, 1), "2 of 2")],
)
def test_layers_that_cannot_be_skipped_are_named(skipped: tuple[int, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        layers_left(skipped, 2)
    assert layers_left((0,), 2) == (1,)
