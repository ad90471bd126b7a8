"""Prompt lookup against a search written out in full."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import ngram
from specjax.errors import ConfigError
from specjax.types import NO_TOKEN

SIZE = 24


def by_search(text: list[int], config: ngram.Config) -> list[list[int]]:
    """What followed the latest of the longest matches of the text's end, by different first tokens."""
    branches: list[list[int]] = []
    for size in range(min(config.max_ngram, len(text) - 1), config.min_ngram - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            following = text[end:]
            if text[end - size : end] == text[-size:] and following[0] not in [b[0] for b in branches]:
                branches.append([following[i % len(following)] for i in range(config.draft_length)])
    nothing = [[NO_TOKEN] * config.draft_length] * config.num_branches
    return (branches + nothing)[: config.num_branches]


@pytest.mark.parametrize(
    ("max_ngram", "min_ngram", "num_branches"),
    [(1, 1, 1), (3, 1, 1), (3, 2, 1), (5, 3, 1), (3, 1, 3), (2, 2, 2)],
)
def test_lookup_equals_a_search(max_ngram: int, min_ngram: int, num_branches: int) -> None:
    config = ngram.Config(4, max_ngram, min_ngram, num_branches)
    rng = np.random.default_rng(0)
    # What lies behind the length must not be read: it repeats the text's own tokens.
    texts = rng.integers(0, 3, size=(400, SIZE))
    lengths = rng.integers(1, SIZE + 1, size=400)
    found = jax.jit(jax.vmap(lambda tokens, length: ngram.lookup(tokens, length, config)))(
        jnp.asarray(texts), jnp.asarray(lengths)
    )
    wanted = [by_search(text[:length].tolist(), config) for text, length in zip(texts, lengths, strict=True)]
    assert found.tolist() == wanted
    assert [[NO_TOKEN] * 4] * num_branches in wanted and len({str(row) for row in wanted}) > 20


def test_no_branches_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_branches is 0"):
        ngram.Config(draft_length=1, max_ngram=1, num_branches=0)


@pytest.mark.parametrize(("min_ngram", "max_ngram"), [(0, 2), (3, 2)])
def test_contradictory_lengths_are_named(min_ngram: int, max_ngram: int) -> None:
    with pytest.raises(ConfigError, match=f"min_ngram is {min_ngram} and max_ngram {max_ngram}"):
        ngram.Config(draft_length=1, max_ngram=max_ngram, min_ngram=min_ngram)
