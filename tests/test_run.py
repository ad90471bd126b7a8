"""The command: what it writes, what it refuses, and how it goes on from an interruption."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from specjax import run
from specjax.checkpoints import source
from specjax.eval.timing import Programs
from specjax.modules import module_names
from tests.caches import with_kernels
from tests.model_folder import write_model, write_prompts

pytestmark = pytest.mark.quick_compile

ROOT = Path(__file__).parent.parent
CONFIG = """
from specjax.config import run_config

def get_config():
    config = run_config()
    config.target = {target!r}
    config.drafter = {{"name": "ngram", "draft_length": 4, "max_ngram": 3, "min_ngram": 1}}
    config.prompts = {prompts!r}
    config.max_new_tokens = 12
    return config
"""
PLAIN, NGRAM = "plain", "ngram+rejection"


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config file beside the tiny model and the prompts that it names."""
    folder = tmp_path_factory.mktemp("experiment")
    target, prompts = write_model(folder / "target"), write_prompts(folder / "prompts.jsonl")
    (folder / "config.py").write_text(CONFIG.format(target=str(target), prompts=str(prompts)))
    with_kernels(folder / "cache")
    return folder


@pytest.fixture(autouse=True)
def own_cache(
    request: pytest.FixtureRequest, experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Keep what is compiled here out of the user's cache; the slow test wants the real model from it."""
    is_slow = "slow" in request.keywords
    if not is_slow:
        monkeypatch.setenv("SPECJAX_CACHE", str(experiment / "cache"))
    # The real model is compiled as users compile it.
    jax.config.update("jax_disable_most_optimizations", not is_slow)
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(scope="module")
def finished(experiment: Path) -> Path:
    """The workdir of a finished run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECJAX_CACHE", str(experiment / "cache"))
        # JAX decides at its first compilation whether there is a cache: let it decide again.
        compilation_cache.reset_cache()
        assert run.main([f"--config={experiment}/config.py", f"--workdir={experiment}/finished"]) == 0
    return experiment / "finished"


def lines_of(workdir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / "generations.jsonl").read_text().splitlines()]


def tokens_of(workdir: Path) -> dict[tuple[str, str], list[int]]:
    return {(line["id"], line["method"]): line["tokens"] for line in lines_of(workdir)}


def test_everything_is_written_and_nothing_else(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert names == {"config.json", "generations.jsonl", "summary.json", "table.md"}
    assert json.loads((finished / "config.json").read_text())["drafter"]["draft_length"] == 4
    assert {(line["id"], line["method"]) for line in lines_of(finished)} == {
        (name, method) for name in "abc" for method in (PLAIN, NGRAM)
    }
    table = (finished / "table.md").read_text()
    assert "| plain | 1.00 |" in table and "bonus included" in table


def test_metrics_agree_with_a_recount_of_the_generations(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    stop = 0
    for task in (None, "animals", "numbers"):
        lines = [line for line in lines_of(finished) if task in (None, line["task"])]
        metrics = summary["methods"] if task is None else summary["tasks"][task]
        rates = {}
        for method, reported in metrics.items():
            own = [line for line in lines if line["method"] == method]
            num_tokens = sum(len(line["tokens"]) for line in own)
            passes = sum(line["num_steps"] for line in own)
            for line in own:
                assert 1 <= len(line["tokens"]) <= 12
                assert stop not in line["tokens"][:-1]
                # Every pass gives its accepted tokens and one more, unless the end cut that one off.
                assert len(line["tokens"]) - line["num_steps"] - sum(line["accepted_at_depth"]) in (0, -1)
            assert reported["tokens_per_step"] == pytest.approx(num_tokens / passes)
            rates[method] = num_tokens / sum(line["decode_seconds"] for line in own)
            assert reported["tokens_per_second"] == pytest.approx(rates[method])
            by_depth = reported["acceptance_by_depth"]
            for depth in range(0 if method == PLAIN else 4):
                accepted = sum(line["accepted_at_depth"][depth] for line in own)
                tried = sum(line["tried_at_depth"][depth] for line in own)
                assert by_depth["unconditional"][depth] == pytest.approx(accepted / passes)
                assert by_depth["conditional"][depth] == (accepted / tried if tried else None)
        assert metrics[NGRAM]["speedup"]["value"] == pytest.approx(rates[NGRAM] / rates[PLAIN])
        assert metrics[PLAIN]["speedup"]["value"] == 1.0
        assert metrics[PLAIN]["tokens_per_step"] == 1.0
    assert summary["methods"][NGRAM]["tokens_per_step"] > 1
    assert summary["methods"][NGRAM]["lossless"] is True


def test_speculative_text_is_the_greedy_text(finished: Path) -> None:
    tokens = tokens_of(finished)
    assert all(tokens[name, PLAIN] == tokens[name, NGRAM] for name in "abc")
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["methods"][NGRAM]["identical_to_greedy"] == {"identical": 3, "of": 3}


def test_summary_names_device_and_versions(finished: Path) -> None:
    environment = json.loads((finished / "summary.json").read_text())["environment"]
    assert environment.keys() == {"platform", "device_kind", "jax", "jaxlib", "flax", "python"}
    assert all(environment.values())


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--config.drafter.draft_length=0"], ["draft_length is 0", "at least 1"]),
        (["--config.temperature=-1"], ["temperature is -1", "give 0"]),
        (["--config.top_p=0"], ["top_p is 0", "above 0"]),
        (["--config.top_p=1.5"], ["top_p is 1.5", "at most 1"]),
        (["--config.max_new_tokens=0"], ["max_new_tokens is 0", "at least 1"]),
        (["--config.batch_size=0"], ["batch_size is 0", "at least 1"]),
        (["--config.limit=0"], ["limit is 0", "at least 1"]),
        (["--config.seed=-1"], ["seed is -1", "from 0"]),
        (["--config.dtype=float31"], ["dtype is 'float31'", "bfloat16"]),
        (["--config.batch_size=two"], ["config.batch_size", "two"]),
        (["--config.bach_size=2"], ["no field 'bach_size'", "did you mean 'batch_size'"]),
        (
            ["--config.drafter.draft_lenght=2"],
            ["'drafter.draft_lenght'", "'drafter.draft_length'?"],
        ),
        (["--config.drafter.name=ngran"], ["no drafter 'ngran'", "did you mean 'ngram'"]),
        (["--config.drafter.name=my.module"], ["'my.module' cannot be imported"]),
        (["--config.drafter={'name': 'ngram', 'max_ngram': 2}"], ["needs the field 'draft_length'", "set"]),
        (
            ["--config.drafter={'name': 'ngram', 'draft_length': 2, 'max_gram': 2}"],
            ["no field 'max_gram'", "did you mean 'max_ngram'"],
        ),
        (["--config.drafter={'draft_length': 2}"], ["drafter.name is missing", "ngram"]),
        (["--config.drafter={'name': 'ngram', 'draft_length': '2', 'max_ngram': 2}"], ["type int"]),
        (["--config.drafter.max_ngram=0"], ["max_ngram 0", "1 <= min <= max"]),
        (
            [
                "--config.drafter={'name': 'self_speculative', 'draft_length': 2, 'skip_layers': (1,), "
                "'branching': (2,), 'proposal': 'iid_siblings'}"
            ],
            ["'rejection' cannot judge", "a tree of iid_siblings", "multi_round"],
        ),
        (["--config.verify=rejecton"], ["no rule 'rejecton'", "did you mean 'rejection'"]),
        (
            ["--config.verify=greedy", "--config.temperature=1"],
            ["for temperature 0", "rejection"],
        ),
        (["--config.prompts=nowhere.jsonl"], ["no prompt file at nowhere.jsonl"]),
        (["--workdr=x"], ["no flag --workdr", "--help"]),
        (["left-over"], ["'left-over' is not a flag", "--config.field=value"]),
        (["--config=nowhere.py"], ["no config file nowhere.py", "configs/"]),
        (["--config="], ["--config is missing", "--help"]),
        (["--workdir="], ["--workdir is missing", "--help"]),
    ],
)
def test_bad_input_is_one_error_before_anything_is_loaded(
    overrides: list[str],
    expected: list[str],
    experiment: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loaded = _count_calls(monkeypatch, source, "load")
    assert run.main([f"--config={experiment}/config.py", f"--workdir={tmp_path}/out", *overrides]) == 2
    _assert_one_error(capsys, expected)
    assert loaded == []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("config.lmit = 2", ["no field 'lmit'", "did you mean 'limit'"]),
        ("del config.seed", ["misses 'seed'", "run_config()"]),
        ("del config.task", ["misses 'task'", "run_config()"]),
        ("config.task = 'compaer'", ["no task 'compaer'", "did you mean 'compare'"]),
        ("config.seed = 'zero'", ["fails with TypeError"]),
        ("config = None", ["no get_config() that returns a ConfigDict"]),
        ("1 / 0", ["fails with ZeroDivisionError"]),
    ],
)
def test_bad_config_file_is_one_error(
    body: str, expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = CONFIG.format(target="nowhere", prompts="default")
    (tmp_path / "bad.py").write_text(text.replace("    return", f"    {body}\n    return"))
    assert run.main([f"--config={tmp_path}/bad.py", f"--workdir={tmp_path}/out"]) == 2
    _assert_one_error(capsys, expected)


def test_unwritable_workdir_comes_before_every_other_fault(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = _count_calls(monkeypatch, source, "load")
    (tmp_path / "file").touch()
    arguments = [f"--config={experiment}/config.py", f"--workdir={tmp_path}/file/out", "--config.seed=-1"]
    assert run.main(arguments) == 2
    _assert_one_error(capsys, ["file/out cannot be written", "--workdir"])
    assert loaded == []


def test_help_names_flags_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for word in ("--config=FILE", "--workdir=DIR", "stream", "max_new_tokens", "temperature"):
        assert word in shown
    for task in module_names("tasks"):
        assert f"Task '{task}'" in shown


def test_interrupted_run_goes_on_to_the_same_texts(
    experiment: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [f"--config={experiment}/config.py", f"--workdir={tmp_path}"]
    real = Programs.run
    with monkeypatch.context() as patch:
        calls = _fail_after(patch, 3, KeyboardInterrupt)
        assert run.main(arguments) == 130
    assert "interrupted" in capsys.readouterr().err
    kept = (tmp_path / "generations.partial.jsonl").read_text()
    assert len(kept.splitlines()) == 2  # one prompt, two methods
    assert not (tmp_path / "summary.json").exists()
    # As if the interruption had come in the midst of writing.
    (tmp_path / "generations.partial.jsonl").write_text(kept + kept.splitlines()[0][:40])

    decoded: list[int] = []
    monkeypatch.setattr(Programs, "run", lambda *args: decoded.append(1) or real(*args))
    assert run.main(arguments) == 0
    assert len(calls) == 4 and len(decoded) == 4
    assert "1 of 3 batches were finished before" in capsys.readouterr().err
    assert tokens_of(tmp_path) == tokens_of(finished)


def test_finished_run_is_only_shown_again(
    experiment: Path, finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = _count_calls(monkeypatch, source, "load")
    before = (finished / "summary.json").read_text()
    assert run.main([f"--config={experiment}/config.py", f"--workdir={finished}"]) == 0
    assert "tokens" in capsys.readouterr().out
    assert (finished / "summary.json").read_text() == before
    assert loaded == []


def test_workdir_of_another_config_is_left_alone(
    experiment: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path.name: path.read_text() for path in finished.iterdir()}
    arguments = [f"--config={experiment}/config.py", f"--workdir={finished}"]
    assert run.main([*arguments, "--config.drafter.draft_length=3", "--config.limit=1"]) == 2
    differing = ["drafter.draft_length (4 there, 3 here)", "limit (None there, 1 here)"]
    _assert_one_error(capsys, [*differing, "name another --workdir"])
    assert {path.name: path.read_text() for path in finished.iterdir()} == before


MINE = '''
"""Proposes the token 65 always."""
import dataclasses
import jax.numpy as jnp
from specjax.trees.topology import chain_parents
from specjax.types import Draft, Drafter, ProposalLaw

@dataclasses.dataclass(frozen=True)
class Config:
    draft_length: int

def build(config, target, architecture=None):
    size = config.draft_length + 1
    def propose(params, keys, state, context):
        batch = context.length.shape[0]
        return Draft(jnp.full((batch, size), 65), chain_parents(batch, size), None), state
    return Drafter(lambda *a: {}, propose, lambda *a: {}, size, size - 1, ProposalLaw.POINT_MASS)
'''


def test_own_drafter_sampling_streaming_and_one_prompt(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_drafters").mkdir()
    (tmp_path / "my_drafters" / "always.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    drafter = "{'name': 'my_drafters.always', 'draft_length': 2}"
    arguments = [
        f"--config={experiment}/config.py",
        f"--workdir={tmp_path}/out",
        f"--config.drafter={drafter}",
    ]
    more = ["--config.temperature", "1", "--config.limit=1", "--config.verify=target_only", "--stream"]
    assert run.main([*arguments, *more]) == 0
    methods = json.loads((tmp_path / "out" / "summary.json").read_text())["methods"]
    mine = methods["always+target_only"]
    assert mine["identical_to_greedy"] is None
    assert mine["speedup"]["interval"] is None
    assert len(mine["acceptance_by_depth"]["conditional"]) == 2
    shown = capsys.readouterr().out
    assert "no interval" in shown
    text = next(line["text"] for line in lines_of(tmp_path / "out") if line["method"] == "always+target_only")
    assert shown.startswith(text)


@pytest.mark.slow
def test_ngram_config_on_the_real_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = f"--config={ROOT}/configs/ngram_llama.py"
    arguments = [config, f"--workdir={tmp_path}", "--config.limit=2", "--config.max_new_tokens=16"]
    assert run.main(arguments) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["methods"][NGRAM]["identical_to_greedy"] == {"identical": 2, "of": 2}
    assert all(len(line["tokens"]) == 16 and line["text"].strip() for line in lines_of(tmp_path))


OWN_TASK = """
from specjax.config import Field

FIELDS = {"task": Field(str, "", "this task"), "answer": Field(int, 3, "the exit code")}

def validate(config):
    pass

def run(options):
    return options.config.answer
"""
OWN_TASK_CONFIG = """
from specjax.config import run_config

def get_config():
    config = run_config("my_tasks.answer")
    config.task = "my_tasks.answer"
    return config
"""


def test_own_task_by_its_module_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tasks").mkdir()
    (tmp_path / "my_tasks" / "answer.py").write_text(OWN_TASK)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "config.py").write_text(OWN_TASK_CONFIG)
    arguments = [f"--config={tmp_path}/config.py", f"--workdir={tmp_path}/out"]
    assert run.main(arguments) == 3
    assert run.main([*arguments, "--config.answer=4"]) == 4


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*_llama.py")), ids=lambda path: path.stem)
def test_packaged_config_is_valid_and_says_how_to_run_it(path: Path, tmp_path: Path) -> None:
    config = run.parse([f"--config={path}", f"--workdir={tmp_path}"]).config
    assert "drafter" not in config or config.drafter.name in module_names("drafters")
    by_task = {"generate": "specjax.data.generate", "prepare": "specjax.data.prepare"}
    command = by_task.get(config.task, "specjax.run")
    assert f"python -m {command} --config=configs/{path.name} --workdir=" in path.read_text()


def _variants(path: Path) -> list[str]:
    return list(runpy.run_path(str(path)).get("VARIANTS", ()))


CONFIGS = [path for path in sorted(ROOT.glob("configs/**/*.py"))]


@pytest.mark.parametrize(
    "config",
    [f"{path}:{variant}" for path in CONFIGS for variant in _variants(path)],
    ids=lambda config: Path(config).name,
)
def test_every_argument_of_a_packaged_config_is_valid(config: str, tmp_path: Path) -> None:
    drafter = run.parse([f"--config={config}", f"--workdir={tmp_path}"]).config.drafter
    sources = [part.source for part in (drafter, drafter.get("inner", {})) if "source" in part]
    assert all(source.partition(":")[0] in ("hf", "zoo", "pypi") for source in sources)


ARGUMENT = CONFIG.replace(
    "def get_config():", "VARIANTS = ('one', 'two')\n\ndef get_config(seed='one'):"
).replace("    return", "    config.seed = 1 + VARIANTS.index(seed)\n    return")


def test_argument_of_a_config_file_reaches_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, plain, workdir = tmp_path / "config.py", tmp_path / "plain.py", f"--workdir={tmp_path}/out"
    file.write_text(ARGUMENT.format(target="nowhere", prompts="default"))
    plain.write_text(CONFIG.format(target="nowhere", prompts="default"))
    for argument, seed in (("", 1), (":one", 1), (":two", 2)):
        assert run.parse([f"--config={file}{argument}", workdir]).config.seed == seed
    for config, expected in (
        (f"{file}:twoo", ["knows no 'twoo'", "did you mean 'two'", "choose one of one, two"]),
        (f"{plain}:two", ["takes no argument, and is given 'two'", "leave it out"]),
        (f"{tmp_path}/nowhere.py:two", ["no config file", "nowhere.py"]),
    ):
        assert run.main([f"--config={config}", workdir]) == 2
        _assert_one_error(capsys, expected)


def test_methods_of_the_comparison_are_chosen_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, workdir = f"--config={ROOT}/configs/evaluate_all_llama.py", f"--workdir={tmp_path}/out"
    chosen = run.parse([f"{config}:eagle+cascade", workdir]).config.methods
    every = run.parse([config, workdir]).config.methods
    assert set(chosen) == {"eagle", "cascade"} < set(every) and chosen.eagle == every.eagle
    assert run.main([f"{config}:eagle+cascad", workdir]) == 2
    _assert_one_error(capsys, ["no method 'cascad'", "did you mean 'cascade'"])


def _assert_one_error(capsys: pytest.CaptureFixture[str], expected: list[str]) -> None:
    shown = capsys.readouterr().err
    assert shown.startswith("specjax: error: ")
    assert shown.count("\n") == 1
    for part in expected:
        assert part in shown


def _count_calls(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[tuple]:
    calls: list[tuple] = []
    real: Callable = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: calls.append(args) or real(*args))
    return calls


def _fail_after(monkeypatch: pytest.MonkeyPatch, count: int, error: type[BaseException]) -> list[int]:
    calls: list[int] = []
    real = Programs.run

    def run(*args: Any) -> Any:
        calls.append(1)
        if len(calls) > count:
            raise error
        return real(*args)

    monkeypatch.setattr(Programs, "run", run)
    return calls
