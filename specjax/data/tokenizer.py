"""A model's tokenizer, and reading one from a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import tokenizers

from specjax.data.chat_template import Message, render
from specjax.errors import CheckpointError, SpecjaxError

_REPLACEMENT = "\ufffd"  # what decoding makes of bytes that are no UTF-8, or not yet


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back; `stop_tokens` end a generation."""

    inner: tokenizers.Tokenizer
    stop_tokens: tuple[int, ...]
    special_tokens: Mapping[str, str]  # by their names in chat templates, e.g. {"eos_token": "<|im_end|>"}
    chat_template: str | None

    @property
    def vocab_size(self) -> int:
        """Count of token ids, added tokens included; the model's own vocabulary may be padded beyond it."""
        return self.inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`; special tokens written in it are parsed.

        None is added unless asked for: chat templates write theirs, plain text needs the model's own.
        """
        return self.inner.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of `text` and the characters, from one to before another, that each stands for."""
        encoded = self.inner.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        return self.inner.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """Return a stream that turns one generated token at a time into text."""
        return TextStream(self, skip_special_tokens)

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Return the prompt for `messages`, each {"role": ..., "content": ...}.

        Raises SpecjaxError where the model has no chat template or its template refuses the messages.
        """
        if self.chat_template is None:
            raise SpecjaxError(
                "this model has no chat template, so it is probably no chat model; give it plain text, or "
                "use an instruction-tuned model."
            )
        return render(self.chat_template, messages, self.special_tokens, add_generation_prompt)


class TextStream:
    """Incremental decoding: the pieces, `flush` included, join to what `decode` makes of all the ids.

    A piece ends where a character ends. (`tokenizers.decoders.DecodeStream` cannot be asked for the end
    of a text that was cut inside a character, as a token limit does.)
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        # The tokens last shown stay as context: some decoders treat the first token of a text differently.
        self._context: list[int] = []
        self._pending: list[int] = []

    def step(self, token_id: SupportsIndex) -> str | None:
        """Return the text that this token completes, or None while a character is incomplete."""
        self._pending.append(int(token_id))
        piece = self._new_text()
        if not piece or piece.endswith(_REPLACEMENT):
            return None
        self._context, self._pending = self._pending, []
        return piece

    def flush(self) -> str:
        """Return what is left at the end of a generation, incomplete bytes as U+FFFD."""
        piece = self._new_text()
        self._context, self._pending = [], []
        return piece

    def _new_text(self) -> str:
        shown = self._tokenizer.decode(self._context, self._skip)
        return self._tokenizer.decode(self._context + self._pending, self._skip)[len(shown) :]


def from_folder(folder: Path) -> Tokenizer:
    """Read tokenizer.json, its chat template and every end-of-sequence id that the folder's files name.

    Raises CheckpointError naming the file that is missing or damaged.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    read_json(path)  # for its message: the tokenizers library names no file
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path} is no tokenizer ({error}); download it again.") from error
    settings = _optional_json(folder / "tokenizer_config.json")
    special = {
        name: text
        for name, value in settings.items()
        if name.endswith("_token")
        and isinstance(text := value.get("content") if isinstance(value, dict) else value, str)
    }
    stop: list[int | None] = []
    for file in ("generation_config.json", "config.json"):
        value = _optional_json(folder / file).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if not all(i is None or isinstance(i, int) for i in ids):
            raise CheckpointError(f"{folder / file}: field 'eos_token_id' is {value!r}, not token ids.")
        stop += ids
    stop.append(inner.token_to_id(special["eos_token"]) if "eos_token" in special else None)
    return Tokenizer(inner, distinct(stop), special, _template(folder, settings))


def read_json(path: Path) -> Any:
    """Return a JSON file's content; raises CheckpointError naming the file where it is missing or damaged."""
    try:
        return json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is truncated or damaged ({error}); download it again.") from error


def distinct(ids: Iterable[int | None]) -> tuple[int, ...]:
    """Return the ids that are not None, each once, in their order."""
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; download the whole model folder.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); download it again.") from error


def _optional_json(path: Path) -> dict[str, Any]:
    content = read_json(path) if path.exists() else {}
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object; download it again.")
    return content


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    if (path := folder / "chat_template.jinja").exists():
        return _read_text(path)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
