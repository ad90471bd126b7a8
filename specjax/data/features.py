"""The target's hidden states beside the tokens, for drafters that learn from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.step import Method
from specjax.types import NO_PARENT, NO_TOKEN, Draft, Drafter, ProposalLaw, Target
from specjax.verify.target_only import verify

FEATURE_DTYPE = jnp.bfloat16  # of features on disk


class Record(NamedTuple):
    """Features [B, T, F] by name of the first `length` [B] - 1 tokens of every row."""

    features: dict[str, Float[Array, "B T F"]]
    length: Int[Array, "B"]


def recording(target: Target, names: Sequence[str]) -> Method:
    """Plain decoding whose draft state keeps the named features of every token that was read.

    It is a drafter that drafts nothing: what decoding computes anyway need not be computed again. They stay
    in the target's own type: to write one row of a narrower buffer, XLA on a CPU would widen all of it.
    """

    def init(params, context, features, prompt_size: int) -> Record:
        del params, prompt_size
        beyond = context.tokens.shape[1]

        def buffer(of_prompt: Float[Array, "B P F"]) -> Float[Array, "B T F"]:
            rest = beyond - of_prompt.shape[1]
            return jnp.pad(of_prompt, ((0, 0), (0, rest), (0, 0)))

        return Record({name: buffer(features[name]) for name in names}, context.length)

    def propose(params, keys, state: Record, context) -> tuple[Draft, Record]:
        del params, keys
        root = jnp.full((context.length.shape[0], 1), NO_TOKEN, jnp.int32)
        return Draft(root, jnp.full_like(root, NO_PARENT), None), state

    def observe(params, state: Record, draft, verdict, context, features) -> Record:
        del params, draft, verdict

        def put(kept: Float[Array, "B T F"], new: Float[Array, "B 1 F"]) -> Float[Array, "B T F"]:
            return jax.vmap(lambda row, one, at: jax.lax.dynamic_update_slice(row, one, (at, 0)))(
                kept, new, state.length - 1
            )

        kept = {name: put(state.features[name], features[name]) for name in names}
        return Record(kept, context.length)

    recorder = Drafter(
        init, propose, observe, num_nodes=1, max_depth=0, law=ProposalLaw.POINT_MASS, features=tuple(names)
    )
    return Method(target, recorder, verify)


def features_of_text(
    kept: Mapping[str, Float[Array, "B T F"] | Float[np.ndarray, "B T F"]], row: int, num_tokens: int
) -> dict[str, Float[np.ndarray, "T1 F"]]:
    """What is stored of one row: the features of all its tokens but the last, after which nothing comes."""
    return {
        name: np.asarray(of_all[row])[: num_tokens - 1].astype(FEATURE_DTYPE) for name, of_all in kept.items()
    }
