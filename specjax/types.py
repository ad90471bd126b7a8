"""The contract: what is drafted, what is verified, and what a step carries and reports.

Axes, everywhere: B batch rows, N tree nodes, D tree depth, V vocabulary, F features, S cache slots.

Everything drafted is a tree; a chain is a tree of width 1. Node 0 (`ROOT`) is the pending token: the
last committed token, whose keys and values are not in the cache yet.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.errors import ConfigError

ROOT = 0
NO_PARENT = -1
# A node that holds no draft. It is never accepted and never indexes a table.
NO_TOKEN = -1

Params = Any  # nested dict of arrays
DraftState = Any  # whatever a drafter carries from round to round


class ProposalLaw(enum.Enum):
    """How the children of a node were chosen, which decides the rules that may judge them."""

    POINT_MASS = "point_mass"  # a deterministic function of the context
    CHAIN = "chain"  # one child, drawn from `Draft.probs` at its parent
    IID_SIBLINGS = "iid_siblings"
    SIBLINGS_WITHOUT_REPLACEMENT = "siblings_without_replacement"


class KVCache(NamedTuple):
    """Preallocated keys and values; slots at and beyond `length` are scratch for undecided nodes.

    `keys` and `values` hold one [B * Hkv, S, Dh] array per layer, or one [L, B * Hkv, S, Dh] array
    where the layers are stacked.
    """

    keys: tuple[Float[Array, "BH S Dh"], ...] | Float[Array, "L BH S Dh"]
    values: tuple[Float[Array, "BH S Dh"], ...] | Float[Array, "L BH S Dh"]
    length: Int[Array, "B"]


class Draft(NamedTuple):
    """A proposed tree: `tokens` [B, N] (node 0 pending), `parents` [B, N] with parents[i] < i.

    `probs` [B, N, V] is the drafter's law at each node for that node's children, after warping; the
    rows of nodes without a child that holds a token mean nothing. None says that every child is a point mass.
    """

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]
    probs: Float[Array, "B N V"] | None


class Verdict(NamedTuple):
    """What a rule decided: the accepted path and the token that follows it.

    `path` [B, D + 1] lists node indices from the root; entries beyond `num_accepted` mean nothing.
    `num_accepted` [B] counts accepted draft tokens, 0 to D. `next_token` [B] is the bonus or the
    resampled token.
    """

    path: Int[Array, "B D1"]
    num_accepted: Int[Array, "B"]
    next_token: Int[Array, "B"]


class ForwardOutput(NamedTuple):
    """One pass over N nodes: `logits` [B, N, V], the written `cache`, `features` by name [B, N, F]."""

    logits: Float[Array, "B N V"]
    cache: KVCache
    features: dict[str, Float[Array, "B N F"]]


class Warp(NamedTuple):
    """The sampling law of each row: `temperature` 0 is argmax; 0 `top_k`, 1 `top_p`, 0 `min_p` are off."""

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]


class Request(NamedTuple):
    """What each row asks for: `warp`, `limit` [B] in tokens (prompt included), and `stop_tokens` [E]."""

    warp: Warp
    limit: Int[Array, "B"]
    stop_tokens: Int[Array, "E"]


class DecodeState(NamedTuple):
    """What a step carries. The last of the `length` [B] tokens of a row is pending.

    `tokens` [B, T] holds prompt and output side by side; entries beyond `length` mean nothing.
    `keys` [B] are one PRNG key a row: a row's tokens never depend on its batch mates.
    """

    tokens: Int[Array, "B T"]
    length: Int[Array, "B"]
    done: Bool[Array, "B"]
    keys: Key[Array, "B"]
    cache: KVCache
    draft_state: DraftState


class StepInfo(NamedTuple):
    """What one target pass did for each row; all [B]. Rows that had already ended count zero.

    `num_accepted` and `num_emitted` exclude whatever fell after a stop token or beyond the limit.
    """

    active: Bool[Array, "B"]
    num_drafted: Int[Array, "B"]
    num_accepted: Int[Array, "B"]
    num_emitted: Int[Array, "B"]


class Forward(Protocol):
    """`forward(params, tokens, positions, mask, cache)` runs N nodes and writes their keys and values.

    `mask` [B, N, M] says which of the M scratch slots, from `cache.length` on, each node sees besides
    the whole cached prefix. The N nodes take the last N of those slots; the M - N before them hold
    nodes of earlier passes. `cache.length` itself is left as it was.
    """

    def __call__(
        self,
        params: Params,
        tokens: Int[Array, "B N"],
        positions: Int[Array, "B N"],
        mask: Bool[Array, "B N M"],
        cache: KVCache,
        features: tuple[str, ...] = (),
    ) -> ForwardOutput: ...


def not_offered(*arguments: Any) -> jax.Array:
    """Stands for the embedding and the head of a target that has none; raises ConfigError."""
    del arguments
    raise ConfigError("the target has no embedding and head that a drafter could share: choose another")


class Target(NamedTuple):
    """A language model as pure functions; `init_cache(batch, capacity)` makes its empty cache."""

    forward: Forward
    init_cache: Callable[[int, int], KVCache]
    vocab_size: int
    config: Any  # the architecture, for drafters that borrow from it
    dtype: Any
    # For drafters that share the target's embedding and head: params, tokens -> [.., H]; params,
    # hidden [.., H] -> logits [.., V]; params, tokens [K] -> the head's rows [K, H].
    embed: Callable[[Params, jax.Array], jax.Array] = not_offered
    unembed: Callable[[Params, jax.Array], jax.Array] = not_offered
    head_rows: Callable[[Params, jax.Array], jax.Array] = not_offered


class ModelParams(NamedTuple):
    """The weights of the pair; drafters without weights have an empty dict."""

    target: Params
    drafter: Params


class Effort(NamedTuple):
    """How much drafting each row is worth this round; both [B].

    At most `length` tokens, and none where the likeliest has less than `confidence` of the drafter's unwarped
    law. Both are known before the token that they forbid is drawn: what is left is a shorter draft, its
    tokens drawn from the same laws. Chains that are grown token by token save the time too.
    """

    length: Int[Array, "B"]
    confidence: Float[Array, "B"]


class Context(NamedTuple):
    """What a drafter may read: the committed `tokens` [B, T], `length` [B] and the rows' `warp`.

    `effort` is None where as much is to be drafted as there are nodes. `cache` is the target's where a draft
    is to be proposed: all of the context but the pending token.
    """

    tokens: Int[Array, "B T"]
    length: Int[Array, "B"]
    warp: Warp
    effort: Effort | None = None
    cache: KVCache | None = None


def keep_state(
    params: ModelParams,
    state: DraftState,
    context: Context,
    features: dict[str, jax.Array],
    first: Int[Array, "B"],
) -> DraftState:
    """The `Drafter.resume` of a drafter whose state may lag behind the context."""
    del params, context, features, first
    return state


class Drafter(NamedTuple):
    """A drafter as pure functions and static facts; `num_nodes == max_depth + 1` makes it a chain.

    `init(params, context, features, prompt_size)` reads the prompt, the first `prompt_size` columns of
    `context.tokens`, whose features [B, P, F] the prefill collected, and returns the first state.
    `propose(params, keys, state, context)` returns a draft, whose root the step fills in, and the state.
    `observe(params, state, draft, verdict, context, features)` sees what became of the draft, the context
    after it and the features of every node. `resume(params, state, context, features, first)` brings the
    state to a context that came about otherwise: behind position `first` [B], tokens came that were not
    observed, or some went that were; `features` [B, W, F] are those of W positions from `first` on.
    `sizes` are numbers of nodes below `num_nodes` for which a pass of its own is compiled: a round whose
    later nodes all hold `NO_TOKEN` takes the smallest that is enough. `written(state)` takes out of the state
    the target's cache after a draft that wrote into its scratch slots, and returns both; None where drafting
    leaves it alone. Such a draft may go `scratch` slots further than the pass that verifies it.
    """

    init: Callable[[ModelParams, Context, dict[str, jax.Array], int], DraftState]
    propose: Callable[[ModelParams, Key[Array, "B"], DraftState, Context], tuple[Draft, DraftState]]
    observe: Callable[[ModelParams, DraftState, Draft, Verdict, Context, dict[str, jax.Array]], DraftState]
    num_nodes: int
    max_depth: int
    law: ProposalLaw
    features: tuple[str, ...] = ()
    resume: Callable[
        [ModelParams, DraftState, Context, dict[str, jax.Array], Int[Array, "B"]], DraftState
    ] = keep_state
    sizes: tuple[int, ...] = ()
    written: Callable[[DraftState], tuple[KVCache, DraftState]] | None = None
    scratch: int = 0

    @property
    def is_chain(self) -> bool:
        """Whether its trees are chains."""
        return self.num_nodes == self.max_depth + 1


class Parts(NamedTuple):
    """What a drafter made of a drafter is built from.

    `inner` drafts for the target, or for the model in `model`, whose rule is `verify`. Its weights are
    `params.drafter["inner"]`, the model's `params.drafter["model"]`.
    """

    inner: Drafter
    model: Target | None = None
    verify: Verify | None = None


class Verify(Protocol):
    """`verify(keys, draft, target_probs, max_depth=D)` judges a draft against the target's warped law."""

    def __call__(
        self,
        keys: Key[Array, "B"],
        draft: Draft,
        target_probs: Float[Array, "B N V"],
        *,
        max_depth: int,
    ) -> Verdict: ...


