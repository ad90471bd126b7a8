"""What every drafter's loss has in common: it foresees a token that lies some way ahead."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.training import losses
from specjax.types import TrainingBatch

# The text's own tokens instead of the target's law: the baseline.
CROSS_ENTROPY = "cross_entropy"


def is_foreseen(batch: TrainingBatch, ahead: int) -> Bool[Array, "B T"]:
    """Where the token `ahead` + 1 further on is to be learned, and the target's law for it is known."""
    place = jnp.arange(batch.tokens.shape[1])[None]
    return jnp.roll(batch.supervised, -ahead - 1, axis=1) & (place + ahead + 1 < batch.length[:, None])


def foresight(
    logits: Float[Array, "B T K"],
    target_logits: Float[Array, "B T K"],
    batch: TrainingBatch,
    ahead: int,
    distance: str,
    vocab: Int[Array, "K"] | None = None,
    where: Bool[Array, "#B T"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """How far the drafter is from the target's law `ahead` tokens further on, and their overlap 1 - TV.

    Both logits are over the tokens `vocab`, in rising order, or the whole vocabulary; `target_logits` are the
    target's after each token. Means over the supervised tokens, and those of `where` if given; with
    "cross_entropy" the text's tokens count, but for those outside the vocabulary.
    """
    mask = is_foreseen(batch, ahead)
    if where is not None:
        mask = mask & where
    wanted = jnp.roll(target_logits, -ahead, axis=1)
    overlap = losses.masked_mean(1 - losses.total_variation(wanted, jax.lax.stop_gradient(logits)), mask)
    if distance != CROSS_ENTROPY:
        return losses.masked_mean(losses.distance_named(distance)(wanted, logits), mask), overlap
    tokens = jnp.roll(batch.tokens, -ahead - 1, axis=1)
    if vocab is not None:
        index = jnp.minimum(jnp.searchsorted(vocab, tokens), vocab.shape[0] - 1)
        mask, tokens = mask & (vocab[index] == tokens), index
    return losses.masked_mean(losses.cross_entropy(tokens, logits), mask), overlap


def check_distance(name: str) -> None:
    """Raise ConfigError where no distance has this name."""
    if name != CROSS_ENTROPY:
        losses.distance_named(name)
