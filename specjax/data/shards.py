"""A set of texts as numbered files of tokens, each with its features beside it, and the room they take."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from specjax.data import feature_store, token_store
from specjax.data.token_store import SUFFIX, Sample
from specjax.errors import ConfigError

T = TypeVar("T")


class Shard(NamedTuple, Generic[T]):
    """A file of tokens, there or yet to be written, and what it is written from, a member a text."""

    path: Path
    members: Sequence[T]


def make_shards(folder: Path, members: Sequence[T], size: int) -> list[Shard[T]]:
    """The files of a folder for all members, `size` in each, in their order."""
    starts = range(0, len(members), size)
    return [
        Shard(folder / f"tokens-{number:05d}{SUFFIX}", members[start : start + size])
        for number, start in enumerate(starts)
    ]


def missing(shards: Sequence[Shard[T]]) -> list[Shard[T]]:
    """Those that are not written yet."""
    return [shard for shard in shards if not shard.path.is_file()]


def write_shard(path: Path, samples: Sequence[Sample], features: Sequence[Mapping[str, np.ndarray]]) -> None:
    """Store texts and their features [T - 1, F] by name, these first: a file of tokens is a whole shard."""
    if names := list(features[0]):
        by_name = {name: [of_text[name] for of_text in features] for name in names}
        feature_store.write_features(feature_store.features_path(path), by_name)
    token_store.write_samples(path, samples)


def check_room(folder: Path, num_bytes: int) -> None:
    """Raise ConfigError where the disk has no room for so many bytes in the folder."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise ConfigError(
            f"the features take {num_bytes / 1e9:.1f} GB and {folder} has room for {free / 1e9:.1f} GB: keep "
            "fewer features or texts, or name another --workdir"
        )


def summary(folder: Path, shards: Sequence[Shard[Any]]) -> str:
    """How much has been written."""
    samples = [sample for shard in shards for sample in token_store.read_samples(shard.path)]
    supervised = sum(int(sample.supervised.sum()) for sample in samples)
    total = token_store.num_tokens(samples)
    return f"{len(samples)} texts, {total} tokens, {supervised} of them supervised, in {folder}"
