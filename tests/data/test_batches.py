"""Batches: what is cut, padded, dropped and held out; their order, and going on in the middle of it."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.data import batches, feature_store, token_store
from specjax.data.token_store import SUFFIX, Sample
from specjax.errors import ConfigError
from specjax.types import TrainingBatch

LENGTHS = [5, 9, 3, 12, 7, 4, 8, 6]
V = 100
T = 8


def write(folder: Path, number: int, lengths: list[int], num_given: int = 2, features: bool = True) -> None:
    """A file of texts; token i of text t is 10 t + i, and its feature is (that, number of the file)."""
    path = folder / f"tokens-{number:05d}{SUFFIX}"
    samples = [
        Sample((10 * t + np.arange(size)) % V, np.arange(size) >= num_given, 0.0, "made up")
        for t, size in enumerate(lengths)
    ]
    if features:
        rows = [
            np.stack([one.tokens[:-1], np.full(len(one.tokens) - 1, number)], 1).astype(jnp.dtype("bfloat16"))
            for one in samples
        ]
        feature_store.write_features(feature_store.features_path(path), {"state": rows})
    token_store.write_samples(path, samples)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, 0, LENGTHS)
    write(tmp_path, 1, LENGTHS[:3])
    return tmp_path


def load(folder: Path, max_length: int = T, supervise: str = "answers") -> list[batches.Text]:
    return batches.load_texts([str(folder)], max_length, supervise, V)


def make(texts: list[batches.Text], seed: int = 0, process: int = 0, num_processes: int = 1, **changed):
    settings = {"features": ("state",), "num_rows": 4 // num_processes, "max_length": T} | changed
    return batches.make_batches(
        texts,
        settings.pop("features"),
        **settings,
        seed=seed,
        process=process,
        num_processes=num_processes,
    )


def texts_of(batch: TrainingBatch) -> list[tuple[int, ...]]:
    """The texts of a batch, without the rows that were left over."""
    rows = zip(batch.tokens, batch.length, strict=True)
    return [tuple(row[:size].tolist()) for row, size in rows if size > 0]


def test_rows_are_cut_and_padded_to_one_size_with_their_features(folder: Path) -> None:
    texts = load(folder)
    seen = set()
    for batch, _ in zip(make(texts), range(6), strict=False):
        assert batch.tokens.shape == batch.supervised.shape == (4, T)
        assert batch.tokens.dtype == np.int32
        assert batch.features["state"].shape == (4, T, 2)
        for tokens, supervised, length, state in zip(
            batch.tokens,
            batch.supervised,
            batch.length,
            batch.features["state"].astype(np.float32),
            strict=True,
        ):
            if length == 0:
                assert not supervised.any() and not tokens.any() and not state.any()
                continue
            first = tokens[0]
            assert length == min(LENGTHS[first // 10], T)
            np.testing.assert_array_equal(tokens, np.where(np.arange(T) < length, first + np.arange(T), 0))
            np.testing.assert_array_equal(supervised, (np.arange(T) >= 2) & (np.arange(T) < length))
            np.testing.assert_array_equal(state[: length - 1, 0], tokens[: length - 1])
            assert set(state[: length - 1, 1]) in ({0.0}, {1.0})
            assert not state[length - 1 :].any()
            seen.add((int(first), int(state[0, 1])))
    assert len(seen) == len(texts)


def test_every_epoch_has_every_text_once_in_another_order(folder: Path) -> None:
    texts = load(folder)
    stream = (text for batch in make(texts) for text in texts_of(batch))
    epochs = [[next(stream) for _ in texts] for _ in range(3)]
    whole = sorted(tuple(text.tokens.tolist()) for text in texts)
    assert all(sorted(epoch) == whole for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_short_texts_stand_together_in_narrow_rows(tmp_path: Path) -> None:
    lengths = [3 * i % 250 + 4 for i in range(80)]
    write(tmp_path, 0, lengths)
    texts = load(tmp_path, max_length=256)
    widths, stream = {}, make(texts, max_length=256, num_rows=2)
    narrower = {256: 192, 192: 128, 128: 64, 64: 0}
    seen: list[tuple[int, ...]] = []
    while len(seen) < len(texts):
        batch = next(stream)
        rows, width = batch.tokens.shape
        widths[width] = rows
        assert batch.features["state"].shape == (rows, width, 2)
        assert all(narrower[width] < len(text) <= width for text in texts_of(batch))
        seen += texts_of(batch)
    assert widths == {256: 2, 192: 2, 128: 4, 64: 8}
    assert sorted(seen) == sorted(tuple(text.tokens.tolist()) for text in texts)


def test_order_is_a_function_of_the_seed(folder: Path) -> None:
    texts = load(folder)

    def order(seed: int) -> list:
        return [texts_of(batch) for batch, _ in zip(make(texts, seed), range(5), strict=False)]

    assert order(3) == order(3) != order(4)


def test_goes_on_from_any_batch(folder: Path) -> None:
    texts = load(folder)
    whole = make(texts)
    expected = [texts_of(next(whole)) for _ in range(9)]
    begun = make(texts)
    for _ in range(4):
        next(begun)
    state = begun.get_state()
    again = make(texts)
    again.set_state(state)
    assert [texts_of(next(again)) for _ in range(5)] == expected[4:]


def test_processes_divide_the_batches_of_one(folder: Path) -> None:
    texts = load(folder)
    alone, parts = make(texts), [make(texts, process=i, num_processes=2) for i in range(2)]
    for _ in range(7):
        together = [text for part in parts for text in texts_of(next(part))]
        assert sorted(together) == sorted(texts_of(next(alone)))


def test_held_out_texts_are_never_learned_from(folder: Path) -> None:
    texts = load(folder)
    learned_from, held_out = batches.split(texts, 3, seed=1)
    assert len(held_out) == 3

    def places(part):
        return {(text.path, text.first_row) for text in part}

    assert places(learned_from) | places(held_out) == places(texts)
    assert not places(learned_from) & places(held_out)
    assert places(batches.split(texts, 3, seed=1)[1]) == places(held_out)
    assert places(batches.split(texts, 3, seed=2)[1]) != places(held_out)
    with pytest.raises(ConfigError, match="held_out is 11 and there are 11 texts"):
        batches.split(texts, 11, seed=1)


def test_held_out_texts_of_other_folders_are_the_same_whatever_is_learned_from(tmp_path: Path) -> None:
    write(tmp_path, 0, LENGTHS)
    texts = load(tmp_path)
    others = [text._replace(tokens=text.tokens + V) for text in texts]
    held_out = batches.split(texts, 3, seed=1)[1]
    learned_from, same = batches.split(others, 3, seed=1, eval_texts=texts)
    assert keys(same) == keys(held_out) and keys(learned_from) == keys(others)
    # Where the folders share texts, those that are held out are not learned from.
    learned_from, same = batches.split(texts + others, 3, seed=1, eval_texts=texts)
    assert keys(same) == keys(held_out) and keys(learned_from) == keys(texts + others) - keys(held_out)
    with pytest.raises(ConfigError, match="every text is held out"):
        batches.split(held_out, 3, seed=1, eval_texts=texts)


def keys(texts: list[batches.Text]) -> set[bytes]:
    return {text.tokens.tobytes() for text in texts}


def test_only_so_many_tokens_may_be_learned_from(folder: Path) -> None:
    texts = load(folder)
    whole = sum(len(text.tokens) for text in texts[:3])
    assert batches.first_tokens(texts, None) == texts
    assert batches.first_tokens(texts, whole) == texts[:3]
    assert batches.first_tokens(texts, whole - 1) == texts[:2]
    with pytest.raises(ConfigError, match="max_tokens is 1 and the first text has"):
        batches.first_tokens(texts, 1)


def test_texts_without_a_supervised_token_in_the_window_are_dropped(tmp_path: Path) -> None:
    write(tmp_path, 0, [4, 12], num_given=2)
    write(tmp_path, 1, [10, 12, 6], num_given=9)
    assert [len(text.tokens) for text in load(tmp_path)] == [4, T]
    assert [len(text.tokens) for text in load(tmp_path, supervise="all")] == [4, T, T, T, 6]


def test_nothing_to_learn_is_refused_with_the_likely_cause(tmp_path: Path) -> None:
    write(tmp_path, 0, LENGTHS, num_given=50)
    with pytest.raises(ConfigError, match="none of the 8 texts .* supervised token .* chat template"):
        load(tmp_path)


def test_all_tokens_but_the_first_may_be_supervised(folder: Path) -> None:
    for text in load(folder, supervise="all"):
        np.testing.assert_array_equal(text.supervised, np.arange(len(text.tokens)) > 0)


def test_tokens_of_another_vocabulary_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="the target's vocabulary ends at 50"):
        batches.load_texts([str(folder)], T, "answers", 50)


def test_prompt_is_what_comes_before_the_answer(folder: Path) -> None:
    first = load(folder)[0]
    assert batches.prompt(first) == [0, 1]
    assert batches.prompt(first._replace(num_given=0)) == [0]  # no text of the target's: a quarter of it


def test_tokens_to_foresee_are_counted(tmp_path: Path) -> None:
    write(tmp_path, 0, [4, 3])
    np.testing.assert_array_equal(np.flatnonzero(batches.count_tokens(load(tmp_path), V)), [2, 3, 12])


def test_features_count_as_stored_only_where_they_are_for_all_texts(folder: Path) -> None:
    assert batches.stored_among(load(folder), ("state",)) == ("state",)
    assert batches.stored_among(load(folder), ("other", "state")) == ("state",)
    write(folder, 2, [5], features=False)
    assert batches.stored_among(load(folder), ("state",)) == ()
    assert next(make(load(folder), features=())).features == {}
