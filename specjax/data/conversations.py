"""Chats to learn from: what a chat template makes of them, and which of the tokens are to be foreseen."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from specjax.data.documents import read_text
from specjax.data.instructions import evaluation_fingerprints, fingerprint
from specjax.data.tokenizer import Tokenizer
from specjax.errors import ConfigError, SpecjaxError

Messages = Sequence[Mapping[str, Any]]
# Stands for somebody's words where a template is asked what it writes around them.
MARKER = "\x00"


class Conversation(NamedTuple):
    """The messages of a chat, each {"role": ..., "content": ...}, and the "file:line" that holds them."""

    place: str
    messages: Messages


class _Turn(NamedTuple):
    """Where a turn stands in the text of its chat: its words from `start` to `stop`, its end up to `end`."""

    start: int
    stop: int
    end: int


def load_conversations(path: Path) -> list[Conversation]:
    """The chats of a .jsonl file: objects with "messages", or bare lists of them.

    White space around a message's words is dropped, as many templates do, so that no token is partly the
    template's and partly theirs. ConfigError, with file and line, on anything else.
    """
    lines = enumerate(read_text(path).split("\n"), start=1)
    return [_conversation(f"{path}:{number}", line) for number, line in lines if line.strip()]


def without_evaluation_prompts(conversations: Sequence[Conversation]) -> list[Conversation]:
    """The chats in which no message of the user is an evaluation prompt."""
    barred = evaluation_fingerprints()

    def is_clean(one: Conversation) -> bool:
        asked = (message["content"] for message in one.messages if message["role"] == "user")
        return barred.isdisjoint(map(fingerprint, asked))

    return [one for one in conversations if is_clean(one)]


def around(tokenizer: Tokenizer, before: Messages, role: str) -> tuple[str, str]:
    """What the chat template writes up to the words of a turn that follows `before`, and after them.

    Raises SpecjaxError where there is no template or it refuses such a turn.
    """
    text = tokenizer.chat([*before, {"role": role, "content": MARKER}], add_generation_prompt=False)
    opening, marker, closing = text.partition(MARKER)
    if not marker:
        raise SpecjaxError(f"the chat template leaves out what the role '{role}' says.")
    return opening, closing


def encode(
    conversation: Conversation, tokenizer: Tokenizer, roles: Collection[str]
) -> tuple[Int[np.ndarray, "T"], Bool[np.ndarray, "T"]]:
    """The tokens of a chat, and which are words of `roles` or the token that ends their turn.

    That is the first stop token after the words, or the first token where the template writes none.
    ConfigError, with file and line, where the template refuses the messages, or renders a turn within the
    chat otherwise than at its end, so that its words cannot be told from what surrounds them.
    """
    messages = conversation.messages
    try:
        text = tokenizer.chat(messages, add_generation_prompt=False)
        turns = [
            _turn(text, tokenizer, messages, i) for i, one in enumerate(messages) if one["role"] in roles
        ]
    except SpecjaxError as error:
        raise ConfigError(f"{conversation.place}: {error}") from error
    ids, spans = tokenizer.encode_with_spans(text)
    tokens = np.asarray(ids, np.int32)
    starts, stops = np.asarray(spans, np.int64).reshape(-1, 2).T
    supervised = np.zeros(len(tokens), bool)
    for turn in turns:
        supervised |= (stops > turn.start) & (starts < turn.stop)
        closing = np.flatnonzero((starts >= turn.stop) & (starts < turn.end))
        is_stop = np.isin(tokens[closing], tokenizer.stop_tokens)
        supervised[closing[: 1 + (int(is_stop.argmax()) if is_stop.any() else 0)]] = True
    return tokens, supervised


def _conversation(place: str, line: str) -> Conversation:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: no JSON ({error})") from error
    messages = record.get("messages") if isinstance(record, dict) else record
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ConfigError(
            f'{place}: no chat: give {{"messages": [{{"role": ..., "content": ...}}, ...]}}, or only the list'
        )
    return Conversation(place, [one | {"content": one["content"].strip()} for one in messages])


def _is_message(one: Any) -> bool:
    return isinstance(one, dict) and all(isinstance(one.get(name), str) for name in ("role", "content"))


def _turn(text: str, tokenizer: Tokenizer, messages: Messages, i: int) -> _Turn:
    """Where turn `i` stands in the text of the whole chat."""
    role, words = messages[i]["role"], messages[i]["content"]
    opening, closing = around(tokenizer, messages[:i], role)
    if not text.startswith(opening + words + closing):
        raise SpecjaxError(
            f"the chat template renders message {i + 1} ('{role}') within the chat otherwise than at its "
            "end, so that its words cannot be found: end the chat with it, or do not supervise its role."
        )
    start, stop = len(opening), len(opening) + len(words)
    return _Turn(start, stop, stop + len(closing))
