"""The tokenizer in a GGUF file's metadata: byte-level BPE from vocabulary, merges and token types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from specjax.data.tokenizer import Tokenizer, distinct
from specjax.errors import CheckpointError, nearest

_CONTROL, _USER_DEFINED = 3, 4  # token types
_PRE_TOKENIZERS = {
    "smollm": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    ),
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
}


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
    stop = distinct(token_id(name) for name in ("eos", "eot", "eom"))
    return Tokenizer(inner, stop, special, fields.get("tokenizer.chat_template"))
