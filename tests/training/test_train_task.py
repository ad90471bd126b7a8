"""The task: what a run leaves behind, what it refuses, and that it goes on to the same bits when killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from specjax import run
from specjax.build import build_target
from specjax.training import export
from specjax.training.checkpoints import Checkpoints
from specjax.training.history import LINES
from tests.caches import with_kernels
from tests.training.experiment import write_experiment

pytestmark = pytest.mark.quick_compile

ROOT = Path(__file__).parent.parent.parent
STEPS = 12
TOY = {"name": "tests.training.toy_drafter"}
# What changes from run to run is the time.
TIMES = "tokens_per_second"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_experiment(tmp_path_factory.mktemp("training"))


@pytest.fixture(autouse=True, scope="module")
def own_cache(config: Path) -> Iterator[None]:
    """Keep what is compiled here, all of it, out of the user's cache and for every run and process here."""
    settings = {"jax_compilation_cache_dir": None, "jax_persistent_cache_min_compile_time_secs": 0}
    before = {name: getattr(jax.config, name) for name in settings}
    compilation_cache.reset_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECJAX_CACHE", str(with_kernels(config.parent / "cache")))
        # For processes of their own; here they are set already.
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        for name, value in settings.items():
            jax.config.update(name, value)
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def train(config: Path, workdir: Path, *flags: str) -> int:
    return run.main([f"--config={config}", f"--workdir={workdir}", *flags])


def lines_of(workdir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / LINES).read_text().splitlines()]


def untimed(workdir: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != TIMES} for line in lines_of(workdir)]


def state_of(workdir: Path, step: int = STEPS) -> list[np.ndarray]:
    """Every array of a checkpoint, whatever devices wrote it."""
    path = workdir / "checkpoints" / str(step) / "state"
    checkpointer = ocp.PyTreeCheckpointer()
    kinds = jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray), checkpointer.metadata(path).item_metadata.tree
    )
    return jax.tree.leaves(checkpointer.restore(path, restore_args=kinds))


def assert_same_run(workdir: Path, other: Path) -> None:
    for array, expected in zip(state_of(workdir), state_of(other), strict=True):
        np.testing.assert_array_equal(array, expected)
    assert untimed(workdir) == untimed(other)


@pytest.fixture(scope="module")
def finished(config: Path) -> Path:
    workdir = config.parent / "finished"
    assert train(config, workdir) == 0
    return workdir


def test_run_leaves_curves_checkpoints_and_the_best_weights(finished: Path) -> None:
    lines = lines_of(finished)
    assert [line["step"] for line in lines] == [0, 2, 4, 6, 8, 10, 12]
    # The last batch of an epoch may hold two texts only.
    assert min(line["loss"] for line in lines[1:]) < lines[1]["loss"] / 2
    assert ["held_out/tokens_per_step" in line for line in lines] == [
        True,
        False,
        False,
        True,
        False,
        False,
        True,
    ]
    assert list((finished / "tensorboard").glob("events*"))
    assert sorted(int(path.name) for path in (finished / "checkpoints").iterdir()) == [8, 12]
    weights, about = export.read_drafter(finished / "drafter")
    assert about["drafter"] == "tests.training.toy_drafter"
    assert about["training"]["distance"] == "forward_kl"
    assert about["step"] == 12
    assert about["tokens"] == lines[-1]["tokens"]
    assert about["held_out"]["tokens_per_step"] == lines[-1]["held_out/tokens_per_step"]
    assert weights.keys() == {"table", "order"}


def test_finished_run_is_left_as_it_is(config: Path, finished: Path) -> None:
    before = (finished / LINES).read_text()
    assert train(config, finished) == 0
    assert (finished / LINES).read_text() == before


def test_training_raises_what_is_accepted_and_the_best_is_kept(config: Path, tmp_path: Path) -> None:
    flags = ["--config.steps=60", "--config.eval_every=20", "--config.save_every=60", "--config.log_every=20"]
    assert train(config, tmp_path / "run", *flags) == 0
    first, *rest = [line["held_out/tokens_per_step"] for line in lines_of(tmp_path / "run")]
    assert first == 1
    _, about = export.read_drafter(tmp_path / "run" / "drafter")
    assert about["held_out"]["tokens_per_step"] == max(rest) > 1.1
    source = tmp_path / "run" / "drafter"
    assert train(config, tmp_path / "on", f"--config.drafter={TOY | {'source': str(source)}}") == 0
    assert lines_of(tmp_path / "on")[0]["held_out/tokens_per_step"] == max(rest)


def test_target_that_learns_too_is_written_beside_the_drafter(config: Path, tmp_path: Path) -> None:
    flags = [
        "--config.training={'trains_target': True}",
        "--config.ema=0.9",
        "--config.target_learning_rate=1e-2",
    ]
    assert train(config, tmp_path, *flags, "--config.steps=4") == 0
    assert train(config, tmp_path, *flags, "--config.steps=4") == 0
    before, after = (build_target(str(folder / "target")) for folder in (config.parent, tmp_path))
    assert after.tokenizer is not None
    moved = jax.tree.map(lambda a, b: float(abs(a - b).max()), before.params, after.params)
    # Only the embedding is in the toy's loss; the rest has no gradient, and matrices decay a little.
    assert moved["embed_tokens"]["weight"] > 1e-3
    assert moved["norm"]["weight"] == 0


