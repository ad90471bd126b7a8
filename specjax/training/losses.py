"""How far a drafter is from its target, position by position; from logits and in log space, in float32.

To compare over a draft vocabulary alone, gather both sides' logits there first.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.errors import ConfigError, nearest

Logits = Float[Array, "... V"]
Distance = Callable[[Logits, Logits], Float[Array, "..."]]


def forward_kl(target: Logits, draft: Logits) -> Float[Array, "..."]:
    """KL(target, draft): the draft is to cover all that the target may say."""
    log_target, log_draft = _log_probs(target), _log_probs(draft)
    return _expected(log_target, log_target - log_draft)


def reverse_kl(target: Logits, draft: Logits) -> Float[Array, "..."]:
    """KL(draft, target): the draft is to say nothing that the target would not."""
    return forward_kl(draft, target)


def jensen_shannon(target: Logits, draft: Logits) -> Float[Array, "..."]:
    """The mean of both sides' KL to their mean; at most log 2."""
    log_target, log_draft = _log_probs(target), _log_probs(draft)
    mean = (jnp.exp(log_target) + jnp.exp(log_draft)) / 2
    log_mean = jnp.log(jnp.where(mean > 0, mean, 1))
    return (_expected(log_target, log_target - log_mean) + _expected(log_draft, log_draft - log_mean)) / 2


def total_variation(target: Logits, draft: Logits) -> Float[Array, "..."]:
    """1 minus the probability that a token drawn from the draft is accepted."""
    return jnp.abs(jnp.exp(_log_probs(target)) - jnp.exp(_log_probs(draft))).sum(-1) / 2


DISTANCES: dict[str, Distance] = {
    distance.__name__: distance for distance in (forward_kl, reverse_kl, jensen_shannon, total_variation)
}


def distance_named(name: str) -> Distance:
    """The distance that a config names; ConfigError if there is none."""
    if name not in DISTANCES:
        raise ConfigError(
            f"there is no distance '{name}'{nearest(name, DISTANCES)} (known: {', '.join(DISTANCES)})"
        )
    return DISTANCES[name]


def cross_entropy(tokens: Int[Array, "..."], draft: Logits) -> Float[Array, "..."]:
    """Minus the log-probability of the text's own tokens."""
    return -jnp.take_along_axis(_log_probs(draft), tokens[..., None], axis=-1)[..., 0]


def smooth_l1(target: Float[Array, "... F"], draft: Float[Array, "... F"]) -> Float[Array, "..."]:
    """The mean over features of the squared error / 2 below 1 and of the error - 1/2 beyond."""
    error = jnp.abs(target.astype(jnp.float32) - draft.astype(jnp.float32))
    return jnp.where(error < 1, error**2 / 2, error - 0.5).mean(-1)


def masked_mean(values: Float[Array, "..."], mask: Bool[Array, "..."]) -> Float[Array, ""]:
    """The mean where `mask` holds; 0 where it never does."""
    return jnp.where(mask, values, 0).sum() / jnp.maximum(mask.sum(), 1)


def _log_probs(logits: Logits) -> Logits:
    return jax.nn.log_softmax(logits.astype(jnp.float32))


def _expected(log_probs: Logits, values: Logits) -> Float[Array, "..."]:
    """The mean of `values` under a law; what has no probability counts nothing, be its value infinite."""
    probs = jnp.exp(log_probs)
    return (probs * jnp.where(probs > 0, values, 0)).sum(-1)
