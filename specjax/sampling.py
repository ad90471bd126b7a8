"""The sampling law of each row, and draws from it.

The order is that of transformers: temperature, then top-k, then top-p, then min-p.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.errors import ConfigError
from specjax.types import NO_TOKEN, Warp

SAMPLE_BLOCK = 256
# The most probable tokens among which the cuts of a law are looked for first.
NUM_BEST = 64


def make_warp(
    batch: int, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Warp:
    """The same law for every row: argmax unless a temperature is given.

    Raises ConfigError on a temperature or `top_k` below 0, `top_p` outside (0, 1], `min_p` outside [0, 1].
    """
    if not 0.0 <= temperature < float("inf"):
        raise ConfigError(f"temperature is {temperature}: give 0 (argmax) or a positive number")
    if top_k < 0:
        raise ConfigError(f"top_k is {top_k}: give 0 (off) or a positive number of tokens")
    if not 0.0 < top_p <= 1.0:
        raise ConfigError(f"top_p is {top_p}: give a number above 0 and at most 1 (off)")
    if not 0.0 <= min_p <= 1.0:
        raise ConfigError(f"min_p is {min_p}: give a number from 0 (off) to 1")
    return Warp(
        jnp.full((batch,), temperature, jnp.float32),
        jnp.full((batch,), top_k, jnp.int32),
        jnp.full((batch,), top_p, jnp.float32),
        jnp.full((batch,), min_p, jnp.float32),
    )


def warp_probs(logits: Float[Array, "B N V"], warp: Warp) -> Float[Array, "B N V"]:
    """Each row's law over the next token at each node; ties at a threshold are all kept."""
    logits = logits.astype(jnp.float32)
    vocab_size = logits.shape[-1]

    def per_row(values: Array) -> Array:
        return values[:, None, None]

    def sampled() -> Float[Array, "B N V"]:
        # The best logit becomes 0, so that no division overflows upwards.
        below_best = logits - logits.max(-1, keepdims=True)
        scaled = below_best / per_row(jnp.where(warp.temperature > 0, warp.temperature, 1.0))
        probs = jax.nn.softmax(scaled, axis=-1)
        cuts = (warp.top_k > 0) | (warp.top_p < 1) | (warp.min_p > 0)
        return jax.lax.cond(cuts.any(), lambda p: _cut(p, warp), lambda p: p, probs)

    def greedy() -> Float[Array, "B N V"]:
        return jax.nn.one_hot(argmax(logits), vocab_size, dtype=jnp.float32)

    is_greedy = warp.temperature == 0
    return jax.lax.cond(
        jnp.all(is_greedy),
        greedy,
        lambda: jnp.where(per_row(is_greedy), greedy(), sampled()),
    )


def _cut(probs: Float[Array, "B N V"], warp: Warp) -> Float[Array, "B N V"]:
    """Top-k, then top-p of what is left, then min-p of what is left, renormalised.

    The best few tokens nearly always tell where the cuts fall; only a row for which they do not is
    searched as a whole, and the others keep what they have, so that no row depends on its batch mates.
    """
    floor, is_known = _floor_among_best(probs, warp)
    kept = jnp.where(probs >= floor[..., None], probs, 0.0)
    if probs.shape[-1] > NUM_BEST:  # else the best are all there are
        kept = jax.lax.cond(
            is_known.all(),
            lambda: kept,
            lambda: jnp.where(is_known[..., None], kept, _cut_by_search(probs, warp)),
        )
    return kept / kept.sum(-1, keepdims=True)


