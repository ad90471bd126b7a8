"""Vocabulary 8, blocks of 4 drafts without a bonus token, and a draft that is the target's row blurred.

`draft = (target + blur) / (1 + 8 blur)`: the blur is added to every entry and the row renormalised. That
reading is inferred: its total variation is 8 blur / (1 + 8 blur) times the row's distance from uniform, and
one mean distance, 0.20065, gives both published figures, 0.0486 at blur 0.04 and 0.1338 at blur 0.25. The
published 3.6328 and 3.0727 tokens kept per pass belong to a table that is not published and are not
reproduced: tables of ours with the same total variation keep more (what was tried: experiments/exactness).
Here the closed form of our own table is checked over 60 000 blocks, through the step, with a limit of 4 new
tokens that cuts the bonus.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.analysis.theory import acceptance_of, kept_per_block, total_variation
from specjax.decode import row_keys, start
from specjax.sampling import make_warp
from specjax.step import Method, step
from specjax.testing import side_by_side, tabulated_drafter, tabulated_target, unverified
from specjax.types import ModelParams
from specjax.verify import rejection

VOCAB = 8
BLOCK = 4
BLOCKS = 60_000
DISTANCE_FROM_UNIFORM = 0.20065
PUBLISHED_VARIATION = {0.04: 0.0486, 0.25: 0.1338}


def target_rows() -> np.ndarray:
    """A random table [V, V] of next-token laws, pulled towards uniform until its mean distance is right."""
    rows = np.random.default_rng(0).dirichlet(np.ones(VOCAB), VOCAB) - 1 / VOCAB
    return 1 / VOCAB + rows * DISTANCE_FROM_UNIFORM / (np.abs(rows).sum(1).mean() / 2)


def blurred(rows: np.ndarray, blur: float) -> np.ndarray:
    return (rows + blur) / (1 + VOCAB * blur)


def as_logits(rows: np.ndarray) -> jax.Array:
    """The same rows whatever came before."""
    return jnp.broadcast_to(jnp.log(jnp.asarray(rows, jnp.float32)), (VOCAB + 1, VOCAB, VOCAB))


@pytest.mark.slow
@pytest.mark.parametrize("blur", [0.04, 0.25])
def test_tokens_kept_per_pass_equal_the_closed_form(blur: float) -> None:
    rows = target_rows()
    assert rows.min() > 0
    draft = blurred(rows, blur)
    variation = total_variation(rows, draft).mean()
    assert round(float(variation), 4) == PUBLISHED_VARIATION[blur]

    rules = side_by_side([rejection.verify, unverified], np.repeat([0, 1], BLOCKS))
    method = Method(tabulated_target(as_logits(rows)), tabulated_drafter(as_logits(draft), BLOCK), rules)
    prompts = [[row % VOCAB] for row in range(2 * BLOCKS)]
    params = ModelParams({}, {})
    request, state = start(
        method,
        params,
        prompts,
        max_new_tokens=BLOCK,
        warp=make_warp(2 * BLOCKS, 1.0),
        keys=row_keys(0, range(2 * BLOCKS)),
        stop_tokens=[VOCAB],
        capacity=12,
    )
    _, info = jax.jit(step, static_argnums=0)(method, params, request, state)
    kept = np.asarray(info.num_emitted)
    mean, variance = kept_per_block(rows, draft, np.full(VOCAB, 1 / VOCAB), BLOCK)
    four_errors = 4 * (variance / BLOCKS) ** 0.5
    assert abs(kept[:BLOCKS].mean() - mean) < four_errors < 0.02
    # The negative control keeps whole blocks.
    assert (kept[BLOCKS:] == BLOCK).all() and mean + four_errors < BLOCK
    # At the first position, by starting token: acceptance is 1 - total variation of that row.
    first = np.asarray(info.num_accepted)[:BLOCKS].reshape(-1, VOCAB) > 0
    acceptance = acceptance_of(rows, draft)
    errors = (acceptance * (1 - acceptance) / len(first)) ** 0.5
    assert (np.abs(first.mean(0) - acceptance) < 4.5 * errors).all()
