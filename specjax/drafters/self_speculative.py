"""The target with some of its layers skipped drafts for the whole of it (arXiv 2309.08168).

Which layers it can do without is for a search to say (`specjax.tasks.skip_layers`). A draft may end early,
where the thinned model is unsure (there with a threshold that adapts, here with a fixed one).

The thinned model has a cache of its own, or reads the target's (`share_cache`): then there is nothing to keep
and no prompt to read, and its context is what the whole model made of it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from specjax import draft_vocab
from specjax.drafters.draft_model import model_drafter, sharing_drafter
from specjax.errors import ConfigError
from specjax.models.functional import keep_layers, make_target
from specjax.proposals import TreeConfig
from specjax.types import Context, Drafter, Effort, ModelParams, Params, Target

# It has no weights of its own, but may be given a draft vocabulary.
TAKES_DRAFT_VOCAB = True


@dataclasses.dataclass(frozen=True)
class Config(TreeConfig):
    """Drafts of the target without the layers `skip_layers`, counted from 0.

    A chain ends before a token whose law, unwarped, gives no token the probability `confidence`; 0 is off.
    With `share_cache` the kept layers read the target's keys and values, and write where the target will.
    Raises ConfigError on a `confidence` outside [0, 1), and on one for a tree.
    """

    skip_layers: tuple[int, ...]
    confidence: float = 0.0
    share_cache: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.confidence < 1:
            raise ConfigError(
                f"confidence is {self.confidence}: give a probability below 1, or 0 for drafts of full length"
            )
        if self.confidence and not self.shape.is_chain:
            raise ConfigError(
                f"confidence is {self.confidence} and the draft is a tree: leave out one of them; a tree "
                "that follows its confidence has num_nodes"
            )


# Small settings that the contract tests and the certificate build it with.
EXAMPLES = {
    "self_speculative": Config(draft_length=2, skip_layers=(1,)),
    # The probabilities are such that drafts end at every length.
    "self_speculative while sure": Config(draft_length=2, skip_layers=(0,), confidence=0.32),
    "self_speculative top-1 while sure": Config(
        draft_length=2, skip_layers=(0,), proposal="point_mass", confidence=0.12
    ),
    "self_speculative with the target's cache": Config(
        draft_length=3,
        branching=(2,),
        proposal="siblings_without_replacement",
        skip_layers=(1,),
        share_cache=True,
    ),
}


def build(config: Config, target: Target, architecture: Any = None) -> Drafter:
    """Drafts of the thinned target: its weights are the target's, its cache is its own.

    What `params.drafter` holds is a draft vocabulary, or nothing.
    Raises ConfigError if a layer to skip does not exist, or if none would be left or skipped.
    """
    del architecture
    kept = layers_left(config.skip_layers, target.config.num_layers)
    thinned = dataclasses.replace(target.config, num_layers=len(kept))
    model = draft_vocab.within(make_target(thinned, dtype=target.dtype))

    def weights_of(params: ModelParams) -> Params:
        return keep_layers(params.target, kept) | params.drafter

    make = functools.partial(sharing_drafter, kept) if config.share_cache else model_drafter
    drafter = make(model, weights_of, config.shape)
    return while_sure(drafter, config.confidence) if config.confidence else drafter


def layers_left(skip_layers: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """The layers that are kept, in order; ConfigError on an unknown one, or if none is kept or skipped."""
    skipped = set(skip_layers)
    unknown = sorted(skipped - set(range(num_layers)))
    if unknown:
        raise ConfigError(f"skip_layers names layers {unknown}: the target has layers 0 to {num_layers - 1}")
    if not 0 < len(skipped) < num_layers:
        raise ConfigError(
            f"skip_layers names {len(skipped)} of {num_layers} layers: skip at least one, keep at least one"
        )
    return tuple(layer for layer in range(num_layers) if layer not in skipped)


def while_sure(drafter: Drafter, confidence: float) -> Drafter:
    """The drafter, whose chains end (`NO_TOKEN`) before the first token that it gives less than `confidence`.

    Exact: whether a token is drafted is settled by the context and the drafts before it, before it is drawn,
    so that to a rule it is a shorter draft of the same laws. An effort that the context asks for holds too.
    """

    def propose(params, keys, state, context: Context):
        rows = context.length.shape
        effort = context.effort
        if effort is None:
            effort = Effort(jnp.full(rows, drafter.max_depth), jnp.zeros(rows))
        effort = effort._replace(confidence=jnp.maximum(effort.confidence, jnp.full(rows, confidence)))
        return drafter.propose(params, keys, state, context._replace(effort=effort))

    return drafter._replace(propose=propose)
