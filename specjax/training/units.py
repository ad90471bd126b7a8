"""Weights that learn in units of their inputs.

Optimizers move all weights of a matrix by like amounts. Where one input is twenty times another, as a
target's states are beside its embeddings, what comes in small is learned late. So steps are taken as if every
input had the size 1: as if the weights were these, times what is here called their unit.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from specjax.types import Params

# The states of a text's first tokens, to which later ones attend for want of anything else, are far larger.
SETTLED = 8


def feature_sizes(
    features: Mapping[str, Float[Array, "B T F"]], length: Int[Array, "B"]
) -> dict[str, Float[np.ndarray, "F"]]:
    """The root mean squares of a batch's features by name, of all tokens but the first ones of every text."""

    def sizes(states: Float[np.ndarray, "B T F"]) -> Float[np.ndarray, "F"]:
        place = np.arange(states.shape[1])[None]
        # The last token's states are not known.
        is_known = place < np.asarray(length)[:, None] - 1
        is_settled = is_known & (place >= SETTLED)
        return root_mean_square(states[is_settled if is_settled.any() else is_known])

    return {name: sizes(np.asarray(states, np.float32)) for name, states in features.items()}


def root_mean_square(
    rows: Float[np.ndarray, "N F"], weights: np.ndarray | None = None
) -> Float[np.ndarray, "F"]:
    """The size of every column; 1 where it is nothing but zeros."""
    found = np.sqrt(np.average(np.square(rows, dtype=np.float64), axis=0, weights=weights))
    return np.where(found > 0, found, 1).astype(np.float32)


def complete(units: Params, weights: Params) -> Params:
    """A unit for every weight: 1 where none is given."""
    return {
        name: complete(units.get(name, {}), part)
        if isinstance(part, dict)
        else units.get(name, np.float32(1))
        for name, part in weights.items()
    }


def in_units(inner: optax.GradientTransformation, units: Params) -> optax.GradientTransformation:
    """What `inner` does to weights over their units; the weights themselves stay as they are."""

    def times(tree: Params) -> Params:
        return jax.tree.map(jnp.multiply, tree, units)

    def over(tree: Params) -> Params:
        return jax.tree.map(jnp.divide, tree, units)

    def init(params: Params) -> optax.OptState:
        return inner.init(over(params))

    def update(updates: Params, state: optax.OptState, params: Params | None = None):
        updates, state = inner.update(times(updates), state, None if params is None else over(params))
        return times(updates), state

    return optax.GradientTransformation(init, update)
