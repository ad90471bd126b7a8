"""What a drafter's weights are worth: what is accepted of its drafts while the target decodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from specjax import decode
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.types import ModelParams


class HeldOut(NamedTuple):
    """Tokens emitted a target pass, and of the drafts at each depth that were tried the share accepted.

    A depth that was never tried has None. `counts` are the tokens emitted and the passes of each prompt.
    """

    tokens_per_step: float
    acceptance: tuple[float | None, ...]
    counts: tuple[tuple[int, int], ...]


def make_measure(
    method: Method, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stop_tokens: Sequence[int]
) -> Callable[[ModelParams], HeldOut]:
    """A function of the weights that decodes the prompts at temperature 0, together; compiled once.

    It raises ConfigError where a prompt and its output do not fit the target.
    """
    size = len(prompts)

    def measure(params: ModelParams) -> HeldOut:
        request, state = decode.start(
            method,
            params,
            prompts,
            max_new_tokens=max_new_tokens,
            warp=make_warp(size, temperature=0.0),
            keys=decode.row_keys(0, range(size)),
            stop_tokens=stop_tokens,
        )
        _, stats = decode.generate(method, params, request, state)
        steps, emitted, tried, accepted = (np.asarray(part).sum(0) for part in stats)
        counts = np.stack([stats.num_emitted, stats.num_steps], axis=-1).tolist()
        by_depth = (float(a / t) if t else None for a, t in zip(accepted, tried, strict=True))
        return HeldOut(float(emitted / steps), tuple(by_depth), tuple(map(tuple, counts)))

    return measure
