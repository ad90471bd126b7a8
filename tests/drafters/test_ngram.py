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


def by_search(text: list[int], config: ngram.Config) -> list[int]:
    """What followed the latest of the longest earlier matches of the text's end."""
    for size in range(min(config.max_ngram, len(text) - 1), config.min_ngram - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                following = text[end:]
                return [following[i % len(following)] for i in range(config.draft_length)]
    return [NO_TOKEN] * config.draft_length


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(1, 1), (3, 1), (3, 2), (5, 3)])
def test_lookup_equals_a_search(max_ngram: int, min_ngram: int) -> None:
    config = ngram.Config(draft_length=4, max_ngram=max_ngram, min_ngram=min_ngram)
    rng = np.random.default_rng(0)
    # What lies behind the length must not be read: it repeats the text's own tokens.
    texts = rng.integers(0, 3, size=(400, SIZE))
    lengths = rng.integers(1, SIZE + 1, size=400)
    found = jax.jit(jax.vmap(lambda tokens, length: ngram.lookup(tokens, length, config)))(
        jnp.asarray(texts), jnp.asarray(lengths)
    )
    wanted = [by_search(text[:length].tolist(), config) for text, length in zip(texts, lengths, strict=True)]
    assert found.tolist() == wanted
    assert [NO_TOKEN] * 4 in wanted and len({tuple(row) for row in wanted}) > 20


@pytest.mark.parametrize(("min_ngram", "max_ngram"), [(0, 2), (3, 2)])
def test_contradictory_lengths_are_named(min_ngram: int, max_ngram: int) -> None:
    with pytest.raises(ConfigError, match=f"min_ngram is {min_ngram} and max_ngram {max_ngram}"):
        ngram.Config(draft_length=1, max_ngram=max_ngram, min_ngram=min_ngram)
