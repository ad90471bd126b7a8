"""Prompts to learn from: instruction sets and passages to ask about, without evaluation prompts."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from specjax.data.documents import load_documents, read_text
from specjax.errors import ConfigError

# What is asked about a passage, so that long prompts are among those learned from.
REQUESTS = (
    "Summarize: {passage}",
    "{passage}\n\nSummarize the text above in a few sentences.",
    "A chat between a curious user and an assistant. Answer the question about the passage.\n\n"
    "Passage: {passage}\n\nQuestion: What is this passage about?",
    "Rewrite the following text in simpler words: {passage}",
    "Who and what are named in the following text? {passage}",
    "What are the main points of this text?\n\n{passage}",
)
SENTENCE_REQUESTS = (
    "Translate English to German: {passage}",
    "Translate into French: {passage}",
    "Continue this story: {passage}",
    "What does this sentence mean? {passage}",
)
PASSAGE_WORDS, SENTENCE_WORDS = (60, 260), (8, 40)


def load_instructions(path: Path) -> list[str]:
    """The requests of a .jsonl file, in its order: strings, or objects of a known instruction set.

    Known are "prompt", "turns" (the first), "instruction" with "instances", "question", "messages" (the
    first of the user) and "text". ConfigError, with file and line, on anything else.
    """
    found = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            text = _request(json.loads(line))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ConfigError(
                f"{path}:{number}: no instruction: give a JSON string or an object with 'prompt', 'turns', "
                "'instruction', 'question', 'messages' or 'text'"
            ) from error
        found.append(text.strip())
    return found


def load_passages(path: Path, seed: int) -> list[str]:
    """Requests about the passages of a .txt file, or of a .zip of such files, in a random order.

    Every passage of about 60 to 260 words gets a request of its own, every second one a sentence too.
    """
    draw = random.Random(seed)
    requests = []
    for text in load_documents(path):
        words = text.split()
        start = 0
        while start < len(words):
            size = draw.randint(*PASSAGE_WORDS)
            passage = words[start : start + size]
            start += size
            if len(passage) < PASSAGE_WORDS[0]:
                break
            requests.append(draw.choice(REQUESTS).format(passage=" ".join(passage)))
            if draw.random() < 0.5:
                sentence = " ".join(passage[: draw.randint(*SENTENCE_WORDS)])
                requests.append(draw.choice(SENTENCE_REQUESTS).format(passage=sentence))
    draw.shuffle(requests)
    return requests


def normalized(text: str) -> str:
    """The text without what case and white space tell apart."""
    return " ".join(text.casefold().split())


def fingerprint(text: str) -> str:
    """A short hash of the normalised text."""
    return hashlib.sha256(normalized(text).encode()).hexdigest()[:16]


def evaluation_fingerprints() -> frozenset[str]:
    """The fingerprints of the evaluation prompts of Spec-Bench, MT-bench, HumanEval, GSM8K's test and others.

    The package holds no word of those prompts, but knows one when it sees it.
    """
    packaged = resources.files("specjax.data") / "prompts" / "evaluation_fingerprints.txt"
    return frozenset(packaged.read_text(encoding="utf-8").split())


def for_training(requests: Iterable[str], seen: set[str] | None = None) -> list[str]:
    """The requests that are no evaluation prompts, each once; those in `seen` are left out."""
    seen = set() if seen is None else seen
    barred = evaluation_fingerprints()
    kept = []
    for request in requests:
        mark = fingerprint(request)
        if mark not in barred and mark not in seen and normalized(request):
            seen.add(mark)
            kept.append(request)
    return kept


def _request(record: Any) -> str:
    """The user's words in a record of an instruction set."""
    if isinstance(record, str):
        return record
    if "instruction" in record:
        given = record["instances"][0]["input"] if record.get("instances") else record.get("input", "")
        return f"{record['instruction']}\n{given}" if given else record["instruction"]
    if "messages" in record:
        own = [message["content"] for message in record["messages"] if message["role"] == "user"]
        return own[0]
    if "turns" in record:
        return record["turns"][0]
    for name in ("prompt", "question", "text"):
        if name in record:
            return record[name]
    raise KeyError("prompt")
