"""Several methods in one run: what is counted, what goes on after a crash, and what is refused."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import run
from specjax.config import run_config
from specjax.eval import timing
from specjax.eval.compare import PLAIN
from specjax.eval.timing import Programs
from specjax.tasks import evaluate
from tests.caches import with_kernels
from tests.model_folder import write_model

pytestmark = pytest.mark.quick_compile

CONFIG = """
from specjax.config import run_config

NGRAM = {{"name": "ngram", "max_ngram": 3}}
SKIP = {{"name": "draft_model", "source": {target!r}, "draft_length": 2}}

def get_config():
    config = run_config("evaluate")
    config.target = {target!r}
    config.methods = {{
        "lookup": {{"drafter": {{**NGRAM, "draft_length": 3}}, "verify": "rejection"}},
        "self": {{"drafter": SKIP, "verify": "rejection"}},
    }}
    config.prompts = ("mt_bench", {other!r})
    config.prompts_path = {folder!r}
    config.temperatures = (0.0, 1.0)
    config.max_new_tokens = (12,)
    config.multi_turn = True
    return config
"""
QUESTIONS = [
    {
        "question_id": 81,
        "category": "animals",
        "turns": ["the cat sat on the mat and the cat sat", "the dog"],
    },
    {"question_id": 82, "category": "numbers", "turns": ["one two three one two three one two"]},
]
METHODS = (PLAIN, "lookup", "self")
ANSWERS = 4  # of three prompts, one of which has two turns


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config file beside the tiny model and two prompt sets."""
    folder = tmp_path_factory.mktemp("experiment")
    target = write_model(folder / "target", num_layers=1)
    lines = [json.dumps(question) + "\n" for question in QUESTIONS]
    (folder / "mt_bench_question.jsonl").write_text("".join(lines))
    (folder / "mine.txt").write_text("four five six four five\n")
    text = CONFIG.format(target=str(target), folder=str(folder), other=str(folder / "mine.txt"))
    (folder / "config.py").write_text(text)
    return folder


@pytest.fixture(autouse=True, scope="module")
def quick(experiment: Path) -> Any:
    """What is compiled is kept from run to run, not in the user's cache; the clock counts its readings."""
    before = jax.config.jax_compilation_cache_dir
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECJAX_CACHE", str(with_kernels(experiment / "cache")))
        engines: dict[str, evaluate.Engine] = {}
        load = evaluate.load
        patch.setattr(evaluate, "load", lambda config: engines.setdefault(str(config.methods), load(config)))
        patch.setattr(timing.time, "perf_counter", functools.partial(next, itertools.count(0.0)))
        patch.setattr(timing, "ROUNDS", 2)
        yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(scope="module")
def finished(experiment: Path) -> Path:
    """The workdir of a finished run."""
    assert run.main(arguments(experiment, experiment / "finished")) == 0
    return experiment / "finished"


def arguments(experiment: Path, workdir: Path, *more: str) -> list[str]:
    return [f"--config={experiment}/config.py", f"--workdir={workdir}", *more]


