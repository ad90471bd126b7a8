"""Who runs which trial: an Optuna storage that any number of processes share, each trial run once.

A trial has a place from 0 on, and is claimed by being written down as running. Of two claims to one place
the earlier one counts, which every process sees alike, so that no lock is needed. Its process shows
signs of life; where they stop, the claim is given up and the place is free again.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy.exc import SQLAlchemyError

from specjax.errors import ConfigError
from specjax.sweeps.space import Axis, Point, grid

COMPLETE, PRUNED, RUNNING, FAIL = TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING, TrialState.FAIL
FINISHED = (COMPLETE, PRUNED)
PLACE, OWNER, COPIED, REASON = "place", "owner", "copied_from", "reason"
POLL_SECONDS = 0.5

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Claim(NamedTuple):
    """A trial that is this process's to run."""

    trial_id: int
    place: int
    point: Point


class Plan:
    """Which point each place has, by the sampler and the seed; for tpe also by the trials so far."""

    def __init__(self, axes: tuple[Axis, ...], sampler: str, trials: int | None, seed: int) -> None:
        self.axes, self._sampler, self._seed = axes, sampler, seed
        self.distributions = {axis.name: _distribution(axis) for axis in axes}
        self._points = grid(axes) if sampler == "grid" else None
        if self._points is not None:
            trials = min(trials or len(self._points), len(self._points))
        if trials is None:
            raise ConfigError(f"trials is not set, and the sampler {sampler} has no end: say how many")
        self.num_trials = trials

    @property
    def is_fixed(self) -> bool:
        """Whether all points are known from the start."""
        return self._sampler != "tpe"

    def point(self, place: int, trials: Sequence[FrozenTrial] = ()) -> Point:
        """The point of a place, given the trials so far."""
        if self._points is not None:
            return self._points[place]
        # A seed for each place: a sweep that goes on from an interruption draws what it would have drawn.
        seed = int(np.random.SeedSequence([self._seed, place]).generate_state(1)[0])
        if self.is_fixed:
            return self._draw(optuna.samplers.RandomSampler(seed), ())
        return self._draw(optuna.samplers.TPESampler(seed=seed, constant_liar=True), trials)

    def _draw(self, sampler: optuna.samplers.BaseSampler, trials: Sequence[FrozenTrial]) -> Point:
        study = optuna.create_study(sampler=sampler, direction="maximize")
        study.add_trials(sorted(trials, key=place_of))
        return study.ask(self.distributions).params


