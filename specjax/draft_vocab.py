"""A vocabulary for drafts smaller than the target's: what is never drafted need not be scored.

Frequent tokens do for most drafts, and leaving out the rest needs no training (arXiv 2502.14856,
arXiv 2506.22694). Weights hold the tokens, in rising order, as "d2t" [K]; without it every token may be
drafted. Decoding keeps the rows of the head for them at hand, the "weight" [K, H] of "head", which no file
holds.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.errors import ConfigError
from specjax.models.functional import LAST_HIDDEN, LOGITS
from specjax.models.layers import project
from specjax.types import ForwardOutput, KVCache, ModelParams, Params, Target

TOKENS, HEAD = "d2t", "head"


def choose(token_counts: Int[np.ndarray, "V"], size: int | None) -> Params:
    """The `size` most frequent tokens as fixed weights; ConfigError where there are not so many."""
    if size is None:
        return {}
    if not 0 < size <= len(token_counts):
        raise ConfigError(
            f"draft_vocab_size is {size}: give 1 to {len(token_counts)}, the target's vocabulary"
        )
    frequent = np.argsort(-np.asarray(token_counts), kind="stable")[:size]
    return {TOKENS: jnp.asarray(np.sort(frequent), jnp.int32)}


def keep(weights: Params, tokens: Int[Array, "K"]) -> Params:
    """Trained weights that draft only those of `tokens` that they drafted before; own heads lose the rest.

    Raises ConfigError where they drafted none of them.
    """
    before = weights.get(TOKENS)
    kept = np.asarray(tokens) if before is None else np.flatnonzero(np.isin(before, tokens))
    if not len(kept):
        raise ConfigError("the drafter drafts none of the tokens that are to be kept: raise draft_vocab_size")

    def cut(part: Params, is_head: bool = False) -> Params:
        if isinstance(part, dict):
            return {name: cut(leaf, is_head or name == "lm_head") for name, leaf in part.items()}
        return part[kept] if is_head else part

    return cut(weights) | {TOKENS: jnp.asarray(tokens if before is None else before[kept])}


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


def scores_of(
    target: Target, params: ModelParams, output: Float[Array, "B N O"], *, has_own: bool
) -> Float[Array, "B N K"]:
    """The logits that a drafter's output means: itself, or what the target's head makes of it."""
    return output.astype(jnp.float32) if has_own else scores(target, params, output)


def in_target_vocab(
    logits: Float[Array, "B N K"], params: ModelParams, vocab_size: int
) -> Float[Array, "B N V"]:
    """Logits of the tokens that may be drafted as logits of all: -inf for the others."""
    tokens = params.drafter.get(TOKENS)
    if tokens is None:
        return logits
    everywhere = jnp.full((*logits.shape[:-1], vocab_size), -jnp.inf, logits.dtype)
    return everywhere.at[..., tokens].set(logits)


def within(model: Target) -> Target:
    """A complete model whose weights may hold a draft vocabulary beside its own: the rest has logits -inf."""

    def own(params: Params) -> Params:
        return {name: part for name, part in params.items() if name not in (TOKENS, HEAD)}

    def forward(params: Params, tokens, positions, mask, cache: KVCache, features=()) -> ForwardOutput:
        weights = own(params)
        if TOKENS not in params:
            return model.forward(weights, tokens, positions, mask, cache, features)
        # Nobody reads the logits of this pass, so the compiler leaves them out.
        out = model.forward(weights, tokens, positions, mask, cache, (*features, LAST_HIDDEN))
        logits = unembed(params, out.features[LAST_HIDDEN])
        known = out.features | {LOGITS: logits}
        return ForwardOutput(logits, out.cache, {name: known[name] for name in features})

    def unembed(params: Params, hidden: Float[Array, "B N H"]) -> Float[Array, "B N V"]:
        both = ModelParams(own(params), params)
        return in_target_vocab(scores(model, both, hidden), both, model.vocab_size)

    return model._replace(
        forward=forward,
        embed=lambda params, tokens: model.embed(own(params), tokens),
        unembed=unembed,
        head_rows=lambda params, tokens: model.head_rows(own(params), tokens),
    )
