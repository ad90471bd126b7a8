"""Trials that processes share: each run once, whatever happens to the process that runs it."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specjax.sweeps import report, space
from specjax.sweeps.ledger import COPIED, FAIL, OWNER, RUNNING, Ledger, Plan, open_storage, place_of
from specjax.sweeps.space import Axis

AXES = (Axis("drafter.draft_length", (1, 2, 3)), Axis("top_k", (1, 2)), Axis("verify", ("a", "b")))
FINE = (Axis("temperature", low=0.0, high=1.0), Axis("drafter.draft_length", low=1, high=8))


def objective(point: space.Point) -> float | None:
    """A value; none for one setting."""
    if point.get("verify") == "b" and point["drafter.draft_length"] == 3:
        return None
    return sum(len(value) if isinstance(value, str) else float(value) for value in point.values())


def work(ledger: Ledger, most: int = 1000) -> list[space.Point]:
    """Run at most so many trials, and say which."""
    done: list[space.Point] = []
    while len(done) < most and (claim := ledger.claim()):
        done.append(claim.point)
        assert ledger.finish(claim, objective(claim.point), {})
    return done


def found(ledger: Ledger) -> list[tuple[int, dict[str, Any], float | None]]:
    return [(place_of(trial), trial.params, trial.value) for trial in ledger.finished()]


def make_plan(sampler: str, seed: int = 0) -> Plan:
    return Plan(FINE if sampler == "tpe" else AXES, sampler, None if sampler == "grid" else 14, seed)


def storage_url(kind: str, folder: Path) -> str | None:
    return None if kind == "journal" else f"sqlite:///{folder}/trials.db"


def open_ledger(storage: str | None, folder: Path, plan: Plan, patience: float = 0.6) -> Ledger:
    return Ledger(open_storage(storage, folder), "name", plan, patience)


def undisturbed(sampler: str, folder: Path) -> list[tuple[int, dict[str, Any], float | None]]:
    folder.mkdir()
    with open_ledger(None, folder, make_plan(sampler)) as ledger:
        work(ledger)
        return found(ledger)


SQLITE = pytest.param("grid", "sqlite", marks=pytest.mark.slow)  # it waits for the disk at every turn


@pytest.mark.parametrize(
    ("sampler", "kind"), [("grid", "journal"), ("random", "journal"), ("tpe", "journal"), SQLITE]
)
def test_killed_and_restarted_is_as_undisturbed(sampler: str, kind: str, tmp_path: Path) -> None:
    storage = storage_url(kind, tmp_path)
    killed = open_ledger(storage, tmp_path, make_plan(sampler))
    killed.__enter__()
    first = work(killed, most=4)
    lost = killed.claim()
    assert lost is not None
    # Killed: it shows no life, and gives nothing up.
    killed._stop.set()
    killed._thread.join()
    with open_ledger(storage, tmp_path, make_plan(sampler)) as ledger:
        second = work(ledger)
        assert found(ledger) == undisturbed(sampler, tmp_path / "undisturbed")
        assert second[0] == lost.point
        assert not [point for point in second if point in first]
        assert Counter(trial.state for trial in ledger.trials())[FAIL] == 1
        assert not ledger.finish(lost, 1.0, {})  # too late


@pytest.mark.parametrize(("sampler", "kind"), [("grid", "journal"), ("random", "journal"), SQLITE])
def test_shared_by_two_is_as_undisturbed(sampler: str, kind: str, tmp_path: Path) -> None:
    storage = storage_url(kind, tmp_path)
    with (
        open_ledger(storage, tmp_path, make_plan(sampler), 60) as one,
        open_ledger(storage, tmp_path, make_plan(sampler), 60) as other,
    ):
        done: list[space.Point] = []
        for ledger in itertools.cycle((one, other)):
            claims = ledger.claim(), (other if ledger is one else one)._claim(one.trials())
            if claims[0] is None:
                break
            # Both at once have different ones.
            assert claims[1] is None or claims[0].point != claims[1].point
            for claim, owner in zip(claims, (ledger, other if ledger is one else one), strict=True):
                if claim is not None:
                    done.append(claim.point)
                    assert owner.finish(claim, objective(claim.point), {})
        assert found(one) == undisturbed(sampler, tmp_path / "undisturbed")
        assert len(done) == len({repr(point) for point in done})
        owners = Counter(trial.user_attrs[OWNER] for trial in one.finished())
        assert len(owners) == 2 and all(trial.state != FAIL for trial in one.trials())


def test_of_two_claims_to_one_place_the_first_counts(tmp_path: Path) -> None:
    plan = make_plan("grid")
    with open_ledger(None, tmp_path, plan) as one, open_ledger(None, tmp_path, plan) as other:
        stale = other.trials()  # before the other's claim
        claim = one.claim()
        assert claim is not None and other._claim(stale) is None
        assert [trial.state for trial in one.trials()] == [RUNNING, FAIL]
        assert one.finish(claim, 1.0, {})
        # Nor does a process measure again what was finished while it was looking.
        assert other._write_down(1, claim.point, known=set()) is None
        assert other._write_down(1, claim.point, known={0}) is not None


def test_what_was_measured_is_copied_not_measured_again(tmp_path: Path) -> None:
    with open_ledger(None, tmp_path, make_plan("random")) as ledger:
        done = work(ledger)
        trials = ledger.finished()
        copies = [trial for trial in trials if COPIED in trial.user_attrs]
        assert len(trials) == 14 and len(done) + len(copies) == 14 and copies
        for copy in copies:
            origin = trials[copy.user_attrs[COPIED]]
            assert (copy.params, copy.value, copy.state) == (origin.params, origin.value, origin.state)


def test_interrupted_process_gives_its_trial_back_at_once(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), open_ledger(None, tmp_path, make_plan("grid"), 60) as ledger:
        lost = ledger.claim()
        raise KeyboardInterrupt
    with open_ledger(None, tmp_path, make_plan("grid"), 60) as ledger:
        assert lost is not None and work(ledger, most=1) == [lost.point]


def test_living_process_keeps_its_trial_however_long_it_takes(tmp_path: Path) -> None:
    plan = Plan((Axis("verify", ("a",)),), "grid", None, 0)
    with open_ledger(None, tmp_path, plan, 0.9) as one, open_ledger(None, tmp_path, plan, 0.9) as other:
        claim = one.claim()
        assert claim is not None
        waited: list[float] = []

        def wait(what: str) -> None:
            waited.append(time.monotonic())
            if waited[-1] - waited[0] > 2:
                assert one.finish(claim, 1.0, {})

        assert other.claim(wait) is None
        assert len(one.trials()) == 1


def test_plans_depend_on_the_seed_and_random_ones_on_nothing_else() -> None:
    first, again, another = make_plan("random"), make_plan("random"), make_plan("random", seed=1)
    points = [[plan.point(place) for place in range(14)] for plan in (first, again, another)]
    assert points[0] == points[1] != points[2]


def test_heat_map_has_the_best_of_each_pair_of_values(tmp_path: Path) -> None:
    drafters = ("{'name': 'ngram', 'draft_length': 2}", "{'name': 'suffix', 'draft_length': 4}")
    axes = (Axis("top_p", low=0.7, high=1.0, step=0.1), Axis("drafter", drafters), Axis("top_k", (1, 2)))
    with open_ledger(None, tmp_path, Plan(axes, "random", 30, 0)) as ledger:
        work(ledger)
        trials = ledger.finished()
        figure = report.heat_map(trials, axes[0], axes[1], "speedup", others=True)
    assert figure is not None
    heat = figure.axes[0]
    assert [label.get_text() for label in heat.get_xticklabels()] == [
        "ngram\ndraft_length 2",
        "suffix\ndraft_length 4",
    ]
    assert [label.get_text() for label in heat.get_yticklabels()] == ["0.7", "0.8", "0.9", "1"]
    values: dict[tuple[float, str], list[float]] = {}
    for trial in trials:
        values.setdefault((round(trial.params["top_p"], 1), trial.params["drafter"]), []).append(trial.value)
    pairs = itertools.product((0.7, 0.8, 0.9, 1.0), drafters)
    best = [max(values[pair]) for pair in pairs if pair in values]
    assert [float(text.get_text()) for text in heat.texts] == pytest.approx(best)
