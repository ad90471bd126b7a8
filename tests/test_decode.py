"""From prompts to tokens: layout, errors, ends, and three loops that must tell the same story."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode import (
    bucket,
    generate,
    new_tokens,
    prepare,
    rollout,
    row_keys,
    start,
    stream,
    stream_text,
)
from specjax.drafters import eagle, ngram
from specjax.errors import ConfigError
from specjax.eval.exactness.subjects import made_up
from specjax.prefill import CHUNK, read_prompt
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.testing import point_mass_drafter, tabulated_drafter, tabulated_target
from specjax.types import DecodeState, ModelParams, Params, Request, Target
from specjax.verify import rejection

pytestmark = pytest.mark.quick_compile

VOCAB = 8
NEVER = 99
NO_WEIGHTS = ModelParams({}, {})
PROMPTS = [[0], [1, 2, 3], [4, 5, 6, 7, 0, 1]]


@pytest.fixture(scope="module")
def counting() -> Method:
    """A target that counts upwards modulo 8 and a drafter that knows it, four tokens ahead."""
    table = jnp.broadcast_to(9 * jnp.roll(jnp.eye(VOCAB), 1, axis=1), (VOCAB + 1, VOCAB, VOCAB))
    return Method(tabulated_target(table), point_mass_drafter(table, 4), rejection.verify)


@pytest.fixture(scope="module")
def noisy() -> Method:
    """A random target and a drafter that resembles it, three tokens ahead."""
    rng = np.random.default_rng(0)
    table = rng.normal(size=(VOCAB + 1, VOCAB, VOCAB))
    other = jnp.asarray(table + 0.7 * rng.normal(size=table.shape), jnp.float32)
    target = tabulated_target(jnp.asarray(table, jnp.float32))
    return Method(target, tabulated_drafter(other, 3), rejection.verify)


def begin(
    method: Method,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    *,
    max_new_tokens: int = 20,
    temperature: float = 0.0,
    seed: int = 0,
    stop_token: int = NEVER,
    capacity: int | None = 64,
) -> tuple[Request, DecodeState]:
    return start(
        method,
        NO_WEIGHTS,
        prompts,
        max_new_tokens=max_new_tokens,
        warp=make_warp(len(prompts), temperature),
        keys=row_keys(seed, range(len(prompts))),
        stop_tokens=[stop_token],
        capacity=capacity,
    )


def count_up(prompt: Sequence[int], num: int) -> list[int]:
    return [(prompt[-1] + 1 + i) % VOCAB for i in range(num)]


def test_nothing_after_a_stop_token_is_emitted_or_counted(counting: Method) -> None:
    request, state = begin(counting, stop_token=3)
    state, stats = generate(counting, NO_WEIGHTS, request, state)
    assert new_tokens(state, PROMPTS) == [[1, 2, 3], [4, 5, 6, 7, 0, 1, 2, 3], [2, 3]]
    assert stats.num_emitted.tolist() == [3, 8, 2]
    assert stats.num_steps.tolist() == [1, 2, 1]
    # Row 1 takes five tokens, the bonus among them, and then three drafts.
    assert stats.accepted_at_depth.tolist() == [[1, 1, 1, 0], [2, 2, 2, 1], [1, 1, 0, 0]]
    assert stats.tried_at_depth.tolist() == stats.accepted_at_depth.tolist()


def test_a_stop_token_in_the_prompt_stops_nothing(counting: Method) -> None:
    request, state = begin(counting, [[3], [3, 3, 3], [0, 3, 4]], max_new_tokens=2, stop_token=3)
    state, _ = generate(counting, NO_WEIGHTS, request, state)
    assert new_tokens(state, [[3], [3, 3, 3], [0, 3, 4]]) == [[4, 5], [4, 5], [5, 6]]


@pytest.mark.parametrize("limit", [1, 4, 5, 6, 12])
def test_limit_is_kept_wherever_it_falls(counting: Method, limit: int) -> None:
    request, state = begin(counting, max_new_tokens=limit)
    state, stats = generate(counting, NO_WEIGHTS, request, state)
    assert new_tokens(state, PROMPTS) == [count_up(prompt, limit) for prompt in PROMPTS]
    assert stats.num_emitted.tolist() == [limit] * 3
    assert stats.num_steps.tolist() == [-(-limit // 5)] * 3


def test_every_row_has_its_own_limit(counting: Method) -> None:
    request, state = begin(counting)
    limits = [2, 9, 5]
    request = request._replace(limit=jnp.asarray([len(p) + n for p, n in zip(PROMPTS, limits, strict=True)]))
    state, stats = generate(counting, NO_WEIGHTS, request, state)
    assert new_tokens(state, PROMPTS) == [count_up(p, n) for p, n in zip(PROMPTS, limits, strict=True)]
    assert stats.num_steps.tolist() == [1, 2, 1]


def test_rollout_and_stream_equal_generate_and_stats_are_their_sum(noisy: Method) -> None:
    request, state = begin(noisy, temperature=1.0, seed=2, stop_token=7)
    state, stats = generate(noisy, NO_WEIGHTS, request, state)
    wanted = new_tokens(state, PROMPTS)

    request, state = begin(noisy, temperature=1.0, seed=2, stop_token=7)
    rolled, infos = rollout(noisy, NO_WEIGHTS, request, state, 20)
    assert new_tokens(rolled, PROMPTS) == wanted

    request, state = begin(noisy, temperature=1.0, seed=2, stop_token=7)
    rounds = list(stream(noisy, NO_WEIGHTS, request, state))
    assert [[token for r in rounds for token in r[row]] for row in range(3)] == wanted
    assert len(rounds) == int(stats.num_steps.max())

    drafted, accepted = np.asarray(infos.num_drafted), np.asarray(infos.num_accepted)
    for row in range(3):
        steps = [r for r in range(20) if infos.active[r, row]]
        assert len(steps) == stats.num_steps[row]
        assert (
            sum(int(infos.num_emitted[r, row]) for r in steps) == len(wanted[row]) == stats.num_emitted[row]
        )
        tried = [sum(drafted[r, row] >= d and accepted[r, row] >= d - 1 for r in steps) for d in (1, 2, 3)]
        passed = [sum(accepted[r, row] >= d for r in steps) for d in (1, 2, 3)]
        assert tried == stats.tried_at_depth[row].tolist()
        assert passed == stats.accepted_at_depth[row].tolist()
        # Every step emits what it accepted and one token more, but for a last step that was cut.
        surplus = [int(infos.num_emitted[r, row] - accepted[r, row]) for r in steps]
        assert surplus[:-1] == [1] * (len(steps) - 1) and surplus[-1] in (0, 1)
    assert 0 < int(stats.accepted_at_depth.sum()) < int(stats.tried_at_depth.sum())


def test_seed_has_an_effect_above_temperature_0_and_only_there(noisy: Method) -> None:
    found = {}
    for temperature in (0.0, 1.0):
        for seed in (0, 0, 1):
            request, state = begin(noisy, temperature=temperature, seed=seed)
            state, _ = generate(noisy, NO_WEIGHTS, request, state)
            found.setdefault((temperature, seed), []).append(new_tokens(state, PROMPTS))
    assert found[1.0, 0][0] == found[1.0, 0][1] != found[1.0, 1][0]
    assert found[0.0, 0][0] == found[0.0, 0][1] == found[0.0, 1][0]


def test_copies_of_a_request_agree_at_temperature_0_and_differ_above(noisy: Method) -> None:
    for temperature, num_texts in ((0.0, 1), (1.0, 3)):
        request, state = begin(noisy, [[1, 2]] * 3, temperature=temperature)
        state, _ = generate(noisy, NO_WEIGHTS, request, state)
        assert len({tuple(row) for row in new_tokens(state, [[1, 2]] * 3)}) == num_texts


def test_a_state_is_used_up(counting: Method) -> None:
    request, state = begin(counting)
    generate(counting, NO_WEIGHTS, request, state)
    with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
        generate(counting, NO_WEIGHTS, request, state)


def test_methods_of_a_target_share_the_reading_of_the_prompts(
    tiny_target: Target, tiny_params: Params
) -> None:
    """Traced once for each set of features, whatever is drafted; and drafters go on from the very same."""
    traced: list[tuple[str, ...]] = []

    def noted(params, tokens, positions, mask, cache, features=()):
        traced.append(features)
        return tiny_target.forward(params, tokens, positions, mask, cache, features)

    target = tiny_target._replace(forward=noted)
    short, long = (ngram.build(ngram.Config(draft_length=n, max_ngram=2), target) for n in (2, 4))
    heads = [made_up(eagle, eagle.Config(draft_length=n), target, tiny_params, 0.1) for n in (2, 3)]
    methods = [(None, {}), (short, {}), (long, {}), *heads]
    caches = []
    for drafter, weights in methods:
        verify = None if drafter is None else rejection.verify
        params = ModelParams(tiny_params, weights)
        _, state = start(
            Method(target, drafter, verify),
            params,
            [[3, 1, 2], [7, 5]],
            max_new_tokens=8,
            warp=make_warp(2),
            keys=row_keys(0, [0, 1]),
            capacity=64,
        )
        caches.append(state.cache)
    assert traced == [(), ("last_hidden",)]
    for cache in caches[1:]:
        jax.tree.map(np.testing.assert_array_equal, cache, caches[0])


def test_stream_text_joins_what_each_row_got() -> None:
    class Letters:
        def step(self, token: int) -> str | None:
            return None if token == 0 else "abcdefgh"[token]

        def flush(self) -> str:
            return "."

    rounds = iter([[[1, 0, 2], []], [[0], [3]]])
    assert list(stream_text(rounds, [Letters(), Letters()])) == [["bc", ""], ["", "d"], [".", "."]]


def test_buckets_are_few_and_hold_what_they_must() -> None:
    sizes = [bucket(n) for n in range(1, 1025)]
    assert all(size >= n for n, size in enumerate(sizes, start=1))
    assert sorted(set(sizes)) == [64, 96, 128, 192, 256, 384, 512, 768, 1024]


@pytest.mark.parametrize(
    ("prompts", "options", "named"),
    [
        ([], {}, "no prompts"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1], [2, VOCAB]], {}, f"prompt 1 has a token outside .* vocabulary of {VOCAB}"),
        ([[-1]], {}, "prompt 0 has a token outside"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([[1], [1] * 9], {"max_new_tokens": 20, "capacity": 33}, "9 tokens, 20 new ones and 5 .* 34 .* 33"),
    ],
)
def test_prepare_names_what_is_wrong(counting: Method, prompts, options: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        prepare(counting, prompts, warp=make_warp(len(prompts)), **({"max_new_tokens": 4} | options))


def test_every_prompt_has_a_law_and_a_key(counting: Method) -> None:
    prompts = [[1], [2]]
    with pytest.raises(ConfigError, match="the sampling law has 1 rows for 2 prompts"):
        prepare(counting, prompts, max_new_tokens=4, warp=make_warp(1))
    with pytest.raises(ConfigError, match="1 keys for 2 prompts"):
        start(counting, NO_WEIGHTS, prompts, max_new_tokens=4, warp=make_warp(2), keys=row_keys(0, [0]))


def test_prepare_knows_the_positions_of_the_target(tiny_target: Target) -> None:
    with pytest.raises(ConfigError, match="1020 tokens and 5 new ones exceed the target's 1024 positions"):
        prepare(Method(tiny_target), [[1] * 1020], max_new_tokens=5, warp=make_warp(1))
    prepare(Method(tiny_target), [[1] * 1020], max_new_tokens=4, warp=make_warp(1))


def test_the_smallest_capacity_that_is_granted_is_enough(counting: Method) -> None:
    longest = max(len(prompt) for prompt in PROMPTS)
    request, state = begin(counting, max_new_tokens=7, capacity=longest + 7 + 5)
    state, _ = generate(counting, NO_WEIGHTS, request, state)
    assert new_tokens(state, PROMPTS) == [count_up(prompt, 7) for prompt in PROMPTS]


@pytest.mark.parametrize("size", [1, 257, 300, 512])
def test_prompts_read_in_pieces_equal_one_pass(tiny_target: Target, tiny_params: Params, size: int) -> None:
    assert CHUNK == 256
    tokens = jnp.asarray(np.random.default_rng(size).integers(0, 32, size=(2, size)))
    names = ("last_hidden", "hidden.1")
    empty = tiny_target.init_cache(2, 512)

    @jax.jit
    def in_pieces(tokens):
        return read_prompt(tiny_target.forward, tiny_params, tokens, empty, names)

    @jax.jit
    def at_once(tokens):
        positions = jnp.broadcast_to(jnp.arange(size), (2, size))
        causal = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (2, size, size))
        return tiny_target.forward(tiny_params, tokens, positions, causal, empty, names)

    cache, features = in_pieces(tokens)
    out = at_once(tokens)
    assert cache.length.tolist() == [size, size]
    for name in names:
        assert features[name].shape == (2, size, 32)
        np.testing.assert_allclose(features[name], out.features[name], atol=1e-4)
    for found, wanted in zip(cache.keys + cache.values, out.cache.keys + out.cache.values, strict=True):
        np.testing.assert_allclose(found[:, :size], wanted[:, :size], atol=1e-4)
