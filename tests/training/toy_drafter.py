"""A drafter that learns and is as small as can be: a table, from the last token to the next one's logits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.training.losses import distance_named, masked_mean
from specjax.types import NO_TOKEN, Draft, Drafter, ProposalLaw, Trainable


@dataclasses.dataclass(frozen=True)
class Config:
    draft_length: int = 2
    source: str | None = None


@dataclasses.dataclass(frozen=True)
class Training:
    distance: str = "forward_kl"
    noise: float = 0.0
    trains_target: bool = False


def build(config, target):
    depth = config.draft_length
    parents = jnp.arange(-1, depth)[None]

    def init(params, context, features, prompt_size):
        return {}

    def propose(params, keys, state, context):
        token = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)
        tokens = [jnp.full_like(token, NO_TOKEN)]
        for _ in range(depth):
            token = params.drafter["table"][token].argmax(-1)
            tokens.append(token)
        tokens = jnp.concatenate(tokens, axis=1)
        return Draft(tokens, jnp.broadcast_to(parents, tokens.shape), None), state

    def observe(params, state, draft, verdict, context, features):
        return state

    return Drafter(init, propose, observe, depth + 1, depth, ProposalLaw.POINT_MASS)


def trainable(config, training, target):
    distance = distance_named(training.distance)
    size = target.vocab_size

    def init(key, target_params, token_counts):
        table = 0.02 * jax.random.normal(key, (size, size))
        return {"table": table}, {"order": jnp.argsort(-jnp.asarray(token_counts))}

    def loss(params, batch, key):
        hidden = batch.features["last_hidden"][:, :-1]
        wanted = hidden @ params.target["embed_tokens"]["weight"].T
        draft = params.drafter["table"][batch.tokens[:, :-1]]
        draft = draft + training.noise * jax.random.normal(key, draft.shape)
        mask = batch.supervised[:, 1:]
        mean = masked_mean(distance(wanted, draft), mask)
        return mean, {"agreement": masked_mean(wanted.argmax(-1) == draft.argmax(-1), mask)}

    return Trainable(init, loss, ("last_hidden",), training.trains_target)
