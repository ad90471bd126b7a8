"""Measuring one trial: plain decoding and the trial's method, on one target and one set of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ml_collections import ConfigDict

from specjax.build import build_on
from specjax.eval.compare import PLAIN, Settings, compare, make_batches
from specjax.eval.metrics import Metrics, summarize_lines
from specjax.step import Method
from specjax.targets import LoadedTarget
from specjax.types import ModelParams

# What a sweep may raise, and what tables call it.
OBJECTIVES = {
    "speedup": "speed-up",
    "tokens_per_step": "tokens per pass",
    "tokens_per_second": "tokens/s",
    "acceptance": "accepted",
}
TRIAL = "trial"
# The fields that make a method.
METHOD = ("drafter", "drafter_dtype", "draft_vocab_size", "draft_vocab_from", "verify", "verify_options")
KEPT = 4  # methods whose weights stay loaded

Built = tuple[Method, ModelParams, bool]


def objective_of(metrics: Metrics, objective: str) -> float | None:
    """The value of an objective; None where nothing was there to be accepted."""
    return metrics["speedup"]["value"] if objective == "speedup" else metrics[objective]


class Bench:
    """A loaded target and its encoded prompts, each of one of the `tasks`.

    Programs are JAX's to keep, by method and shapes: plain decoding is one method throughout, and a trial
    whose drafter and rule are those of one of the latest four compiles nothing new.
    """

    def __init__(self, loaded: LoadedTarget, prompts: Sequence[Sequence[int]], tasks: Sequence[str]) -> None:
        assert loaded.tokenizer is not None
        self._loaded, self._prompts, self._tasks = loaded, prompts, tasks
        self._stop_tokens = loaded.tokenizer.stop_tokens
        self._plain = Method(loaded.target), ModelParams(loaded.params, {})
        self._methods: dict[str, Built] = {}
        self._told: set[str] = set()

    def measure(
        self, config: ConfigDict, report: Callable[[str], None] = lambda what: None
    ) -> dict[str, Any]:
        """The metrics of a run's config: of plain decoding, of its method, and of its method by task.

        Raises ConfigError where its parts do not fit each other, the target or the prompts.
        """
        key = repr([config[name] for name in METHOD])
        built = self._methods.pop(key, None) or self._build(config)
        self._methods[key] = built  # the latest at the end
        while len(self._methods) > KEPT:
            del self._methods[next(iter(self._methods))]
        method, params, lossless = built

        def tell(what: str) -> None:
            # What comes again is in JAX's cache: nothing is compiled.
            said = what if PLAIN in what else f"{key} {what}"
            if said not in self._told or not what.startswith("compiling"):
                report(what)
            self._told.add(said)

        settings = Settings(
            **{name: config[name] for name in Settings._fields if name in config},
            stop_tokens=self._stop_tokens,
        )
        batches = dict(enumerate(make_batches(self._prompts, config.batch_size)))
        both = {PLAIN: self._plain, TRIAL: (method, params)}
        lines = [
            {"task": self._tasks[generation.row], **generation._asdict()}
            for generations in compare(both, batches, settings, tell)
            for generation in generations
        ]
        metrics = summarize_lines(
            lines, greedy=config.temperature == 0, lossless={PLAIN: True, TRIAL: lossless}
        )
        return {
            "metrics": metrics["methods"][TRIAL],
            "plain": metrics["methods"][PLAIN],
            "tasks": {task: methods[TRIAL] for task, methods in metrics["tasks"].items()},
        }

    def _build(self, config: ConfigDict) -> Built:
        _, method, params, lossless = build_on(self._loaded, config)
        return method, params, lossless
