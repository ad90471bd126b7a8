"""The README's picture: which settings it shows of a result, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.all_methods import draw
from specjax.analysis.plots import Bar

PARTS = {"temperature": 0.0, "batch_size": 1, "max_new_tokens": 40}


def section(speedup: float, prompts: int, **setting: float) -> dict[str, Any]:
    """A setting with one method."""
    gained = {"speedup": {"value": speedup, "interval": [1.0, 2.0]}, "tokens_per_step": 1.5}
    return {**PARTS, **setting, "methods": {"plain": {"prompts": prompts}, "eagle_tree": gained}}


def write(path: Path, sections: list[dict[str, Any]], overall: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"sections": sections, "overall": overall}))
    return path


def test_a_panel_for_each_setting_all_sets_together(tmp_path: Path) -> None:
    cold = write(tmp_path / "T0.json", [section(1.0, 4), section(2.0, 4)], [section(1.5, 8)])
    warm = write(tmp_path / "T1.json", [section(1.2, 4, temperature=1.0)], [])
    panels = draw.make_panels([cold, warm])
    assert panels == {
        "8 prompts\ntemperature 0, batch 1, 40 new tokens": {"eagle tree": Bar(1.5, [1.0, 2.0], "1.50")},
        "4 prompts\ntemperature 1, batch 1, 40 new tokens": {"eagle tree": Bar(1.2, [1.0, 2.0], "1.50")},
    }


def test_the_picture_is_small(tmp_path: Path) -> None:
    stored = [str(Path(draw.__file__).with_name(f"results_{t}.json")) for t in ("T0", "T1")]
    assert draw.main([*stored, f"--out={tmp_path / 'picture.png'}"]) == 0
    assert 5_000 < (tmp_path / "picture.png").stat().st_size < 60_000


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["T0.json", "T0.json"], "8 prompts temperature 0"),
        (["missing.json"], "missing.json is no result"),
        (["other.json"], "'sections'"),
        (["T0.json", "--out=picture.xyz"], "ends in .png"),
    ],
)
def test_bad_input_is_one_error(
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("T0.json"), [], [section(1.5, 8)])
    Path("other.json").write_text("{}")
    assert draw.main(["--out=picture.png", *arguments]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("specjax: error: ") and expected in error
    assert not Path("picture.png").exists()
