"""Lookahead decoding (arXiv 2402.02057): n-grams out of the target's own Jacobi iterates are its drafts.

One pass carries two branches. The lookahead branch is a window of W columns and N - 1 levels: column i of
level l guesses the token i + l places behind the pending one, level 0 is the oldest iterate, and each pass
appends a new level, the target's arg-max behind the last one, and drops the oldest. A column and what the
pass adds to it is an n-gram, which goes to a pool. The verification branch judges up to G n-grams of the
pool that begin with the pending token.

The paper's attention mask is that of a tree. A token of column i sees level 0 up to column i, then its own
column from level 1 to itself: a path from the root, which is the first entry of level 0. So both branches
are nodes of one draft, and the rule judges the window's guesses along with the pool's. N-grams with common
prefixes share the nodes of these, so that the longest match of all is found.

The window moves on by one place a pass however many tokens are accepted, as in the authors' code: moved by
their number, its last column repeated, it wrote fewer tokens a pass (1.24 instead of 1.30 on HumanEval with
W = 5, N = 4, G = 5). At first all its levels hold the beginning of the text.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax.drafters.jacobi import first_guess
from specjax.errors import ConfigError
from specjax.models.functional import LOGITS
from specjax.sampling import argmax
from specjax.trees.topology import paths_of
from specjax.types import NO_PARENT, NO_TOKEN, ROOT, Context, Draft, Drafter, ProposalLaw, Target, Verdict


@dataclasses.dataclass(frozen=True)
class Config:
    """W = `window` columns make n-grams of N = `ngram` tokens, of which G = `num_guesses` are judged a pass.

    The pool has `num_buckets` buckets a row, each of the G n-grams that it was last given; first tokens share
    them where they are more. So a row takes 4 N G `num_buckets` bytes.
    """

    window: int
    ngram: int
    num_guesses: int
    num_buckets: int = 4096

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("ngram", 2), ("num_guesses", 1), ("num_buckets", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"drafter.{name} is {getattr(self, name)}: give at least {least}")


# Small settings that the contract tests and the certificate build it with.
EXAMPLES = {
    "lookahead": Config(window=2, ngram=3, num_guesses=2, num_buckets=8),
    "lookahead bigrams": Config(window=3, ngram=2, num_guesses=2, num_buckets=3),
}


class State(NamedTuple):
    """The `window` [B, N - 1, W], whose first entry stands for the root, and the `pool` [B, K, G, N].

    A bucket's oldest n-gram comes first; `NO_TOKEN` fills what was never used.
    """

    window: Int[Array, "B L W"]
    pool: Int[Array, "B K G N"]


def build(config: Config, target: Target, architecture: Any = None) -> Drafter:
    """Point-mass drafts of the pool and the window; it has no weights.

    The window is iterated at temperature 0 whatever a row's law, as in the paper.
    """
    del target, architecture
    levels, width, num_guesses = config.ngram - 1, config.window, config.num_guesses
    parents = _parents(config)
    newest = _window_nodes(config)[-1]

    def init(params, context: Context, features, prompt_size: int) -> State:
        del params, features, prompt_size
        places = np.arange(levels)[:, None] + np.arange(width)[None]
        shape = (len(context.length), config.num_buckets, num_guesses, config.ngram)
        return State(first_guess(context, levels + width)[:, places], jnp.full(shape, NO_TOKEN, jnp.int32))

    def propose(params, keys, state: State, context: Context) -> tuple[Draft, State]:
        del params, keys
        pending = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)
        batch = len(pending)
        guesses = jax.vmap(recall)(state.pool, pending[:, 0]).reshape(batch, -1)
        window = state.window.reshape(batch, -1)[:, 1:]
        tokens = jnp.concatenate((pending, guesses, window), axis=1)
        return Draft(tokens, shared_prefixes(tokens, parents), None), state

    def observe(params, state: State, draft: Draft, verdict: Verdict, context, features) -> State:
        del params, verdict, context
        window = state.window.at[:, 0, 0].set(draft.tokens[:, ROOT])
        following = argmax(features[LOGITS][:, newest])
        iterates = jnp.concatenate((window, following[:, None]), axis=1)
        pool = jax.vmap(remember)(state.pool, iterates.swapaxes(1, 2))
        return State(iterates[:, 1:], pool)

    return Drafter(
        init,
        propose,
        observe,
        num_nodes=len(parents),
        max_depth=max(levels, width + levels - 2),
        law=ProposalLaw.POINT_MASS,
        features=(LOGITS,),
    )


def _window_nodes(config: Config) -> Int[np.ndarray, "L W"]:
    """The node of each entry of the window; the first one's is the root, the others follow the guesses."""
    levels, num_guessed = config.ngram - 1, config.num_guesses * (config.ngram - 1)
    nodes = num_guessed + np.arange(levels * config.window).reshape(levels, config.window)
    nodes[0, 0] = ROOT
    return nodes


def _parents(config: Config) -> tuple[int, ...]:
    """Chains of guesses; level 0 of the window, a chain as well; and the columns that hang from it."""
    levels = config.ngram - 1
    guesses = 1 + np.arange(config.num_guesses * levels).reshape(-1, levels)
    window = _window_nodes(config)
    parents = {ROOT: NO_PARENT}
    for chain in (*guesses, window[0, 1:]):
        parents |= zip(chain.tolist(), (ROOT, *chain.tolist()), strict=False)
    parents |= zip(window[1:].ravel().tolist(), window[:-1].ravel().tolist(), strict=True)
    return tuple(parents[node] for node in range(len(parents)))


def shared_prefixes(tokens: Int[Array, "B N"], parents: tuple[int, ...]) -> Int[Array, "B N"]:
    """The parents in a tree in which, of nodes with the same path of tokens, only the first has children.

    A rule that descends from token to token then sees all that follows a prefix.
    """
    paths = paths_of(parents)
    depths = np.array([len(path) for path in paths])
    lineage = np.array([path + (ROOT,) * (depths.max() - len(path)) for path in paths])
    texts = tokens[:, lineage]
    is_same = (texts[:, :, None] == texts[:, None]).all(-1) & (depths[:, None] == depths)[None]
    first = jnp.argmax(is_same, axis=-1).astype(jnp.int32)
    own = first[:, np.array(parents[1:])]
    return jnp.pad(own, ((0, 0), (1, 0)), constant_values=NO_PARENT)


def recall(pool: Int[Array, "K G N"], token: Int[Array, ""]) -> Int[Array, "G N1"]:
    """What the pool knows to follow a token, N - 1 tokens an n-gram; the others hold `NO_TOKEN`."""
    known = pool[token % len(pool)]
    return jnp.where(known[:, :1] == token, known[:, 1:], NO_TOKEN)


def remember(pool: Int[Array, "K G N"], ngrams: Int[Array, "W N"]) -> Int[Array, "K G N"]:
    """The pool with these n-grams as the latest of their buckets, in their order.

    An n-gram that is known already is only moved; for any other the bucket's oldest makes room.
    """
    num_guesses = pool.shape[1]

    def add(pool: Int[Array, "K G N"], ngram: Int[Array, "N"]):
        bucket = ngram[0] % len(pool)
        known = pool[bucket]
        # The first place where none is known, that of the oldest.
        leaves = jnp.argmax((known == ngram[None]).all(-1))
        place = jnp.arange(num_guesses)
        kept = known[jnp.where(place < leaves, place, place + 1)[:-1]]
        return pool.at[bucket].set(jnp.append(kept, ngram[None], axis=0)), None

    return jax.lax.scan(add, pool, ngrams)[0]