def read(workdir: Path, name: str = "generations.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / name).read_text().splitlines()]


def summary_of(workdir: Path) -> dict[str, Any]:
    return json.loads((workdir / "summary.json").read_text())


def test_every_combination_is_a_section_with_tasks_of_its_set(finished: Path) -> None:
    sections = summary_of(finished)["sections"]
    assert [(s["prompts"], s["temperature"]) for s in sections] == [
        *itertools.product(("mt_bench", "mine"), (0.0,)),
        *itertools.product(("mt_bench", "mine"), (1.0,)),
    ]
    assert [list(s["tasks"]) for s in sections[:2]] == [["mt_bench/animals", "mt_bench/numbers"], ["mine"]]
    assert all(tuple(s["methods"]) == METHODS for s in sections)
    assert [whole["methods"][PLAIN]["prompts"] for whole in summary_of(finished)["overall"]] == [4, 4]
    names = {path.name for path in finished.iterdir()}
    assert names == {"config.json", "costs.jsonl", "generations.jsonl", "summary.json", "table.md"}


def recount(lines: list[dict[str, Any]], method: str) -> dict[str, Any]:
    """What a method's lines say, by counting: every pass gives what it accepted and one token more."""
    own = [line for line in lines if line["method"] == method]
    plain = [line for line in lines if line["method"] == PLAIN]
    tokens, passes = sum(len(line["tokens"]) for line in own), sum(line["num_steps"] for line in own)
    accepted, tried = (
        [sum(of_depth) for of_depth in zip(*(line[kind] for line in own), strict=True)]
        for kind in ("accepted_at_depth", "tried_at_depth")
    )
    for line in own:
        # The last pass of a text may have its next token cut off.
        surplus = line["num_steps"] + sum(line["accepted_at_depth"]) - len(line["tokens"])
        assert surplus in (0, 1), "the bonus token is miscounted"
    rate = tokens / sum(line["decode_seconds"] for line in own)
    plain_rate = sum(len(line["tokens"]) for line in plain) / sum(line["decode_seconds"] for line in plain)
    return {
        "tokens_per_step": tokens / passes,
        "acceptance": sum(accepted) / sum(tried) if sum(tried) else None,
        "conditional": [a / t if t else None for a, t in zip(accepted, tried, strict=True)],
        "unconditional": [a / passes for a in accepted],
        "tokens_per_second": rate,
        "speedup": rate / plain_rate,
    }


def reported(metrics: dict[str, Any]) -> dict[str, Any]:
    by_depth, speedup = metrics["acceptance_by_depth"], metrics["speedup"]["value"]
    kept = ("tokens_per_step", "acceptance", "tokens_per_second")
    return {**{name: metrics[name] for name in kept}, **by_depth, "speedup": speedup}


def check_recount(lines: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    for section in summary["sections"]:
        own = [
            line
            for line in lines
            if all(line[axis] == section[axis] for axis in ("prompts", "temperature", "batch_size"))
        ]
        for task, methods in [(None, section["methods"]), *section["tasks"].items()]:
            counted = [line for line in own if task in (None, line["task"])]
            for method, metrics in methods.items():
                for name, value in recount(counted, method).items():
                    assert reported(metrics)[name] == pytest.approx(value), (task, method, name)


def test_metrics_agree_with_a_recount_of_the_generations(finished: Path) -> None:
    summary = summary_of(finished)
    check_recount(read(finished), summary)
    assert summary["sections"][0]["methods"]["lookup"]["tokens_per_step"] > 1.1
    self_drafted = summary["sections"][0]["methods"]["self"]
    assert self_drafted["alpha"] == 1.0 and self_drafted["n_alpha"] == [1.0, 1.0]
    assert self_drafted["identical_to_greedy"] == {"identical": 3, "of": 3}


@pytest.mark.parametrize("mistake", ["a token too many", "a token too few", "one pass more"])
def test_recount_notices_a_bonus_token_that_is_miscounted(finished: Path, mistake: str) -> None:
    lines = read(finished)
    for line in lines:
        if line["method"] == "self":
            if mistake == "a token too many":
                line["tokens"].append(0)
            elif mistake == "a token too few":
                line["accepted_at_depth"] = [0 for _ in line["accepted_at_depth"]]
            else:
                line["num_steps"] += 1
    with pytest.raises(AssertionError):
        check_recount(lines, summary_of(finished))


def fail_after(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, count: int) -> None:
    calls = itertools.count()
    real: Callable = getattr(owner, name)

    def call(*args: Any) -> Any:
        if next(calls) == count:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(owner, name, call)


def test_further_turn_is_asked_after_the_methods_own_answer(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, list[str]] = {}
    real = Programs.run

    def run_and_note(programs: Programs, inputs: timing.Inputs) -> timing.Timed:
        timed = real(programs, inputs)
        drafter = programs.method.drafter
        name = PLAIN if drafter is None else "lookup" if drafter.max_depth == 3 else "self"
        asked.setdefault(name, []).append(np.asarray(inputs.tokens)[0, : int(inputs.lengths[0])].tolist())
        return timed

    monkeypatch.setattr(Programs, "run", run_and_note)
    fail_after(monkeypatch, evaluate, "_measure", 0)  # all turns of the first set are there by then
    more = ["--config.limit=1", "--config.temperatures=(1.0,)"]
    assert run.main(arguments(experiment, tmp_path, *more)) == 130
    lines = read(tmp_path, "generations.partial.jsonl")
    answers = {line["method"]: line["text"] for line in lines if line["turn"] == 0}
    (engine,) = {
        id(e): e for e in [evaluate.load(run.parse(arguments(experiment, tmp_path)).config)]
    }.values()
    first, second = QUESTIONS[0]["turns"]
    for name in METHODS:
        said = [("user", first), ("assistant", answers[name]), ("user", second)]
        chat = engine.tokenizer.chat([{"role": role, "content": text} for role, text in said])
        assert asked[name][1] == engine.tokenizer.encode(chat)
    assert len(set(answers.values())) > 1  # at temperature 1 each has its own


def test_killed_run_goes_on_to_the_same_summary(
    experiment: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashes = [
        (Programs, "run", 8),
        (evaluate, "_measure", 0),
        (evaluate, "_measure", 1),
        (Programs, "run", 20),
    ]
    kept: list[str] = []
    for owner, name, count in crashes:
        with monkeypatch.context() as patch:
            fail_after(patch, owner, name, count)
            assert run.main(arguments(experiment, tmp_path)) == 130
        assert not (tmp_path / "summary.json").exists()
        now = (tmp_path / "generations.partial.jsonl").read_text()
        assert now.startswith("".join(kept)) and now
        kept = [now]
        with (tmp_path / "generations.partial.jsonl").open("a") as file:
            file.write(now[:50])  # as if it had come in the midst of writing
    assert run.main(arguments(experiment, tmp_path)) == 0
    assert (tmp_path / "generations.jsonl").read_text().startswith(kept[0])

    def timeless(workdir: Path) -> dict[str, Any]:
        return _without(summary_of(workdir), {"compile_seconds", "process_peak"})

    assert timeless(tmp_path) == timeless(finished)
    assert len(read(tmp_path)) == len(read(finished)) == 2 * ANSWERS * len(METHODS)

    before = (tmp_path / "summary.json").read_text()
    monkeypatch.setattr(evaluate, "load", lambda config: pytest.fail("loaded"))
    assert run.main(arguments(experiment, tmp_path)) == 0  # a finished run is only shown again
    assert (tmp_path / "summary.json").read_text() == before


def _without(tree: Any, names: set[str]) -> Any:
    if isinstance(tree, dict):
        return {name: _without(value, names) for name, value in tree.items() if name not in names}
    return [_without(value, names) for value in tree] if isinstance(tree, list) else tree


def test_costs_are_reported_with_shares_memory_and_a_model(finished: Path) -> None:
    section = summary_of(finished)["sections"][0]
    plain, drafted = section["methods"][PLAIN], section["methods"]["self"]
    assert sum(drafted["step"]["shares"].values()) == pytest.approx(1)
    assert drafted["step"]["parts_over_step"] == 4.0  # each is one second here
    assert plain["step"]["shares"] == {} and plain["step"]["parts_over_step"] is None
    model = drafted["speedup_if_memory_bound"]
    assert model["drafting_cost"] == 1.0
    assert model["value"] == pytest.approx(drafted["tokens_per_step"] / 2)
    assert plain["speedup_if_memory_bound"]["value"] == 1.0
    # The drafter's weights are the target's own.
    assert drafted["memory"]["weights"] == plain["memory"]["weights"] > 0
    assert drafted["memory"]["peak"] > plain["memory"]["peak"] > plain["memory"]["weights"]
    assert drafted["memory"]["process_peak"] > drafted["memory"]["peak"]
    table = (finished / "table.md").read_text()
    assert "memory-bound (model)" in table and "Speed-up (tokens per pass) by task" in table
    assert "| mt_bench/animals | 2 |" in table and "| all | 4 |" in table
    assert "| self | 3.00* |" in table and "| plain | 1.00 |" in table  # the best of a column is marked


def test_equal_weights_of_drafters_are_shared() -> None:
    first = {"a": jnp.ones(3), "b": {"c": jnp.zeros((2, 2))}}
    second = jax.tree.map(jnp.copy, first)
    assert evaluate._equal(first, second)
    assert not evaluate._equal(first, second | {"a": jnp.zeros(3)})
    assert not evaluate._equal(first, second | {"a": jnp.ones(4)})
    assert not evaluate._equal(first, {"a": jnp.ones(3)})


@pytest.mark.parametrize("file", ["sum/question.jsonl", "eagle_cnn_dm_sum_question.jsonl"])
def test_published_set_is_found_in_a_folder_and_named_where_it_has_no_category(
    file: str, tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(json.dumps({"question_id": 1, "category": "", "turns": ["a", "b"]}) + "\n")
    config = run_config("evaluate")
    config.prompts, config.prompts_path = ("cnn_dm",), str(tmp_path)
    (prompt,) = evaluate.load_sets(config)["cnn_dm"]
    assert (prompt.task, prompt.turns) == ("cnn_dm", ("a",))
    config.multi_turn = True
    assert evaluate.load_sets(config)["cnn_dm"][0].turns == ("a", "b")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("methods={}", ["methods is empty", "drafter"]),
        (
            "methods={'plain': {'drafter': {'name': 'ngram'}, 'verify': 'greedy'}}",
            ["methods.plain", "another name"],
        ),
        ("methods.lookup.verify=rejecton", ["methods.lookup", "did you mean 'rejection'"]),
        ("methods.lookup.verify=greedy", ["methods.lookup", "temperature is 1.0"]),
        ("methods.lookup.drafter.draft_length=0", ["methods.lookup", "draft_length is 0"]),
        ("methods={'x': {'drafter': {'name': 'ngram'}}}", ["methods.x misses 'verify'"]),
        (
            "methods={'x': {'verify': 'greedy', 'drafer': 1}}",
            ["methods.x has no field 'drafer'", "'drafter'"],
        ),
        ("methods={'x': 3}", ["methods.x is 3", "ConfigDict"]),
        ("temperatures=()", ["temperatures is empty", "at least one"]),
        ("temperatures=(0.0,-1.0)", ["temperature is -1.0"]),
        ("batch_sizes=(0,)", ["one of batch_sizes is 0", "at least 1"]),
        ("batch_sizes=(2,2)", ["batch_sizes has 2 twice"]),
        ("max_new_tokens=('a',)", ["one of max_new_tokens is 'a'", "int"]),
        ("prompts=('default','mt_bnch')", ["unknown prompt set 'mt_bnch'", "mt_bench"]),
        ("prompts=('gsm8k',)", ['no file of the prompt set "gsm8k"', "eagle_gsm8k_question.jsonl"]),
        ("max_new_tokens=(150,)", ["mt_bench, 81", "exceed the target's 256 positions"]),
        ("seed=-1", ["seed is -1"]),
    ],
)
def test_bad_input_is_one_error(
    override: str, expected: list[str], experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(arguments(experiment, tmp_path, f"--config.{override}")) == 2
    *_, shown = capsys.readouterr().err.splitlines()
    assert shown.startswith("specjax: error: ")
    for part in expected:
        assert part in shown
    assert not (tmp_path / "generations.jsonl").exists()
