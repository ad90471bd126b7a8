"""Plain text to learn from: files of it, and pieces that a model can read."""

from __future__ import annotations

import zipfile
from pathlib import Path

from specjax.data.tokenizer import Tokenizer
from specjax.errors import ConfigError


def load_documents(path: Path) -> list[str]:
    """The text of a .txt file, in UTF-8, or those in a .zip, by name; ConfigError if it cannot be read."""
    if path.suffix != ".zip":
        return [read_text(path)]
    try:
        with zipfile.ZipFile(path) as archive:
            names = sorted(name for name in archive.namelist() if name.endswith(".txt"))
            return [_decoded(archive.read(name)) for name in names]
    except (OSError, zipfile.BadZipFile) as error:
        raise ConfigError(f"cannot read the archive {path}: {error}") from error


def cut(text: str, tokenizer: Tokenizer, max_length: int) -> list[list[int]]:
    """The tokens of a text in pieces of at most `max_length`; each begins as the model's plain texts do.

    Pieces of which nothing can be foreseen, a lone token and an opening without text, are left out.
    """
    tokens = tokenizer.encode(text)
    opening = _opening(tokenizer)
    room = max_length - len(opening)
    if room < 1:
        raise ConfigError(f"max_length is {max_length} and texts open with {len(opening)} tokens: raise it")
    pieces = [[*opening, *tokens[start : start + room]] for start in range(0, len(tokens), room)]
    return [piece for piece in pieces if len(piece) > 1]


def read_text(path: Path) -> str:
    """The content of a file in UTF-8; ConfigError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _opening(tokenizer: Tokenizer) -> list[int]:
    """What the model wants before plain text: mostly its token for a beginning, or nothing."""
    plain, whole = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=True)
    return whole[: whole.index(plain[0])]


def _decoded(content: bytes) -> str:
    # Archives of older corpora hold both, without a word about it.
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    return text.replace("\r\n", "\n")
