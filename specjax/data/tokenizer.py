"""A model's tokenizer, from a Hugging Face folder or from the metadata of a GGUF file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from specjax.data.chat_template import Message, render
from specjax.errors import CheckpointError, SpecjaxError, nearest

_REPLACEMENT = "\ufffd"  # what decoding makes of bytes that are no UTF-8, or not yet
_CONTROL, _USER_DEFINED = 3, 4  # token types in GGUF


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

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; special tokens written in it are parsed, and none is added."""
        return self.inner.encode(text, add_special_tokens=False).ids

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

    A piece ends where a character ends. (`tokenizers.decoders.DecodeStream` raises on, or loses, bytes
    that never become a character, which sampled text does contain.)
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        # The tokens last shown stay as context: some decoders treat the first token of a text differently.
        self._context: list[int] = []
        self._pending: list[int] = []

    def step(self, token_id: int) -> str | None:
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
        name: value["content"] if isinstance(value, dict) else value
        for name, value in settings.items()
        if name.endswith("_token") and isinstance(value, (str, dict))
    }
    stop: list[Any] = []
    for file in ("generation_config.json", "config.json"):
        ids = _optional_json(folder / file).get("eos_token_id")
        stop += ids if isinstance(ids, list) else [ids]
    stop.append(inner.token_to_id(special["eos_token"]) if "eos_token" in special else None)
    return Tokenizer(inner, _distinct(stop), special, _template(folder, settings))


def from_gguf_fields(fields: Mapping[str, Any], source: str) -> Tokenizer:
    """Build the tokenizer that a GGUF file's metadata describes; `source` names the file in messages.

    Raises CheckpointError naming the field that is missing or not supported.
    """

    def get(name: str, kind: type) -> Any:
        value = fields.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, kind):
            raise CheckpointError(
                f"{source}: field 'tokenizer.ggml.{name}' is missing or malformed; download it again."
            )
        return value

    if (model := get("model", str)) != "gpt2":
        raise CheckpointError(
            f"{source}: tokenizer model '{model}' is not supported; 'gpt2' (byte-level BPE) is. "
            "Use the Hugging Face folder of the same model."
        )
    pre = get("pre", str)
    if pre not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{source}: pre-tokenizer '{pre}' is not supported; supported are {', '.join(_PRE_TOKENIZERS)}"
            f"{nearest(pre, _PRE_TOKENIZERS) or '.'} Use the Hugging Face folder of the same model."
        )
    tokens, merges, types = get("tokens", list), get("merges", list), list(get("token_type", np.ndarray))
    pairs = [tuple(merge.split(" ")) for merge in merges]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(types) != len(tokens) or len(vocabulary) != len(tokens) or any(len(pair) != 2 for pair in pairs):
        raise CheckpointError(
            f"{source}: the fields 'tokenizer.ggml.tokens', 'token_type' and 'merges' contradict each other; "
            "download it again."
        )
    try:
        inner = tokenizers.Tokenizer(models.BPE(vocabulary, pairs))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{source}: field 'tokenizer.ggml.merges' is damaged ({error}).") from error
    inner.pre_tokenizer = _PRE_TOKENIZERS[pre]
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )

    def token_id(name: str) -> int | None:
        i = fields.get(f"tokenizer.ggml.{name}_token_id")
        if i is not None and not (isinstance(i, int) and 0 <= i < len(tokens)):
            raise CheckpointError(
                f"{source}: field 'tokenizer.ggml.{name}_token_id' is {i!r}, which is no token."
            )
        return i

    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: tokens[i] for name, key in named.items() if (i := token_id(key)) is not None}
    stop = _distinct(token_id(name) for name in ("eos", "eot", "eom"))
    return Tokenizer(inner, stop, special, fields.get("tokenizer.chat_template"))


def read_json(path: Path) -> Any:
    """Return a JSON file's content; raises CheckpointError naming the file where it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; download the whole model folder.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is truncated or damaged ({error}); download it again.") from error


def _optional_json(path: Path) -> dict[str, Any]:
    content = read_json(path) if path.exists() else {}
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object; download it again.")
    return content


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    if (path := folder / "chat_template.jinja").exists():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _distinct(ids: Iterable[int | None]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(i for i in ids if i is not None))


_PRE_TOKENIZERS = {
    "smollm": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    ),
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
}
