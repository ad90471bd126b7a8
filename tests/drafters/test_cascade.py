"""A cascade drafts with the law of its model, whatever the inner drafter and however much was refused."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import pytest

from specjax.config import drafter_config
from specjax.decode import generate, new_tokens, row_keys, start
from specjax.drafters import cascade, ngram
from specjax.errors import ConfigError
from specjax.eval.exactness.subjects import made_up
from specjax.modules import compose
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.types import Drafter, ModelParams, Params, Target
from specjax.verify import rejection
from tests.drafters.test_draft_model import check_drafts_over_rounds, fresh_laws

pytestmark = pytest.mark.quick_compile

NGRAM = {"name": "ngram", "draft_length": 2, "max_ngram": 2}
DRAFT_MODEL = {"name": "draft_model", "draft_length": 2}
EAGLE = {"name": "eagle", "draft_length": 2}
CASCADE = {"name": "cascade", "inner": NGRAM, "source": None, "draft_length": 2}
INNER = {
    "ngram": NGRAM,
    "draft_model": DRAFT_MODEL,
    "eagle": EAGLE,
    "adaptive": {"name": "adaptive", "inner": EAGLE, "costs": (1.2, 1.6), "probe_every": 2},
    "cascade": CASCADE,
}


def made(
    inner: dict[str, Any], target: Target, params: Params, noise: float, verify: str = "rejection"
) -> tuple[Drafter, Params]:
    config = cascade.Config(inner, None, 3, verify)
    return made_up(cascade, config, target, params, noise)


@pytest.mark.parametrize("inner", INNER)
def test_its_law_is_the_models_after_any_number_accepted(
    inner: str, tiny_target: Target, tiny_params: Params
) -> None:
    drafter, weights = made(INNER[inner], tiny_target, tiny_params, 0.04)
    accepted = check_drafts_over_rounds(
        tiny_target,
        drafter,
        ModelParams(tiny_params, weights),
        functools.partial(fresh_laws, tiny_target, weights["model"]),
    )
    assert {0, drafter.max_depth} <= accepted


def written(target: Target, params: Params, inner: dict[str, Any], noise: float) -> tuple[list[int], float]:
    """What it writes at temperature 0, and its tokens a pass."""
    drafter, weights = made(inner, target, params, noise)
    method = Method(target, drafter, rejection.verify)
    options = {"warp": make_warp(1), "keys": row_keys(0, [0]), "capacity": 96}
    every = ModelParams(params, weights)
    request, state = start(method, every, [[3, 1, 2]], max_new_tokens=32, **options)
    state, stats = generate(method, every, request, state)
    return new_tokens(state, [[3, 1, 2]])[0], float(stats.num_emitted[0] / stats.num_steps[0])


def test_a_model_that_is_the_target_is_never_refused(tiny_target: Target, tiny_params: Params) -> None:
    text, tokens_per_step = written(tiny_target, tiny_params, NGRAM, 0.0)
    assert tokens_per_step == 4
    other, fewer = written(tiny_target, tiny_params, NGRAM, 0.5)
    assert other == text and fewer < 4


def test_wrong_laws_are_caught(tiny_target: Target, tiny_params: Params) -> None:
    """The negative control: the laws one place late."""
    drafter, weights = made(NGRAM, tiny_target, tiny_params, 0.04)

    def late(*arguments):
        draft, state = drafter.propose(*arguments)
        return draft._replace(probs=jnp.roll(draft.probs, 1, axis=1)), state

    with pytest.raises(AssertionError):
        check_drafts_over_rounds(
            tiny_target,
            drafter._replace(propose=late),
            ModelParams(tiny_params, weights),
            functools.partial(fresh_laws, tiny_target, weights["model"]),
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"inner": NGRAM, "draft_length": 0}, "draft_length is 0"),
        ({"inner": {"name": "ngrm"}, "draft_length": 2}, "no drafter 'ngrm'; did you mean 'ngram'"),
        ({"inner": {**NGRAM, "length": 2}, "draft_length": 2}, "has no field 'length'"),
        ({"inner": NGRAM, "draft_length": 2, "verify": "typical"}, "inner rule is 'typical'"),
        ({"inner": NGRAM, "draft_length": 2, "verify": "greedy"}, "inner rule is 'greedy'"),
    ],
)
def test_misuse(fields: dict[str, Any], message: str, tiny_target: Target, tiny_params: Params) -> None:
    with pytest.raises(ConfigError, match=message):
        config = drafter_config({"name": "cascade", "source": None, **fields})
        part, _ = made_up(ngram, drafter_config(config.inner), tiny_target, tiny_params, 0.0)
        compose(cascade, config, tiny_target, part, tiny_target)
