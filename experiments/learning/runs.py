"""Runs of one of specjax's commands after one another, each in a folder of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from specjax.config import load_config, override, validate
from specjax.errors import ConfigError

ROOT = Path(__file__).parents[2]

Overrides = Mapping[str, Any]


class Run(NamedTuple):
    """A command's arguments, and the config that they amount to."""

    name: str
    folder: Path
    arguments: tuple[str, ...]
    config: ConfigDict


def make_run(name: str, file: Path, arguments: Sequence[str], folder: Path) -> Run:
    """The run of a config file under the flags `arguments`, checked; ConfigError names the wrong field."""
    config = override(load_config(str(file)), arguments)
    validate(config)
    return Run(name, folder, (f"--config={file}", *arguments, f"--workdir={folder}"), config)


def as_flags(overrides: Overrides) -> list[str]:
    """The fields of a config as the flags of a command line."""
    return [f"--config.{name}={value}" for name, value in overrides.items()]


def without(flags: Iterable[str], overrides: Overrides) -> list[str]:
    """The flags but those that a run sets itself: of a tuple that is given twice both parts would stay."""
    return [flag for flag in flags if _field(flag) not in overrides]


def refuse_both(flags: Iterable[str], overrides: Iterable[Overrides]) -> None:
    """Raise ConfigError where a flag sets what the runs differ in."""
    own = {name for part in overrides for name in part}
    for flag in flags:
        name = _field(flag)
        if own & {name, name.partition(".")[0]}:
            raise ConfigError(f"{flag} is what the runs differ in: leave it out")


def _field(flag: str) -> str:
    return flag.partition("=")[0].lstrip("-").removeprefix("config.")


def execute(module: str, run: Run) -> None:
    """Run it in a process of its own, whose memory and threads end with it; ConfigError where it fails."""
    print(f"{run.name}: in {run.folder}", flush=True)
    code = subprocess.run([sys.executable, "-m", module, *run.arguments]).returncode
    if code:
        raise ConfigError(f"the run '{run.name}' ended with {code}; the same command goes on there")
