"""Batches to learn from: files of tokens, and the features beside them, as padded rows of one size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import Bool, Int
from safetensors import safe_open

from specjax.data.feature_store import features_path, read_features
from specjax.data.token_store import read_samples, token_files
from specjax.errors import ConfigError, import_extra
from specjax.types import TrainingBatch

ANSWERS, ALL = "answers", "all"
SUPERVISE = (ANSWERS, ALL)

PREFETCHED = 4  # batches that wait, ready, in this process
READERS = 2  # threads that make them
NARROWEST = 64  # tokens of a row


class Text(NamedTuple):
    """A text of T tokens: which of them are to be foreseen, and the row of its features in its file.

    `num_given` tokens come before the first that the target wrote.
    """

    tokens: Int[np.ndarray, "T"]
    supervised: Bool[np.ndarray, "T"]
    num_given: int
    path: Path
    first_row: int


class Batches(Protocol):
    """An endless iterator over batches that can say where it is and go on from there."""

    def __iter__(self) -> Iterator[TrainingBatch]: ...
    def __next__(self) -> TrainingBatch: ...
    def get_state(self) -> Any: ...
    def set_state(self, state: Any) -> None: ...


def load_texts(folders: Sequence[str], max_length: int, supervise: str, vocab_size: int) -> list[Text]:
    """The first `max_length` tokens of every text that has some to be foreseen there.

    Raises ConfigError where no text has, or where a token is outside the vocabulary.
    """
    texts, count = [], 0
    for path in (path for folder in folders for path in token_files(Path(folder))):
        row = 0
        for tokens, supervised, *_ in read_samples(path):
            count += 1
            num_given = int(supervised.argmax()) if supervised.any() else len(tokens)
            wanted = (supervised if supervise == ANSWERS else np.ones_like(supervised))[:max_length].copy()
            wanted[:1] = False  # nothing comes before the first token
            if wanted.any():
                texts.append(Text(tokens[:max_length], wanted, num_given, path, row))
            row += len(tokens) - 1  # the last token was never read
    if not texts:
        raise ConfigError(
            f"none of the {count} texts in {', '.join(folders)} has a supervised token among its first "
            f"{max_length}: raise max_length, or, if they were rendered with a chat template that is not the "
            "target's, write them again"
        )
    largest = max(int(text.tokens.max()) for text in texts)
    if largest >= vocab_size:
        raise ConfigError(
            f"the texts in {', '.join(folders)} hold the token {largest} and the target's vocabulary ends at "
            f"{vocab_size}: train with the target that wrote them"
        )
    return texts


def split(
    texts: Sequence[Text], held_out: int, seed: int, eval_texts: Sequence[Text] = ()
) -> tuple[list[Text], list[Text]]:
    """The texts to learn from and the `held_out` ones never to learn from, drawn by `seed`.

    The held-out ones are drawn from `eval_texts` where there are some: the same, whatever is learned from.
    Raises ConfigError where nothing is left to learn from.
    """
    order = _shuffled(eval_texts or texts, seed)
    cut = len(order) - held_out
    if cut <= 0:
        raise ConfigError(f"held_out is {held_out} and there are {len(order)} texts: hold out fewer")
    kept = order[cut:]
    if not eval_texts:
        return order[:cut], kept
    never = {text.tokens.tobytes() for text in kept}
    rest = [text for text in _shuffled(texts, seed) if text.tokens.tobytes() not in never]
    if not rest:
        raise ConfigError("every text is held out: hold out fewer, or name other folders as data")
    return rest, kept


def _shuffled(texts: Sequence[Text], seed: int) -> list[Text]:
    return [texts[i] for i in np.random.default_rng(seed).permutation(len(texts))]


def first_tokens(texts: Sequence[Text], max_tokens: int | None) -> list[Text]:
    """The first texts that have at most `max_tokens` tokens in all; ConfigError where the first has more."""
    if max_tokens is None:
        return list(texts)
    ends = np.cumsum([len(text.tokens) for text in texts])
    found = list(texts[: int(np.searchsorted(ends, max_tokens, side="right"))])
    if not found:
        raise ConfigError(f"max_tokens is {max_tokens} and the first text has {ends[0]} tokens: give more")
    return found


def prompt(text: Text) -> list[int]:
    """What the target went on from; the first quarter of a text that it did not write."""
    size = text.num_given if 0 < text.num_given < len(text.tokens) else max(1, len(text.tokens) // 4)
    return text.tokens[:size].tolist()


def count_tokens(texts: Sequence[Text], vocab_size: int) -> Int[np.ndarray, "V"]:
    """How often each token is to be foreseen."""
    foreseen = np.concatenate([text.tokens[text.supervised] for text in texts])
    return np.bincount(foreseen, minlength=vocab_size)


def stored_among(texts: Sequence[Text], names: Sequence[str]) -> tuple[str, ...]:
    """Those of the features that lie beside all of the texts."""
    found = set(names)
    for path in {features_path(text.path) for text in texts}:
        if not path.is_file():
            return ()
        with safe_open(path, framework="numpy") as file:
            found &= set(file.keys())
    return tuple(name for name in names if name in found)


def make_batches(
    texts: Sequence[Text],
    features: Sequence[str],
    *,
    num_rows: int,
    max_length: int,
    seed: int,
    process: int,
    num_processes: int,
) -> Batches:
    """Batches of a process, in a new order every epoch, made ahead in threads.

    Texts of like length stand together, so that little is padding: rows are as wide as `max_length`, 3/4,
    1/2, 1/4 of it and so on, and those of half the width are twice as many. `features` are read from beside
    the texts. Every text comes once an epoch; rows that are left over have length 0.
    """
    grain = import_extra("grain", "training needs", "train")
    groups = _groups(texts, num_rows * num_processes, max_length, seed)

    def make(group: _Group) -> TrainingBatch:
        rows = [_row(text, features, group.width) for text in group.texts[process::num_processes]]
        return jax.tree.map(lambda *parts: np.stack(parts), *rows)

    data = grain.MapDataset.source(groups).shuffle(seed=seed).repeat(None).map(make)
    return iter(data.to_iter_dataset(grain.ReadOptions(num_threads=READERS, prefetch_buffer_size=PREFETCHED)))


class _Group(NamedTuple):
    """The texts of one batch, each in a row of `width` tokens."""

    width: int
    texts: list[Text]


def _groups(texts: Sequence[Text], num_rows: int, max_length: int, seed: int) -> list[_Group]:
    """Which texts stand together: a random choice among those of like length."""
    empty = Text(np.zeros(0, np.int32), np.zeros(0, bool), 0, texts[0].path, 0)
    order = _shuffled(texts, seed)
    groups, widths = [], _widths(max_length)
    for width, narrower in zip(widths, [*widths[1:], 0], strict=True):
        here = [text for text in order if len(text.tokens) > narrower]
        order = [text for text in order if len(text.tokens) <= narrower]
        size = num_rows * (max_length // width)
        for start in range(0, len(here), size):
            members = here[start : start + size]
            groups.append(_Group(width, members + [empty] * (size - len(members))))
    return groups


def _widths(max_length: int) -> list[int]:
    """The widths of rows, falling: by whole halves, and 3/4 of the longest; none too narrow.

    A step is compiled for each. Over half of what the package's target wrote is between 1/2 and 3/4 of 512.
    """
    halves = {max_length >> n for n in range(max_length.bit_length()) if max_length % 2**n == 0}
    narrower = {width for width in halves | {max_length * 3 // 4} if NARROWEST <= width < max_length}
    return [max_length, *sorted(narrower, reverse=True)]


def _row(text: Text, names: Sequence[str], width: int) -> TrainingBatch:
    """One row of a batch, on the host: [T] and [T, F]."""
    length = len(text.tokens)
    beyond, known = width - length, max(length - 1, 0)
    found = {}
    if names:
        found = read_features(features_path(text.path), names, text.first_row, text.first_row + known)
    fields: tuple[Any, ...] = (
        np.pad(text.tokens.astype(np.int32), (0, beyond)),
        np.pad(text.supervised, (0, beyond)),
        np.int32(length),
        {name: np.pad(rows, ((0, width - known), (0, 0))) for name, rows in found.items()},
    )
    return TrainingBatch(*fields)
