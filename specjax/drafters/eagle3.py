"""EAGLE-3 (arXiv 2503.01840): drafts from the target's states of several layers, learned as it decodes.

It foresees tokens, not states: its own outputs stand in for the target's states, in training as in decoding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from specjax import draft_vocab
from specjax.errors import CheckpointError, ConfigError
from specjax.models.eagle import embed
from specjax.models.eagle3 import Eagle3, Eagle3Config
from specjax.models.functional import LAST_HIDDEN, LAYER_INPUT, init_module, pure
from specjax.models.layers import activation_dtype
from specjax.proposals import TreeConfig
from specjax.state_drafting import StateNetwork, adding_nothing, one_layer_cache, state_drafter, unroll
from specjax.training.copying import start_copying
from specjax.training.foresight import check_distance, foresight
from specjax.types import Drafter, ModelParams, Params, Target, Trainable, TrainingBatch, not_offered

PARTS = ("fc", "midlayer", "norm", "lm_head")


@dataclasses.dataclass(frozen=True)
class Config(TreeConfig):
    """Drafts of the weights that `source` names, over `draft_vocab_size` tokens (None is all).

    `state_layers` are the layers whose inputs are fused, L for what enters the target's head; () means the
    published choice 2, L // 2, L - 3.
    Without `own_unembedding` it shares the target's, which neither learns nor is stored.
    """

    source: str | None = None
    draft_vocab_size: int | None = None
    state_layers: tuple[int, ...] = ()
    own_unembedding: bool = True


@dataclasses.dataclass(frozen=True)
class Training:
    """The loss: `distance` to the target's law, each of `unroll_steps` steps weighing `decay` less.

    With `copying`, a head that reads its tokens' own embeddings (layer 0) and is like the target's layers
    starts by copying what followed them before.
    """

    distance: str = "forward_kl"
    unroll_steps: int = 3
    decay: float = 0.8
    copying: bool = True

    def __post_init__(self) -> None:
        if self.unroll_steps < 1:
            raise ConfigError(f"training.unroll_steps is {self.unroll_steps}: give at least 1")
        if not 0 < self.decay < math.inf:
            raise ConfigError(f"training.decay is {self.decay}: give a number above 0")


# Small settings that the contract tests and the certificate build it with; they make up the weights.
EXAMPLES = {
    "eagle3": Config(draft_length=2, state_layers=(0, 1), draft_vocab_size=6),
    "eagle3 dynamic": Config(
        draft_length=2,
        branching=(2, 2),
        proposal="point_mass",
        num_nodes=5,
        state_layers=(0, 2),
        own_unembedding=False,
    ),
}


def build(config: Config, target: Target, architecture: Eagle3Config | None = None) -> Drafter:
    """Drafts of a head of the given architecture, or of one like the target's own layers."""
    return state_drafter(make_network(config, target, architecture or like(config, target)), config.shape)


