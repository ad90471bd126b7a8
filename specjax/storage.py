"""Where specjax keeps what it fetched or built, and how a file is written whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def cache_folder() -> Path:
    """Return the cache folder: SPECJAX_CACHE, or `specjax` in XDG_CACHE_HOME, or ~/.cache/specjax."""
    if chosen := os.environ.get("SPECJAX_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specjax"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write a file that then takes the place of `path`: a reader finds the old or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
