"""Medusa (arXiv 2401.10774): heads on the target's last state, each foreseeing a token further ahead.

The heads know nothing of each other's choices: a tree is the product of their likeliest tokens, pruned to
`paths`, for which `specjax.trees.static.sparse` takes measured accuracies.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from specjax import draft_vocab
from specjax.errors import ConfigError
from specjax.growth import Reading, grow
from specjax.models.functional import LAST_HIDDEN, init_module, pure
from specjax.models.layers import activation_dtype
from specjax.models.medusa import Medusa, MedusaConfig
from specjax.prefill import read_prompt
from specjax.proposals import TreeConfig
from specjax.training.foresight import CROSS_ENTROPY, check_distance, foresight
from specjax.types import (
    Context,
    Draft,
    Drafter,
    ModelParams,
    Params,
    Target,
    Trainable,
    TrainingBatch,
    Verdict,
    not_offered,
)


@dataclasses.dataclass(frozen=True)
class Config(TreeConfig):
    """Drafts of the weights that `source` names, `num_heads` heads of `num_layers` blocks each.

    The heads share the target's unembedding, or have one each where `own_unembedding` is set.
    """

    source: str | None = None
    num_heads: int | None = None
    num_layers: int = 1
    own_unembedding: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_layers < 1 or self.heads < self.draft_length:
            raise ConfigError(
                f"num_heads is {self.num_heads} and num_layers {self.num_layers}: give at least 1 layer, and "
                f"a head for each of the {self.draft_length} tokens of draft_length"
            )

    @property
    def heads(self) -> int:
        """How many heads there are; those beyond the draft's length are not used."""
        return self.draft_length if self.num_heads is None else self.num_heads

    @property
    def decided(self) -> Config:
        """What is to be known of trained weights, whatever length they draft later."""
        return dataclasses.replace(self, num_heads=self.heads)


@dataclasses.dataclass(frozen=True)
class Training:
    """The loss: `distance` to the target's law of each head, weighted by `decay` to the power of its number.

    With `lm_weight` the target is trained along (Medusa-2), and its own loss on the text counts so much: 5
    keeps it nearly as good as alone, with 1 it turns duller. Only the `draft_vocab_size` most frequent tokens
    are drafted.
    """

    distance: str = "forward_kl"
    decay: float = 0.8
    draft_vocab_size: int | None = None
    lm_weight: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.decay < math.inf:
            raise ConfigError(f"training.decay is {self.decay}: give a number above 0")
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise ConfigError(f"training.draft_vocab_size is {self.draft_vocab_size}: give at least 1")
        if self.lm_weight is not None and not 0 <= self.lm_weight < math.inf:
            raise ConfigError(f"training.lm_weight is {self.lm_weight}: give 0 or more, or leave it out")


# Small settings that the contract tests and the certificate build it with; they make up the weights.
EXAMPLES = {
    "medusa": Config(draft_length=2),
    "medusa paths": Config(draft_length=2, paths=((0,), (1,), (0, 0), (1, 0)), proposal="point_mass"),
}


class State(NamedTuple):
    """The state [B, H] of the last token that the target has read: the pending one follows it."""

    last: Float[Array, "B H"]


def build(config: Config, target: Target, architecture: None = None) -> Drafter:
    """Drafts of heads on the target's last state."""
    del architecture
    run, shape = pure(module_of(config, target)), config.shape

    def init(params, context: Context, features, prompt_size: int) -> State:
        del params, prompt_size
        # A prompt of one token has none before it: its first drafts are as good as random.
        before = jnp.maximum(context.length - 2, 0)
        return State(jnp.take_along_axis(features[LAST_HIDDEN], before[:, None, None], axis=1)[:, 0])

    def propose(params: ModelParams, keys: Key[Array, "B"], state: State, context: Context):
        outputs = run(heads_of(params), state.last[:, None])

        def logits(depth: int) -> Float[Array, "B 1 V"]:
            scores = scores_of(target, params, outputs[depth])
            return draft_vocab.in_target_vocab(scores, params, target.vocab_size)

        def read(tokens, carry, depth: int, seen, cache) -> Reading:
            # The head of this depth says the same after every token.
            return Reading(logits(depth), carry, cache)

        start = Reading(logits(0), jnp.zeros((len(keys), 1, 0)), None)
        return grow(read, shape, keys, context.warp, start).draft, state

    def observe(params, state: State, draft: Draft, verdict: Verdict, context, features) -> State:
        del params, draft, context, state
        last = jnp.take_along_axis(verdict.path, verdict.num_accepted[:, None], axis=1)
        return State(jnp.take_along_axis(features[LAST_HIDDEN], last[..., None], axis=1)[:, 0])

    def resume(params, state: State, context: Context, features, first: Int[Array, "B"]) -> State:
        del params
        place = context.length - 2 - first
        found = jnp.take_along_axis(features[LAST_HIDDEN], place[:, None, None], axis=1, mode="clip")[:, 0]
        return State(jnp.where(place[:, None] >= 0, found, state.last))

    return Drafter(
        init,
        propose,
        observe,
        num_nodes=shape.num_nodes,
        max_depth=shape.max_depth,
        law=shape.law,
        features=(LAST_HIDDEN,),
        resume=resume,
    )


