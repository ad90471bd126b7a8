"""What every drafter and every rule must keep; new modules are found by themselves.

A drafter is built as its module's `EXAMPLES` say (their output laws: tests/test_law.py).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax.drafters
import specjax.verify
from specjax.decode import generate, new_tokens, row_keys, start
from specjax.eval.exactness.subjects import made_up
from specjax.modules import may_judge
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.testing import side_by_side, tree_drafter
from specjax.types import (
    NO_PARENT,
    NO_TOKEN,
    ROOT,
    Context,
    Draft,
    ModelParams,
    Params,
    ProposalLaw,
    Target,
    Verdict,
    Warp,
)

pytestmark = pytest.mark.quick_compile

NEW_TOKENS = 24
CAPACITY = 64
NEVER = 99


def modules_of(package: ModuleType) -> dict[str, ModuleType]:
    names = [name for _, name, _ in pkgutil.iter_modules(package.__path__)]
    return {name: importlib.import_module(f"{package.__name__}.{name}") for name in names}


DRAFTERS = modules_of(specjax.drafters)
RULES = modules_of(specjax.verify)


EXAMPLES = {name: (module, c) for module in DRAFTERS.values() for name, c in module.EXAMPLES.items()}


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafter_modules_export_what_they_must(name: str) -> None:
    module = DRAFTERS[name]
    assert callable(module.build)
    assert module.EXAMPLES and all(isinstance(config, module.Config) for config in module.EXAMPLES.values())


@pytest.mark.parametrize("name", RULES)
def test_rule_modules_export_what_they_must(name: str) -> None:
    rule = RULES[name]
    assert isinstance(rule.LOSSLESS, bool)
    assert rule.LAWS and set(ProposalLaw) >= rule.LAWS
    assert callable(rule.verify)


class Row(NamedTuple):
    """One request: what it asks for, and the number that its key comes from."""

    prompt: tuple[int, ...]
    temperature: float
    top_k: int
    key: int


PLAIN = Row((5, 9, 2, 30), 0.0, 0, 0)
REPEATING = Row((3, 4, 5, 6, 3, 4, 5, 6, 3, 4), 0.0, 0, 1)
WARM = Row((7,), 1.0, 0, 2)
CUT = Row((1, 2, 1, 2, 1, 2, 1), 0.8, 5, 3)
REQUESTS = (PLAIN, REPEATING, WARM, CUT)
OTHERS = (Row((11,) * 30, 1.5, 3, 4), Row((0, 31), 0.0, 0, 5))


class Case:
    """A drafter on the tiny target under all its rules, side by side in one batch."""

    def __init__(self, name: str, target: Target, params: Params):
        module, example = EXAMPLES[name]
        self.drafter, weights = made_up(module, example, target, params, noise=0.05)
        self.params = ModelParams(params, weights)
        is_tree = not self.drafter.is_chain
        self.rules = [rule for rule in RULES.values() if may_judge(rule, self.drafter.law, is_tree)]
        assert self.rules, f"no rule may judge specjax.drafters.{name}"
        self.num_traces = 0
        # Once for each size of a pass and, where there are several, once for their shapes.
        sizes = len(self.drafter.sizes)
        self.expected_traces = 2 + sizes if sizes else 1

        def counted(*args, **kwargs):
            self.num_traces += 1
            return target.forward(*args, **kwargs)

        rule_of_row = np.repeat(np.arange(len(self.rules)), len(REQUESTS))
        verify = side_by_side([rule.verify for rule in self.rules], rule_of_row)
        self.target = target._replace(forward=counted)
        self.method = Method(self.target, self.drafter, verify)

    def rows(self, requests: Sequence[Row]) -> list[Row]:
        """The requests once for each rule, at temperature 0 where the rule is for that only."""
        found = []
        for rule in self.rules:
            for row in requests:
                is_greedy = getattr(rule, "TEMPERATURE_ZERO_ONLY", False)
                found.append(row._replace(temperature=0.0) if is_greedy else row)
        return found

    def decode(self, method: Method, rows: Sequence[Row]) -> tuple[list[list[int]], Any]:
        prompts = [row.prompt for row in rows]
        off = make_warp(len(rows))
        warp = Warp(
            jnp.asarray([row.temperature for row in rows]),
            jnp.asarray([row.top_k for row in rows]),
            off.top_p,
            off.min_p,
        )
        request, state = start(
            method,
            self.params,
            prompts,
            max_new_tokens=NEW_TOKENS,
            warp=warp,
            keys=row_keys(0, [row.key for row in rows]),
            stop_tokens=[NEVER],
            capacity=CAPACITY,
        )
        before = self.num_traces
        state, stats = generate(method, self.params, request, state)
        self.traces_of_generate = self.num_traces - before
        return new_tokens(state, prompts), stats


def examples() -> list[Any]:
    """The first and the last example of every drafter, which differ most; the last is slow."""
    names = [list(module.EXAMPLES) for module in DRAFTERS.values()]
    last = [pytest.param(own[-1], marks=pytest.mark.slow) for own in names if len(own) > 1]
    return [own[0] for own in names] + last


@pytest.fixture(scope="module", params=examples())
def case(request: pytest.FixtureRequest, tiny_target: Target, tiny_params: Params) -> Case:
    return Case(request.param, tiny_target, tiny_params)


@pytest.fixture(scope="module")
def written(case: Case) -> tuple[list[list[int]], Any]:
    """What the batch of all requests under all rules wrote."""
    found = case.decode(case.method, case.rows(REQUESTS))
    assert case.traces_of_generate == case.expected_traces
    return found


@pytest.fixture(scope="module")
def plain(tiny_target: Target, tiny_params: Params) -> dict[Row, list[int]]:
    """What plain decoding writes at temperature 0, one prompt at a time."""
    case = Case("ngram", tiny_target, tiny_params)
    method = Method(tiny_target)
    return {row: case.decode(method, [row._replace(temperature=0.0)])[0][0] for row in REQUESTS}


def test_at_temperature_0_every_rule_writes_what_plain_decoding_writes(
    case: Case, written, plain: dict[Row, list[int]]
) -> None:
    texts, stats = written
    rows = case.rows(REQUESTS)
    compared = 0
    for index, (row, text) in enumerate(zip(rows, texts, strict=True)):
        if row.temperature == 0:
            assert text == plain[REQUESTS[index % len(REQUESTS)]], row
            compared += 1
    assert compared >= 2 * len(case.rules)
    # Neither nothing nor everything was accepted, or the comparison would show little.
    accepted, tried = int(stats.accepted_at_depth.sum()), int(stats.tried_at_depth.sum())
    assert 0 < accepted < tried
    assert (np.asarray(stats.num_emitted) == NEW_TOKENS).all()


@pytest.mark.parametrize("replaced", [0, 1])
def test_a_row_does_not_depend_on_its_batch_mates(case: Case, written, replaced: int) -> None:
    rows = case.rows(REQUESTS)
    mixed = [
        OTHERS[i // 2 % 2]._replace(temperature=row.temperature) if i % 2 == replaced else row
        for i, row in enumerate(rows)
    ]
    texts, _ = case.decode(case.method, mixed)
    assert case.traces_of_generate == 0  # other prompts, lengths and temperatures: the same program
    for index in range(1 - replaced, len(rows), 2):
        assert texts[index] == written[0][index], rows[index]
    assert any(texts[i] != written[0][i] for i in range(replaced, len(rows), 2))


def test_a_row_alone_writes_what_it_writes_among_others(case: Case, written) -> None:
    last = len(case.rules) - 1
    method = Method(case.target, case.drafter, case.rules[last].verify)
    for number, row in enumerate(case.rows(REQUESTS)[last * len(REQUESTS) :]):
        texts, _ = case.decode(method, [row])
        assert texts[0] == written[0][last * len(REQUESTS) + number], row
        assert case.traces_of_generate == (case.expected_traces if number == 0 else 0)


def test_drafts_keep_the_contract(case: Case) -> None:
    rows = case.rows(REQUESTS)
    batch, drafter = len(rows), case.drafter
    prompts = [row.prompt for row in rows]
    warp = make_warp(batch)._replace(temperature=jnp.asarray([row.temperature for row in rows]))
    keys = row_keys(0, range(batch))
    options = {"warp": warp, "keys": keys, "stop_tokens": [NEVER], "capacity": CAPACITY}
    _, state = start(case.method, case.params, prompts, max_new_tokens=NEW_TOKENS, **options)
    context = Context(state.tokens, state.length, warp, cache=state.cache)
    draft, _ = jax.jit(drafter.propose)(case.params, keys, state.draft_state, context)
    shape = (batch, drafter.num_nodes)
    assert draft.tokens.shape == draft.parents.shape == shape
    assert draft.tokens.dtype == draft.parents.dtype == jnp.int32
    tokens, parents = np.asarray(draft.tokens), np.asarray(draft.parents)
    assert (parents[:, ROOT] == NO_PARENT).all()
    assert ((parents[:, 1:] >= ROOT) & (parents[:, 1:] < np.arange(1, drafter.num_nodes))).all()
    assert ((tokens[:, 1:] >= NO_TOKEN) & (tokens[:, 1:] < case.target.vocab_size)).all()
    depth = np.zeros(shape, int)
    for node in range(1, drafter.num_nodes):
        depth[:, node] = depth[np.arange(batch), parents[:, node]] + 1
    assert depth.max() == drafter.max_depth
    assert (draft.probs is None) == (drafter.law is ProposalLaw.POINT_MASS)
    if draft.probs is not None:
        assert draft.probs.shape == (*shape, case.target.vocab_size)
        drafted = np.argwhere(tokens[:, 1:] != NO_TOKEN)
        for row, node in {(int(r), int(parents[r, n + 1])) for r, n in drafted}:
            assert abs(float(draft.probs[row, node].sum()) - 1) < 1e-5
            assert (draft.probs[row, node] >= 0).all()


TREES = {
    ProposalLaw.POINT_MASS: (-1, 0, 1, 2),
    ProposalLaw.CHAIN: (-1, 0, 1, 2),
    ProposalLaw.IID_SIBLINGS: (-1, 0, 0, 1, 1, 2, 3),
    ProposalLaw.SIBLINGS_WITHOUT_REPLACEMENT: (-1, 0, 0, 1, 1, 2, 3),
}
PAIRS = [(name, law) for name, rule in RULES.items() for law in TREES if law in rule.LAWS]


@pytest.mark.parametrize(("name", "law"), PAIRS)
def test_verdicts_keep_the_contract(name: str, law: ProposalLaw) -> None:
    batch, vocab_size = 64, 6
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(vocab_size + 1, vocab_size, vocab_size)), jnp.float32)
    drafter = tree_drafter(table, TREES[law], law)
    keys = row_keys(0, range(batch))
    context = Context(
        jnp.asarray(rng.integers(0, 6, (batch, 4))), jnp.full((batch,), 2), make_warp(batch, 1.0)
    )
    logits = jnp.asarray(rng.normal(size=(batch, drafter.num_nodes, vocab_size)), jnp.float32)

    @jax.jit
    def judge(keys: jax.Array) -> tuple[Draft, Verdict]:
        draft, _ = drafter.propose({}, keys, {}, context)
        target_probs = jax.nn.softmax(logits)
        return draft, RULES[name].verify(keys, draft, target_probs, max_depth=drafter.max_depth)

    draft, verdict = judge(keys)
    assert verdict.path.shape == (batch, drafter.max_depth + 1)
    assert verdict.num_accepted.shape == verdict.next_token.shape == (batch,)
    assert {part.dtype for part in verdict} == {jnp.dtype(jnp.int32)}
    assert set(np.unique(verdict.num_accepted)) > {0, 1}
    assert ((verdict.next_token >= 0) & (verdict.next_token < vocab_size)).all()
    path, parents = np.asarray(verdict.path), np.asarray(draft.parents)
    assert ((path >= 0) & (path < drafter.num_nodes)).all()  # what means nothing still indexes a cache
    for row in range(batch):
        accepted = path[row, : int(verdict.num_accepted[row]) + 1]
        assert accepted[0] == ROOT
        assert parents[row, accepted[1:]].tolist() == accepted[:-1].tolist()
        assert (np.asarray(draft.tokens)[row, accepted] != NO_TOKEN).all()
    # The key decides, unless the rule draws nothing.
    if not getattr(RULES[name], "TEMPERATURE_ZERO_ONLY", False):
        _, again = judge(row_keys(1, range(batch)))
        assert again.next_token.tolist() != verdict.next_token.tolist()
