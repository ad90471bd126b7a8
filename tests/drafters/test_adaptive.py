"""Adaptive drafting: it drafts while that pays, does not while it loses, and finds back into every text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode import generate, rollout, row_keys, start
from specjax.drafters import adaptive, draft_model, eagle, eagle3, medusa
from specjax.errors import ConfigError
from specjax.eval.exactness.subjects import made_up
from specjax.prefill import read_prompt
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.types import NO_TOKEN, Context, DecodeState, Effort, ModelParams, Params, StepInfo, Target
from specjax.verify import rejection

pytestmark = pytest.mark.quick_compile

MODEL = {"name": "draft_model", "draft_length": 3}
PROMPTS = [[3, 1, 2], [7, 5, 5, 9, 1]]
CAPACITY = 128


def decode(
    target: Target, params: Params, config: Any, noise: float, num_rounds: int = 40
) -> tuple[DecodeState, StepInfo]:
    """A fixed number of rounds at temperature 0."""
    drafter, weights = made_up(adaptive, config, target, params, noise)
    method, every = Method(target, drafter, rejection.verify), ModelParams(params, weights)
    options = {"warp": make_warp(2), "keys": row_keys(0, [0, 1]), "capacity": CAPACITY * 2}
    request, state = start(method, every, PROMPTS, max_new_tokens=200, **options)
    state, infos = rollout(method, every, request, state, num_rounds)
    return state, jax.device_get(infos)


def test_a_perfect_drafter_drafts_as_far_as_it_pays(tiny_target: Target, tiny_params: Params) -> None:
    _, infos = decode(tiny_target, tiny_params, adaptive.Config(MODEL, (1.1, 1.2, 1.3)), 0.0)
    assert (infos.num_drafted == 3).all() and (infos.num_emitted == 4).all()
    # Where the third draft costs more than a token, two are drafted.
    _, infos = decode(tiny_target, tiny_params, adaptive.Config(MODEL, (1.1, 1.2, 2.7)), 0.0)
    assert (infos.num_drafted == 2).all()


def test_drafts_shorten_where_context_makes_them_dear(tiny_target: Target, tiny_params: Params) -> None:
    # A third draft's token pays for 1.3 + 0.018 passes a token of context up to 16 tokens.
    config = adaptive.Config(MODEL, (1.1, 1.2, 1.3), context_costs=(0.0, 0.0, 18.0), prior=1.0)
    _, infos = decode(tiny_target, tiny_params, config, 0.0)
    for row, prompt in enumerate(PROMPTS):
        context = len(prompt) + np.cumsum(infos.num_emitted[:, row]) - infos.num_emitted[:, row]
        expected = np.where(4 / (1.3 + 0.018 * context) > 3 / 1.2, 3, 2)
        np.testing.assert_array_equal(infos.num_drafted[:, row], expected)
        assert set(expected) == {2, 3}


def test_a_useless_drafter_is_asked_now_and_then(tiny_target: Target, tiny_params: Params) -> None:
    config = adaptive.Config(MODEL, (1.3, 1.6, 1.9), probe_every=9)
    state, infos = decode(tiny_target, tiny_params, config, 5.0)
    asked = (infos.num_drafted > 0).sum(0)
    # At first it learns that it loses; from then on it is a round in ten, and what luck adds.
    assert (asked >= 4).all() and (asked <= 16).all()
    never = adaptive.Config(MODEL, (1.3, 1.6, 1.9), probe_every=10**6, prior=0.0)
    plain, infos = decode(tiny_target, tiny_params, never, 5.0)
    assert (infos.num_drafted == 0).all() and (infos.num_emitted == 1).all()
    shared = int(np.minimum(state.length, plain.length).min())
    assert (np.asarray(state.tokens)[:, :shared] == np.asarray(plain.tokens)[:, :shared]).all()


def test_confidence_cuts_a_draft(tiny_target: Target, tiny_params: Params) -> None:
    """With a bar that nothing reaches nothing is drafted, with none everything."""
    drafted = []
    for confidence in (0.0, 0.1, 1.0):
        config = adaptive.Config(MODEL, (1.0, 1.0, 1.0), confidence=confidence)
        _, infos = decode(tiny_target, tiny_params, config, 0.02)
        drafted.append(infos.num_drafted.mean())
    assert drafted[0] == 3 and 0 < drafted[1] < 3 and drafted[2] == 0


@pytest.mark.parametrize(("given", "expected"), [((1, 3), {1, 3}), (None, {1, 2})])
def test_a_pass_has_no_more_nodes_than_it_needs(
    given: tuple[int, ...] | None, expected: set[int], tiny_target: Target, tiny_params: Params
) -> None:
    """One draft is what pays best here."""
    sizes: list[int] = []

    def noted(params, tokens, *rest):
        jax.debug.callback(lambda: sizes.append(tokens.shape[1]))
        return tiny_target.forward(params, tokens, *rest)

    config = adaptive.Config(MODEL, (1.3, 1.6, 1.9), probe_every=9, sizes=given)
    drafter, weights = made_up(adaptive, config, tiny_target, tiny_params, 5.0)
    method = Method(tiny_target._replace(forward=noted), drafter, rejection.verify)
    every, options = ModelParams(tiny_params, weights), {"warp": make_warp(1), "keys": row_keys(0, [0])}
    request, state = start(method, every, PROMPTS[:1], max_new_tokens=60, capacity=CAPACITY, **options)
    jax.effects_barrier()
    sizes.clear()
    _, stats = generate(method, every, request, state)
    jax.effects_barrier()
    drafting = int(stats.tried_at_depth[0, 0])
    assert len(sizes) == int(stats.num_steps[0]) and set(sizes) == expected
    assert sizes.count(1) >= len(sizes) - drafting > 0


def test_a_drafter_in_the_targets_cache_keeps_none(tiny_target: Target, tiny_params: Params) -> None:
    """It drafts in some rounds and not in others, and the text is that of plain decoding."""
    thinned = {"name": "self_speculative", "draft_length": 3, "skip_layers": (0,), "share_cache": True}
    texts = {}
    for name, prior in (("now and then", 0.6), ("never", 0.0)):
        probe_every = 3 if prior else 10**6
        config = adaptive.Config(thinned, (1.3, 1.6, 1.9), prior=prior, probe_every=probe_every)
        state, infos = decode(tiny_target, tiny_params, config, 0.0)
        assert state.draft_state.inner == {} and state.draft_state.cache is None
        texts[name] = np.asarray(state.tokens), np.asarray(state.length)
        drafting = (infos.num_drafted > 0).mean()
        assert 0.1 < drafting < 0.9 if prior else drafting == 0
    shared = int(min(lengths.min() for _, lengths in texts.values()))
    assert shared > 30
    np.testing.assert_array_equal(*(tokens[:, :shared] for tokens, _ in texts.values()))


LATE = {
    "draft_model": (draft_model, draft_model.Config(draft_length=2)),
    "eagle": (eagle, eagle.Config(draft_length=2)),
    "eagle3": (eagle3, eagle3.EXAMPLES["eagle3"]),
    "medusa": (medusa, medusa.Config(draft_length=2)),
}


class Late(NamedTuple):
    """A drafter at random texts whose features are known, everything compiled once."""

    drafter: Drafter
    start: Callable[..., Any]
    resume: Callable[..., Any]
    propose: Callable[..., tuple[Draft, Any]]


def late(name: str, target: Target, weights: Params) -> Late:
    module, config = LATE[name]
    drafter, own = made_up(module, config, target, weights, 0.05)
    params, keys, warp = ModelParams(weights, own), row_keys(0, [0, 1]), make_warp(2, temperature=1.0)
    texts = jax.random.randint(jax.random.key(4), (2, 48), 0, 32)
    empty = target.init_cache(2, 48)
    _, features = jax.jit(lambda: read_prompt(target.forward, weights, texts, empty, drafter.features))()

    @jax.jit
    def init(length: jax.Array):
        return drafter.init(params, Context(texts, length, warp), features, 24)

    @jax.jit
    def resume(state: Any, length: jax.Array, first: jax.Array, shift: int):
        places = (first + shift)[:, None] + jnp.arange(12)[None]
        seen = {n: jnp.take_along_axis(f, places[..., None], axis=1) for n, f in features.items()}
        return drafter.resume(params, state, Context(texts, length, warp), seen, first)

    @jax.jit
    def propose(state: Any, length: jax.Array, effort: Effort | None = None):
        return drafter.propose(params, keys, state, Context(texts, length, warp, effort))

    return Late(drafter, init, resume, propose)


@pytest.mark.parametrize("name", LATE)
def test_a_drafter_that_resumes_drafts_as_if_it_had_read_everything(
    name: str, tiny_target: Target, tiny_params: Params
) -> None:
    drafter, start, resume, propose = late(name, tiny_target, tiny_params)
    before = jnp.asarray([6, 11])

    def laws(state: Any, length: jax.Array):
        return propose(state, length)[0].probs[:, : drafter.max_depth]

    for grown in (1, 2, 9):
        old, after = start(before), before + grown
        expected = laws(start(after), after)
        resumed = resume(old, after, before - 1, 0)
        np.testing.assert_allclose(laws(resumed, after), expected, atol=2e-5)
    # The negative control: the features of other positions, or nothing read at all.
    wrong = resume(old, after, before - 1, 1) if drafter.features else old
    assert not np.allclose(laws(wrong, after), expected, atol=1e-3)


@pytest.mark.parametrize("name", ["draft_model", "eagle"])
def test_effort_shortens_a_chain_and_changes_nothing_else(
    name: str, tiny_target: Target, tiny_params: Params
) -> None:
    _, start, _, propose = late(name, tiny_target, tiny_params)
    length = jnp.asarray([6, 11])
    whole, _ = propose(start(length), length)
    cut, _ = propose(start(length), length, Effort(jnp.asarray([1, 2]), jnp.zeros((2,))))
    assert cut.tokens[0, 2] == NO_TOKEN
    np.testing.assert_array_equal(cut.tokens[0, 1], whole.tokens[0, 1])
    np.testing.assert_array_equal(cut.tokens[1, 1:], whole.tokens[1, 1:])
    np.testing.assert_allclose(cut.probs[1, :2], whole.probs[1, :2], atol=2e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"costs": ()}, "costs is"),
        ({"costs": (1.0, 0.0, 1.0)}, "costs is"),
        ({"costs": (1.0, 1.2)}, "costs has 2 numbers and the inner drafter drafts up to 3"),
        ({"costs": (1.0, 1.0, 1.0), "confidence": 1.5}, "confidence is 1.5"),
        ({"costs": (1.0, 1.0, 1.0), "half_life": 0}, "half_life is 0"),
        ({"costs": (1.0, 1.0, 1.0), "context_costs": (0.1,)}, "context_costs has 1 numbers"),
        ({"costs": (1.0, 1.0), "context_costs": (0.1, -0.1)}, "context_costs is"),
        ({"costs": (1.0, 1.0, 1.0), "sizes": (1, 4)}, "sizes is"),
    ],
)
def test_misuse(fields: dict[str, Any], message: str, tiny_target: Target, tiny_params: Params) -> None:
    with pytest.raises(ConfigError, match=message):
        made_up(adaptive, adaptive.Config(MODEL, **fields), tiny_target, tiny_params, 0.0)
