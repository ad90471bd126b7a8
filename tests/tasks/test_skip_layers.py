"""The search for layers to skip: what it counts, what it finds, and that it goes on where it stopped."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from specjax import run
from specjax.analysis import theory
from specjax.build import build_method
from specjax.config import run_config
from specjax.errors import ConfigError
from specjax.tasks import skip_layers as task
from tests.model_folder import write_model, write_prompts

pytestmark = pytest.mark.quick_compile

NUM_LAYERS, ROUNDS = 3, 2
CONFIG = """
from specjax.config import run_config

def get_config():
    config = run_config("skip_layers")
    config.target, config.prompts = {target!r}, {prompts!r}
    config.max_new_tokens, config.batch_size, config.max_skipped = 12, 2, {rounds}
    return config
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Keep what is compiled here out of the user's cache."""
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config file beside the tiny model and the prompts that it names."""
    folder = tmp_path_factory.mktemp("search")
    target, prompts = write_model(folder / "target", num_layers=NUM_LAYERS), write_prompts(folder / "p.jsonl")
    text = CONFIG.format(target=str(target), prompts=str(prompts), rounds=ROUNDS)
    (folder / "config.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def finished(experiment: Path) -> Path:
    """The workdir of a search that was interrupted once and then finished."""
    workdir = experiment / "out"
    real: Callable[..., Any] = task.make_count
    calls: list[task.Skip] = []

    def make_count(*args: Any) -> Callable[[task.Skip], list[int]]:
        count = real(*args)

        def counted(skip: task.Skip) -> list[int]:
            calls.append(skip)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return count(skip)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECJAX_CACHE", str(experiment / "cache"))
        patch.setattr(task, "make_count", make_count)
        arguments = [f"--config={experiment}/config.py", f"--workdir={workdir}"]
        assert run.main(arguments) == 130
        assert len((workdir / task.FILES.partial).read_text().splitlines()) == 2
        assert run.main(arguments) == 0
    # The third one is measured again, and nothing else is measured twice.
    assert len(calls) - 1 == len(set(calls)) == len(lines_of(workdir))
    return workdir


def lines_of(workdir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / task.FILES.lines).read_text().splitlines()]


def summary_of(workdir: Path) -> dict[str, Any]:
    return json.loads((workdir / task.FILES.summary).read_text())


def test_everything_is_written_and_what_was_found_is_the_best_that_was_tried(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert names == {
        "config.json", "answers.json", "layer_sets.jsonl", "skip_layers.json", "skip_layers.md",
        "found.py", "agreement.png",
    }  # fmt: skip
    summary, lines = summary_of(finished), lines_of(finished)
    rows = {"overall": [0, 1, 2], "animals": [0, 2], "numbers": [1]}
    answers = json.loads((finished / "answers.json").read_text())
    assert list(summary["found"]) == list(rows)
    for name, own in rows.items():
        positions = sum(len(answers[row]) for row in own)
        assert summary["positions"][name] == positions
        tried = {
            tuple(line["skip_layers"]): sum(line["matches"][row] for row in own) / positions for line in lines
        }
        found = summary["found"][name]
        assert found["agreement"] == tried[tuple(found["skip_layers"])]
        for skip, agreement in tried.items():
            cost = next(
                c["draft_cost"] for c in summary["frontier"][name] if len(c["skip_layers"]) == len(skip)
            )
            assert theory.wall_clock_factor(agreement, 1, cost, 1.0) <= found["speedup"] + 1e-12
        assert [len(c["skip_layers"]) for c in summary["frontier"][name]] == list(range(1, ROUNDS + 1))
    assert "| overall |" in (finished / "skip_layers.md").read_text()


def test_greedy_search_took_the_best_further_layer(finished: Path) -> None:
    tried = {tuple(line["skip_layers"]): sum(line["matches"]) for line in lines_of(finished)}
    singles = {skip: matches for skip, matches in tried.items() if len(skip) == 1}
    assert len(singles) == NUM_LAYERS
    (best,) = max(singles, key=lambda skip: singles[skip])
    others = [layer for layer in range(NUM_LAYERS) if layer != best]
    assert {tuple(sorted((best, layer))) for layer in others} <= tried.keys()


def test_what_was_found_can_be_run(finished: Path, tmp_path: Path) -> None:
    found = summary_of(finished)["found"]
    for argument, name in (("", "overall"), (":animals", "animals")):
        config = run.parse([f"--config={finished}/found.py{argument}", f"--workdir={tmp_path}"]).config
        assert config.drafter.skip_layers == tuple(found[name]["skip_layers"])
        assert config.drafter.draft_length == found[name]["draft_length"]
        assert build_method(config).lossless


def test_agreement_is_counted_where_an_answer_is_foreseen() -> None:
    texts = task.make_texts([[5, 6, 7], [8]], [[1, 2], [3, 4, 9]])
    assert texts.tokens[:, :6].tolist() == [[5, 6, 7, 1, 2, 0], [8, 3, 4, 9, 0, 0]]
    assert np.flatnonzero(texts.answered[0]).tolist() == [2, 3]
    assert np.flatnonzero(texts.answered[1]).tolist() == [0, 1, 2]


def test_the_whole_model_agrees_with_its_own_answers_and_thinned_ones_do_not(
    experiment: Path, finished: Path
) -> None:
    loaded = task.build_target(str(experiment / "target"))
    answers = json.loads((finished / "answers.json").read_text())
    prompts = task.load_prompts(str(experiment / "p.jsonl"))
    encoded = task.compare.encode(prompts, task.compare.load_tokenizer(loaded), True)
    count = task.make_count(loaded, task.make_texts(encoded, answers), 2)
    lengths = [len(answer) for answer in answers]
    assert count(()) == lengths
    assert all(sum(line["matches"]) < sum(lengths) for line in lines_of(finished))


def value_of(skip: task.Skip) -> float:
    """Layers 1 and 3 are best skipped together; layer 2 seems good alone."""
    known = {(2,): 0.9, (1,): 0.8, (3,): 0.7, (1, 3): 1.2, (2, 3): 0.95, (1, 2): 0.6, (1, 2, 3): 1.0}
    return known.get(skip, 0.5 - 0.1 * len(skip))


def test_greedy_search_is_exact_in_each_round_and_no_further() -> None:
    asked: list[task.Skip] = []
    task.greedy(4, 3, lambda skip: asked.append(skip) or value_of(skip))
    assert asked[:4] == [(0,), (1,), (2,), (3,)]
    assert asked[4:7] == [(0, 2), (1, 2), (2, 3)]
    assert asked[7:] == [(0, 2, 3), (1, 2, 3)]


def test_bayesian_search_finds_the_pair_and_repeats_itself() -> None:
    pytest.importorskip("optuna")
    runs = []
    for _ in range(2):
        asked: list[task.Skip] = []
        task.bayesian(4, 40, 0, lambda skip, asked=asked: asked.append(skip) or value_of(skip))
        runs.append(asked)
    assert runs[0] == runs[1]
    assert runs[0][:4] == [(0,), (1,), (2,), (3,)]
    every = [s for size in (1, 2, 3) for s in itertools.combinations(range(4), size)]
    assert max(runs[0], key=value_of) == max(every, key=value_of) == (1, 3)


def test_worth_is_the_best_length_even_where_none_gains() -> None:
    config = run_config("skip_layers")
    config.verify_cost, config.max_draft_length = (1.0, 1.1, 1.2, 5.0), 3
    gains, loses = task.worth((1,), 0.9, 0.2, config), task.worth((1,), 0.1, 0.9, config)
    for found, agreement, cost in ((gains, 0.9, 0.2), (loses, 0.1, 0.9)):
        factors = [theory.wall_clock_factor(agreement, k, cost, config.verify_cost[k]) for k in (1, 2, 3)]
        assert found.speedup == max(factors) == factors[found.draft_length - 1]
    assert (gains.draft_length, loses.draft_length) == (2, 1)
    assert loses.speedup < 1


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"sampler": "gready"}, "did you mean 'greedy'"),
        ({"max_skipped": 0}, "max_skipped is 0: give at least 1"),
        ({"verify_cost": (1.0, 1.1)}, "costs end at 1 drafts"),
        ({"verify_cost": (1.0, -1.1), "max_draft_length": 1}, "give a positive number"),
        ({"dtype": "float31"}, "dtype is 'float31'"),
        ({"sampler": "bayesian"}, r"pip install 'specjax\[sweep\]'"),
    ],
)
def test_bad_fields_are_named_before_anything_is_loaded(
    fields: dict, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)  # as if it were not installed
    config = run_config("skip_layers")
    config.update(fields)
    with pytest.raises(ConfigError, match=named):
        task.validate(config)
