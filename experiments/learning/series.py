"""Which runs are compared, and in what they differ."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from experiments.learning.runs import ROOT, Overrides
from specjax.data import batches
from specjax.errors import ConfigError
from specjax.training.foresight import CROSS_ENTROPY

EAGLE, EAGLE3 = (ROOT / "configs" / "train" / f"{name}_llama.py" for name in ("eagle", "eagle3"))
# Of every run; flags may change them. One unrolled step is half the cost, and asks the same of all.
BASE = {"training.unroll_steps": 1, "held_out": 48, "eval_prompts": 48}
DISTANCES = ("forward_kl", "reverse_kl", "jensen_shannon", "total_variation", CROSS_ENTROPY)
SHARES = (1 / 8, 1 / 4, 1 / 2, 1)


class Series(NamedTuple):
    """A question, and the fields in which each run differs; the others are compared with the first.

    `variants` is given the config that all have in common and the folders of texts that people wrote.
    `is_fitted` says that the runs differ in `max_tokens`, and that a law is to be fitted to them. `file` is
    the config that all begin with.
    """

    question: str
    variants: Callable[[ConfigDict, Sequence[str]], dict[str, Overrides]]
    is_fitted: bool = False
    file: Path = EAGLE


def losses(config: ConfigDict, human: Sequence[str]) -> dict[str, Overrides]:
    """The distances without regression of the target's states, then two weights of it."""
    del config, human
    weights = itertools.product(DISTANCES[:1], (0.1, 1.0))
    return {
        name if not weight else f"{name}_states_{weight}": {
            "training.distance": name,
            "training.feature_weight": weight,
        }
        for name, weight in (*((name, 0.0) for name in DISTANCES), *weights)
    }


def optimizers(config: ConfigDict, human: Sequence[str]) -> dict[str, Overrides]:
    """AdamW and Muon, each with weights in units of their inputs and without."""
    del config, human
    return {
        f"{name}{'_in_units' if units else ''}": {"optimizer": name, "units": units, "learning_rate": rate}
        for name, rate in (("adamw", 1e-3), ("muon", 2e-3))
        for units in (False, True)
    }


def data(config: ConfigDict, human: Sequence[str]) -> dict[str, Overrides]:
    """The target's own texts, or as many tokens of people's; all held to the same held-out texts.

    People's are learned twice: by the target's laws, and by the text alone as without a target. Raises
    ConfigError where no folder of people's texts is named.
    """
    if not human:
        raise ConfigError("there are no texts that people wrote: name folders of them with --human")
    own = tuple(config.data)
    most = min(_num_tokens(_learned_from(config)), _num_tokens(_texts(config, human)))
    common = {"eval_data": own, "max_tokens": most}
    of_people = {"data": tuple(human), **common}
    return {
        "self_written": {"data": own, **common},
        "human": of_people,
        "human_text_alone": {**of_people, "training.distance": CROSS_ENTROPY},
    }


def scaling(config: ConfigDict, human: Sequence[str]) -> dict[str, Overrides]:
    """A growing share of the texts, equally often."""
    del human
    total = _num_tokens(_learned_from(config))
    return {
        f"share_{share:g}": {
            "max_tokens": int(share * total),
            "steps": max(1, round(share * config.steps)),
            "warmup": int(share * config.warmup),
        }
        for share in SHARES
    }


def copying(config: ConfigDict, human: Sequence[str]) -> dict[str, Overrides]:
    """EAGLE-3's first weights as they are drawn, or such as copy what followed the same token before."""
    del config, human
    return {name: {"training.copying": name == "copying"} for name in ("drawn", "copying")}


SERIES = {
    "losses": Series("Which distance to the target's law teaches most in equally many steps?", losses),
    "optimizers": Series("Which steps teach most, and do units help?", optimizers),
    "data": Series("Are the target's own texts better to learn from than people's?", data),
    "scaling": Series("What would more texts bring?", scaling, is_fitted=True),
    "copying": Series("Does EAGLE-3 learn more where it starts by copying?", copying, file=EAGLE3),
}


def _texts(config: ConfigDict, folders: Sequence[str]) -> list[batches.Text]:
    # Whether the tokens fit the target is left to the run.
    return batches.load_texts(folders, config.max_length, config.supervise, np.iinfo(np.int32).max)


def _learned_from(config: ConfigDict) -> list[batches.Text]:
    return batches.split(_texts(config, config.data), config.held_out, config.seed)[0]


def _num_tokens(texts: Sequence[batches.Text]) -> int:
    return sum(len(text.tokens) for text in texts)
