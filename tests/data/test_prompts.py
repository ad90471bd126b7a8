"""Prompt sets: what is packaged, what Spec-Bench's file becomes, and what each error says."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from specjax.data.prompts import load_prompts
from specjax.errors import ConfigError

TASKS = {"chat", "translation", "summarization", "qa", "math_reasoning", "rag"}


def write(folder: Path, name: str, *lines: str) -> str:
    file = folder / name
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(file)


def test_default_set_has_two_prompts_of_each_task() -> None:
    prompts = load_prompts("default")
    assert Counter(p.task for p in prompts) == {task: 2 for task in TASKS}
    assert len({p.id for p in prompts}) == 12
    # so that a run over the first few sees every task
    assert {p.task for p in load_prompts("default", limit=6)} == TASKS


def test_per_category_takes_the_first_of_each_task() -> None:
    prompts = load_prompts("default")
    one_each = load_prompts("default", per_category=1)
    assert Counter(p.task for p in one_each) == {task: 1 for task in TASKS}
    assert one_each == [p for p in prompts if p.id.endswith("-1")]
    assert load_prompts("default", per_category=99) == prompts


def test_limit_applies_after_per_category() -> None:
    assert load_prompts("default", per_category=1, limit=4) == load_prompts("default", per_category=1)[:4]


def test_jsonl_file_by_either_name(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "mine.jsonl",
        '{"prompt": "One."}',
        "",
        '{"id": "b", "category": "code", "turns": ["Two.", "Th\u2028ree."]}',
        '{"question_id": 7, "prompt": "Four."}',
    )
    prompts = load_prompts(file)
    assert load_prompts("file", file) == prompts
    assert [p.id for p in prompts] == ["1", "b", "7"]
    assert [p.category for p in prompts] == ["mine", "code", "mine"]
    assert prompts[1].turns == ("Two.", "Th\u2028ree.")


def test_plain_text_file_has_one_prompt_a_line(tmp_path: Path) -> None:
    file = write(tmp_path, "mine.txt", " What is jit? ", "", "{not json}")
    assert [p.turns for p in load_prompts(file)] == [("What is jit?",), ("{not json}",)]


def test_spec_bench_groups_its_chat_categories_as_mt_bench(tmp_path: Path) -> None:
    rows = [{"question_id": i, "category": c, "turns": ["?"]} for i, c in enumerate(["math", "stem", "qa"])]
    file = write(tmp_path, "question.jsonl", *map(json.dumps, rows))
    assert [(p.task, p.category) for p in load_prompts("spec_bench", file)] == [
        ("mt_bench", "math"),
        ("mt_bench", "stem"),
        ("qa", "qa"),
    ]
    assert [p.task for p in load_prompts("spec_bench", file, per_category=1)] == ["mt_bench", "qa"]


def test_the_real_spec_bench_file() -> None:
    beside = Path(__file__).parents[3] / "shared" / "data" / "eval" / "spec_bench_question.jsonl"
    file = Path(os.environ.get("SPECJAX_SPEC_BENCH", beside))
    if not file.is_file():
        pytest.skip("SPECJAX_SPEC_BENCH does not name Spec-Bench's question.jsonl")
    prompts = load_prompts("spec_bench", str(file))
    assert len({p.id for p in prompts}) == 480
    assert set(Counter(p.task for p in prompts).values()) == {80}
    assert len({p.task for p in prompts}) == 6
    assert len({p.category for p in prompts}) == 13


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": ', "not JSON"),
        ('["a"]', "an object"),
        ('{"text": "a"}', "an object"),
        ('{"prompt": "a", "turns": ["a"]}', "either"),
        ('{"prompt": 3}', "must be a string"),
        ('{"turns": "a"}', "list of strings"),
        ('{"turns": []}', "empty prompt"),
        ('{"turns": ["a", " "]}', "empty prompt"),
    ],
)
def test_malformed_line_is_reported_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    file = write(tmp_path, "bad.jsonl", '{"prompt": "fine"}', line)
    with pytest.raises(ConfigError) as error:
        load_prompts(file)
    assert str(error.value).startswith(f"{file}:2: ")
    assert message in str(error.value)


def test_unknown_set_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"spec_bnch.*spec_bench"):
        load_prompts("spec_bnch")


def test_paths_that_are_missing_wrong_or_unwanted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='"spec_bench" needs the path'):
        load_prompts("spec_bench")
    with pytest.raises(ConfigError, match=r"no prompt file at .*absent\.jsonl"):
        load_prompts("file", str(tmp_path / "absent.jsonl"))
    with pytest.raises(ConfigError, match="no prompt file at"):
        load_prompts(str(tmp_path))
    with pytest.raises(ConfigError, match="takes no path"):
        load_prompts("default", "somewhere.jsonl")


def test_file_without_prompts_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no prompts"):
        load_prompts(write(tmp_path, "empty.jsonl", ""))
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="cannot read"):
        load_prompts(str(tmp_path / "binary.txt"))


@pytest.mark.parametrize("option", ["limit", "per_category"])
def test_counts_below_one_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} must be at least 1"):
        load_prompts("default", **{option: 0})
