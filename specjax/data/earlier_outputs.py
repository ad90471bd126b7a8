"""What was written before, as one row of tokens to search: files of tokens, and the generations of runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from specjax.data.token_counts import files_of
from specjax.data.token_store import read_samples
from specjax.errors import ConfigError
from specjax.types import NO_TOKEN

LINES = ".jsonl"


def read_outputs(paths: Sequence[str], most: int, vocab_size: int) -> Int[np.ndarray, "E"]:
    """The last `most` tokens that files hold as written, each text with `NO_TOKEN` behind it.

    `paths` are files of tokens, folders of them, or generations.jsonl of runs. Raises ConfigError on a file
    that is none of these, where nothing was written, or where a token is not in the vocabulary.
    """
    texts = [text for path in paths for text in _texts(path) if len(text)]
    names = ", ".join(map(str, paths))
    if not texts:
        raise ConfigError(f"nothing was written in {names}: name other outputs")
    largest = max(int(text.max()) for text in texts)
    if largest >= vocab_size:
        raise ConfigError(
            f"the outputs in {names} hold the token {largest} and the target's vocabulary ends at "
            f"{vocab_size}: name outputs of this target"
        )
    ended = np.concatenate([np.append(text, NO_TOKEN) for text in texts])
    return ended[-most:].astype(np.int32)


def _texts(path: str) -> list[np.ndarray]:
    if not path.endswith(LINES):
        return [s.tokens[s.supervised] for file in files_of([path]) for s in read_samples(file)]
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        return [np.asarray(json.loads(line)["tokens"], np.int64) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"cannot read the outputs {path} ({error}): name the generations.jsonl of a run"
        ) from error
