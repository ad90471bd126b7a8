"""The folder of a run after interruptions of every kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specjax.errors import ConfigError
from specjax.eval import results

CONFIG = {"seed": 1, "drafter": {"name": "ngram"}}
EXPECTED = {0: 2, 1: 2}


def line(batch: int, text: str) -> results.Line:
    return {"batch": batch, "text": text}


def test_only_whole_batches_are_kept(tmp_path: Path) -> None:
    assert results.resume(tmp_path, CONFIG, EXPECTED) == []
    results.append(tmp_path, [line(0, "a"), line(0, "é\u2028")])
    results.append(tmp_path, [line(1, "c")])
    with (tmp_path / results.PARTIAL).open("a") as file:
        file.write('{"batch": 1, "te')
    kept = results.resume(tmp_path, CONFIG, EXPECTED)
    assert kept == [line(0, "a"), line(0, "é\u2028")]
    results.append(tmp_path, [line(1, "c"), line(1, "d")])
    results.finish(tmp_path, {"x": 1}, "table")
    assert {path.name for path in tmp_path.iterdir()} == {
        results.CONFIG,
        results.SUMMARY,
        results.TABLE,
        results.GENERATIONS,
    }
    assert results.resume(tmp_path, CONFIG, EXPECTED) == [*kept, line(1, "c"), line(1, "d")]


def test_results_of_another_config_are_refused_by_field(tmp_path: Path) -> None:
    results.resume(tmp_path, CONFIG, EXPECTED)
    results.append(tmp_path, [line(0, "a"), line(0, "b")])
    other = {"seed": 2, "drafter": {"name": "ngram", "draft_length": 3}}
    with pytest.raises(
        ConfigError, match=r"drafter.draft_length \('absent' there, 3 here\), seed \(1 there, 2"
    ):
        results.resume(tmp_path, other, EXPECTED)
    assert json.loads((tmp_path / results.CONFIG).read_text()) == CONFIG
    (tmp_path / results.CONFIG).unlink()
    with pytest.raises(ConfigError, match="without the config.json"):
        results.resume(tmp_path, CONFIG, EXPECTED)


def test_another_config_may_have_a_folder_without_results(tmp_path: Path) -> None:
    results.resume(tmp_path, CONFIG, EXPECTED)
    assert results.resume(tmp_path, {"seed": 2}, EXPECTED) == []
    assert json.loads((tmp_path / results.CONFIG).read_text()) == {"seed": 2}


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results.write_whole(tmp_path / "x", "old")
    monkeypatch.setattr("os.replace", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        results.write_whole(tmp_path / "x", "new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