def _floor_among_best(
    probs: Float[Array, "B N V"], warp: Warp
) -> tuple[Float[Array, "B N"], Bool[Array, "B N"]]:
    """The least probability that survives all cuts, and whether the best tokens alone decide it."""
    vocab_size = probs.shape[-1]
    num_best = min(NUM_BEST, vocab_size)
    # Behind the barrier, for XLA on CPU sorts the whole vocabulary where it sees slices of a top-k.
    best, _ = jax.lax.optimization_barrier(jax.lax.top_k(probs, num_best))
    top_k, top_p, min_p = (setting[:, None, None] for setting in (warp.top_k, warp.top_p, warp.min_p))
    has_top_k, has_top_p = top_k > 0, top_p < 1
    rank = jnp.arange(num_best)[None, None, :]
    # Ties with the last token that top-k keeps are kept too.
    last = jnp.take_along_axis(best, jnp.clip(top_k - 1, 0, num_best - 1), axis=-1)
    left = jnp.where(has_top_k & (best < last), 0.0, best)
    total = jnp.where(has_top_k, left.sum(-1, keepdims=True), probs.sum(-1, keepdims=True))
    first_of_equals = (best[..., None, :] > best[..., :, None]).sum(-1)
    before = jnp.where(rank > 0, jnp.cumsum(left, axis=-1) - left, 0.0)
    before = jnp.take_along_axis(before, first_of_equals, axis=-1)
    left = jnp.where(has_top_p & (before >= top_p * total), 0.0, left)
    left = jnp.where(left >= min_p * best[..., :1], left, 0.0)
    floor = jnp.where(left > 0, left, jnp.inf).min(-1)
    # Something below the floor must be in sight, or what is beyond might belong above it.
    is_known = (floor > best[..., -1]) & (top_k <= num_best)[..., 0]
    has_cut = (has_top_k | has_top_p | (min_p > 0))[..., 0]
    return jnp.where(has_cut, floor, 0.0), is_known | ~has_cut | (num_best == vocab_size)


def _cut_by_search(probs: Float[Array, "B N V"], warp: Warp) -> Float[Array, "B N V"]:
    """The cuts, without renormalising; each costs passes over the vocabulary and is skipped if unwanted."""

    def top_k(probs: Float[Array, "B N V"]) -> Float[Array, "B N V"]:
        wanted = jnp.where(warp.top_k > 0, warp.top_k, probs.shape[-1]).astype(jnp.float32)
        return _keep_top(probs, jnp.ones_like, jnp.minimum(wanted, probs.shape[-1])[:, None])

    def top_p(probs: Float[Array, "B N V"]) -> Float[Array, "B N V"]:
        # A row with top_p off keeps all, whatever the rounding of its sums.
        wanted = jnp.where(warp.top_p < 1, warp.top_p, 0.0)[:, None] * probs.sum(-1)
        kept = _keep_top(probs, lambda p: p, wanted)
        return jnp.where(warp.top_p[:, None, None] < 1, kept, probs)

    def min_p(probs: Float[Array, "B N V"]) -> Float[Array, "B N V"]:
        floor = warp.min_p[:, None, None] * probs.max(-1, keepdims=True)
        return jnp.where(probs >= floor, probs, 0.0)

    cuts = ((warp.top_k > 0, top_k), (warp.top_p < 1, top_p), (warp.min_p > 0, min_p))
    for is_on, cut in cuts:
        probs = jax.lax.cond(is_on.any(), cut, lambda p: p, probs)
    return probs


def _keep_top(
    probs: Float[Array, "B N V"],
    weigh: Callable[[Float[Array, "B N *V"]], Float[Array, "B N *V"]],
    wanted: Float[Array, "B #N"],
) -> Float[Array, "B N V"]:
    """Zero all but the most probable tokens, as few of them as together weigh at least `wanted`.

    Non-negative floats are ordered as their bit patterns are, so at most 31 halvings find the largest
    floor that leaves enough, without the sort that would cost more than the rest of a step. They end
    once no more than one token lies between the bounds: what a kept token weighs least tells.
    """

    def weight(floor: Int[Array, "B N"]) -> Float[Array, "B N"]:
        return jnp.where(probs >= _as_float(floor)[..., None], weigh(probs), 0.0).sum(-1)

    def is_open(search) -> Bool[Array, ""]:
        low, high, weight_low, weight_high = search
        has_two = weight_low - weight_high >= 1.5 * weigh(_as_float(low))
        return ((high - low > 1) & has_two).any()

    def halve(search):
        low, high, weight_low, weight_high = search
        middle = low + (high - low) // 2
        found = weight(middle)
        ok = found >= wanted
        return (
            jnp.where(ok, middle, low),
            jnp.where(ok, high, middle),
            jnp.where(ok, found, weight_low),
            jnp.where(ok, weight_high, found),
        )

    low = jnp.zeros(probs.shape[:-1], jnp.int32)
    high = jnp.full_like(low, jax.lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32) + 1)
    search = (low, high, weight(low), jnp.zeros(low.shape))
    floor = _as_float(jax.lax.while_loop(is_open, halve, search)[0])
    return jnp.where(probs >= floor[..., None], probs, 0.0)


