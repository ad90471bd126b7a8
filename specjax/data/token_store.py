"""Token ids on disk: ArrayRecord files, each written whole, with a loss mask and where they come from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import serialization
from jaxtyping import Bool, Int

from specjax.errors import ConfigError, import_extra
from specjax.storage import replacing

SUFFIX = ".array_record"


class Sample(NamedTuple):
    """One text: its `tokens` [T], which of them are to be learned, and how it came about."""

    tokens: Int[np.ndarray, "T"]
    supervised: Bool[np.ndarray, "T"]
    temperature: float
    source: str


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write a file whole, or not at all."""
    with replacing(path) as draft:
        # One text a group: readers ask for single ones, in any order.
        writer = _array_record().ArrayRecordWriter(str(draft), "group_size:1,zstd:9")
        for sample in samples:
            writer.write(_pack(sample))
        writer.close()


def read_samples(path: Path) -> list[Sample]:
    """All texts of a file; ConfigError if it is none."""
    if not path.is_file():
        raise ConfigError(
            f"there is no file of tokens {path}: write one with python -m specjax.data.generate"
        )
    try:
        reader = _array_record().ArrayRecordReader(str(path))
        return [_unpack(record) for record in reader.read_all()]
    except (RuntimeError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} is truncated or no file of tokens ({error}): write it again") from error


def token_files(folder: Path) -> list[Path]:
    """The files of a folder in their order; ConfigError where there is none."""
    found = sorted(Path(folder).glob(f"*{SUFFIX}"))
    if not found:
        raise ConfigError(
            f"the folder {folder} holds no *{SUFFIX}: write some with python -m specjax.data.generate"
        )
    return found


def num_tokens(samples: Sequence[Sample]) -> int:
    """Tokens in all of them, prompts included."""
    return sum(len(sample.tokens) for sample in samples)


def digest(texts: Iterable[Any]) -> str:
    """The SHA-256 of texts that have `tokens` and `supervised`, as samples have."""
    found = hashlib.sha256()
    for text in texts:
        found.update(text.tokens.tobytes() + text.supervised.tobytes())
    return found.hexdigest()


def _pack(sample: Sample) -> bytes:
    # Where the mask changes is all there is to it.
    changes = np.flatnonzero(np.diff(np.concatenate(([False], sample.supervised)).astype(np.int8)))
    return serialization.msgpack_serialize(
        {
            "tokens": np.asarray(sample.tokens).astype("<u4" if max(sample.tokens) > 0xFFFF else "<u2"),
            "changes": changes.astype("<u4"),
            "temperature": float(sample.temperature),
            "source": sample.source,
        }
    )


def _unpack(record: bytes) -> Sample:
    found = serialization.msgpack_restore(record)
    tokens = found["tokens"].astype(np.int32)
    flips = np.zeros(len(tokens), np.int32)
    flips[found["changes"]] = 1
    return Sample(tokens, np.cumsum(flips) % 2 == 1, found["temperature"], found["source"])


def _array_record() -> Any:
    return import_extra("array_record.python.array_record_module", "token files need", "train")
