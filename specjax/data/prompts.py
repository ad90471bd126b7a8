"""Prompt sets: the packaged one, Spec-Bench (arXiv 2401.07851), EAGLE's five, and files of your own."""

from __future__ import annotations

import json
import os
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from specjax.errors import ConfigError, nearest

# Where Spec-Bench's and EAGLE's repositories keep their questions below `data`, and a name for a flat folder.
PUBLISHED = {
    "spec_bench": ("spec_bench/question.jsonl", "spec_bench_question.jsonl"),
    "mt_bench": ("mt_bench/question.jsonl", "mt_bench_question.jsonl"),
    "humaneval": ("humaneval/question.jsonl", "eagle_humaneval_question.jsonl"),
    "gsm8k": ("gsm8k/question.jsonl", "eagle_gsm8k_question.jsonl"),
    "alpaca": ("alpaca/question.jsonl", "eagle_alpaca_question.jsonl"),
    "cnn_dm": ("sum/question.jsonl", "eagle_cnn_dm_sum_question.jsonl"),
}
PROMPT_SETS = ("default", *PUBLISHED, "file")

# Spec-Bench's table gives these eight categories of its file one row.
_MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}


class Prompt(NamedTuple):
    """One conversation: its user `turns` in order, its `category`, and the `task` that tables report."""

    id: str
    task: str
    category: str
    turns: tuple[str, ...]


def load_prompts(
    name: str,
    path: str | None = None,
    limit: int | None = None,
    per_category: int | None = None,
) -> list[Prompt]:
    """Load a prompt set: the first `per_category` of each task, then the first `limit` of what is left.

    `name` is "default" (packaged), one of `PUBLISHED` (`path` to its question.jsonl, or to the folder that
    holds it), "file" (`path` to any file) or itself a file's path. A .jsonl file holds {"prompt": ...} or
    {"turns": [...]} a line, with "id" and "category" where wanted; any other file holds one prompt a line.

    Raises:
        ConfigError: the set is unknown, its file missing, unreadable or without prompts, a line malformed
            or a prompt empty (both with file and line), or a count below 1.
    """
    for option, count in (("limit", limit), ("per_category", per_category)):
        if count is not None and count < 1:
            raise ConfigError(f"{option} must be at least 1, not {count}")

    source, text = _read(name, path)
    prompts = [
        _parse(line, source, number) for number, line in enumerate(text.split("\n"), start=1) if line.strip()
    ]
    if not prompts:
        raise ConfigError(f"{source} holds no prompts")
    if name == "spec_bench":
        prompts = [p._replace(task="mt_bench") if p.category in _MT_BENCH else p for p in prompts]
    if per_category is not None:
        prompts = _first_of_each_task(prompts, per_category)
    return prompts[:limit]


def _read(name: str, path: str | None) -> tuple[Path, str]:
    """Return where the set lies, for messages and by its suffix for the format, and its text."""
    if name == "default":
        if path is not None:
            raise ConfigError(f'the prompt set "default" is packaged and takes no path, but got {path!r}')
        packaged = resources.files("specjax.data") / "prompts" / "default.jsonl"
        return Path("default.jsonl"), packaged.read_text(encoding="utf-8")

    if name in PROMPT_SETS:
        if path is None:
            raise ConfigError(f'the prompt set "{name}" needs the path of its file: set prompts_path')
        source = _within(Path(path), name)
    elif Path(name).suffix or os.sep in name:
        source = Path(name)
    else:
        raise ConfigError(f"unknown prompt set {name!r}{nearest(name, PROMPT_SETS)}")

    if not source.is_file():
        raise ConfigError(f"no prompt file at {source}")
    try:
        return source, source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prompt file {source}: {error}") from error


def _within(path: Path, name: str) -> Path:
    """The file itself, or that of a published set in a folder."""
    if not path.is_dir() or name not in PUBLISHED:
        return path
    known = [path / file for file in PUBLISHED[name]]
    found = next((file for file in known if file.is_file()), None)
    if found is None:
        raise ConfigError(f'no file of the prompt set "{name}" at {" or ".join(map(str, known))}')
    return found


def _parse(line: str, source: Path, number: int) -> Prompt:
    where = f"{source}:{number}"
    record: Any = {"prompt": line.strip()}
    if source.suffix == ".jsonl":
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where}: not JSON: {error}") from error
        if not isinstance(record, dict) or ("prompt" in record) == ("turns" in record):
            raise ConfigError(f'{where}: expected an object with either "prompt" or "turns"')

    turns = record["turns"] if "turns" in record else [record["prompt"]]
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise ConfigError(f'{where}: "prompt" must be a string, "turns" a list of strings')
    if not turns or not all(turn.strip() for turn in turns):
        raise ConfigError(f"{where}: empty prompt")

    category = str(record.get("category") or source.stem)
    identity = record.get("id", record.get("question_id", number))
    return Prompt(id=str(identity), task=category, category=category, turns=tuple(turns))


def _first_of_each_task(prompts: list[Prompt], count: int) -> list[Prompt]:
    seen: Counter[str] = Counter()
    chosen = []
    for prompt in prompts:
        seen[prompt.task] += 1
        if seen[prompt.task] <= count:
            chosen.append(prompt)
    return chosen
