"""Cache folders of the tests' own."""

from __future__ import annotations

from pathlib import Path

from specjax import storage


def with_kernels(folder: Path) -> Path:
    """A new cache folder that shares the kernels with the user's: compiling them takes long."""
    kernels = storage.cache_folder() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    (folder / "kernels").symlink_to(kernels.absolute())
    return folder
