"""EAGLE and EAGLE-2 (arXiv 2401.15077, arXiv 2406.16858): drafts from the target's last states.

A decoder layer foresees the state that enters the target's head, whose logits are the draft's. With chains
and `paths` it is EAGLE-1, with `num_nodes` EAGLE-2's trees.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from specjax import draft_vocab
from specjax.errors import ConfigError
from specjax.models.eagle import Eagle, EagleConfig, embed
from specjax.models.functional import LAST_HIDDEN, init_module, pure
from specjax.models.layers import activation_dtype
from specjax.proposals import TreeConfig
from specjax.state_drafting import StateNetwork, adding_nothing, one_layer_cache, state_drafter, unroll
from specjax.training import losses
from specjax.training.foresight import check_distance, foresight, is_foreseen
from specjax.training.units import root_mean_square
from specjax.types import Drafter, ModelParams, Params, Target, Trainable, TrainingBatch, not_offered


@dataclasses.dataclass(frozen=True)
class Config(TreeConfig):
    """Drafts of the weights that `source` names, a folder or a name of the zoo."""

    source: str | None = None


@dataclasses.dataclass(frozen=True)
class Training:
    """The loss: `feature_weight` times smooth L1 to the target's states and `distance` to its distribution.

    Each of `unroll_steps` steps takes the states that the step before it foresaw. `noise` is the half width
    of what is added to the target's states. Only the `draft_vocab_size` most frequent tokens are drafted.
    """

    distance: str = "forward_kl"
    feature_weight: float = 0.1
    unroll_steps: int = 2
    noise: float = 0.1
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("feature_weight", 0),
            ("unroll_steps", 1),
            ("noise", 0),
            ("draft_vocab_size", 1),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                raise ConfigError(f"training.{name} is {value}: give at least {least}")


# Small settings that the contract tests and the certificate build it with; they make up the weights.
EXAMPLES = {
    "eagle": Config(draft_length=2),
    "eagle without replacement": Config(
        draft_length=2, branching=(2, 1), proposal="siblings_without_replacement"
    ),
    "eagle dynamic": Config(draft_length=2, branching=(2, 2), proposal="point_mass", num_nodes=5),
}


def build(config: Config, target: Target, architecture: EagleConfig | None = None) -> Drafter:
    """Drafts of a layer of the given architecture, or one like the target's own layers."""
    return state_drafter(make_network(target, architecture or like(target)), config.shape)


def like(target: Target) -> EagleConfig:
    """A layer of the target's own sizes; ConfigError where the target offers no embedding."""
    if target.embed is not_offered:
        not_offered()
    return EagleConfig(dataclasses.replace(target.config, num_layers=1), fc_bias=True)


def make_network(target: Target, architecture: EagleConfig) -> StateNetwork:
    """The head as pure functions; it shares the target's head, and its embedding unless it has its own."""
    dtype = activation_dtype(target.dtype)
    run = pure(lambda rngs: Eagle(architecture, dtype=dtype, rngs=rngs))

    def encode(params: ModelParams, features: dict[str, jax.Array]) -> Float[Array, "B N H"]:
        del params
        return features[LAST_HIDDEN].astype(dtype)

    def forward(params: ModelParams, tokens, states, positions, mask, cache):
        embedded = embed(target, params, tokens)
        weights = {name: params.drafter[name] for name in ("fc", "layers")}
        return run(weights, embedded, states, positions, mask, cache)

    def logits(params: ModelParams, states: Float[Array, "B N H"]) -> Float[Array, "B N V"]:
        scores = draft_vocab.scores(target, params, states)
        return draft_vocab.in_target_vocab(scores, params, target.vocab_size)

    return StateNetwork(
        features=(LAST_HIDDEN,),
        encode=encode,
        forward=forward,
        logits=logits,
        init_cache=one_layer_cache(architecture.layer, dtype),
    )


def trainable(
    config: Config, training: Training, target: Target, architecture: EagleConfig | None = None
) -> Trainable:
    """How it learns: regression of states and distance of distributions, over `unroll_steps` steps."""
    del config
    sizes, dtype = architecture or like(target), activation_dtype(target.dtype)
    network = make_network(target, sizes)
    check_distance(training.distance)

    def init(key: Key[Array, ""], target_params: Params, token_counts: Int[np.ndarray, "V"]):
        del target_params
        weights = init_module(lambda rngs: Eagle(sizes, dtype=dtype, rngs=rngs), key)
        weights["layers"][0] = adding_nothing(weights["layers"][0])
        return weights, draft_vocab.choose(token_counts, training.draft_vocab_size)

    def loss(params: ModelParams, batch: TrainingBatch, key: Key[Array, ""]):
        states = network.encode(params, batch.features)
        noise = training.noise * jax.random.uniform(key, states.shape, states.dtype, -1.0, 1.0)
        outputs = unroll(network, params, batch.tokens, states + noise, training.unroll_steps)
        scores = functools.partial(draft_vocab.scores, target, params)
        vocab = params.drafter.get(draft_vocab.TOKENS)
        target_logits, next_states = scores(states), jnp.roll(states, -1, axis=1)
        place = jnp.arange(batch.tokens.shape[1])[None]
        total = jnp.zeros(())
        report: dict[str, jax.Array] = {}
        for step, out in enumerate(outputs):
            # Its first inputs have no drafts before them.
            where = place >= step
            of_law, overlap = foresight(scores(out), target_logits, batch, 1, training.distance, vocab, where)
            error = losses.smooth_l1(next_states, out)
            of_state = losses.masked_mean(error, is_foreseen(batch, 1) & where)
            total += of_law + training.feature_weight * of_state
            report |= {
                f"law_{step + 1}": of_law,
                f"state_{step + 1}": of_state,
                f"overlap_{step + 1}": overlap,
            }
        return total / training.unroll_steps, report

    def units(target_params: Params, token_counts: Int[np.ndarray, "V"], sizes: dict[str, np.ndarray]):
        # A state is some twenty times an embedding.
        everything = np.asarray(target.embed(target_params, jnp.arange(target.vocab_size)), np.float32)
        embedded = root_mean_square(everything, token_counts)
        return {"fc": {"weight": 1 / np.concatenate((embedded, sizes[LAST_HIDDEN]))[None]}}

    return Trainable(init, loss, network.features, units=units)
