"""The walk from the root: it follows what was chosen, and nothing that is not there."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from specjax.trees.descent import descend
from specjax.types import NO_PARENT, NO_TOKEN, Draft, Verdict

#        0 -> 1 (token 5) -> 3 (token 2)
#          -> 2 (token 6) -> 4 (token 2), 5 (token NO_TOKEN)
PARENTS = [NO_PARENT, 0, 0, 1, 2, 2]
TOKENS = [9, 5, 6, 2, 2, NO_TOKEN]


def walk(*choices: int) -> Verdict:
    """A walk of one row that chooses these tokens in turn."""
    draft = Draft(jnp.asarray([TOKENS]), jnp.asarray([PARENTS]), None)
    wanted = jnp.asarray(choices)
    return descend(draft, lambda depth, node: wanted[depth][None], max_depth=2)


@pytest.mark.parametrize(
    ("choices", "path", "next_token"),
    [
        ((6, 2, 7), [0, 2, 4], 7),
        ((5, 2, 7), [0, 1, 3], 7),
        ((5, 6, 7), [0, 1], 6),  # a token of another branch is no child
        ((2, 5, 7), [0], 2),  # a grandchild is no child
        ((9, 5, 7), [0], 9),  # the root is not its own child
        ((6, NO_TOKEN, 7), [0, 2], NO_TOKEN),  # an empty node carries nothing
    ],
)
def test_walk(choices: tuple[int, ...], path: list[int], next_token: int) -> None:
    verdict = walk(*choices)
    assert verdict.num_accepted.tolist() == [len(path) - 1]
    assert verdict.path[0, : len(path)].tolist() == path
    assert verdict.next_token.tolist() == [next_token]


def test_of_twins_the_first_is_taken() -> None:
    draft = Draft(jnp.asarray([[0, 4, 4]]), jnp.asarray([[NO_PARENT, 0, 0]]), None)
    verdict = descend(draft, lambda depth, node: jnp.asarray([4]), max_depth=1)
    assert verdict.path.tolist() == [[0, 1]] and verdict.num_accepted.tolist() == [1]
