"""Jacobi decoding reaches the greedy text, in no more passes than tokens."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import jacobi
from specjax.errors import ConfigError
from specjax.types import Drafter
from tests.drafters.greedy_toy import (
    PROMPTS,
    TARGET,
    first_guess,
    following,
    greedy_text,
    has_ended,
    passes,
    random_table,
)

pytestmark = pytest.mark.quick_compile

LENGTH = 4


def by_iteration(table: np.ndarray, prompt: list[int]) -> tuple[list[int], list[int]]:
    """The text, and its length after each pass, where the block slides along as far as it is right."""
    text, lengths = list(prompt), []
    guess = first_guess(prompt, LENGTH)
    whole = greedy_text(table, prompt)
    while not has_ended(text, prompt):
        iterate = [following(table, text + guess[:place]) for place in range(LENGTH + 1)]
        right = next((place for place in range(LENGTH) if guess[place] != iterate[place]), LENGTH)
        text = (text + iterate[: right + 1])[: len(whole)]
        lengths.append(len(text))
        guess = (iterate[right + 1 :] + [iterate[-1]] * LENGTH)[:LENGTH]
    return text, lengths


def decoded(drafter: Drafter, table: np.ndarray) -> tuple[list[list[int]], list[list[int]]]:
    """The texts, and the length of each after its passes."""
    found = list(passes(drafter, table))
    lengths = np.stack([lengths for _, lengths, _ in found], axis=1)
    texts = [row[:end].tolist() for row, end in zip(found[-1][0], lengths[:, -1], strict=True)]
    return texts, [list(dict.fromkeys(row.tolist())) for row in lengths]


def test_it_is_the_iteration_and_its_fixed_point_is_the_greedy_text() -> None:
    gains, drafter = [], jacobi.build(jacobi.Config(LENGTH), TARGET)
    for seed in range(4):
        table = random_table(seed)
        texts, lengths = decoded(drafter, table)
        for row, prompt in enumerate(PROMPTS):
            text, wanted = by_iteration(table, prompt)
            assert texts[row] == text == greedy_text(table, prompt)
            assert lengths[row] == wanted
            assert len(wanted) <= len(text) - len(prompt)
            gains.append((len(text) - len(prompt)) / len(wanted))
    # Some gain nothing and others much.
    assert min(gains) == 1 and max(gains) > 1.5


def test_an_iterate_in_the_wrong_place_costs_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the text stays, the passes do not."""
    monkeypatch.setattr(jacobi, "argmax", lambda logits: jnp.roll(jnp.argmax(logits, axis=-1), 1, axis=1))
    table = random_table(0)
    texts, lengths = decoded(jacobi.build(jacobi.Config(LENGTH), TARGET), table)
    wanted = [by_iteration(table, prompt) for prompt in PROMPTS]
    assert texts == [text for text, _ in wanted]
    assert lengths != [found for _, found in wanted]


def test_nothing_to_iterate_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft_length is 0"):
        jacobi.Config(draft_length=0)
