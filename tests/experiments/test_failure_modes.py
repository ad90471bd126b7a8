"""Where plain decoding wins is read off the runs as they were measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.failure_modes import draw
from experiments.failure_modes.config import VARIANTS, get_config
from specjax import config


def generation(method: str, row: int, prefill: float, decode: float) -> dict[str, Any]:
    depth = [] if method == "plain" else [4]
    return {
        "task": "qa",
        "max_new_tokens": 8,
        "method": method,
        "row": row,
        "batch": row,
        "tokens": list(range(8)),
        "num_steps": 8 if method == "plain" else 4,
        "tried_at_depth": depth,
        "accepted_at_depth": depth,
        "prefill_seconds": prefill,
        "decode_seconds": decode,
        "compile_seconds": 0.0,
    }


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A drafter that decodes twice as fast and needs a prefill that takes longer than it saves."""
    lines = [g for row in range(3) for g in (generation("plain", row, 0, 4), generation("slow", row, 9, 2))]
    metrics = {"speedup": {"value": 2.0, "interval": [1.9, 2.1]}, "tokens_per_step": 2.0}
    section = {
        "temperature": 0.0,
        "max_new_tokens": 8,
        "batch_size": 1,
        "methods": {"plain": metrics, "slow": metrics},
    }
    for axis in ("length", "temperature"):
        folder = tmp_path / "runs" / axis
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps({"sections": [section]}))
        (folder / "generations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "runs"


def test_short_answers_pay_for_the_prefill(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert draw.main([f"--runs={runs}", f"--out={out}"]) == 0
    found = json.loads((out / "results.json").read_text())
    assert found["length"]["slow"][0]["speedup"] == pytest.approx(4 / 11)
    assert found["temperature"]["slow"][0]["speedup"] == 2.0
    table = (out / "tables.md").read_text()
    assert "**0.36" in table and "**2.00" not in table
    assert {path.name for path in out.glob("*.png")} == {"length.png", "temperature.png"}


def test_without_runs_there_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert draw.main([f"--runs={tmp_path}", f"--out={tmp_path}"]) == 2
    assert "run config.py first" in capsys.readouterr().err


@pytest.mark.parametrize("axis", VARIANTS)
def test_every_axis_is_a_valid_config(axis: str) -> None:
    config.validate(get_config(axis))