class TrainingBatch(NamedTuple):
    """Texts to learn from: `tokens` [B, T], of which `length` [B] mean something in a row.

    `supervised` [B, T] says which tokens are to be foreseen. `features` [B, T, F] by name are the target's
    at each token; those of a row's last token may be missing and are then 0.
    """

    tokens: Int[Array, "B T"]
    supervised: Bool[Array, "B T"]
    length: Int[Array, "B"]
    features: dict[str, Float[Array, "B T F"]]


class Trainable(NamedTuple):
    """How a drafter learns. Its weights come in two parts: what is learned, and what is fixed beside it.

    `init(key, target_params, token_counts)` makes both, nested dicts with different names at the top;
    `token_counts` [V] says how often each token occurs in the data. `loss(params, batch, key)`, where
    `params.drafter` holds both parts, returns a scalar and scalars to report, means over the supervised
    tokens of the whole batch. It reads the target's `features`, which the loop provides.
    `units(target_params, token_counts, sizes)` says in what units weights are to learn (`training.units`),
    where not in 1: a nested dict with the names of what is learned; `sizes` [F] are the root mean squares
    of the features, by name.
    """

    init: Callable[[Key[Array, ""], Params, Int[np.ndarray, "V"]], tuple[Params, Params]]
    loss: Callable[
        [ModelParams, TrainingBatch, Key[Array, ""]], tuple[Float[Array, ""], dict[str, jax.Array]]
    ]
    features: tuple[str, ...]
    trains_target: bool = False
    units: Callable[[Params, Int[np.ndarray, "V"], dict[str, np.ndarray]], Params] | None = None
