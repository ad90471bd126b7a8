"""Many rows at once: every text is what the row would have written alone, with its features beside it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.data.features import FEATURE_DTYPE, recording
from specjax.data.self_written import GROUP, Job, Settings, write
from specjax.decode import generate, new_tokens, row_keys, start
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.trees.topology import chain_mask
from specjax.types import ModelParams, Params, Target

pytestmark = pytest.mark.quick_compile

SETTINGS = Settings(batch_size=2 * GROUP, capacity=64, max_new_tokens=24, top_p=1.0, seed=3, stop_tokens=(7,))


def jobs(count: int) -> list[Job]:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 20, count)
    return [
        Job(number, tuple(rng.integers(0, 32, size).tolist()), float(number % 2))
        for number, size in enumerate(sizes)
    ]


@pytest.fixture(scope="module")
def written(tiny_target: Target, tiny_params: Params):
    method = recording(tiny_target, ("last_hidden", "hidden.1"))
    # More jobs than rows, and a last group that is not full.
    return list(write(method, ModelParams(tiny_params, {}), jobs(2 * GROUP + 11), SETTINGS))


def test_every_job_ends_once(written) -> None:
    assert sorted(one.job.number for one in written) == list(range(2 * GROUP + 11))
    for one in written:
        answer = one.tokens[len(one.job.prompt) :]
        assert tuple(one.tokens[: len(one.job.prompt)]) == one.job.prompt
        assert answer[-1] == 7 or len(answer) == SETTINGS.max_new_tokens
        assert 7 not in answer[:-1]
    assert len({len(one.tokens) - len(one.job.prompt) for one in written}) > 3


def test_each_text_is_what_its_row_writes_alone(written, tiny_target: Target, tiny_params: Params) -> None:
    method, params = recording(tiny_target, ()), ModelParams(tiny_params, {})
    for one in written[:: len(written) // 5]:
        request, state = start(
            method,
            params,
            [one.job.prompt],
            max_new_tokens=SETTINGS.max_new_tokens,
            warp=make_warp(1, one.job.temperature),
            keys=row_keys(SETTINGS.seed, [one.job.number]),
            stop_tokens=SETTINGS.stop_tokens,
            capacity=SETTINGS.capacity,
        )
        state, _ = generate(method, params, request, state)
        assert list(one.job.prompt) + new_tokens(state, [one.job.prompt])[0] == one.tokens


def test_features_are_those_of_a_fresh_reading(written, tiny_target: Target, tiny_params: Params) -> None:
    width, names = SETTINGS.capacity, tuple(written[0].features)

    @jax.jit
    def read(texts: jax.Array) -> dict[str, jax.Array]:
        positions, empty = jnp.arange(width)[None], tiny_target.init_cache(1, width)
        return tiny_target.forward(tiny_params, texts, positions, chain_mask(1, width), empty, names).features

    for one in written[::7]:
        rows = len(one.tokens) - 1
        # What stands behind a text is not seen from within.
        fresh = read(np.pad([one.tokens], ((0, 0), (0, width - len(one.tokens)))))
        for name, values in one.features.items():
            assert values.shape == (rows, 32) and values.dtype == FEATURE_DTYPE
            np.testing.assert_allclose(
                values.astype(np.float32),
                np.asarray(fresh[name])[0, :rows],
                rtol=2**-8,  # half a step of bfloat16
                atol=2e-4,
                err_msg=name,
            )


def test_plain_decoding_has_no_features(tiny_target: Target, tiny_params: Params) -> None:
    one, *_ = write(Method(tiny_target), ModelParams(tiny_params, {}), jobs(1), SETTINGS)
    assert one.features == {}
