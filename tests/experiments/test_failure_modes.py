"""Where plain decoding wins is read off the runs as they were measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.failure_modes import draw
from experiments.failure_modes.config import VARIANTS, get_config
from specjax import config

SETTING = {"temperature": 0.0, "batch_size": 1, "max_new_tokens": 8, "prompts": "spec_bench"}
ALMOST = {name: SETTING | {name: value} for name, value in (("temperature", 1.0), ("prompts", "other"))}


def generation(
    method: str, row: int, prefill: float, decode: float, setting: dict[str, Any]
) -> dict[str, Any]:
    depth = [] if method == "plain" else [4]
    return {
        **setting,
        "task": "spec_bench/qa" if row < 2 else "spec_bench/math_reasoning",
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


def section(setting: dict[str, Any], speedup: float, has_interval: bool = True) -> dict[str, Any]:
    plain, slow, steady = (
        {
            "speedup": {"value": value, "interval": [value - 0.1, value + 0.1] if has_interval else None},
            "tokens_per_step": 2.0,
            "identical_to_greedy": None,
        }
        for value in (1.0, speedup, 1.1)
    )
    methods = {"plain": plain, "slow_one": slow, "steady": steady}
    return {
        **setting,
        "methods": methods,
        "tasks": {f"spec_bench/{t}": methods for t in ("qa", "math_reasoning")},
    }


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A drafter that decodes twice as fast and needs a prefill that takes longer than it saves.

    At settings that differ in one number only, or in the prompts, its prefill takes no time.
    """

    def write(axis: str, sections: list[dict[str, Any]]) -> None:
        folder = tmp_path / "runs" / axis
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps({"sections": sections}))
        (folder / "generations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    lines = [
        generation(*own, setting)
        for setting, prefill in ((SETTING, 9.0), *((almost, 0.0) for almost in ALMOST.values()))
        for row in range(4)
        for own in (("plain", row, 0.0, 4.0), ("slow_one", row, prefill, 2.0), ("steady", row, 0.0, 4.0))
    ]
    for axis in ("length", "temperature"):
        write(axis, [section(SETTING, 2.0)])
    write("batch", [section(SETTING, 2.0, has_interval=False)])
    write("domain", [section(SETTING, 2.0), section(ALMOST["temperature"], 1.5)])
    return tmp_path / "runs"


@pytest.fixture
def drawn(runs: Path, tmp_path: Path) -> Path:
    """The folder of what is made of the runs."""
    out = tmp_path / "out"
    assert draw.main([f"--runs={runs}", f"--out={out}"]) == 0
    return out


def table(folder: Path, title: str) -> list[list[str]]:
    """The cells of a table by its title, without the rule."""
    _, text = (folder / "tables.md").read_text().split(f"**{title}**\n\n")
    head, _, *rows = text.split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in (head, *rows)]


def test_an_answer_that_ended_early_counts_its_part_of_the_prefill() -> None:
    lines = []
    for row in range(3):
        early = generation("early", row, 4.0, 0.5, SETTING)
        lines += [generation("plain", row, 4.0, 4.0, SETTING), {**early, "tokens": early["tokens"][:2]}]
    section = {**SETTING, "methods": ["plain", "early"]}
    found = draw.count_prefill(section, lines)["methods"]["early"]["speedup"]["value"]
    assert found == pytest.approx((4 + 4) / 8 / ((0.5 + 4 * 2 / 8) / 2))


def test_every_axis_counts_prefill_too(drawn: Path) -> None:
    found = json.loads((drawn / "results.json").read_text())
    for axis in ("length", "temperature"):
        (point,) = found[axis]["slow_one"]
        assert point["speedup"] == {"value": 2.0, "interval": [1.9, 2.1]}
        assert point["with_prefill"]["value"] == pytest.approx(4 / 11)  # 4 s against 2 s and 9 s of prefill
        assert table(drawn, f"By {axis}")[1][1] == "2.00 (1.90-2.10); **0.36 (0.36-0.36)**; 2.00"
    assert table(drawn, "By batch")[1][1] == "2.00 (-); **0.36 (0.36-0.36)**; 2.00"
    assert {path.stem for path in drawn.glob("*.png")} == {"length", "temperature", "batch", "domain"}


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (
            0,
            {
                "steady": ["1.10 (1.00-1.20)", "1.00 (1.00-1.00)", *["2.00; 1.10; 1.00"] * 2],
                "slow one": ["2.00 (1.90-2.10)", "**0.36 (0.36-0.36)**", *["2.00; 2.00; 0.36"] * 2],
            },
        ),
        (
            1,
            {
                "slow one": ["1.50 (1.40-1.60)", "2.00 (2.00-2.00)", *["2.00; 1.50; 2.00"] * 2],
                "steady": ["1.10 (1.00-1.20)", "1.00 (1.00-1.00)", *["2.00; 1.10; 1.00"] * 2],
            },
        ),
    ],
)
def test_a_domain_table_for_each_temperature(
    drawn: Path, temperature: int, expected: dict[str, list[str]]
) -> None:
    head, *rows = table(drawn, f"By domain, temperature {temperature}")
    assert head == ["method", "speed-up (95 %)", "with prefill (95 %)", "qa", "math reasoning"]
    assert rows == [[name, *cells] for name, cells in expected.items()]


def test_without_runs_there_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert draw.main([f"--runs={tmp_path}", f"--out={tmp_path}"]) == 2
    assert "run config.py first" in capsys.readouterr().err


def test_an_unfinished_run_is_refused(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "length" / "summary.json").unlink()
    assert draw.main([f"--runs={runs}", f"--out={tmp_path / 'out'}"]) == 2
    assert "length holds no finished run" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("axis", VARIANTS)
def test_every_axis_is_a_valid_config(axis: str) -> None:
    config.validate(get_config(axis))
