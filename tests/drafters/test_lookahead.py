"""Lookahead decoding against the paper's algorithm with lists and dictionaries."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import lookahead
from specjax.drafters.lookahead import Config
from specjax.errors import ConfigError
from specjax.trees.topology import paths_of, repeat_parents
from specjax.types import NO_TOKEN, Drafter
from tests.drafters.greedy_toy import (
    PROMPTS,
    TARGET,
    VOCAB,
    first_guess,
    following,
    greedy_text,
    has_ended,
    passes,
    random_table,
)

pytestmark = pytest.mark.quick_compile

Pool = dict[int, list[tuple[int, ...]]]


class Pass(NamedTuple):
    """What a row holds after a pass."""

    text: list[int]
    pool: Pool
    window: list[list[int]]


def by_paper(table: np.ndarray, prompt: list[int], config: Config, sees_level_0: bool = True) -> list[Pass]:
    """Passes over one prompt: verification of whole n-grams, one by one, and the window's next level.

    As a negative control, columns may be blind to level 0 to their left.
    """
    text, pool = list(prompt), defaultdict(list)
    levels = config.ngram - 1
    guess = first_guess(prompt, config.window + levels)
    window = [guess[level : level + config.window] for level in range(levels)]
    whole, done = greedy_text(table, prompt), []
    while not has_ended(text, prompt):
        window = [[text[-1], *window[0][1:]], *window[1:]]
        left = window[0][1:] if sees_level_0 else []
        columns = [left[:i] + [level[i] for level in window[1:]] for i in range(config.window)]
        known = [list(ngram[1:]) for ngram in pool[text[-1] % config.num_buckets] if ngram[0] == text[-1]]
        iterate = [following(table, text + column) for column in columns]
        accepted = max(confirmed(table, text, drafts) for drafts in known + columns)
        for i in range(config.window):
            ngram = (*(level[i] for level in window), iterate[i])
            bucket = pool[ngram[0] % config.num_buckets]
            if ngram in bucket:
                bucket.remove(ngram)
            bucket.append(ngram)
            del bucket[: -config.num_guesses]
        window = [*window[1:], iterate]
        text = whole[: len(text) + accepted + 1]
        done.append(Pass(text, {key: list(found) for key, found in pool.items() if found}, window))
    return done


def confirmed(table: np.ndarray, text: list[int], drafts: list[int]) -> int:
    """How many drafts are what the target would write."""
    count = 0
    while count < len(drafts) and following(table, text + drafts[:count]) == drafts[count]:
        count += 1
    return count


def decoded(drafter: Drafter, table: np.ndarray) -> list[list[Pass]]:
    """What every row holds after each of its passes."""
    rows: list[list[Pass]] = [[] for _ in PROMPTS]
    for tokens, lengths, state in passes(drafter, table):
        for row, done in enumerate(rows):
            text = tokens[row, : lengths[row]].tolist()
            if done and done[-1].text == text:
                continue  # it has ended
            pool = {
                key: [tuple(ngram.tolist()) for ngram in bucket if ngram[0] != NO_TOKEN]
                for key, bucket in enumerate(state.pool[row])
                if bucket[-1, 0] != NO_TOKEN
            }
            done.append(Pass(text, pool, state.window[row].tolist()))
    return rows


CONFIGS = {
    "a bucket a token": Config(window=4, ngram=3, num_guesses=3, num_buckets=VOCAB),
    "pool overflows": Config(window=3, ngram=4, num_guesses=2, num_buckets=2),
    "bigrams": Config(window=4, ngram=2, num_guesses=1, num_buckets=VOCAB),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_papers_algorithm(name: str) -> None:
    config, gains, evicted, blind = CONFIGS[name], [], False, 0
    drafter = lookahead.build(config, TARGET)
    for seed in range(3):
        table = random_table(seed)
        for prompt, found in zip(PROMPTS, decoded(drafter, table), strict=True):
            assert found == by_paper(table, prompt, config)
            blind += found[0].pool != by_paper(table, prompt, config, sees_level_0=False)[0].pool
            assert found[-1].text == greedy_text(table, prompt)
            gains.append((len(found[-1].text) - len(prompt)) / len(found))
            ngrams = [{n for bucket in done.pool.values() for n in bucket} for done in found]
            evicted |= len(set().union(*ngrams)) > len(ngrams[-1])
    assert max(gains) > 1.2
    assert evicted
    # The toy sees two tokens: columns of three see nothing of level 0.
    assert blind >= 10 or config.ngram > 3


def test_prefixes_that_share_nothing_cost_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the texts stay, the longest matches are missed."""
    config, table = CONFIGS["a bucket a token"], random_table(0)
    monkeypatch.setattr(
        lookahead, "shared_prefixes", lambda tokens, parents: repeat_parents(parents, len(tokens))
    )
    found = decoded(lookahead.build(config, TARGET), table)
    right = [by_paper(table, prompt, config) for prompt in PROMPTS]
    assert [row[-1].text for row in found] == [row[-1].text for row in right]
    assert sum(map(len, found)) > sum(map(len, right))


def test_a_window_token_sees_level_0_up_to_its_column_then_its_column() -> None:
    config = Config(window=4, ngram=4, num_guesses=2)
    nodes, paths = lookahead._window_nodes(config), paths_of(lookahead._parents(config))
    for level, column in np.ndindex(nodes.shape):
        seen = [*nodes[0, : column + 1], *nodes[1 : level + 1, column]]
        assert list(paths[nodes[level, column]]) == seen
    guesses = [paths[node] for node in range(1, len(paths)) if node not in nodes]
    assert sorted(map(len, guesses)) == [2, 2, 3, 3, 4, 4]
    assert all(path[1] + depth == node for path in guesses for depth, node in enumerate(path[1:]))


@pytest.mark.parametrize(
    ("tokens", "parents", "wanted"),
    [
        # Both branches begin with 7: what follows the second 7 moves below the first.
        ([3, 7, 8, 7, 9], (-1, 0, 1, 0, 3), [-1, 0, 1, 0, 1]),
        # The same token below other tokens is another path.
        ([3, 7, 8, 6, 8, 5], (-1, 0, 1, 0, 3, 4), [-1, 0, 1, 0, 3, 4]),
        # Nor is a token the same at another depth.
        ([3, 3, 3, 3], (-1, 0, 1, 2), [-1, 0, 1, 2]),
    ],
)
def test_same_paths_share_their_children(tokens, parents, wanted) -> None:
    find = jax.jit(lookahead.shared_prefixes, static_argnums=1)
    found = find(jnp.asarray([tokens, [0] * len(tokens)]), parents)
    assert found[0].tolist() == wanted
    assert found.dtype == jnp.int32


@pytest.mark.parametrize(
    ("field", "value"), [("window", 0), ("ngram", 1), ("num_guesses", 0), ("num_buckets", 0)]
)
def test_sizes_that_make_no_ngrams_are_named(field: str, value: int) -> None:
    sizes = {"window": 2, "ngram": 3, "num_guesses": 2} | {field: value}
    with pytest.raises(ConfigError, match=f"drafter.{field} is {value}"):
        Config(**sizes)
