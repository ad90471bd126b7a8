"""Suffix decoding against a search written out in full, and on texts whose trees are counted by hand."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections import defaultdict
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.data.earlier_outputs import read_outputs
from specjax.data.token_store import Sample, write_samples
from specjax.drafters import suffix
from specjax.errors import ConfigError
from specjax.types import NO_PARENT, NO_TOKEN, ROOT, Draft

SIZE = 24
Path = tuple[int, ...]


def by_search(text: list[int], config: suffix.Config, earlier: Sequence[list[int]] = ()) -> set[Path]:
    """The paths of the likeliest nodes: what followed each occurrence, weighed by its length."""
    matches: list[tuple[int, list[int]]] = []

    def search(place: list[int], ends: range, is_own: bool) -> None:
        for end in ends:
            most = min(config.max_suffix, end, len(text))
            sizes = [n for n in range(1, most + 1) if place[end - n : end] == text[-n:]]
            if sizes and sizes[-1] >= config.min_suffix:
                # The text itself goes on periodically; others end.
                following = place[end:] * config.draft_length if is_own else place[end:]
                matches.append((sizes[-1], following))

    search(text, range(len(text) - 1, 0, -1), True)
    for other in reversed(earlier):
        search(other, range(len(other), 0, -1), False)
    matches = sorted(matches, key=lambda match: -match[0])[: config.num_matches]
    weights: dict[Path, int] = defaultdict(int)
    order: dict[Path, tuple[int, int]] = {}
    for number, (size, following) in enumerate(matches):
        path = tuple(following[: config.draft_length])
        for depth in range(1, len(path) + 1):
            weights[path[:depth]] += 2**size
            order.setdefault(path[:depth], (depth, number))
    total = sum(2**size for size, _ in matches)
    most = config.num_nodes - 1
    if config.nodes_per_match is not None and matches:
        most = min(most, int(config.nodes_per_match * matches[0][0]))
    likely = [path for path in weights if weights[path] >= config.min_prob * total]
    return set(sorted(likely, key=lambda path: (-weights[path], order[path]))[:most])


def paths_of(draft: Draft, row: int) -> list[Path]:
    """The tokens that lead to each drafted node of a row."""
    found: list[Path] = [()]
    for token, parent in zip(draft.tokens[row, 1:].tolist(), draft.parents[row, 1:].tolist(), strict=True):
        found.append((*found[parent], token))
    return [path for path in found[1:] if path[-1] != NO_TOKEN]


def lookup(texts: list[list[int]], config: suffix.Config, behind: int = NO_TOKEN) -> Draft:
    """The drafts for ragged texts, side by side; `behind` stands behind them."""
    tokens = [text + [behind] * (SIZE - len(text)) for text in texts]
    lengths = [len(text) for text in texts]
    return jax.device_get(compiled(jnp.asarray(tokens), jnp.asarray(lengths), config))


compiled = jax.jit(suffix.lookup, static_argnames="config")


CONFIGS = {
    "all": suffix.Config(4, 9),
    "few matches": suffix.Config(4, 9, num_matches=3),
    "long suffixes": suffix.Config(3, 6, max_suffix=5, min_suffix=2),
    "one token": suffix.Config(3, 8, max_suffix=1),
    "limited": suffix.Config(4, 12, nodes_per_match=1.5, min_prob=0.17),
    "more nodes than matches": suffix.Config(2, 40, num_matches=2),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_trees_equal_a_search(config: suffix.Config) -> None:
    rng = np.random.default_rng(0)
    # What lies behind the length must not be read: it repeats the text's own tokens.
    texts = rng.integers(0, 3, size=(300, SIZE))
    lengths = rng.integers(1, SIZE + 1, size=300)
    draft = jax.jit(lambda tokens, lengths: suffix.lookup(tokens, lengths, config))(
        jnp.asarray(texts), jnp.asarray(lengths)
    )
    assert draft.tokens.shape == draft.parents.shape == (300, config.num_nodes)
    assert draft.probs is None and (draft.tokens[:, ROOT] == NO_TOKEN).all()
    parents = np.asarray(draft.parents)
    assert (parents[:, ROOT] == NO_PARENT).all()
    assert (parents[:, 1:] < np.arange(1, config.num_nodes)).all() and (parents[:, 1:] >= ROOT).all()
    draft = jax.device_get(draft)
    wanted = [by_search(text[:length].tolist(), config) for text, length in zip(texts, lengths, strict=True)]
    for row, paths in enumerate(wanted):
        found = paths_of(draft, row)
        assert len(found) == len(set(found))  # no node comes twice
        assert set(found) == paths, texts[row, : lengths[row]]
    assert set() in wanted and len({frozenset(paths) for paths in wanted}) > 20


def test_the_search_tells_wrong_weights_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    # The negative control: with matches of one length less, the same comparison fails.
    right = suffix.match_lengths
    monkeypatch.setattr(
        suffix, "match_lengths", lambda tokens, length, most: jnp.maximum(right(tokens, length, most) - 1, 0)
    )
    with pytest.raises(AssertionError):
        test_trees_equal_a_search(CONFIGS["all"])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_earlier_texts_are_searched_too(config: suffix.Config) -> None:
    rng = np.random.default_rng(1)
    before = [rng.integers(0, 3, size=size).tolist() for size in (17, 5, 1, 9)]
    row = np.concatenate([[*text, NO_TOKEN] for text in before])
    texts = rng.integers(0, 3, size=(200, SIZE))
    lengths = rng.integers(1, SIZE + 1, size=200)
    draft = jax.jit(lambda *given: suffix.lookup(*given[:2], config, given[2]))(
        jnp.asarray(texts), jnp.asarray(lengths), jnp.asarray(row)
    )
    draft = jax.device_get(draft)
    changed = 0
    for number, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        wanted = by_search(text[:length].tolist(), config, before)
        assert set(paths_of(draft, number)) == wanted, (number, text[:length])
        changed += wanted != by_search(text[:length].tolist(), config)
    assert changed > 50  # they made a difference


def test_named_outputs_become_its_weights(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "generations.jsonl"
    run.write_text("".join(json.dumps({"tokens": tokens}) + "\n" for tokens in ([1, 2], [], [3])))
    samples = [Sample(np.array([4, 5, 6]), np.array([False, True, True]), 0.0, "test")]
    write_samples(tmp_path / "tokens-00000.array_record", samples)
    found = read_outputs([str(run), str(tmp_path)], 100, vocab_size=7)
    assert found.tolist() == [1, 2, NO_TOKEN, 3, NO_TOKEN, 5, 6, NO_TOKEN]
    assert read_outputs([str(run), str(tmp_path)], 4, vocab_size=7).tolist() == found.tolist()[-4:]
    with pytest.raises(ConfigError, match="the token 6 and the target's vocabulary ends at 6"):
        read_outputs([str(tmp_path)], 4, vocab_size=6)
    run.write_text("[1]\n")
    with pytest.raises(ConfigError, match=r"generations\.jsonl"):
        read_outputs([str(run)], 4, vocab_size=7)


BY_HAND = {
    "no match": ([1, 2, 3, 4], []),
    "a single token": ([1], []),
    # 4 and 3 followed "1 2", each with 4 of a weight of 8: the latest comes first, but no level before it.
    "frequencies tie": ([1, 2, 3, 1, 2, 4, 1, 2], [(4,), (3,), (4, 1), (3, 1), (4, 1, 2)]),
    # 8 followed "7 2", which weighs 4, and 9 twice a "2" of weight 2; the latter two part at the next token.
    "short matches add up": ([7, 2, 8, 2, 9, 2, 9, 7, 2], [(8,), (9,), (8, 2), (8, 2, 9), (9, 7)]),
    "the end goes on periodically": ([5, 6, 5, 6], [(5,), (5, 6), (5, 6, 5)]),
    # The occurrences overlap one another and the end.
    "overlapping": ([3, 3, 3, 3], [(3,), (3, 3), (3, 3, 3)]),
}


TEXTS = [text for text, _ in BY_HAND.values()]
SMALL = suffix.Config(draft_length=3, num_nodes=6)


def test_trees_counted_by_hand() -> None:
    draft = lookup(TEXTS, SMALL)
    for row, (name, (_, wanted)) in enumerate(BY_HAND.items()):
        assert set(paths_of(draft, row)) == set(wanted), name


def test_a_row_does_not_depend_on_its_mates_nor_on_what_lies_behind_it() -> None:
    drafts = lookup(TEXTS, SMALL, behind=2)
    for row, text in enumerate(TEXTS):
        others = lookup([text, *TEXTS[1:]], SMALL)
        assert paths_of(others, 0) == paths_of(drafts, row)


def test_longer_matches_draft_more() -> None:
    draft = lookup(TEXTS, dataclasses.replace(SMALL, nodes_per_match=1.5))
    matched = dict(zip(BY_HAND, (0, 0, 2, 2, 2, 3), strict=True))
    for row, (name, (_, wanted)) in enumerate(BY_HAND.items()):
        assert len(paths_of(draft, row)) == min(len(wanted), int(1.5 * matched[name])), name


def test_improbable_nodes_are_not_drafted() -> None:
    draft = lookup(TEXTS, dataclasses.replace(SMALL, min_prob=0.4))
    row = list(BY_HAND).index("short matches add up")
    assert set(paths_of(draft, row)) == {(8,), (8, 2), (8, 2, 9), (9,)}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("draft_length", 0),
        ("num_nodes", 4),
        ("num_nodes", 5000),
        ("min_suffix", 0),
        ("max_suffix", 17),
        ("num_matches", 0),
        ("num_matches", 1000),
        ("nodes_per_match", 0.0),
        ("min_prob", 1.0),
        ("num_earlier", 0),
    ],
)
def test_contradictory_numbers_are_named(field: str, value: float) -> None:
    fields = {"draft_length": 3, "num_nodes": 9, field: value}
    with pytest.raises(ConfigError, match=f"{field} (is )?{value}"):
        suffix.Config(**fields)  # type: ignore[arg-type]
