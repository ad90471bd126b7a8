"""Decode a prompt set plainly and speculatively, and say what speculation gains.

    python -m specjax.run --config=configs/ngram_llama.py --workdir=runs/ngram

  --config=FILE            a Python file whose get_config() starts from specjax.config.run_config()
  --config.FIELD=VALUE     override a field, e.g. --config.limit=2 --config.drafter.draft_length=8
  --workdir=DIR            where the results go; the same command goes on from an interruption
  --[no]stream             print the first prompt's text as it comes
  --help                   this text

DIR receives summary.json and table.md (the metrics), generations.jsonl (every text, with its counts
and seconds) and config.json. Nothing in DIR is overwritten by a run of another config.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import flags
from ml_collections import ConfigDict
from rich.console import Console

from specjax import decode
from specjax.build import Built, build_method, build_verify
from specjax.config import FIELDS, load_config, override, validate
from specjax.data.prompts import Prompt, load_prompts
from specjax.data.tokenizer import Tokenizer
from specjax.errors import ConfigError, SpecjaxError
from specjax.eval import results, tables
from specjax.eval.compare import PLAIN, Generation, Settings, compare, make_batches
from specjax.eval.metrics import summarize_lines
from specjax.eval.progress import Progress
from specjax.sampling import make_warp
from specjax.storage import cache_folder
from specjax.types import ModelParams


class Options(NamedTuple):
    """A command line, parsed and checked."""

    config: ConfigDict
    workdir: Path
    stream: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0, or 2 after an error that the user can put right, or 130 after an interruption."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help", "--helpfull", "--helpshort"} & set(arguments):
        print(help_text())
        return 0
    # Before anything is compiled; a second run of the same shapes then compiles little.
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    try:
        run(parse(arguments))
    except SpecjaxError as error:
        print(f"specjax: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("specjax: interrupted; the same command goes on after the last finished batch", file=sys.stderr)
        return 130
    return 0


def help_text() -> str:
    """What --help prints: the module's docstring and the fields of a config."""
    lines = [f"  {name:<16} {field.meaning}{_default(field.default)}" for name, field in FIELDS.items()]
    return "\n".join([str(__doc__), "Fields of a config, and their defaults:", "", *lines])


def parse(arguments: Sequence[str]) -> Options:
    """Read a command line; everything that can be checked at once is, the workdir first."""
    values = flags.FlagValues()
    values.set_gnu_getopt(True)
    flags.DEFINE_string("config", None, "config file", flag_values=values)
    flags.DEFINE_string("workdir", None, "folder for the results", flag_values=values)
    flags.DEFINE_boolean("stream", False, "print the first text as it comes", flag_values=values)
    try:
        rest = values(["", *arguments], known_only=True)[1:]
    except flags.Error as error:
        raise ConfigError(f"{error}: --help lists the flags") from error
    for name in ("config", "workdir"):
        if not values[name].value:
            raise ConfigError(f"--{name} is missing: --help shows an example")
    workdir = Path(values.workdir).expanduser()
    results.check_writable(workdir)
    config = override(load_config(values.config), rest)
    validate(config)
    return Options(config, workdir, values.stream)


def run(options: Options) -> dict[str, Any]:
    """Compare plain decoding with the config's method, print the table, and return the summary."""
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
    return summary


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


def _default(value: Any) -> str:
    return "" if value is None or value == ConfigDict() else f" ({value})"


def _digest(prompts: list[Prompt]) -> str:
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
