"""A step by its parts: the same tokens as the step, whatever the shape; a wrong part shows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from specjax.decode import row_keys
from specjax.eval import timing
from specjax.eval.compare import PLAIN, Batch, Settings, lay_out
from specjax.eval.exactness import subjects
from specjax.eval.timing import PARTS, STEP, Inputs, Parts, Programs
from specjax.step import Method
from specjax.testing import tabulated_target, tree_drafter
from specjax.types import DecodeState, ModelParams, ProposalLaw
from specjax.verify import multi_round, rejection

pytestmark = pytest.mark.quick_compile

TARGET_TABLE, DRAFT_TABLE = (jnp.asarray(table, jnp.float32) for table in subjects.random_tables())
TARGET = tabulated_target(TARGET_TABLE)
METHODS = {
    PLAIN: Method(TARGET),
    "chain": Method(TARGET, tree_drafter(DRAFT_TABLE, subjects.CHAIN, ProposalLaw.CHAIN), rejection.verify),
    "tree": Method(
        TARGET,
        tree_drafter(DRAFT_TABLE, subjects.TREE, ProposalLaw.IID_SIBLINGS),
        multi_round.verify,
    ),
}
SETTINGS = Settings(
    max_new_tokens=40, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, repeats=1, stop_tokens=()
)


@pytest.fixture(scope="module")
def programs() -> dict[str, Programs]:
    return {name: Programs(method, ModelParams({}, {})) for name, method in METHODS.items()}


@pytest.fixture(scope="module")
def parts() -> dict[str, Parts]:
    return {name: Parts(method) for name, method in METHODS.items() if name != PLAIN}


@pytest.fixture(scope="module")
def inputs(programs: dict[str, Programs]) -> dict[str, Inputs]:
    """Two rows of one method and another, compiled."""
    methods = {name: (program.method, program.params) for name, program in programs.items()}
    found = lay_out(methods, dict.fromkeys(methods, Batch((0, 1), ((1, 2, 3), (4,)))), SETTINGS)
    for name, program in programs.items():
        program.compile(found[name])
    return found


def three_steps(program: Programs, parts: Parts, inputs: Inputs) -> list[DecodeState]:
    """The state after three steps, a token each, and after their parts; rows that have ended go on."""
    whole, apart = (timing.middle(program, inputs) for _ in range(2))
    ended = inputs.request._replace(limit=whole.length)
    expected = whole.length + 3
    for _ in range(3):
        whole, _ = program.step(ended, whole)
        apart, seconds = parts.step(program.params, ended, apart)
        assert tuple(seconds) == PARTS
    assert (whole.length == expected).all() and (apart.length == expected).all()
    return [whole, apart]


def differ(one: DecodeState, other: DecodeState) -> bool:
    return not all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), one, other)))


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_parts_of_a_step_do_what_the_step_does(
    name: str,
    programs: dict[str, Programs],
    parts: dict[str, Parts],
    inputs: dict[str, Inputs],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not differ(*three_steps(programs[name], parts[name], inputs[name]))
    real, other_keys = parts[name]._accept, row_keys(1, [0, 1])
    monkeypatch.setattr(parts[name], "_accept", lambda judge: real((other_keys, *judge[1:])))
    assert differ(*three_steps(programs[name], parts[name], inputs[name]))


def test_every_part_is_timed_and_plain_decoding_has_none(
    programs: dict[str, Programs], parts: dict[str, Parts], inputs: dict[str, Inputs]
) -> None:
    seconds = timing.time_parts(programs, parts, inputs, num_rounds=2)
    assert tuple(seconds[PLAIN]) == (STEP,)
    assert tuple(seconds["chain"]) == tuple(seconds["tree"]) == (*PARTS, STEP)


def test_memory_counts_weights_once_and_grows_with_the_batch() -> None:
    weights = jnp.zeros(1000)
    peaks = []
    for size in (1, 4):
        program = Programs(METHODS["chain"], ModelParams({"w": weights}, {"also": weights}))
        batch = Batch(tuple(range(size)), ((1, 2, 3),) * size)
        (found,) = lay_out({"chain": (program.method, program.params)}, {"chain": batch}, SETTINGS).values()
        program.compile(found)
        memory = program.memory(found)
        assert memory["weights"] == weights.nbytes
        assert memory["peak"] > memory["weights"] + found.tokens.nbytes
        peaks.append(memory["peak"] - memory["weights"])
    assert 2 < peaks[1] / peaks[0] < 5
