"""How often a target writes each of its tokens: what a drafter of few tokens is to keep.

Counts that come with the package lie in `token_counts/`, a file for each vocabulary, which they name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from specjax.data.token_store import read_samples, token_files
from specjax.data.tokenizer import Tokenizer
from specjax.errors import ConfigError
from specjax.storage import replacing

PACKAGED = Path(__file__).parent / "token_counts"


def files_of(paths: Sequence[str]) -> list[Path]:
    """Files of tokens, and those of folders; ConfigError where there are none."""
    given = [Path(path) for path in paths]
    return [file for path in given for file in ([path] if path.is_file() else token_files(path))]


def count_written(paths: Sequence[str], vocab_size: int) -> Int[np.ndarray, "V"]:
    """How often each token is written in files of tokens or folders of them; prompts do not count.

    Raises ConfigError where there are no such files, nothing in them was written, or it is not in the
    vocabulary.
    """
    written = [sample.tokens[sample.supervised] for file in files_of(paths) for sample in read_samples(file)]
    counts = np.bincount(np.concatenate(written, dtype=np.int64), minlength=vocab_size)
    names = ", ".join(map(str, paths))
    if not counts.sum():
        raise ConfigError(f"no token in {names} is marked as written, only prompts: name other files")
    if len(counts) > vocab_size:
        raise ConfigError(
            f"the texts in {names} hold the token {len(counts) - 1} and the target's vocabulary ends at "
            f"{vocab_size}: name texts that this target wrote"
        )
    return counts


def packaged(tokenizer: Tokenizer | None, vocab_size: int) -> Int[np.ndarray, "V"]:
    """The counts that come with the package for a tokenizer; ConfigError where they are of other ones."""
    wanted = None if tokenizer is None else fingerprint(tokenizer)
    for path in sorted(PACKAGED.glob("*.npz")):
        with np.load(path) as found:
            if str(found["vocabulary"]) == wanted:
                return np.pad(found["counts"], (0, vocab_size - len(found["counts"]))).astype(np.int64)
    raise ConfigError(
        "the token counts that come with specjax are of another tokenizer than the target's: set "
        "draft_vocab_from to folders of texts that the target wrote (python -m specjax.data.generate)"
    )


def write_counts(path: Path, counts: Int[np.ndarray, "V"], tokenizer: Tokenizer) -> None:
    """Write what `packaged` reads."""
    with replacing(path) as draft, open(draft, "wb") as file:
        np.savez_compressed(file, counts=counts.astype(np.uint32), vocabulary=fingerprint(tokenizer))


def fingerprint(tokenizer: Tokenizer) -> str:
    """The SHA-256 of a vocabulary: its tokens and their numbers."""
    vocabulary = sorted(tokenizer.inner.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()
