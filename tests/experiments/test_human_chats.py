"""Instruction sets with answers as chats: each request with its own answer, and a word where one lacks it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.learning import human
from specjax.data.conversations import load_conversations

SOLVED = {"question": "What is 2 + 3?", "answer": "It is 2+3 = <<2+3=5>>5.\n#### 5"}
DONE = {"instruction": "Translate.", "instances": [{"input": "Hund", "output": " dog "}]}
BLANK = {"instruction": "Say nothing.", "instances": [{"input": "", "output": " "}]}


def write(path: Path, *records: object) -> str:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return str(path)


def test_chats_are_what_prepare_reads(tmp_path: Path) -> None:
    files = write(tmp_path / "a.jsonl", SOLVED), write(tmp_path / "b.jsonl", DONE, SOLVED)
    out = tmp_path / "new" / "chats.jsonl"
    assert human.main([*files, f"--out={out}"]) == 0
    words = [[message["content"] for message in chat.messages] for chat in load_conversations(out)]
    solved = [SOLVED["question"], "It is 2+3 = 5.\n#### 5"]
    assert words == [solved, ["Translate.\nHund", "dog"], solved]


@pytest.mark.parametrize("record", [BLANK, {"question": "Why?"}, "Why?"])
def test_a_request_without_an_answer_is_named(
    record: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, out = write(tmp_path / "a.jsonl", SOLVED, record), tmp_path / "chats.jsonl"
    assert human.main([files, f"--out={out}"]) == 2
    assert "a.jsonl:2: no answer" in capsys.readouterr().err
    assert not out.exists()