class Ledger:
    """The trials of one sweep, `name`, in a storage; between `with` and its end it shows signs of life.

    A process without them for `patience` seconds is taken for dead. Clocks of different machines are never
    compared.
    """

    def __init__(self, storage: BaseStorage, name: str, plan: Plan, patience: float) -> None:
        self._storage, self._name, self._plan, self._patience = storage, name, plan, patience
        optuna.create_study(storage=storage, study_name=name, direction="maximize", load_if_exists=True)
        self._study = storage.get_study_id_from_name(name)
        self._owner = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._seen: dict[str, tuple[Any, float]] = {}  # owner -> its last sign and when it was new here
        self._unclear: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._show_life, daemon=True)

    def __enter__(self) -> Ledger:
        self._unclear = {trial.user_attrs[OWNER] for trial in self._running()}
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        for trial in self._running():
            if trial.user_attrs[OWNER] == self._owner:
                self._give_up(trial, f"interrupted by {kind.__name__ if kind else 'nothing'}")

    @property
    def study(self) -> optuna.Study:
        """Optuna's own view of the trials."""
        return optuna.load_study(study_name=self._name, storage=self._storage)

    def trials(self) -> list[FrozenTrial]:
        """All trials, whatever became of them, in the order of their claims."""
        return self._storage.get_all_trials(self._study, deepcopy=False)

    def finished(self) -> list[FrozenTrial]:
        """The finished trials of the plan's places, in the order of these."""
        found = (trial for trial in self.trials() if trial.state in FINISHED)
        return sorted((t for t in found if place_of(t) < self._plan.num_trials), key=place_of)

    def claim(self, waiting: Callable[[str], None] = lambda what: None) -> Claim | None:
        """The next trial to run; None when all are finished. While others run the last ones it waits.

        What an earlier trial of another place has measured is copied, not measured again.
        """
        while True:
            self._give_up_dead()
            # What a dead process left comes first: later draws may depend on it.
            if not self._unclear:
                trials = self.trials()
                if claim := self._claim(trials):
                    return claim
                finished = {place_of(trial) for trial in trials if trial.state in FINISHED}
                if finished.issuperset(range(self._plan.num_trials)):
                    return None
            if self._running():
                waiting("waiting for other processes")
                time.sleep(POLL_SECONDS)

    def finish(self, claim: Claim, value: float | None, attributes: Mapping[str, Any]) -> bool:
        """Store what came of a trial, pruned where it has no value; False where it was given up meanwhile."""
        return self._end(claim.trial_id, PRUNED if value is None else COMPLETE, value, attributes)

    def _end(
        self, trial_id: int, state: TrialState, value: float | None, attributes: Mapping[str, Any]
    ) -> bool:
        try:
            for name, attribute in attributes.items():
                self._storage.set_trial_user_attr(trial_id, name, attribute)
            self._storage.set_trial_state_values(trial_id, state, None if value is None else [value])
        except UpdateFinishedTrialError:
            return False
        return True

    def _running(self) -> list[FrozenTrial]:
        return [trial for trial in self.trials() if trial.state == RUNNING]

    def _claim(self, trials: list[FrozenTrial]) -> Claim | None:
        live = [trial for trial in trials if trial.state != FAIL]
        taken = {place_of(trial) for trial in live}
        for place in range(self._plan.num_trials):
            if place in taken:
                continue
            # Once more with what it had when its process died.
            before = [trial.params for trial in trials if place_of(trial) == place]
            point = before[0] if before else self._plan.point(place, live)
            twins = [trial for trial in live if trial.params == point]
            if any(trial.state == RUNNING for trial in twins):
                continue  # to be copied when it is finished
            claim = self._write_down(place, point, {trial.number for trial in twins})
            if claim is None or not twins:
                return claim
            twin = twins[0]
            kept = {name: value for name, value in twin.user_attrs.items() if name not in (PLACE, OWNER)}
            self.finish(claim, twin.value, kept | {COPIED: place_of(twin)})
            return None
        return None

    def _write_down(self, place: int, point: Point, known: set[int]) -> Claim | None:
        """A claim, or None where another process was faster; twins that are `known` are no rivals."""
        template = create_trial(
            state=RUNNING,
            params=point,
            distributions=self._plan.distributions,
            user_attrs={PLACE: place, OWNER: self._owner},
        )
        trial_id = self._storage.create_new_trial(self._study, template)
        own = self._storage.get_trial(trial_id)
        for trial in self.trials():
            is_rival = place_of(trial) == place or (trial.params == point and trial.number not in known)
            if is_rival and trial.state != FAIL and trial.number < own.number:
                self._give_up(own, "claimed by another process first")
                return None
        return Claim(trial_id, place, point)

    def _give_up_dead(self) -> None:
        """Free the places of processes that show no sign of life."""
        running = self._running()
        signs, now = self._storage.get_study_user_attrs(self._study), time.monotonic()
        self._unclear &= {trial.user_attrs[OWNER] for trial in running}
        for trial in running:
            owner = trial.user_attrs[OWNER]
            sign, since = self._seen.setdefault(owner, (signs.get(owner), now))
            if sign != signs.get(owner):
                self._seen[owner] = signs[owner], now
                self._unclear.discard(owner)
            elif now - since > self._patience and owner != self._owner:
                self._give_up(trial, f"no sign of life of {owner}")

    def _give_up(self, trial: FrozenTrial, reason: str) -> None:
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study, trial.number)
        self._end(trial_id, FAIL, None, {REASON: reason})

    def _show_life(self) -> None:
        count = 0
        while True:
            count += 1
            # The next one may come through.
            with contextlib.suppress(OSError, StorageInternalError):
                self._storage.set_study_user_attr(self._study, self._owner, count)
            if self._stop.wait(self._patience / 6):
                return


def place_of(trial: FrozenTrial) -> int:
    """A trial's place in the plan."""
    return trial.user_attrs[PLACE]


def open_storage(url: str | None, folder: Path) -> BaseStorage:
    """A database by its URL, a journal file by its path, or the journal in the folder.

    Raises ConfigError where it cannot be opened.
    """
    if url is None or "://" not in url:
        path = folder / "trials.journal" if url is None else Path(url).expanduser()
        if not path.parent.is_dir():
            raise ConfigError(f"storage is {url}, and there is no folder {path.parent}: make it")
        return JournalStorage(JournalFileBackend(str(path)))
    try:
        try:
            return RDBStorage(url)
        except SQLAlchemyError:
            return RDBStorage(url)  # another process may have made the tables between two looks
    except (SQLAlchemyError, ImportError, StorageInternalError) as error:
        # Without the password that a URL may hold.
        kind, said = url.partition("://")[0], " ".join(str(error).split())
        raise ConfigError(
            f"the storage {kind}://... cannot be opened ({said}): give a path, or a URL such as "
            "sqlite:///FILE, whose driver is installed"
        ) from error


def _distribution(axis: Axis) -> BaseDistribution:
    if axis.values:
        return CategoricalDistribution(axis.values)
    if axis.is_whole:
        return IntDistribution(int(axis.low), int(axis.high), axis.log, int(axis.step or 1))
    return FloatDistribution(axis.low, axis.high, axis.log, axis.step)
