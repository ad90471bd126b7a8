"""Where specjax keeps what it fetched or built, to have it again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the cache folder: SPECJAX_CACHE, or `specjax` in XDG_CACHE_HOME, or ~/.cache/specjax."""
    if chosen := os.environ.get("SPECJAX_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specjax"
