"""One step of learning, for every drafter: the loss and its gradient, the optimizer, the weights' average."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from specjax.prefill import read_prompt
from specjax.training.units import in_units
from specjax.types import ModelParams, Params, Target, Trainable, TrainingBatch

Metrics = dict[str, Float[Array, ""]]

DRAFTER, TARGET = "drafter", "target"
HEAD = "lm_head"  # its outputs are tokens: it learns by rows
OPTIMIZERS = ("adamw", "muon")
# Muon's steps in Adam's size, so that both take the same learning rate (arXiv 2502.16982).
MUON_RMS = 0.2


class Settings(NamedTuple):
    """How to learn: a linear `warmup`, then a cosine down to 0 over what is left of `steps`.

    Gradients are cut to the norm `clip`; matrices decay; `ema` is the decay of the weights' average, 0 for
    none. A target that learns too has a learning rate of its own, and AdamW always.
    """

    optimizer: str
    steps: int
    learning_rate: float
    target_learning_rate: float
    warmup: int
    weight_decay: float
    clip: float
    ema: float
    seed: int


class TrainState(NamedTuple):
    """What a step carries: what learns, under DRAFTER and TARGET, and its average in `ema`, or () there."""

    params: Params
    opt_state: Any
    ema: Params
    step: Int[Array, ""]


Step = Callable[[TrainState, Params, TrainingBatch], tuple[TrainState, Metrics]]


def make_optimizer(settings: Settings, units: Params | None = None) -> optax.GradientTransformation:
    """The optimizer with clipping, a warm-up and a cosine; a learning rate for each of drafter and target.

    "muon" is for matrices between states (arXiv 2502.16982), and leaves all else to AdamW. `units`, one for
    each weight, are those that they learn in.
    """

    def adamw(peak: float) -> optax.GradientTransformation:
        schedule = learning_rate(peak, settings.warmup, settings.steps)
        return optax.adamw(schedule, weight_decay=settings.weight_decay, mask=_are_matrices)

    def muon(peak: float) -> optax.GradientTransformation:
        schedule = learning_rate(peak, settings.warmup, settings.steps)
        return optax.contrib.muon(
            schedule,
            weight_decay=settings.weight_decay,
            adam_weight_decay=settings.weight_decay,
            weight_decay_mask=_are_matrices,
            consistent_rms=MUON_RMS,
            muon_weight_dimension_numbers=_between_states,
        )

    of_drafter = {"adamw": adamw, "muon": muon}[settings.optimizer](settings.learning_rate)
    rules = {DRAFTER: of_drafter, TARGET: adamw(settings.target_learning_rate)}
    by_name = optax.partition(rules, _names)
    if units is not None:
        by_name = in_units(by_name, units)
    return optax.chain(optax.clip_by_global_norm(settings.clip), by_name)


def learning_rate(peak: float, warmup: int, steps: int) -> optax.Schedule:
    """The rate of each of `steps` steps, counted from 0: none is wasted on a rate of 0."""

    def rate(count: Int[Array, ""]) -> Float[Array, ""]:
        rise = (count + 1) / (warmup + 1)
        progress = jnp.clip((count - warmup) / max(1, steps - warmup), 0, 1)
        return peak * jnp.minimum(rise, (1 + jnp.cos(jnp.pi * progress)) / 2)

    return rate


def init_state(params: Params, settings: Settings, units: Params | None = None) -> TrainState:
    """The state before the first step; `params` are the weights that learn, a float32 copy of which does."""
    params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), params)
    ema = jax.tree.map(jnp.copy, params) if settings.ema else ()
    return TrainState(params, make_optimizer(settings, units).init(params), ema, jnp.zeros((), jnp.int32))


def learned(state: TrainState) -> Params:
    """The weights to use: their average where there is one."""
    return state.ema or state.params


def model_params(learned: Params, frozen: Params, dtype: Any) -> ModelParams:
    """The weights of the pair: those that learn, in the target's type, with those that do not."""
    learned = jax.tree.map(lambda leaf: leaf.astype(dtype), learned)
    return ModelParams(learned.get(TARGET, frozen.get(TARGET)), learned[DRAFTER] | frozen.get(DRAFTER, {}))


def make_step(trainable: Trainable, target: Target, settings: Settings, units: Params | None = None) -> Step:
    """The compiled step `(state, frozen, batch)`, which uses up the state; `frozen` is what does not learn.

    Features that the batch lacks are computed, once. The metrics are those of the loss, with "loss",
    "gradient_norm", "learning_rate" and the batch's number of "tokens".
    """
    optimizer = make_optimizer(settings, units)
    rate = learning_rate(settings.learning_rate, settings.warmup, settings.steps)

    def step(state: TrainState, frozen: Params, batch: TrainingBatch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(settings.seed), state.step)
        batch = with_features(trainable, target, model_params(state.params, frozen, target.dtype), batch)
        (loss, reported), gradient = jax.value_and_grad(
            lambda params: trainable.loss(model_params(params, frozen, target.dtype), batch, key),
            has_aux=True,
        )(state.params)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = _average(state.ema, params, state.step, settings.ema) if settings.ema else ()
        metrics = {
            "loss": loss,
            **reported,
            "gradient_norm": optax.tree.norm(gradient),
            "learning_rate": rate(state.step),
            "tokens": batch.length.sum(),
        }
        return TrainState(params, opt_state, ema, state.step + 1), metrics

    return jax.jit(step, donate_argnums=0)


def with_features(
    trainable: Trainable, target: Target, params: ModelParams, batch: TrainingBatch
) -> TrainingBatch:
    """The batch with all features that are asked for, in the target's type; what it lacks is computed."""
    missing = tuple(name for name in trainable.features if name not in batch.features)
    features = batch.features
    if missing:
        empty = target.init_cache(*batch.tokens.shape)
        _, computed = read_prompt(target.forward, params.target, batch.tokens, empty, missing)
        features = features | jax.lax.stop_gradient(computed)
    return batch._replace(features={name: features[name].astype(target.dtype) for name in trainable.features})


def _average(ema: Params, params: Params, step: Int[Array, ""], decay: float) -> Params:
    """A mean that at first follows the weights closely: they have moved far from where they began."""
    share = jnp.maximum(1 - decay, 9 / (10 + step))

    return jax.tree.map(lambda old, new: (old + share * (new - old)).astype(new.dtype), ema, params)


def _are_matrices(params: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _between_states(params: Params) -> Params:
    """Which axes of a matrix Muon takes for inputs and outputs; None for what it is not to learn."""

    def axes(path: tuple[Any, ...], leaf: jax.Array) -> Any:
        is_head = any(getattr(key, "key", None) == HEAD for key in path)
        matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
        return matrix if leaf.ndim == 2 and not is_head else None

    return jax.tree_util.tree_map_with_path(axes, params)


def _names(params: Params) -> Params:
    return {name: jax.tree.map(lambda _, name=name: name, part) for name, part in params.items()}
