"""Sweeps: what varies, what is written, and that processes that are killed or share come to the same."""

from __future__ import annotations

import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import optuna
import pytest

from specjax import run
from specjax.analysis import plots
from specjax.checkpoints import source
from specjax.config import run_config
from specjax.errors import ConfigError
from specjax.sweeps import space
from specjax.sweeps.bench import Bench
from specjax.sweeps.ledger import COMPLETE, FAIL, OWNER, RUNNING, open_storage, place_of
from specjax.sweeps.space import Axis
from tests.model_folder import write_model, write_prompts

pytestmark = pytest.mark.quick_compile

ROOT = Path(__file__).parent.parent
CONFIG = """
from specjax.config import run_config
from specjax.sweeps.space import dotted

def get_config():
    config = run_config("sweep")
    config.base = run_config()
    config.base.target = {target!r}
    config.base.drafter = {{"name": "my_drafters.gated", "draft_length": 4, "max_ngram": 3}}
    config.base.verify = "target_only"
    config.base.prompts = {prompts!r}
    config.base.batch_size = 3
    config.base.max_new_tokens = 12
    config.space = dotted({{"temperature": (0.0, 0.5, 0.8, 1.0), "drafter.draft_length": (0, 2, 3)}})
    config.objective = "tokens_per_step"
    config.patience = 5.0
    return config
"""
# Prompt lookup that waits: for other processes, and one setting of it until the gate is open.
GATED = """
import os, time
from pathlib import Path
from specjax.drafters import ngram

Config = ngram.Config

def build(config, target, architecture=None):
    if "GATE" in os.environ:
        folder = Path(os.environ["GATE"])
        (folder / f"{os.getpid()}.{config.draft_length}").touch()
        until = time.monotonic() + 240
        while time.monotonic() < until and (
            len({path.stem for path in folder.glob("*.*")}) < int(os.environ["TOGETHER"])
            or (config.draft_length == 3 and not (folder / "open").exists())
        ):
            time.sleep(0.05)
    return ngram.build(config, target)
"""
NAMES = ("temperature", "drafter.draft_length")


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config file beside the tiny model, the prompts and the drafter that it names."""
    folder = tmp_path_factory.mktemp("experiment")
    target, prompts = write_model(folder / "target"), write_prompts(folder / "prompts.jsonl")
    (folder / "config.py").write_text(CONFIG.format(target=str(target), prompts=str(prompts)))
    (folder / "my_drafters").mkdir()
    (folder / "my_drafters" / "gated.py").write_text(GATED)
    return folder


@pytest.fixture(autouse=True)
def surroundings(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The drafter can be imported, and JAX's settings stay as they were."""
    monkeypatch.syspath_prepend(experiment)
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(scope="module")
def compiled() -> list[int]:
    """How many programs each trial of the undisturbed sweep compiled."""
    return []


@pytest.fixture(scope="module")
def finished(experiment: Path, compiled: list[int]) -> Path:
    """The workdir of a sweep that nothing disturbed."""
    events: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.append(event))
    real = Bench.measure

    def measure(*arguments: Any) -> Any:
        events.clear()
        measured = real(*arguments)
        compiled.append(sum("backend_compile" in event for event in events))
        return measured

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(experiment)
        patch.setattr(Bench, "measure", measure)
        assert run.main(command(experiment, experiment / "finished")) == 0
    return experiment / "finished"


def command(experiment: Path, workdir: Path, *more: str) -> list[str]:
    return [f"--config={experiment}/config.py", f"--workdir={workdir}", *more]


def table_of(workdir: Path) -> list[dict[str, str]]:
    with (workdir / "trials.csv").open() as file:
        return list(csv.DictReader(file))


def outcomes(workdir: Path) -> list[tuple[str, ...]]:
    """What does not depend on the clock."""
    measured = ("tokens_per_step", "tokens", "steps", "animals.tokens_per_step", "reason")
    kept = ("trial", "state", *NAMES, *measured)
    return [tuple(row[name] for name in kept) for row in table_of(workdir)]


def test_every_setting_is_measured_and_impossible_ones_are_pruned(finished: Path) -> None:
    rows = table_of(finished)
    points = {tuple(float(row[name]) for name in NAMES) for row in rows}
    assert points == set(itertools.product((0.0, 0.5, 0.8, 1.0), (0, 2, 3))) and len(rows) == 12
    for row in rows:
        is_possible = row["drafter.draft_length"] != "0"
        assert row["state"] == ("complete" if is_possible else "pruned")
        assert ("draft_length is 0" in row["reason"]) != is_possible
        assert (row["tokens_per_step"] != "") == is_possible
        if is_possible:
            assert float(row["tokens_per_step"]) == int(row["tokens"]) / int(row["steps"])
        if is_possible and row["temperature"] == "0.0":
            assert row["identical_to_greedy"] == "3"
    # Two tasks; the temperature varies fastest, for it changes no program.
    assert {"animals.speedup", "numbers.acceptance", "speedup_low"} <= set(rows[0])
    assert [row["temperature"] for row in rows] == ["0.0", "0.5", "0.8", "1.0"] * 3


