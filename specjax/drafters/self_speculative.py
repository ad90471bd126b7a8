"""The target with some of its layers skipped drafts for the whole of it (arXiv 2309.08168)."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.drafters.draft_model import model_drafter
from specjax.errors import ConfigError
from specjax.models.functional import keep_layers, make_target
from specjax.proposals import TreeConfig
from specjax.types import Drafter, Target


@dataclasses.dataclass(frozen=True)
class Config(TreeConfig):
    """Drafts of the target without the layers `skip_layers`, counted from 0."""

    skip_layers: tuple[int, ...]


# Small settings that the contract tests and the certificate build it with.
EXAMPLES = {"self_speculative": Config(draft_length=2, skip_layers=(1,))}


def build(config: Config, target: Target, architecture: Any = None) -> Drafter:
    """Drafts of the thinned target: its weights are the target's, its cache is its own.

    Raises ConfigError if a layer to skip does not exist, or if none would be left or skipped.
    """
    del architecture
    num_layers = target.config.num_layers
    skipped = set(config.skip_layers)
    unknown = sorted(skipped - set(range(num_layers)))
    if unknown:
        raise ConfigError(f"skip_layers names layers {unknown}: the target has layers 0 to {num_layers - 1}")
    if not 0 < len(skipped) < num_layers:
        raise ConfigError(
            f"skip_layers names {len(skipped)} of {num_layers} layers: skip at least one, keep at least one"
        )
    kept = tuple(i for i in range(num_layers) if i not in skipped)
    thinned = dataclasses.replace(target.config, num_layers=len(kept))
    return model_drafter(
        make_target(thinned, dtype=target.dtype),
        lambda params: keep_layers(params.target, kept),
        config.shape,
    )
