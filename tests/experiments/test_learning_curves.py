"""The statistics and the plan of the comparisons; no run is made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.learning import curves
from experiments.learning.compare import make_runs
from experiments.learning.runs import ROOT, refuse_both
from experiments.learning.series import SERIES, losses
from specjax.errors import ConfigError
from specjax.training.history import LINES


def point(counts) -> curves.Point:
    counts = np.array(counts, float)
    emitted, steps = counts.sum(0)
    return curves.Point(1, 1, emitted / steps, (), counts)


@pytest.mark.parametrize(("gap", "exponent"), [(0.3, 0.5), (0.05, 1.2), (0.0, 1.0)])
def test_the_law_is_found_and_carries_on(gap: float, exponent: float) -> None:
    tokens = [2e4, 4e4, 8e4, 16e4]
    true = curves.Law(2.0, gap, exponent, 16e4)
    found = curves.fit(tokens, true.at(np.array(tokens)), draft_length=4)
    assert found.at(np.array(16e5)) == pytest.approx(true.at(np.array(16e5)), abs=0.01)


def test_a_law_of_the_same_points_shuffled_is_another() -> None:
    tokens = [2e4, 4e4, 8e4, 16e4]
    values = curves.Law(2.0, 0.3, 0.5, 16e4).at(np.array(tokens))
    assert abs(float(curves.fit(tokens, values[::-1], 4).at(np.array(16e5))) - 1.905) > 0.2


def test_two_points_are_no_curve() -> None:
    with pytest.raises(ConfigError, match="2 runs"):
        curves.fit([1.0, 2.0], np.array([1.0, 2.0]), 4)


def test_pairing_by_prompt_sees_what_lies_within_the_spread_of_prompts() -> None:
    rng = np.random.default_rng(1)
    steps = rng.integers(20, 60, 40)
    first, second = (point(np.stack([np.full(40, 64), taken], 1)) for taken in (steps, steps - 2))
    drawn = curves.resample([first, second])
    assert drawn is not None
    assert curves.interval(drawn[:, 1] - drawn[:, 0])[0] > 0
    # Unpaired, the same figures overlap.
    assert curves.interval(drawn[:, 0])[1] > curves.interval(drawn[:, 1])[0]
    assert drawn.mean(0) == pytest.approx([first.tokens_per_step, second.tokens_per_step], abs=0.05)
    assert curves.resample([first, second._replace(counts=None)]) is None
    with pytest.raises(ConfigError, match="eval_prompts"):
        curves.resample([first, point([[1, 1]])])


def test_a_curve_is_read_without_its_other_lines(tmp_path) -> None:
    lines = [
        {"step": 0, "held_out/tokens_per_step": 1.0},
        {"step": 10, "loss": 3.0, "tokens": 50},
        {"step": 20, "tokens": 100, "held_out/tokens_per_step": 1.5, "held_out/acceptance_1": 0.5},
    ]
    (tmp_path / LINES).write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, last = curves.read_curve(tmp_path, 2)
    assert (first.tokens, first.acceptance) == (0, (None, None))
    assert last == curves.Point(20, 100, 1.5, (0.5, None), None)
    with pytest.raises(ConfigError, match="no measurement"):
        curves.read_curve(tmp_path / "none", 2)


@pytest.mark.parametrize("flag", ["--config.training.distance=forward_kl", "--config.drafter.draft_length=3"])
def test_a_flag_that_a_run_would_override_is_refused(flag: str) -> None:
    own: list[dict[str, Any]] = [{"training.distance": "reverse_kl"}, {"drafter": {}}]
    with pytest.raises(ConfigError, match="leave it out"):
        refuse_both([flag], own)
    refuse_both(["--config.training.noise=0.1"], own)


def test_losses_differ_in_what_they_say() -> None:
    planned = losses(None, ())  # type: ignore[arg-type]
    assert len(planned) == 7 == len({tuple(part.items()) for part in planned.values()})
    assert next(iter(planned)) == "forward_kl"
    assert planned["forward_kl_states_1.0"]["training.feature_weight"] == 1.0


def test_peoples_texts_take_the_place_of_the_targets(tmp_path: Path) -> None:
    """Of a tuple that a command line gives twice both parts would stay."""
    own, people = ROOT / "experiments" / "self_written", tmp_path / "people"
    people.mkdir()
    shutil.copy(own / "tokens-00003.array_record", people)
    flags = [f"--config.data=('{own}',)", "--config.max_length=64"]
    runs = make_runs(SERIES["data"], tmp_path / "runs", [str(people)], flags)
    assert {run.name: run.config.data for run in runs} == {
        "self_written": (str(own),),
        "human": (str(people),),
        "human_text_alone": (str(people),),
    }
    assert all(run.config.eval_data == (str(own),) for run in runs)
    for run in runs:
        assert [flag.startswith("--config.data=") for flag in run.arguments].count(True) == 1