def _as_float(bits: Int[Array, "*N"]) -> Float[Array, "*N"]:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def argmax(values: Float[Array, "*N V"]) -> Int[Array, "*N"]:
    """The first index of the largest value; two plain reductions vectorise where `jnp.argmax` does not."""
    size = values.shape[-1]
    is_best = values == values.max(-1, keepdims=True)
    return jnp.where(is_best, jnp.arange(size, dtype=jnp.int32), size - 1).min(-1)


def sample(keys: Key[Array, "B"], probs: Float[Array, "B V"]) -> Int[Array, "B"]:
    """One token a row, drawn from its (not necessarily normalised) law with the row's own key.

    The vocabulary is searched in two levels, each with a uniform of its own: 23 random bits would be
    too coarse for 100 000 tokens at once, and noise for every token would cost ten times as much.
    """
    batch, vocab_size = probs.shape
    width = min(SAMPLE_BLOCK, vocab_size)
    padded = jnp.pad(probs, ((0, 0), (0, -vocab_size % width)))
    blocks = padded.reshape(batch, -1, width)

    def draw(key: Key[Array, ""], blocks: Float[Array, "G W"]) -> Int[Array, ""]:
        which, within = jax.random.uniform(key, (2,))
        block = _invert(blocks.sum(-1), which)
        return block * width + _invert(blocks[block], within)

    return jax.vmap(draw)(keys, blocks).astype(jnp.int32)


def _invert(weights: Float[Array, "W"], uniform: Float[Array, ""]) -> Int[Array, ""]:
    """The index at which the running sum of the weights passes `uniform` times their total."""
    # Sums in parallel may rise by a rounding where a weight is 0: such an index is never drawn.
    sums = jnp.where(weights > 0, jnp.cumsum(weights), 0.0)
    return jnp.argmax(sums > uniform * sums.max())


def prob_of(probs: Float[Array, "B *N V"], tokens: Int[Array, "B *N"]) -> Float[Array, "B *N"]:
    """The probability of each token; `NO_TOKEN` has none."""
    found = jnp.take_along_axis(probs, jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(tokens == NO_TOKEN, 0.0, found)


def law_at(laws: Float[Array, "B N V"], nodes: Int[Array, "B"]) -> Float[Array, "B V"]:
    """The law at one node of each row."""
    return jnp.take_along_axis(laws, nodes[:, None, None], axis=1)[:, 0]


def residual(target_probs: Float[Array, "B V"], draft_probs: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """max(0, target - draft), normalised; where nothing is left the laws agree, and the target's is it."""
    left = jnp.maximum(target_probs - draft_probs, 0.0)
    mass = left.sum(-1, keepdims=True)
    return jnp.where(mass > 0, left / jnp.where(mass > 0, mass, 1.0), target_probs)


def point_mass(tokens: Int[Array, "*B"], vocab_size: int) -> Float[Array, "*B V"]:
    """The law of a certain token; that of `NO_TOKEN` is nothing, 0 everywhere."""
    return jax.nn.one_hot(tokens, vocab_size, dtype=jnp.float32)


def without(law: Float[Array, "B V"], tokens: Int[Array, "B"]) -> Float[Array, "B V"]:
    """The law without a token of each row, renormalised; 0 everywhere where nothing is left."""
    rest = jnp.where(jnp.arange(law.shape[-1])[None] == tokens[:, None], 0.0, law)
    mass = rest.sum(-1, keepdims=True)
    return rest / jnp.where(mass > 0, mass, 1.0)


def uniform(keys: Key[Array, "B"], num: int) -> Float[Array, "B K"]:
    """`num` numbers in [0, 1) for every row."""
    return jax.vmap(lambda key: jax.random.uniform(key, (num,)))(keys)


def split_keys(keys: Key[Array, "B"], num: int) -> tuple[Key[Array, "B"], ...]:
    """`num` new keys for every row."""
    split = jax.vmap(lambda key: jax.random.split(key, num))(keys)
    return tuple(split[:, i] for i in range(num))