def module_of(config: Config, target: Target):
    """What makes the heads; ConfigError where the target has no head to share."""
    if target.unembed is not_offered:
        not_offered()
    own = target.vocab_size if config.own_unembedding else None
    sizes = MedusaConfig(target.config.hidden_size, config.heads, config.num_layers, own)
    return lambda rngs: Medusa(sizes, dtype=activation_dtype(target.dtype), rngs=rngs)


def heads_of(params: ModelParams) -> Params:
    """The weights of the heads alone."""
    return {"heads": params.drafter["heads"]}


def scores_of(target: Target, params: ModelParams, output: Float[Array, "B N O"]) -> Float[Array, "B N K"]:
    """The logits that a head's output means, over the tokens that may be drafted."""
    has_own = "lm_head" in params.drafter["heads"][0]
    return draft_vocab.scores_of(target, params, output, has_own=has_own)


def trainable(config: Config, training: Training, target: Target) -> Trainable:
    """How the heads learn, the target frozen (Medusa-1) or trained along (Medusa-2)."""
    make = module_of(config, target)
    run, dtype = pure(make), activation_dtype(target.dtype)
    check_distance(training.distance)
    if config.own_unembedding and training.draft_vocab_size is not None:
        raise ConfigError("training.draft_vocab_size is for heads that share the target's unembedding")

    def init(key: Key[Array, ""], target_params: Params, token_counts: Int[np.ndarray, "V"]):
        weights = init_module(make, key)
        if config.own_unembedding:
            rows = target.head_rows(target_params, jnp.arange(target.vocab_size))
            for head in weights["heads"].values():
                head["lm_head"]["weight"] = rows.astype(dtype)
        return weights, draft_vocab.choose(token_counts, training.draft_vocab_size)

    def loss(params: ModelParams, batch: TrainingBatch, key: Key[Array, ""]):
        del key
        report: dict[str, jax.Array] = {}
        if training.lm_weight is None:
            states, total = batch.features[LAST_HIDDEN].astype(dtype), jnp.zeros(())
        else:
            cache = target.init_cache(*batch.tokens.shape)
            _, read = read_prompt(target.forward, params.target, batch.tokens, cache, (LAST_HIDDEN,))
            states = read[LAST_HIDDEN]
            logits = target.unembed(params.target, states)
            report["text"], _ = foresight(logits, logits, batch, 0, CROSS_ENTROPY)
            total = training.lm_weight * report["text"]
        outputs = run(heads_of(params), states)
        of_target = draft_vocab.scores(target, params, states)
        of_target, vocab = jax.lax.stop_gradient(of_target), params.drafter.get(draft_vocab.TOKENS)
        for number, output in enumerate(outputs, start=1):
            scores = scores_of(target, params, output)
            of_law, overlap = foresight(scores, of_target, batch, number, training.distance, vocab)
            total += training.decay**number * of_law
            report |= {f"law_{number}": of_law, f"overlap_{number}": overlap}
        return total, report

    def units(target_params: Params, token_counts: Int[np.ndarray, "V"], sizes: dict[str, np.ndarray]):
        del target_params, token_counts
        # Every block reads states like the target's.
        block = {"linear": {"weight": 1 / sizes[LAST_HIDDEN][None]}}
        head = {"blocks": dict.fromkeys(range(config.num_layers), block)}
        return {"heads": dict.fromkeys(range(config.heads), head)}

    if training.lm_weight is not None:
        return Trainable(init, loss, (), trains_target=True)
    return Trainable(init, loss, (LAST_HIDDEN,), units=units)