def layers_of(config: Config, target: Target) -> tuple[int, ...]:
    """The layers whose inputs are fused; ConfigError where the target has no such layers."""
    num_layers = target.config.num_layers
    layers = config.state_layers or (2, num_layers // 2, num_layers - 3)
    if not all(0 <= layer <= num_layers for layer in layers):
        raise ConfigError(
            f"state_layers are {layers}: give layers 0 to {num_layers - 1} of the target, {num_layers} for "
            "what enters its head"
        )
    return layers


def like(config: Config, target: Target) -> Eagle3Config:
    """A head of the target's own sizes; ConfigError where the target has none to be like."""
    if target.embed is not_offered:
        not_offered()
    size = config.draft_vocab_size or target.vocab_size
    if not 0 < size <= target.vocab_size:
        raise ConfigError(
            f"draft_vocab_size is {size}: give 1 to {target.vocab_size}, the target's vocabulary"
        )
    layer = dataclasses.replace(target.config, num_layers=1)
    states = len(layers_of(config, target)) * layer.hidden_size
    return Eagle3Config(
        layer, states, size, norm_before_residual=False, own_unembedding=config.own_unembedding
    )


def make_network(config: Config, target: Target, architecture: Eagle3Config) -> StateNetwork:
    """The head as pure functions; it shares the target's embedding unless it has its own."""
    dtype = activation_dtype(target.dtype)
    last = target.config.num_layers
    names = tuple(
        LAST_HIDDEN if layer == last else f"{LAYER_INPUT}{layer}" for layer in layers_of(config, target)
    )
    run, fuse = (
        pure(lambda rngs: Eagle3(architecture, dtype=dtype, rngs=rngs), method)
        for method in ("__call__", "fuse")
    )

    def encode(params: ModelParams, features: dict[str, jax.Array]) -> Float[Array, "B N H"]:
        fused = jnp.concatenate([features[name].astype(dtype) for name in names], axis=-1)
        return fuse(own(params), fused)

    def forward(params: ModelParams, tokens, states, positions, mask, cache):
        embedded = embed(target, params, tokens)
        return run(own(params), embedded, states, positions, mask, cache)

    score = scorer(target, architecture)

    def logits(params: ModelParams, states: Float[Array, "B N H"]) -> Float[Array, "B N V"]:
        return draft_vocab.in_target_vocab(score(params, states), params, target.vocab_size)

    init_cache = one_layer_cache(architecture.layer, dtype)
    return StateNetwork(names, encode, forward, logits, init_cache)


def with_own_head(
    layers: Sequence[int],
    architecture: Eagle3Config,
    weights: Params,
    target: Target,
    target_params: Params,
) -> tuple[Eagle3Config, Params]:
    """The drafter over the states of `layers` as other engines know it, with a head of its own.

    CheckpointError where it reads what enters the target's head: theirs read the inputs of layers.
    """
    num_layers = target.config.num_layers
    if num_layers in layers:
        raise CheckpointError(
            f"the drafter cannot be written: its state_layers are {layers}, and the format knows layers 0 to "
            f"{num_layers - 1} alone"
        )
    if architecture.own_unembedding:
        return architecture, weights
    drafted = weights.get(draft_vocab.TOKENS, jnp.arange(target.vocab_size))
    rows = target.head_rows(target_params, drafted).astype(weights["norm"]["weight"].dtype)
    architecture = dataclasses.replace(architecture, own_unembedding=True)
    return architecture, weights | {"lm_head": {"weight": rows}}


def scorer(target: Target, architecture: Eagle3Config) -> Callable[..., Float[Array, "B N K"]]:
    """What makes logits over the draft vocabulary of `ModelParams` and the head's outputs [B, N, H]."""
    dtype = activation_dtype(target.dtype)
    unembedded = pure(lambda rngs: Eagle3(architecture, dtype=dtype, rngs=rngs), "unembedded")

    def score(params: ModelParams, states: Float[Array, "B N H"]) -> Float[Array, "B N K"]:
        output = unembedded(own(params), states)
        return draft_vocab.scores_of(target, params, output, has_own=architecture.own_unembedding)

    return score


def own(params: ModelParams) -> Params:
    """The weights of the layer and what is around it alone."""
    return {name: part for name, part in params.drafter.items() if name in PARTS}


def trainable(
    config: Config, training: Training, target: Target, architecture: Eagle3Config | None = None
) -> Trainable:
    """How it learns: the laws of all unrolled steps, with no regard to states (training-time test)."""
    sizes, dtype = architecture or like(config, target), activation_dtype(target.dtype)
    network, hidden = make_network(config, target, sizes), sizes.layer.hidden_size
    # As published: states as wide as the head pass as they are.
    is_single = sizes.state_size == hidden
    is_as_wide = hidden == target.config.hidden_size
    layers = layers_of(config, target)
    copies = training.copying and not is_single and 0 in layers and is_as_wide

    def make(rngs) -> Eagle3:
        return Eagle3(sizes, dtype=dtype, rngs=rngs)

    score = scorer(target, sizes)
    check_distance(training.distance)

    def init(key: Key[Array, ""], target_params: Params, token_counts: Int[np.ndarray, "V"]):
        drawn, copied = jax.random.split(key)
        weights = init_module(make, drawn)
        is_reduced = sizes.draft_vocab_size < target.vocab_size
        fixed = draft_vocab.choose(token_counts, sizes.draft_vocab_size if is_reduced else None)
        if sizes.own_unembedding and is_as_wide:
            # The head starts as the target's own.
            drafted = fixed.get(draft_vocab.TOKENS, jnp.arange(target.vocab_size))
            weights["lm_head"]["weight"] = target.head_rows(target_params, drafted).astype(dtype)
        weights["midlayer"] = adding_nothing(weights["midlayer"])
        if copies:
            weights["fc"]["weight"], weights["midlayer"] = start_copying(
                weights["fc"]["weight"], weights["midlayer"], sizes.layer, layers.index(0) * hidden, copied
            )
        if is_single:
            del weights["fc"]
            fixed["fc"] = {"weight": jnp.eye(hidden, dtype=dtype)}
        return weights, fixed

    def loss(params: ModelParams, batch: TrainingBatch, key: Key[Array, ""]):
        del key
        states = network.encode(params, batch.features)
        outputs = unroll(network, params, batch.tokens, states, training.unroll_steps)
        target_logits = draft_vocab.scores(target, params, batch.features[LAST_HIDDEN].astype(dtype))
        vocab = params.drafter.get(draft_vocab.TOKENS)
        place = jnp.arange(batch.tokens.shape[1])[None]
        total = jnp.zeros(())
        report: dict[str, jax.Array] = {}
        for step, out in enumerate(outputs):
            # Its first inputs have no drafts before them.
            of_law, overlap = foresight(
                score(params, out), target_logits, batch, 1, training.distance, vocab, place >= step
            )
            total += training.decay**step * of_law
            report |= {f"law_{step + 1}": of_law, f"overlap_{step + 1}": overlap}
        return total, report

    def units(target_params: Params, token_counts: Int[np.ndarray, "V"], sizes: dict[str, np.ndarray]):
        del target_params, token_counts
        if is_single:
            return {}
        return {"fc": {"weight": 1 / np.concatenate([sizes[name] for name in network.features])[None]}}

    features = tuple(dict.fromkeys((*network.features, LAST_HIDDEN)))
    return Trainable(init, loss, features, units=units)
