"""The folder of a run: its lines are kept as they finish, everything else is replaced whole."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import jaxlib

from specjax.errors import ConfigError
from specjax.storage import replacing

PARTIAL, GENERATIONS = "generations.partial.jsonl", "generations.jsonl"
CONFIG, SUMMARY, TABLE = "config.json", "summary.json", "table.md"

Line = dict[str, Any]


class Files(NamedTuple):
    """The names of a task's files: lines while it runs and afterwards, and what they come to."""

    partial: str
    lines: str
    summary: str
    table: str


COMPARISON = Files(PARTIAL, GENERATIONS, SUMMARY, TABLE)


def check_writable(folder: Path) -> None:
    """Make the folder, and write and remove a file in it; ConfigError where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="write-test-"):
            pass
    except OSError as error:
        raise ConfigError(
            f"the workdir {folder} cannot be written ({error.strerror or error}): name another with --workdir"
        ) from error


def write_whole(path: Path, text: str) -> None:
    """Replace a file, so that a reader finds the old text or the new one and nothing between."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def resume(
    folder: Path,
    config: Mapping[str, Any],
    lines_of_batch: Mapping[int, int],
    files: Files = COMPARISON,
) -> list[Line]:
    """The lines of the batches that an earlier run of this config finished; ConfigError if it was another's.

    `lines_of_batch` says how many lines a finished batch has. `config` is stored for the next run.
    """
    found = _read_lines(folder, files)
    claim(folder, config, has_results=bool(found))
    counts = Counter(line["batch"] for line in found)
    kept = [line for line in found if counts[line["batch"]] == lines_of_batch.get(line["batch"])]
    if not (folder / files.lines).exists():
        # Half a batch, or half a line, would stand in the way of what is appended.
        write_whole(folder / files.partial, _text(kept))
    return kept


def claim(folder: Path, config: Mapping[str, Any], *, has_results: bool) -> None:
    """Store the config of a run; ConfigError where the folder has results of another one."""
    if has_results:
        check_same(folder, config)
    write_whole(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def append(folder: Path, lines: Iterable[Line], files: Files = COMPARISON) -> None:
    """Add finished lines."""
    with (folder / files.partial).open("a", encoding="utf-8") as file:
        file.write(_text(lines))


def finish(folder: Path, summary: Mapping[str, Any], table: str, files: Files = COMPARISON) -> None:
    """Write the summary and the table, and give the lines their final name."""
    write_whole(folder / files.summary, json.dumps(summary, indent=2, allow_nan=False) + "\n")
    write_whole(folder / files.table, table)
    seal(folder, files)


def seal(folder: Path, files: Files) -> None:
    """Give the lines their final name."""
    if (folder / files.partial).exists():
        os.replace(folder / files.partial, folder / files.lines)


def environment() -> dict[str, str]:
    """What the numbers were measured on."""
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "flax": flax.__version__,
        "python": platform.python_version(),
    }


def _text(lines: Iterable[Line]) -> str:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _read_lines(folder: Path, files: Files) -> list[Line]:
    for name in (files.lines, files.partial):
        if (folder / name).exists():
            break
    else:
        return []
    lines = []
    for line in (folder / name).read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break  # the line that an interruption tore, or the empty one at the end
    return lines


def check_same(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise ConfigError, naming the fields, where the folder's config is another one."""
    try:
        stored = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the workdir {folder} holds results without the {CONFIG} they belong to: name another --workdir"
        ) from error
    # As the file has it: JSON knows no tuples.
    before, now = dict(_flat(stored)), dict(_flat(json.loads(json.dumps(config))))
    differing = [
        f"{name} ({before.get(name, 'absent')!r} there, {now.get(name, 'absent')!r} here)"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if differing:
        raise ConfigError(
            f"the workdir {folder} holds results of another config; it differs in {', '.join(differing)}: "
            "name another --workdir, or remove this one"
        )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
