"""A cascade drafts with the law of its model, whatever the inner drafter and however much was refused."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import pytest

from specjax.config import drafter_config
from specjax.decode import generate, new_tokens, row_keys, start
from specjax.drafters import adaptive, cascade, ngram
from specjax.errors import ConfigError
from specjax.eval.exactness.subjects import made_up
from specjax.modules import compose
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.types import Drafter, ModelParams, Params, Parts, Target
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
SHARING = INNER | {"cascade": {**CASCADE, "inner": EAGLE, "share_cache": True}}
PROMPTS = [[3, 1, 2], [7, 5, 5, 9, 1]]


def made(
    inner: dict[str, Any], target: Target, params: Params, noise: float, share_cache: bool = False
) -> tuple[Drafter, Params]:
    config = cascade.Config(inner, None, 3, share_cache=share_cache)
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


def written(
    target: Target, drafter: Drafter | None, params: ModelParams, capacity: int = 96
) -> tuple[list[list[int]], float]:
    """What it writes at temperature 0, and its tokens a pass."""
    method = Method(target, drafter, None if drafter is None else rejection.verify)
    options = {"warp": make_warp(2), "keys": row_keys(0, [0, 1]), "capacity": capacity}
    request, state = start(method, params, PROMPTS, max_new_tokens=32, **options)
    state, stats = generate(method, params, request, state)
    return new_tokens(state, PROMPTS), float(stats.num_emitted.sum() / stats.num_steps.sum())


@pytest.mark.parametrize("share_cache", [False, True])
def test_a_model_that_is_the_target_is_never_refused(
    share_cache: bool, tiny_target: Target, tiny_params: Params
) -> None:
    plain, _ = written(tiny_target, None, ModelParams(tiny_params, {}))
    for noise in (0.0, 0.5):
        drafter, weights = made(NGRAM, tiny_target, tiny_params, noise, share_cache)
        text, tokens_per_step = written(tiny_target, drafter, ModelParams(tiny_params, weights))
        assert text == plain and (tokens_per_step == 4) == (noise == 0)


@pytest.mark.parametrize("inner", SHARING)
def test_in_the_targets_cache_it_keeps_none(inner: str, tiny_target: Target, tiny_params: Params) -> None:
    """Neither does a cascade or an adaptive drafter inside or around it; every text is plain decoding's."""
    fields = {"name": "cascade", "inner": SHARING[inner], "source": None, "draft_length": 3}
    config = drafter_config({**fields, "share_cache": True})
    part, weights = made_up(cascade, config, tiny_target, tiny_params, 0.0)
    around = adaptive.Config({}, (1.3, 1.6, 1.9), prior=0.5, probe_every=3)
    plain, _ = written(tiny_target, None, ModelParams(tiny_params, {}))
    for drafter, own, share in (
        (part, weights, 1.0),
        (adaptive.build(around, tiny_target, Parts(part)), {"inner": weights}, 0.0),
    ):
        params = ModelParams(tiny_params, own)
        # Where there is no slot to spare, nothing is written over.
        longest = max(map(len, PROMPTS))
        text, tokens_per_step = written(tiny_target, drafter, params, longest + 32 + 4 + part.scratch)
        assert text == plain and 4 * share <= tokens_per_step <= 4
        with pytest.raises(ConfigError, match="cache slots"):
            written(tiny_target, drafter, params, longest + 32 + 3 + part.scratch)


def test_the_cache_of_another_architecture_is_not_shared(tiny_target: Target, tiny_params: Params) -> None:
    part, _ = made_up(ngram, drafter_config(NGRAM), tiny_target, tiny_params, 0.0)
    other = tiny_target._replace(config=dataclasses.replace(tiny_target.config, num_layers=1))
    with pytest.raises(ConfigError, match="share_cache is for the target's own architecture"):
        compose(cascade, cascade.Config(NGRAM, None, 3, share_cache=True), tiny_target, part, other)


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
