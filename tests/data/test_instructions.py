"""Prompts to learn from: every known format, and no evaluation prompt among them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from specjax.data import instructions
from specjax.data.prompts import load_prompts
from specjax.errors import ConfigError

ROOT = Path(__file__).parents[2]


def write(path: Path, *records: object) -> Path:
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    return path


def test_every_known_record_is_read(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mixed.jsonl",
        "Why is the sky blue?",
        {"question": "What is 2 + 3?", "answer": "5"},
        {"instruction": "Translate.", "instances": [{"input": "Bonjour", "output": "Hello"}]},
        {"instruction": "Tell a joke.", "instances": [{"input": "", "output": "..."}]},
        {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi there"}]},
        {"turns": ["first", "second"]},
        {"prompt": "a prompt"},
        {"text": "a message", "role": "prompter"},
    )
    assert instructions.load_instructions(path) == [
        "Why is the sky blue?",
        "What is 2 + 3?",
        "Translate.\nBonjour",
        "Tell a joke.",
        "Hi there",
        "first",
        "a prompt",
        "a message",
    ]


@pytest.mark.parametrize("line", ["{not json", '{"answer": 5}', "[]", '{"messages": []}'])
def test_unknown_record_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('"good"\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"bad\.jsonl:2"):
        instructions.load_instructions(path)


def test_passages_of_text_and_archives(tmp_path: Path) -> None:
    words = [f"word{i}" for i in range(1000)]
    plain = tmp_path / "plain.txt"
    plain.write_text(" ".join(words))
    with zipfile.ZipFile(tmp_path / "many.zip", "w") as archive:
        archive.writestr("a/one.txt", " ".join(words))
        archive.writestr("a/README", "not a text")
    for path in (plain, tmp_path / "many.zip"):
        requests = instructions.load_passages(path, seed=0)
        assert requests == instructions.load_passages(path, seed=0)
        assert requests != instructions.load_passages(path, seed=1)
        covered = {word for request in requests for word in request.split() if word in set(words)}
        assert len(covered) > 700
        assert all("word" in request for request in requests)


def test_case_white_space_and_repetitions_do_not_matter() -> None:
    kept = instructions.for_training(["Write a  poem.", "write\na poem.", "Another one", "  "])
    assert kept == ["Write a  poem.", "Another one"]
    assert instructions.for_training(["WRITE A POEM."], {instructions.fingerprint("write a poem.")}) == []


def test_packaged_evaluation_prompts_are_barred() -> None:
    packaged = [turn for prompt in load_prompts("default") for turn in prompt.turns]
    altered = [f"  {text.upper()}\n" for text in packaged]
    assert instructions.for_training(packaged) == instructions.for_training(altered) == []
    assert len(instructions.evaluation_fingerprints()) > 3000


def test_instructions_of_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        instructions.load_instructions(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="archive"):
        instructions.load_passages(write(tmp_path / "no.zip", "text"), seed=0)
