"""The README's picture and tables: which settings they show of a result, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.all_methods import draw
from specjax.analysis.plots import Bar

SETTING = {"temperature": 0.0, "batch_size": 1, "max_new_tokens": 40}
STORED = [str(Path(draw.__file__).with_name(f"results_{t}.json")) for t in ("T0", "T1")]


def metrics(
    speedup: float, prompts: int, counts: tuple[int, int] = (15, 10), step: dict[str, float] | None = None
) -> dict[str, Any]:
    """What the tables read of a method; `counts` are its tokens and steps."""
    tokens, steps = counts
    found = {
        "prompts": prompts,
        "tokens": tokens,
        "steps": steps,
        "tokens_per_step": tokens / steps,
        "speedup": {"value": speedup, "interval": [1.0, 2.0]},
        "break_even_tokens_per_step": tokens / steps / speedup,
        "identical_to_greedy": {"identical": prompts, "of": prompts},
    }
    return found | ({} if step is None else {"step": {"seconds": step, "shares": step}})


def section(speedup: float, prompts: int, label: str = "qa", **setting: float) -> dict[str, Any]:
    """A setting with one method."""
    methods = {"plain": metrics(1.0, prompts), "eagle_tree": metrics(speedup, prompts)}
    return {**SETTING, "prompts": label, "methods": methods, **setting}


def write(path: Path, sections: list[dict[str, Any]], overall: list[dict[str, Any]]) -> Path:
    drafters = {"eagle_tree": "eagle", "chain": "eagle", "careful": "adaptive"}
    config = {"methods": {name: {"drafter": {"name": module}} for name, module in drafters.items()}}
    path.write_text(json.dumps({"config": config, "sections": sections, "overall": overall}))
    return path


def test_a_setting_is_all_sets_together(tmp_path: Path) -> None:
    sections = [section(1.0, 4), section(2.0, 4, "code")]
    cold = write(tmp_path / "T0.json", sections, [section(1.5, 8)])
    warm = write(tmp_path / "T1.json", [section(1.2, 4, temperature=1.0)], [])
    settings = draw.read_all([cold, warm])
    assert {title: draw.bars(setting) for title, setting in settings.items()} == {
        "8 prompts, temperature 0, batch 1, 40 new tokens": {"eagle tree": Bar(1.5, [1.0, 2.0], "1.50")},
        "4 prompts, temperature 1, batch 1, 40 new tokens": {"eagle tree": Bar(1.2, [1.0, 2.0], "1.50")},
    }
    several, single = (draw.gains("", setting) for setting in settings.values())
    assert several.columns[5:] == ("qa", "code", "identical")
    assert several.rows[0][5:] == ("1.50; 1.00", "1.50; 2.00", "8 of 8")
    assert single.columns == several.columns[:5]


@pytest.fixture
def timed(tmp_path: Path) -> draw.Setting:
    """Three sets, of which the last was not timed."""

    def methods(chain: tuple[int, int], draft: float | None, plain: float) -> dict[str, Any]:
        def step(own: float) -> dict[str, float] | None:
            return None if draft is None else {"draft": own, "verify": 0.5, "accept": 0.1, "commit": 0.1}

        return {
            "plain": metrics(1.0, 2, step=None if draft is None else {"step": plain}),
            "eagle_tree": metrics(0.4, 2),
            "chain": metrics(1.2, 2, chain, step(draft or 0.0)),
            "careful": metrics(1.1, 2, step=step(0.3)),
        }

    sets = {
        "a": methods((20, 10), 0.2, 2.0),
        "b": methods((10, 10), 0.6, 2.0),
        "c": methods((90, 10), None, 2.0),
    }
    sections = [{**SETTING, "prompts": name, "methods": own} for name, own in sets.items()]
    overall = {**SETTING, "methods": methods((120, 30), None, 2.0)}
    (setting,) = draw.read(write(tmp_path / "T0.json", sections, [overall]))
    return setting


def test_the_memory_bound_column_takes_the_timed_sets(timed: draw.Setting) -> None:
    # (20 + 10) tokens / (10 + 10) steps, over 1 + the mean of 0.2 / 2 and 0.6 / 2.
    assert draw.if_memory_bound("chain", timed) == pytest.approx(1.5 / 1.2)
    table = draw.gains("", timed)
    assert [row[0] for row in table.rows] == ["chain", "careful", "eagle tree"]
    assert [row[table.columns.index("memory-bound (model)")] for row in table.rows] == ["1.25", "-", "-"]


def test_what_a_run_says_itself_is_taken(timed: draw.Setting) -> None:
    for name in ("chain", "careful"):
        timed.whole["methods"][name]["speedup_if_memory_bound"] = {"value": 3.0}
    assert draw.if_memory_bound("chain", timed) == 3.0
    assert draw.if_memory_bound("careful", timed) is None


def test_parts_are_the_mean_of_the_sets_that_have_them(timed: draw.Setting) -> None:
    table = draw.parts("6 prompts, temperature 0", timed)
    assert table.title == "Where a step's time goes, mean of a, b: temperature 0"
    assert table.rows == [("chain", "0.40", "0.50", "0.10", "0.10")]


def test_the_stored_results_give_the_tables_that_are_stored(tmp_path: Path) -> None:
    assert draw.main([*STORED, f"--out={tmp_path / 'picture.png'}"]) == 0
    assert 5_000 < (tmp_path / "picture.png").stat().st_size < 60_000
    assert (tmp_path / draw.TABLES).read_text() == Path(draw.__file__).with_name(draw.TABLES).read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["T0.json", "T0.json"], "8 prompts, temperature 0"),
        (["missing.json"], "missing.json is no result"),
        (["other.json"], "'config'"),
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
    write(Path("T0.json"), [section(1.5, 8)], [])
    Path("other.json").write_text("{}")
    assert draw.main(["--out=picture.png", *arguments]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("specjax: error: ") and expected in error
    assert not Path("picture.png").exists() and not Path(draw.TABLES).exists()
