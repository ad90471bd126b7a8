"""Tokens and features on disk: what goes in comes out, and what is damaged is named."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from specjax.data import feature_store, token_store
from specjax.data.token_store import Sample
from specjax.errors import ConfigError


def samples(largest: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    found = []
    for size in (1, 2, 30, 500):
        tokens = rng.integers(0, largest, size).astype(np.int32)
        found.append(Sample(tokens, rng.random(size) < 0.5, 0.5 * size, f"source {size}"))
    return found


@pytest.mark.parametrize("largest", [100, 2**16, 200_000])
def test_samples_come_back_as_they_were(tmp_path: Path, largest: int) -> None:
    path = tmp_path / f"tokens{token_store.SUFFIX}"
    written = samples(largest)
    token_store.write_samples(path, written)
    assert token_store.token_files(tmp_path) == [path]
    found = token_store.read_samples(path)
    for before, after in zip(written, found, strict=True):
        np.testing.assert_array_equal(before.tokens, after.tokens)
        np.testing.assert_array_equal(before.supervised, after.supervised)
        assert before[2:] == after[2:]
    assert token_store.num_tokens(found) == 533


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / f"tokens{token_store.SUFFIX}"
    token_store.write_samples(path, samples(100))
    before = path.read_bytes()

    def broken():
        yield samples(100)[0]
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError):
        token_store.write_samples(path, broken())
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no"):
        token_store.token_files(tmp_path)
    with pytest.raises(ConfigError, match="no file of tokens"):
        token_store.read_samples(tmp_path / "none.array_record")
    path = tmp_path / "cut.array_record"
    path.write_bytes(b"nonsense" * 100)
    with pytest.raises(ConfigError, match=r"cut\.array_record"):
        token_store.read_samples(path)


def test_features_are_read_in_slices(tmp_path: Path) -> None:
    path = feature_store.features_path(tmp_path / f"tokens{token_store.SUFFIX}")
    parts = [np.arange(n * 4).reshape(n, 4).astype(ml_dtypes.bfloat16) for n in (3, 5)]
    feature_store.write_features(path, {"last_hidden": parts})
    found = feature_store.read_features(path, ["last_hidden"], 3, 8)["last_hidden"]
    np.testing.assert_array_equal(found, parts[1])
    with pytest.raises(ConfigError, match="no feature 'hidden.2'"):
        feature_store.read_features(path, ["hidden.2"], 0, 1)
    with pytest.raises(ConfigError, match="shorter"):
        feature_store.read_features(path, ["last_hidden"], 3, 9)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ConfigError, match="cannot read"):
        feature_store.read_features(path, ["last_hidden"], 0, 1)
