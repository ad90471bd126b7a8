"""The states of a target that reads texts which it need not have written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from specjax.data.features import FEATURE_DTYPE, features_of_text, recording
from specjax.decode import bucket, prefill, row_keys
from specjax.sampling import make_warp
from specjax.types import ModelParams, Params, Request, Target


def feature_bytes(target: Target, params: Params, names: Sequence[str]) -> int:
    """The bytes that the named features of one token take; ConfigError if the target has no such feature."""

    def read_one(params: Params) -> dict[str, jax.Array]:
        token, cache = jnp.zeros((1, 1), jnp.int32), target.init_cache(1, 1)
        return target.forward(params, token, token, jnp.ones((1, 1, 1), bool), cache, tuple(names)).features

    found = jax.eval_shape(read_one, params)
    return sum(one.shape[-1] for one in found.values()) * jnp.dtype(FEATURE_DTYPE).itemsize


def read(
    target: Target,
    params: Params,
    texts: Sequence[Int[np.ndarray, "T"]],
    names: Sequence[str],
    num_rows: int,
) -> Iterator[dict[int, dict[str, Float[np.ndarray, "T1 F"]]]]:
    """Yield, for `num_rows` texts of like length at a time, their features [T - 1, F] by their places.

    Those of a text's last token are left out, as where the target writes: nothing comes after it.
    """
    method = recording(target, names)
    keys, warp = row_keys(0, range(num_rows)), make_warp(num_rows, 0.0)
    order = sorted(range(len(texts)), key=lambda place: -len(texts[place]))
    for first in range(0, len(order), num_rows):
        places = order[first : first + num_rows]
        width = bucket(len(texts[places[0]]))
        # Rows that are left over read one token.
        tokens, lengths = np.zeros((num_rows, width), np.int32), np.ones(num_rows, np.int32)
        for row, place in enumerate(places):
            lengths[row] = len(texts[place])
            tokens[row, : lengths[row]] = texts[place]
        request = Request(warp, jnp.asarray(lengths), jnp.zeros((0,), jnp.int32))
        state = prefill(
            method,
            ModelParams(params, {}),
            request,
            jnp.asarray(tokens),
            jnp.asarray(lengths),
            keys,
            prompt_size=width,
        )
        found = {name: np.asarray(values) for name, values in state.draft_state.features.items()}
        yield {place: features_of_text(found, row, lengths[row]) for row, place in enumerate(places)}
