"""A vocabulary for drafts smaller than the target's: what is never drafted need not be scored.

Weights hold its tokens, in rising order, as "d2t" [K]; without it every token may be drafted. Decoding keeps
the rows of the target's head for them at hand, the "weight" [K, H] of "head", which no file holds.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.errors import ConfigError
from specjax.models.layers import project
from specjax.types import ModelParams, Params, Target

TOKENS, HEAD = "d2t", "head"


def choose(token_counts: Int[np.ndarray, "V"], size: int | None) -> Params:
    """The `size` most frequent tokens as fixed weights; ConfigError where there are not so many."""
    if size is None:
        return {}
    if not 0 < size <= len(token_counts):
        raise ConfigError(
            f"training.draft_vocab_size is {size}: give 1 to {len(token_counts)}, the target's vocabulary"
        )
    frequent = np.argsort(-np.asarray(token_counts), kind="stable")[:size]
    return {TOKENS: jnp.asarray(np.sort(frequent), jnp.int32)}


def complete(weights: Params, target: Target, target_params: Params, *, whole: bool = False) -> Params:
    """Weights as decoding wants them, with the rows of the target's head at hand.

    Without a draft vocabulary the target's own head serves, unless the `whole` of it is to be at hand.
    """
    if TOKENS not in weights and not whole:
        return weights
    tokens = weights.get(TOKENS, jnp.arange(target.vocab_size))
    return weights | {HEAD: {"weight": target.head_rows(target_params, tokens)}}


def scores(target: Target, params: ModelParams, states: Float[Array, "B N H"]) -> Float[Array, "B N K"]:
    """Logits of the tokens that may be drafted, from states that enter the target's head."""
    if HEAD in params.drafter:
        rows = params.drafter[HEAD]["weight"]
    elif TOKENS in params.drafter:
        rows = target.head_rows(params.target, params.drafter[TOKENS])
    else:
        return target.unembed(params.target, states)
    return project(states, rows).astype(jnp.float32)


def in_target_vocab(
    logits: Float[Array, "B N K"], params: ModelParams, vocab_size: int
) -> Float[Array, "B N V"]:
    """Logits of the tokens that may be drafted as logits of all: -inf for the others."""
    tokens = params.drafter.get(TOKENS)
    if tokens is None:
        return logits
    everywhere = jnp.full((*logits.shape[:-1], vocab_size), -jnp.inf, logits.dtype)
    return everywhere.at[..., tokens].set(logits)