def test_best_is_the_best_row_overall_and_by_task(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    rows = [row for row in table_of(finished) if row["state"] == "complete"]
    assert summary["trials"] == {"pruned": 4, "complete": 8, "copied": 0}
    for about, column in (
        (summary["best"], "tokens_per_step"),
        (summary["best_by_task"]["animals"], "animals.tokens_per_step"),
        (summary["best_by_task"]["numbers"], "numbers.tokens_per_step"),
    ):
        best = max(rows, key=lambda row: float(row[column]))
        assert about["trial"] == int(best["trial"])
        assert about["metrics"]["tokens_per_step"] == float(best[column])
        assert about["params"]["drafter.draft_length"] == int(best["drafter.draft_length"])
    assert sum(summary["importance"].values()) == pytest.approx(1)
    assert set(summary["importance"]) == set(NAMES)


def test_files_are_those_and_the_table_says_what_to_run(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    pictures = {"heatmap.png", "importance.png"}
    assert names == {"config.json", "summary.json", "table.md", "trials.csv", "trials.journal", *pictures}
    assert all((finished / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    table = (finished / "table.md").read_text()
    best = json.loads((finished / "summary.json").read_text())["best"]["params"]
    assert f"--config.drafter.draft_length={best['drafter.draft_length']}" in table
    assert "Best by task" in table and "4 of 12 trials were pruned" in table


def test_finished_sweep_is_only_shown_again_and_another_is_refused(
    experiment: Path, finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded: list[int] = []
    monkeypatch.setattr(source, "load", lambda *args: loaded.append(1))
    before = outcomes(finished)
    assert run.main(command(experiment, finished)) == 0
    assert outcomes(finished) == before and loaded == []
    assert "Best by tokens per pass" in capsys.readouterr().out
    assert run.main(command(experiment, finished, "--config.base.max_new_tokens=8")) == 2
    assert "base.max_new_tokens (12 there, 8 here)" in capsys.readouterr().err
    # More trials of the same sweep are not another one.
    assert run.main(command(experiment, finished, "--config.trials=5")) == 0
    assert len(table_of(finished)) == 5
    assert run.main(command(experiment, finished)) == 0


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["--config.space={'drafter': {'draft_lenght': (1,)}}"],
            ["'drafter.draft_lenght'", "draft_length'?"],
        ),
        (["--config.space={'temprature': (0.0,)}"], ["'temprature'", "did you mean 'temperature'"]),
        (["--config.space={'temperature': ('hot',)}"], ["space: ", "temperature", "hot"]),
        (["--config.space={'temperature': 1.0}"], ["space.temperature is 1.0", "list of values"]),
        (["--config.space={'temperature': ()}"], ["space.temperature is ()", "list of values"]),
        (["--config.space={'temperature': (1.0, 1.0)}"], ["1.0 twice"]),
        (["--config.space={'temperature': {'low': 0.0, 'high': 1.0}}"], ["without steps", "random or tpe"]),
        (["--config.space={'temperature': {'low': 1.0, 'high': 0.0}}"], ["low below high"]),
        (["--config.space={'temperature': {'low': 1.0}}"], ["a range has low, high"]),
        (["--config.space={'top_k': {'low': 0, 'high': 8, 'log': True}}"], ["low above 0"]),
        (["--config.space={'target': ('a', 'b')}"], ["'target', which all trials share"]),
        (["--config.space={}"], ["space is empty"]),
        (["--config.space={'temperature': (-1.0,)}"], ["none of the 1 settings", "temperature is -1"]),
        (["--config.sampler=gird"], ["sampler is 'gird'", "did you mean 'grid'"]),
        (["--config.sampler=random"], ["trials is not set"]),
        (["--config.objective=speed"], ["objective is 'speed'", "did you mean 'speedup'"]),
        (["--config.trials=0"], ["trials is 0", "at least 1"]),
        (["--config.patience=0"], ["patience is 0"]),
        (["--config.heat_map=('temperature', 'verify')"], ["heat_map names 'verify'"]),
        (["--config.base.task=exactness"], ["task 'compare'"]),
        (["--config.storage=nosuch://here/x"], ["storage nosuch://", "sqlite:///FILE"]),
        (["--config.storage=no/such/folder/x"], ["no folder no/such/folder"]),
    ],
)
def test_bad_input_is_one_error_before_anything_is_loaded(
    overrides: list[str],
    expected: list[str],
    experiment: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(source, "load", lambda *args: pytest.fail("loaded"))
    assert run.main(command(experiment, tmp_path, *overrides)) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("specjax: error: ") and shown.count("\n") == 1
    for part in expected:
        assert part in shown


@pytest.mark.parametrize("name", ["optuna", "matplotlib"])
def test_without_the_extra_it_is_named(
    name: str,
    experiment: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    assert run.main(command(experiment, tmp_path)) == 2
    assert f"sweeps need {name}: pip install 'specjax[sweep]'" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/sweeps/*.py")), ids=lambda path: path.stem)
def test_packaged_config_is_valid_possible_and_says_how_to_run_it(path: Path, tmp_path: Path) -> None:
    config = run.parse([f"--config={path}", f"--workdir={tmp_path}"]).config
    assert f"python -m specjax.sweep --config=configs/sweeps/{path.name} --workdir=" in path.read_text()
    for point in space.grid(space.parse(config.space)):
        space.validated(config.base, point)


def test_trials_that_differ_in_the_law_alone_compile_nothing(finished: Path, compiled: list[int]) -> None:
    del finished
    # Plain decoding's programs are compiled with the first drafter's.
    assert compiled[0] > compiled[4] > 0
    assert compiled[1:4] == compiled[5:8] == [0, 0, 0]


def test_sweep_without_a_possible_setting_ends_and_says_why(experiment: Path, tmp_path: Path) -> None:
    more = ("--config.sampler=tpe", "--config.trials=2", "--config.space={'temperature': (-1.0,)}")
    assert run.main(command(experiment, tmp_path, *more)) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["best"] is None and summary["trials"] == {"pruned": 2, "copied": 1}
    table = (tmp_path / "table.md").read_text()
    assert "2 of 2 trials were pruned, the first for: temperature is -1" in table


def test_ranges_and_grids() -> None:
    axes = space.parse(
        space.dotted({"drafter.draft_length": {"low": 1, "high": 7, "step": 3}, "temperature": [0.0, 1.0]})
    )
    assert [axis.listed for axis in axes] == [(1, 4, 7), (0.0, 1.0)]
    assert len(space.grid(axes)) == 6
    assert Axis("top_p", low=0.7, high=1.0, step=0.1).listed == pytest.approx((0.7, 0.8, 0.9, 1.0))
    whole = space.parse({"drafter": [{"name": "ngram", "draft_length": 1, "max_ngram": 2}]})
    config = space.apply(run_config(), space.grid(whole)[0])
    assert config.drafter.to_dict() == {"name": "ngram", "draft_length": 1, "max_ngram": 2}


def test_a_field_of_one_of_the_drafters_is_known() -> None:
    base = run_config()
    base.drafter = {"name": "ngram", "draft_length": 4, "max_ngram": 3}
    axes = space.parse(space.dotted({"drafter.name": ["ngram", "suffix"], "drafter.num_branches": [1, 2]}))
    space.check(base, axes)
    with pytest.raises(ConfigError, match="'drafter.num_branch'; did you mean 'drafter.num_branches'"):
        space.check(base, (*axes, Axis("drafter.num_branch", (1,))))


def test_heat_map_leaves_blank_what_was_not_measured() -> None:
    labels = {"x_label": "width", "y_label": "K"}
    figure = plots.heat_map([[1.0, float("nan")], [2.0, 3.0]], rows=["1", "2"], columns=["3", "4"], **labels)
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.texts] == ["1.00", "2.00", "3.00"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("width", "K")
    with pytest.raises(ConfigError, match="give each row and column one"):
        plots.heat_map([[1.0]], rows=["1", "2"], columns=["3"], **labels)
    bars = plots.shares({"a": 0.7, "b": 0.3}, x_label="share").axes[0]
    assert [bar.get_width() for bar in bars.patches] == [0.7, 0.3] and bars.yaxis_inverted()


@pytest.mark.slow
def test_processes_are_killed_restarted_and_share(experiment: Path, finished: Path, tmp_path: Path) -> None:
    gate, workdir = tmp_path / "gate", tmp_path / "out"
    gate.mkdir()

    def start(together: int) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join((str(experiment), str(ROOT)))
        own = {"PYTHONPATH": paths, "GATE": str(gate), "TOGETHER": str(together), "JAX_PLATFORMS": "cpu"}
        own["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        arguments = [sys.executable, "-m", "specjax.sweep", *command(experiment, workdir)]
        return subprocess.Popen(arguments, env=os.environ | own)

    def wait_for(what: str) -> None:
        until = time.monotonic() + 240
        while not list(gate.glob(what)):
            assert time.monotonic() < until, f"no {what}"
            time.sleep(0.1)

    killed = start(together=1)
    try:
        wait_for("*.3")
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    storage = open_storage(None, workdir)
    (study,) = optuna.get_all_study_summaries(storage)
    before = optuna.load_study(study_name=study.study_name, storage=storage).trials
    assert [trial.state for trial in before[4:]] == [COMPLETE] * 4 + [RUNNING]

    (gate / "open").touch()
    both = [start(together=3) for _ in range(2)]
    try:
        assert [process.wait(timeout=480) for process in both] == [0, 0]
    finally:
        for process in both:
            process.kill()
    assert outcomes(workdir) == outcomes(finished)
    trials = optuna.load_study(study_name=study.study_name, storage=open_storage(None, workdir)).trials
    places = [place_of(trial) for trial in trials if trial.state != FAIL]
    assert sorted(places) == list(range(12))
    assert [trial.state for trial in trials[:9]] == [trial.state for trial in before[:8]] + [FAIL]
    # What was finished stayed as it was, and both had a share of the rest.
    assert trials[:8] == before[:8]
    assert len({trial.user_attrs[OWNER] for trial in trials[9:] if trial.state == COMPLETE}) == 2
