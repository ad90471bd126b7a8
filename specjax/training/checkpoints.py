"""Checkpoints of a run: it can be killed at any moment, and goes on from the last one that is whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from specjax.training.train_loop import TrainState

SCORE = "tokens_per_step"
UNMEASURED = 0.0  # the best is better: a target pass emits at least one token
LATEST = 2  # the last one, and the one before should its files be damaged


class Restored(NamedTuple):
    """A checkpoint: the state, and whatever else was kept beside it."""

    state: TrainState
    position: dict[str, Any]


class Checkpoints:
    """The folder of a run's checkpoints, written beside the computation: the last ones and the best one."""

    def __init__(self, folder: Path, template: TrainState) -> None:
        """`template` is a state, which says shapes and where the arrays are to be."""
        policy = AnyPreservationPolicy([LatestN(LATEST), BestN(get_metric_fn=_score, n=1)])
        options = ocp.CheckpointManagerOptions(preservation_policy=policy, best_fn=_score, best_mode="max")
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)
        self._abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, template)

    def save(
        self, step: int, state: TrainState, position: Mapping[str, Any], score: float = UNMEASURED
    ) -> None:
        """Begin to write a checkpoint; `position` is kept as JSON, and `score` decides which is the best."""
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state), position=ocp.args.JsonSave(dict(position))
        )
        self._manager.save(step, args=args, metrics={SCORE: score})

    def latest(self) -> Restored | None:
        """The last checkpoint that is whole, if there is one."""
        step = self._manager.latest_step()
        return None if step is None else self._restore(step)

    def best(self) -> Restored:
        """The one of the highest score, the last of equals; there has to be one."""
        self._manager.wait_until_finished()
        steps = self._manager.all_steps()
        return self._restore(max(steps, key=lambda step: (_score(self._manager.metrics(step)), step)))

    def close(self) -> None:
        """Wait for what is being written."""
        self._manager.close()

    def _restore(self, step: int) -> Restored:
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(self._abstract), position=ocp.args.JsonRestore()
        )
        found = self._manager.restore(step, args=args)
        return Restored(found.state, found.position)


def _score(metrics: Mapping[str, float]) -> float:
    return metrics[SCORE]