def test_interrupted_run_goes_on_to_the_same_bits(
    config: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Checkpoints.save

    def interrupted(self, step: int, *rest) -> None:
        if step == 8:
            raise KeyboardInterrupt
        save(self, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", interrupted)
        assert train(config, tmp_path) == 130
    assert [line["step"] for line in lines_of(tmp_path)] == [0, 2, 4, 6, 8]
    assert train(config, tmp_path) == 0
    assert_same_run(tmp_path, finished)


KILLED = """
import os, signal, sys
from specjax import run
from specjax.training.checkpoints import Checkpoints
from specjax.training.history import History

kind, name, at = {"save": Checkpoints, "write": History}[sys.argv[1]], sys.argv[1], int(sys.argv[2])
original = getattr(kind, name)

def killed(self, step, *rest):
    original(self, step, *rest)
    if step == at:
        os.kill(os.getpid(), signal.SIGKILL)

setattr(kind, name, killed)
sys.exit(run.main(sys.argv[3:]))
"""


@pytest.mark.slow
def test_killed_run_goes_on_to_the_same_bits(config: Path, finished: Path, tmp_path: Path) -> None:
    """Once between two checkpoints, twice while one is being written, the first of all among them."""
    arguments = [f"--config={config}", f"--workdir={tmp_path}"]
    for where, step in (("save", 0), ("save", 8), ("write", 10)):
        command = [sys.executable, "-c", KILLED, where, str(step), *arguments]
        killed = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [line["step"] for line in lines_of(tmp_path)][-1] == 10
    assert train(config, tmp_path) == 0
    assert_same_run(tmp_path, finished)
    assert not list((tmp_path / "checkpoints").glob("*tmp*"))


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


@pytest.mark.slow
def test_eight_devices_learn_what_one_does(config: Path, finished: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "specjax.train", f"--config={config}", f"--workdir={tmp_path}"]
    devices = environment(XLA_FLAGS="--xla_force_host_platform_device_count=8")
    subprocess.run(command, cwd=ROOT, env=devices, check=True)
    assert_close(tmp_path, finished)


@pytest.mark.slow
def test_two_processes_learn_what_one_does(config: Path, finished: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "specjax.train", f"--config={config}", f"--workdir={tmp_path}"]
    coordinator = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(
                JAX_COORDINATOR_ADDRESS=coordinator, JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(number)
            ),
        )
        for number in range(2)
    ]
    try:
        assert [process.wait(timeout=300) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    assert_close(tmp_path, finished)


def assert_close(workdir: Path, other: Path) -> None:
    for array, expected in zip(state_of(workdir), state_of(other), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-3, atol=1e-4)
    assert [line["step"] for line in lines_of(workdir)] == [line["step"] for line in lines_of(other)]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config.drafter={'name': 'ngram', 'draft_length': 2, 'max_ngram': 2}"], "'ngram' does not learn"),
        (
            ["--config.training={'distanse': 'forward_kl'}"],
            "has no field 'distanse'; did you mean 'distance'",
        ),
        (["--config.training={'noise': 'much'}"], "training.noise is 'much': give a value of type float"),
        (["--config.training={'distance': 'kl'}"], "there is no distance 'kl'"),
        (["--config.data=('nowhere',)"], "the folder nowhere holds no"),
        (["--config.data=()"], "data is empty"),
        (["--config.held_out=40", "--config.eval_prompts=4"], "held_out is 40 and there are 40 texts"),
        (["--config.eval_prompts=7"], "eval_prompts is 7 and held_out is 6"),
        (["--config.warmup=12"], "warmup is 12 and steps is 12"),
        (["--config.learning_rate=0.0"], "learning_rate is 0.0"),
        (["--config.ema=1.0"], "ema is 1.0"),
        (["--config.dtype=int8"], "dtype is 'int8': choose one of float32, bfloat16"),
        (["--config.supervise=some"], "supervise is 'some'"),
        (["--config.verify=none"], "there is no rule 'none'"),
        (["--config.eval_new_tokens=300"], "exceed the target's 256 positions"),
        (["--config.max_length=2"], "none of the 40 texts .* supervised token"),
        ([f"--config.drafter={TOY | {'source': 'nowhere'}}"], "nowhere is no folder of a trained drafter"),
        (["--config.learning_rate=1e38", "--config.clip=1e30"], "the loss became .* lower learning_rate"),
    ],
)
def test_what_cannot_be_is_refused(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert train(config, tmp_path, *flags) == 2
    error = capsys.readouterr().err
    assert re.search(message, " ".join(error.split())), error


def test_workdir_of_another_config_is_refused(
    config: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (finished / "config.json").read_text()
    assert train(config, finished, "--config.steps=13") == 2
    assert "it differs in steps (12 there, 13 here)" in capsys.readouterr().err
    assert (finished / "config.json").read_text() == before
