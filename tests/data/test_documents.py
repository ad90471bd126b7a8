"""Documents: pieces that cover the text, with the model's own opening, and archives of them."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

import pytest
import tokenizers
from tokenizers import processors

from specjax.data.documents import cut, load_documents
from specjax.data.tokenizer import Tokenizer, from_folder
from specjax.errors import ConfigError
from tests.model_folder import END, write_model

WORDS = "the cat sat on the mat and the dog "


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return from_folder(write_model(tmp_path_factory.mktemp("model") / "target"))


def with_opening(tokenizer: Tokenizer) -> Tokenizer:
    """The same, but plain text begins with `END`."""
    inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
    special = [(END, inner.token_to_id(END))]
    inner.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=special)
    return dataclasses.replace(tokenizer, inner=inner)


@pytest.mark.parametrize("length", [2, 7, 16, 1000])
@pytest.mark.parametrize("opens", [False, True])
def test_pieces_cover_the_text(tokenizer: Tokenizer, length: int, opens: bool) -> None:
    whole = tokenizer.encode(WORDS * 9)
    opening = [tokenizer.inner.token_to_id(END)] if opens else []
    pieces = cut(WORDS * 9, with_opening(tokenizer) if opens else tokenizer, length)
    assert all(piece[: len(opening)] == opening for piece in pieces)
    covered = [token for piece in pieces for token in piece[len(opening) :]]
    # A last piece of one token teaches nothing.
    assert covered in (whole, whole[:-1])
    assert {len(piece) for piece in pieces[:-1]} <= {length} and 2 <= len(pieces[-1]) <= length
    assert cut("", tokenizer, length) == []


def test_archives_hold_utf8_or_latin1(tmp_path: Path) -> None:
    path = tmp_path / "texts.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("b.txt", "naïve".encode("latin-1"))
        archive.writestr("a.txt", "naïve\r\ncafé".encode())
        archive.writestr("README", "no text")
    assert load_documents(path) == ["naïve\ncafé", "naïve"]


@pytest.mark.parametrize(("name", "content"), [("bad.txt", b"\xff\xfe\x00"), ("bad.zip", b"no archive")])
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"cannot read .*{name}"):
        load_documents(tmp_path / name)


def test_no_room_beside_the_opening_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="max_length is 1 and texts open with 1"):
        cut(WORDS, with_opening(tokenizer), 1)
