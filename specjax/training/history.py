"""The metrics of a run, a line a step, for people and for TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.errors import import_extra
from specjax.eval.results import write_whole

LINES, EVENTS = "metrics.jsonl", "tensorboard"


class History:
    """Appends to `LINES` of a run's folder, and to `EVENTS` beside it."""

    def __init__(self, folder: Path, step: int) -> None:
        """Go on after `step`: lines beyond it belong to steps that were lost and will be made again."""
        self._path = folder / LINES
        kept = [line for line in _whole_lines(self._path) if json.loads(line)["step"] <= step]
        write_whole(self._path, "".join(kept))
        tensorboard = import_extra("tensorboardX", "training needs", "train")
        self._events = tensorboard.SummaryWriter(str(folder / EVENTS), purge_step=step + 1)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add a step's line; what is None has no value there, and TensorBoard takes numbers only."""
        known = {name: value for name, value in metrics.items() if value is not None}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **known}) + "\n")
        for name, value in known.items():
            if isinstance(value, int | float):
                self._events.add_scalar(name, value, step)
        self._events.flush()

    def close(self) -> None:
        """Write what waits to be written."""
        self._events.close()


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file, without one that an interruption tore."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n")]
