"""One round, looked at from inside: what the target is asked, what is emitted, and what is counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode import generate, new_tokens, row_keys, start
from specjax.sampling import make_warp
from specjax.step import Method, step
from specjax.testing import point_mass_drafter, tabulated_target, tree_drafter
from specjax.trees.topology import chain_parents, chain_path
from specjax.types import (
    NO_TOKEN,
    DecodeState,
    Draft,
    Drafter,
    ModelParams,
    ProposalLaw,
    Request,
    StepInfo,
    Target,
    Verdict,
)
from specjax.verify import rejection, target_only

VOCAB = 8
NO_WEIGHTS = ModelParams({}, {})
NEVER = 99
jitted_step = jax.jit(step, static_argnums=0)


@pytest.fixture(scope="module")
def table() -> jax.Array:
    return jnp.asarray(2 * np.random.default_rng(0).normal(size=(VOCAB + 1, VOCAB, VOCAB)), jnp.float32)


@pytest.fixture(scope="module")
def scripted(table: jax.Array) -> Method:
    """Row i of five accepts i of the drafts 1, 2, 3, 4 and goes on with 7."""
    return Method(tabulated_target(table), fixed_drafter([1, 2, 3, 4]), accepting(range(5), 7))


def fixed_drafter(tokens: Sequence[int]) -> Drafter:
    """A chain that proposes the same tokens in every round."""

    def propose(params, keys, state, context):
        batch = context.length.shape[0]
        rows = jnp.broadcast_to(jnp.asarray([NO_TOKEN, *tokens], jnp.int32), (batch, len(tokens) + 1))
        return Draft(rows, chain_parents(batch, len(tokens) + 1), None), state

    return Drafter(
        init=lambda params, context, features, prompt_size: {},
        propose=propose,
        observe=lambda params, state, draft, verdict, context, features: state,
        num_nodes=len(tokens) + 1,
        max_depth=len(tokens),
        law=ProposalLaw.POINT_MASS,
    )


def accepting(counts: Sequence[int], next_token: int) -> Callable[..., Verdict]:
    """A rule that accepts in each row so many drafts of a chain, whatever they are."""

    def verify(keys, draft, target_probs, *, max_depth):
        accepted = jnp.asarray(counts, jnp.int32)
        return Verdict(chain_path(len(counts), max_depth), accepted, jnp.full_like(accepted, next_token))

    return verify


def one_round(
    method: Method, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_token: int = NEVER
) -> tuple[Request, DecodeState, StepInfo]:
    request, state = start(
        method,
        NO_WEIGHTS,
        prompts,
        max_new_tokens=max_new_tokens,
        warp=make_warp(len(prompts)),
        keys=row_keys(0, range(len(prompts))),
        stop_tokens=[stop_token],
        capacity=24,
    )
    state, info = jitted_step(method, NO_WEIGHTS, request, state)
    return request, state, info


def counts(info: StepInfo) -> list[list[int]]:
    """Drafted, accepted and emitted, row by row."""
    return np.stack((info.num_drafted, info.num_accepted, info.num_emitted), axis=1).tolist()


def test_positions_tokens_and_mask_that_the_target_is_given(table: jax.Array) -> None:
    target = tabulated_target(table)
    asked = []

    def spy(params, tokens, positions, mask, cache, features=()):
        if tokens.shape[1] == 5:  # the tree, not the prompts
            jax.debug.callback(
                lambda *seen: asked.append(jax.tree.map(np.asarray, seen)), tokens, positions, mask
            )
        return target.forward(params, tokens, positions, mask, cache, features)

    parents = (-1, 0, 0, 1, 3)
    drafter = tree_drafter(table, parents, ProposalLaw.POINT_MASS)
    method = Method(target._replace(forward=spy), drafter, target_only.verify)
    prompts = [[3], [1, 2, 3, 4], [5, 6]]
    request, state, _ = one_round(method, prompts, max_new_tokens=9)
    jax.effects_barrier()
    ((tokens, positions, mask),) = asked
    assert tokens[:, 0].tolist() == [3, 4, 6]  # the pending token is the last of the prompt
    assert positions.tolist() == [[n - 1, n, n, n + 1, n + 2] for n in (1, 4, 2)]
    assert mask[1].astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]
    length = np.asarray(state.length)
    assert np.asarray(state.cache.length).tolist() == (length - 1).tolist()
    pending = np.asarray(state.tokens)[np.arange(3), length - 1]
    jitted_step(method, NO_WEIGHTS, request, state)
    jax.effects_barrier()
    tokens, positions, _ = asked[1]
    assert tokens[:, 0].tolist() == pending.tolist()
    assert positions[:, 0].tolist() == (length - 1).tolist()


def test_bonus_token_is_drawn_from_the_warped_law(table: jax.Array) -> None:
    # Top-1 leaves the argmax at temperature 2 too; a raw draw would leave it in most of 64 rows.
    drafter = point_mass_drafter(table, 2)
    method = Method(tabulated_target(table), drafter, rejection.verify)
    prompts = [[row % VOCAB] for row in range(64)]
    warp = make_warp(64, temperature=2.0, top_k=1)
    request, state = start(
        method, NO_WEIGHTS, prompts, max_new_tokens=9, warp=warp, keys=row_keys(0, range(64)), capacity=24
    )
    state, stats = generate(method, NO_WEIGHTS, request, state)
    assert (np.asarray(stats.num_steps) == 3).all()  # each step: two drafts and the bonus
    for prompt, row in zip(prompts, new_tokens(state, prompts), strict=True):
        previous, current = VOCAB, prompt[0]
        for token in row:
            previous, current = current, int(table[previous, current].argmax())
            assert token == current


@pytest.mark.parametrize(
    ("accepted", "stop", "limit", "emitted", "counted", "done"),
    [
        (2, NEVER, 9, [1, 2, 7], [4, 2, 3], False),  # refused at the third
        (4, NEVER, 9, [1, 2, 3, 4, 7], [4, 4, 5], False),  # all, and the bonus
        (0, NEVER, 9, [7], [4, 0, 1], False),
        (4, 3, 9, [1, 2, 3], [3, 3, 3], True),  # a stop token inside the draft
        (2, 3, 9, [1, 2, 7], [4, 2, 3], False),  # a stop token that was not accepted
        (2, 7, 9, [1, 2, 7], [4, 2, 3], True),  # the resampled token stops
        (4, NEVER, 3, [1, 2, 3], [3, 3, 3], True),  # the limit inside the draft
        (4, NEVER, 4, [1, 2, 3, 4], [4, 4, 4], True),  # the limit cuts the bonus token only
        (4, NEVER, 5, [1, 2, 3, 4, 7], [4, 4, 5], True),
        (2, NEVER, 3, [1, 2, 7], [4, 2, 3], True),
        (4, 4, 2, [1, 2], [2, 2, 2], True),  # a stop token behind the limit
    ],
)
def test_emission_is_cut_and_counted(
    scripted: Method, accepted: int, stop: int, limit: int, emitted: list[int], counted: list[int], done: bool
) -> None:
    prompts = [[0], [5, 6, 5], [1], [1, 2], [3, 3]]
    _, state, info = one_round(scripted, prompts, limit, stop)
    assert new_tokens(state, prompts)[accepted] == emitted
    assert counts(info)[accepted] == counted
    assert state.done.tolist()[accepted] == done
    assert info.active.all()


def test_empty_nodes_are_not_counted_as_drafts(table: jax.Array) -> None:
    method = Method(tabulated_target(table), fixed_drafter([1, NO_TOKEN, NO_TOKEN]), rejection.verify)
    _, _, info = one_round(method, [[0]], 9)
    assert info.num_drafted.tolist() == [1]


def test_rows_that_have_ended_stay_as_they_are_and_count_nothing(table: jax.Array) -> None:
    method = Method(tabulated_target(table), fixed_drafter([1, 2]), accepting([2, 2], 7))
    prompts = [[0], [5, 6]]
    request, state, _ = one_round(method, prompts, 9, stop_token=2)
    assert state.done.all()
    again, info = jitted_step(method, NO_WEIGHTS, request, state)
    assert counts(info) == [[0, 0, 0]] * 2 and not info.active.any()
    assert new_tokens(again, prompts) == new_tokens(state, prompts) == [[1, 2]] * 2
    assert again.length.tolist() == state.length.tolist()
    assert again.cache.length.tolist() == state.cache.length.tolist()


def test_plain_step_emits_one_token_and_drafts_none(table: jax.Array) -> None:
    target: Target = tabulated_target(table)
    _, state, info = one_round(Method(target), [[3], [1, 2]], 9)
    wanted = [[int(table[VOCAB, 3].argmax())], [int(table[1, 2].argmax())]]
    assert new_tokens(state, [[3], [1, 2]]) == wanted
    assert counts(info) == [[0, 0, 1]] * 2
