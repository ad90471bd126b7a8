"""A tabulated target that shows its logits to drafters, and its greedy text in numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode import rollout, row_keys, start
from specjax.models.functional import LOGITS
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.testing import tabulated_target
from specjax.types import Drafter, ModelParams
from specjax.verify import greedy

VOCAB, NEW_TOKENS, STOP = 6, 20, 4
PROMPTS = ([1], [2, 0], [5, 3, 3], [0, 1, 2, 3, 4, 5], [3, 1])


def _forward(params, tokens, positions, mask, cache, features=()):
    out = tabulated_target(params).forward({}, tokens, positions, mask, cache)
    assert set(features) <= {LOGITS}
    return out._replace(features=dict.fromkeys(features, out.logits))


# Its params are the table, so that one compilation serves all of them.
TARGET = tabulated_target(jnp.zeros((VOCAB + 1, VOCAB, VOCAB)))._replace(forward=_forward)


def random_table(seed: int) -> np.ndarray:
    """Logits by the previous and the current token."""
    return np.random.default_rng(seed).normal(size=(VOCAB + 1, VOCAB, VOCAB)).astype(np.float32)


def following(table: np.ndarray, text: list[int]) -> int:
    """The target's choice after a text."""
    return int(table[text[-2] if len(text) > 1 else VOCAB, text[-1]].argmax())


def greedy_text(table: np.ndarray, prompt: list[int]) -> list[int]:
    """Prompt and output, up to the stop token or the limit."""
    text = list(prompt)
    while not has_ended(text, prompt):
        text.append(following(table, text))
    return text


def has_ended(text: list[int], prompt: list[int]) -> bool:
    """Whether a text is complete."""
    return STOP in text[len(prompt) :] or len(text) >= len(prompt) + NEW_TOKENS


def first_guess(prompt: list[int], size: int) -> list[int]:
    """What iterations start from: the prompt, over again where it is short."""
    return [prompt[place % len(prompt)] for place in range(size)]


def passes(drafter: Drafter, table: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, Any]]:
    """Tokens, lengths and the drafter's state after each pass over all prompts, until all have ended."""
    method, params = Method(TARGET, drafter, greedy.verify), ModelParams(jnp.asarray(table), {})
    warp, keys = make_warp(len(PROMPTS)), row_keys(0, range(len(PROMPTS)))
    request, state = start(
        method, params, PROMPTS, max_new_tokens=NEW_TOKENS, warp=warp, keys=keys, stop_tokens=[STOP]
    )
    while not bool(state.done.all()):
        state, _ = rollout(method, params, request, state, 1)
        # Copies, for the next pass uses the state up.
        yield jax.tree.map(np.array, (state.tokens, state.length, state.draft_state))
