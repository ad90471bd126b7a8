"""A run from its first step, or the last one kept, to its end: metrics, measurements and checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from specjax.data.batches import Batches
from specjax.errors import ConfigError
from specjax.eval.progress import Progress
from specjax.sharding import divide, on_one_device
from specjax.training.checkpoints import UNMEASURED, Checkpoints
from specjax.training.history import History
from specjax.training.measure import HeldOut
from specjax.training.train_loop import Metrics, Step, TrainState, learned, model_params
from specjax.types import ModelParams, Params


class Every(NamedTuple):
    """How many steps lie between two lines of metrics, two measurements and two checkpoints."""

    log: int
    measure: int
    save: int


class Session(NamedTuple):
    """All that a run needs besides its state; `frozen` are the weights that do not learn.

    `dtype` is the target's, in which the weights that learn are used.
    """

    folder: Path
    console: Console
    num_steps: int
    every: Every
    step: Step
    batches: Batches
    mesh: Mesh
    frozen: Params
    dtype: Any
    measure: Callable[[ModelParams], HeldOut]
    checkpoints: Checkpoints


def learn(session: Session, state: TrainState) -> None:
    """Take the steps that are missing after the last checkpoint, or after `state` where there is none.

    Raises ConfigError where the loss is no number any more.
    """
    restored = session.checkpoints.latest()
    position = {"step": 0, "tokens": 0}
    if restored:
        state, position = restored
        session.batches.set_state(position["batches"])
    step, tokens = position["step"], position["tokens"]
    every = session.every
    history = History(session.folder, step if restored else -1) if jax.process_index() == 0 else None
    pending: list[Metrics] = []
    with Progress(session.num_steps, step, session.console, things="steps") as progress:
        progress.status("compiling")
        held: HeldOut | None
        if not restored:
            held = _measure(session, state)
            _record(history, step, _of_prompts(held))
            _tell(session, progress, step, {}, held)
            _save(session, state, step, tokens, held)
        began = time.monotonic()
        while step < session.num_steps:
            batch = divide(next(session.batches), session.mesh)
            state, metrics = session.step(state, session.frozen, batch)
            pending.append(metrics)
            step += 1
            measures = step % every.measure == 0 or step == session.num_steps
            saves = measures or step % every.save == 0
            if not saves and step % every.log:
                continue
            new_tokens, line = _mean(pending, step)
            rate = new_tokens / (time.monotonic() - began)
            tokens += new_tokens
            held = _measure(session, state) if measures else None
            _record(history, step, {**line, "tokens": tokens, "tokens_per_second": rate, **_of_prompts(held)})
            if saves:
                _save(session, state, step, tokens, held)
            _tell(session, progress, step, line, held)
            progress.advance(len(pending), new_tokens)
            pending = []
            began = time.monotonic()
    if history:
        history.close()


def _measure(session: Session, state: TrainState) -> HeldOut:
    # Every process decodes all of it: they have the weights, and would otherwise wait for the one that does.
    return session.measure(on_one_device(model_params(learned(state), session.frozen, session.dtype)))


def _mean(pending: list[Metrics], step: int) -> tuple[int, dict[str, float]]:
    """How many tokens the steps were taken on, and the means of their metrics."""
    found = jax.device_get(pending)
    tokens = sum(int(metrics.pop("tokens")) for metrics in found)
    for number, metrics in enumerate(found, start=step - len(found) + 1):
        if not math.isfinite(metrics["loss"]):
            raise ConfigError(
                f"the loss became {metrics['loss']} at step {number}: lower learning_rate or clip, or give a "
                "longer warmup, with another --workdir"
            )
    return tokens, {name: float(np.mean([metrics[name] for metrics in found])) for name in found[0]}


def _save(session: Session, state: TrainState, step: int, tokens: int, held: HeldOut | None) -> None:
    position = {
        "step": step,
        "tokens": tokens,
        "batches": session.batches.get_state(),
        "held_out": None if held is None else held._asdict(),
    }
    score = UNMEASURED if held is None else held.tokens_per_step
    session.checkpoints.save(step, state, position, score)


def _record(history: History | None, step: int, line: dict[str, Any]) -> None:
    if history:
        history.write(step, line)


def _of_prompts(held: HeldOut | None) -> dict[str, Any]:
    if held is None:
        return {}
    by_depth = {f"held_out/acceptance_{i}": share for i, share in enumerate(held.acceptance, start=1)}
    return {
        "held_out/tokens_per_step": held.tokens_per_step,
        "held_out/counts": held.counts,
        **by_depth,
    }


def _tell(
    session: Session, progress: Progress, step: int, line: dict[str, float], held: HeldOut | None
) -> None:
    """The loss in the progress bar, or as a line; what was measured as a line at any rate."""
    what = f"step {step}" + (f", loss {line['loss']:.4f}" if line else "")
    if held is not None:
        shares = " ".join("-" if share is None else f"{share:.2f}" for share in held.acceptance)
        what += f": {held.tokens_per_step:.3f} tokens per target pass, accepted by depth {shares}"
    progress.status(what)
    if held is not None or not session.console.is_terminal:
        session.console.print(what, highlight=False, soft_wrap=True)
