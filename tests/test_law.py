"""The output law of every lossless rule, through the step itself, against exact enumeration.

Vocabulary 8; every row of a batch is one sample of the first three new tokens. The headline (rejection on
a drawn chain at temperature 1, 60 000 rows) must stay under the 5 % critical values of chi-square; all
other laws, of which there are more than a hundred, must have p > 1e-5, so that a sound suite fails on one
seed in a thousand, and the seed is fixed. A deviation of total variation 0.01 spread over one marginal is
found in the headline with a power above 0.9 (`test_power`), and each negative control, unverified drafts
and broken rules, positions, masks and commits, must be rejected with p < 1e-6.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import specjax.verify
from specjax import cache as kv
from specjax.decode import generate, row_keys, start
from specjax.sampling import sample
from specjax.step import Method
from specjax.testing import (
    point_mass_drafter,
    side_by_side,
    tabulated_drafter,
    tabulated_target,
    tree_drafter,
    unverified,
)
from specjax.types import Drafter, ModelParams, ProposalLaw, Target, Verdict, Warp
from specjax.verify import rejection

VOCAB = 8
NEW_TOKENS = 3
RULES = {
    name: importlib.import_module(f"specjax.verify.{name}")
    for _, name, _ in pkgutil.iter_modules(specjax.verify.__path__)
}
NO_WEIGHTS = ModelParams({}, {})
CRITICAL_5_PERCENT = 14.07  # chi-square with 7 degrees of freedom
NEVER = (VOCAB,)  # a stop token that no row meets
SEED = 1000  # of the headline
SURE = 1e-6
SUSPECT = 1e-5


class Group(NamedTuple):
    """Rows that share a law: their warp, prompt and number."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    prompt: tuple[int, ...]
    rows: int


class Sample(NamedTuple):
    """The new tokens [rows, 3] of a group."""

    group: Group
    tokens: np.ndarray


HEADLINE_ROWS = 60_000
# Each batch has equally many rows, so that a test compiles once; cuts cost most, so they share a batch.
ROWS = 10_000
BATCHES = (
    (Group(1.0, 0, 1.0, 0.0, (3,), ROWS),),
    (Group(0.5, 0, 1.0, 0.0, (1, 2), ROWS),),
    (Group(1.5, 0, 1.0, 0.0, (7, 0, 5), ROWS),),
    (
        Group(1.0, 4, 1.0, 0.0, (2,), ROWS // 4),
        Group(0.7, 0, 0.8, 0.0, (4, 4), ROWS // 4),
        Group(1.3, 0, 1.0, 0.15, (6,), ROWS // 4),
        Group(1.2, 6, 0.9, 0.05, (0, 1), ROWS // 4),
    ),
)
HALF_TEMPERATURE = BATCHES[1]


def random_tables() -> tuple[np.ndarray, np.ndarray]:
    """The logits of a target and of a drafter that resembles it, [V + 1, V, V]."""
    rng = np.random.default_rng(0)
    target = 1.2 * rng.normal(size=(VOCAB + 1, VOCAB, VOCAB))
    return target, target + 0.8 * rng.normal(size=target.shape)


TARGET_TABLE, DRAFT_TABLE = random_tables()
# Two drafts deep, so that the bonus token and cuts at the limit are among the three new tokens.
TREE = (-1, 0, 0, 1, 1, 2)
DRAFTERS = {
    "chain": tabulated_drafter(jnp.asarray(DRAFT_TABLE, jnp.float32), 2),
    "point_mass_chain": point_mass_drafter(jnp.asarray(TARGET_TABLE, jnp.float32), 2),
    "point_mass_tree": tree_drafter(jnp.asarray(DRAFT_TABLE, jnp.float32), TREE, ProposalLaw.POINT_MASS),
    "iid_tree": tree_drafter(jnp.asarray(DRAFT_TABLE, jnp.float32), TREE, ProposalLaw.IID_SIBLINGS),
    "tree_without_replacement": tree_drafter(
        jnp.asarray(DRAFT_TABLE, jnp.float32), TREE, ProposalLaw.SIBLINGS_WITHOUT_REPLACEMENT
    ),
}
TREE_LAWS = {ProposalLaw.IID_SIBLINGS, ProposalLaw.SIBLINGS_WITHOUT_REPLACEMENT}


def fitting_rules(drafter: Drafter) -> list[str]:
    """The lossless rules above temperature 0 that may judge the drafter; rules for chains get no tree."""
    is_chain = drafter.num_nodes == drafter.max_depth + 1
    return [
        name
        for name, rule in RULES.items()
        if rule.LOSSLESS
        and not getattr(rule, "TEMPERATURE_ZERO_ONLY", False)
        and drafter.law in rule.LAWS
        and (is_chain or rule.LAWS & TREE_LAWS)
    ]


def warped(logits: np.ndarray, group: Group) -> np.ndarray:
    """One law [V], by sorting and in float64: independent of `specjax.sampling`."""
    probs = np.exp((logits - logits.max()) / group.temperature)
    probs /= probs.sum()
    order = np.argsort(-probs)
    if group.top_k:
        probs[order[group.top_k :]] = 0.0
    mass_before = np.cumsum(probs[order]) - probs[order]
    probs[order[mass_before >= group.top_p * probs.sum()]] = 0.0
    probs[probs < group.min_p * probs.max()] = 0.0
    return probs / probs.sum()


def exact_law(table: np.ndarray, group: Group) -> np.ndarray:
    """The joint law [V, V, V] of the first three new tokens."""
    law = np.array([[warped(row, group) for row in rows] for rows in table])
    previous = group.prompt[-2] if len(group.prompt) > 1 else VOCAB
    first = law[previous, group.prompt[-1]]
    second = law[group.prompt[-1]]
    return first[:, None, None] * second[:, :, None] * law[:VOCAB]


def sampled(method: Method, batch: Sequence[Group], seed: int, repeats: int = 1) -> list[Sample]:
    """The new tokens of every group, from one generation; all groups in turn for each of `repeats` rules."""
    groups = list(batch) * repeats
    rows = [group.rows for group in groups]
    columns = [np.repeat(column, rows) for column in list(zip(*groups, strict=True))[:4]]
    warp = Warp(*(jnp.asarray(c, jnp.int32 if c.dtype.kind == "i" else jnp.float32) for c in columns))
    prompts = [group.prompt for group in groups for _ in range(group.rows)]
    request, state = start(
        method,
        NO_WEIGHTS,
        prompts,
        max_new_tokens=NEW_TOKENS,
        warp=warp,
        keys=row_keys(seed, range(len(prompts))),
        stop_tokens=NEVER,
        capacity=12,
    )
    state, _ = generate(method, NO_WEIGHTS, request, state)
    assert (np.asarray(state.length) == np.asarray(request.limit)).all()
    pieces = np.split(np.asarray(state.tokens), np.cumsum(rows)[:-1])
    return [
        Sample(group, piece[:, len(group.prompt) :][:, :NEW_TOKENS])
        for group, piece in zip(groups, pieces, strict=True)
    ]


def assert_lossless(name: str, samples: Sequence[Sample]) -> None:
    for group, tokens in samples:
        assert min(p_values(tokens, group)) > SUSPECT, (name, group)


def assert_caught(name: str, samples: Sequence[Sample]) -> None:
    for group, tokens in samples:
        assert min(p_values(tokens, group)) < SURE, (name, group)


def counts_of(tokens: np.ndarray) -> np.ndarray:
    """How often each triple came, [V, V, V]."""
    return np.bincount(tokens @ [VOCAB**2, VOCAB, 1], minlength=VOCAB**3).reshape((VOCAB,) * 3)


def chi_square(counts: np.ndarray, law: np.ndarray) -> tuple[float, float]:
    """Pearson's statistic and its p-value; cells expected fewer than 5 times are pooled."""
    expected = (law * counts.sum()).ravel()
    counts = counts.ravel()
    if counts[expected == 0].any():
        return np.inf, 0.0  # a token that the law excludes
    small = expected < 5
    expected = np.append(expected[~small], expected[small].sum())
    counts = np.append(counts[~small], counts[small].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return statistic, float(stats.chi2.sf(statistic, len(counts) - 1))


def marginals(joint: np.ndarray) -> list[np.ndarray]:
    """The law or the counts of each of the three positions."""
    return [joint.sum(axis=tuple(j for j in range(NEW_TOKENS) if j != i)) for i in range(NEW_TOKENS)]


def p_values(tokens: np.ndarray, group: Group) -> list[float]:
    """Of each position's marginal and of the joint law."""
    counts, law = counts_of(tokens), exact_law(TARGET_TABLE, group)
    pairs = [*zip(marginals(counts), marginals(law), strict=True), (counts, law)]
    return [chi_square(*pair)[1] for pair in pairs]


def total_variation(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first - second).sum() / 2)


def kl(first: np.ndarray, second: np.ndarray) -> float:
    held = first > 0
    return float((first[held] * np.log(first[held] / second[held])).sum())


@pytest.fixture(scope="module")
def target() -> Target:
    return tabulated_target(jnp.asarray(TARGET_TABLE, jnp.float32))


def bonus_from_unwarped_logits(keys, draft, target_probs, *, max_depth) -> Verdict:
    """Broken: where all were accepted, the next token ignores the temperature 0.5."""
    verdict = rejection.verify(keys, draft, target_probs, max_depth=max_depth)
    bonus = sample(keys, jnp.sqrt(target_probs[:, -1]))
    is_full = verdict.num_accepted == max_depth
    return verdict._replace(next_token=jnp.where(is_full, bonus, verdict.next_token))


def no_residual(keys, draft, target_probs, *, max_depth) -> Verdict:
    """Broken: a refusal resamples from the target's whole law."""
    verdict = rejection.verify(keys, draft, target_probs, max_depth=max_depth)
    law = jnp.take_along_axis(target_probs, verdict.num_accepted[:, None, None], axis=1)[:, 0]
    return verdict._replace(next_token=sample(keys, law))


BROKEN = [unverified, bonus_from_unwarped_logits, no_residual]


class Trial(NamedTuple):
    """A drafter judged by several rules at once, and the names of those that claim to be lossless."""

    method: Method
    names: list[str]
    num_rules: int

    def samples(self, batch: Sequence[Group], seed: int) -> list[list[Sample]]:
        """The samples of every rule, the lossless ones first."""
        found = sampled(self.method, batch, seed, repeats=self.num_rules)
        return [found[i : i + len(batch)] for i in range(0, len(found), len(batch))]


def make_trial(target: Target, kind: str, broken: Sequence[Callable[..., Verdict]]) -> Trial:
    names = fitting_rules(DRAFTERS[kind])
    rules = [*(RULES[name].verify for name in names), *broken]
    judge = side_by_side(rules, np.repeat(np.arange(len(rules)), ROWS))
    return Trial(Method(target, DRAFTERS[kind], judge), names, len(rules))


@pytest.fixture(scope="module")
def chain_trial(target: Target) -> Trial:
    return make_trial(target, "chain", BROKEN)


def test_headline(chain_trial: Trial) -> None:
    rejected = chain_trial.names.index("rejection")
    control = len(chain_trial.names)  # `unverified`, the first of the broken ones
    group = BATCHES[0][0]
    runs = [chain_trial.samples([group], seed=SEED + run) for run in range(HEADLINE_ROWS // ROWS)]
    counts, unverified_counts = (
        counts_of(np.concatenate([run[rule][0].tokens for run in runs])) for rule in (rejected, control)
    )
    law = exact_law(TARGET_TABLE, group)
    for found, wanted in zip(marginals(counts), marginals(law), strict=True):
        assert chi_square(found, wanted)[0] < CRITICAL_5_PERCENT
        assert total_variation(found / HEADLINE_ROWS, wanted) < 0.01
        assert kl(found / HEADLINE_ROWS, wanted) < 0.01
    assert chi_square(counts, law)[1] > 0.05
    assert kl(counts / HEADLINE_ROWS, law) < 0.01

    first_unverified = marginals(unverified_counts)[0]
    assert chi_square(first_unverified, marginals(law)[0])[0] > 100 * CRITICAL_5_PERCENT
    assert total_variation(first_unverified / HEADLINE_ROWS, marginals(law)[0]) > 0.01


@pytest.mark.parametrize("batch", BATCHES)
def test_chain_by_every_rule_and_by_broken_ones(chain_trial: Trial, batch: Sequence[Group]) -> None:
    assert {"rejection", "target_only"} <= set(chain_trial.names)
    results = chain_trial.samples(batch, seed=100)
    for name, samples in zip(chain_trial.names, results, strict=False):
        assert_lossless(name, samples)
    control, *others = results[len(chain_trial.names) :]
    assert_caught("unverified", control)
    if batch == HALF_TEMPERATURE:
        for rule, samples in zip(BROKEN[1:], others, strict=True):
            assert_caught(rule.__name__, samples)


def kinds() -> list[Any]:
    """The other drafters; those whose law no rule looks at say little more than the first and are slow."""
    slow = {
        kind for kind in ("iid_tree", "tree_without_replacement") if len(fitting_rules(DRAFTERS[kind])) < 2
    }
    return [
        pytest.param(kind, marks=pytest.mark.slow if kind in slow else ())
        for kind in DRAFTERS
        if kind != "chain"
    ]


@pytest.mark.parametrize("kind", kinds())
def test_law_of_every_rule(target: Target, kind: str) -> None:
    trial = make_trial(target, kind, [unverified])
    assert "target_only" in trial.names
    for seed, batch in enumerate(BATCHES, start=10):
        *lossless, control = trial.samples(batch, seed)
        for name, samples in zip(trial.names, lossless, strict=True):
            assert_lossless(name, samples)
        assert_caught("unverified", control)


def test_power() -> None:
    for law in marginals(exact_law(TARGET_TABLE, BATCHES[0][0])):
        # Total variation 0.01, spread over the vocabulary in proportion to the law.
        order = np.argsort(law)
        signs = np.where(np.isin(np.arange(VOCAB), order[::2]), 1.0, -1.0)
        gain, loss = law[signs > 0].sum(), law[signs < 0].sum()
        deviation = np.where(signs > 0, 0.01 * law / gain, -0.01 * law / loss)
        noncentrality = HEADLINE_ROWS * (deviation**2 / law).sum()
        assert stats.ncx2.sf(CRITICAL_5_PERCENT, VOCAB - 1, noncentrality) > 0.9


def test_plain_decoding_has_the_law_too(target: Target) -> None:
    for seed, batch in enumerate(BATCHES):
        assert_lossless("plain", sampled(Method(target), batch, seed=20 + seed))


def with_broken_forward(target: Target, change: Callable[..., tuple]) -> Target:
    def forward(params, tokens, positions, mask, cache, features=()):
        return target.forward(params, tokens, *change(positions, mask), cache, features)

    return target._replace(forward=forward)


def late_positions(positions, mask):
    return jnp.where(jnp.arange(positions.shape[1])[None, :] > 0, positions + 1, positions), mask


def everything_seen(positions, mask):
    return positions, jnp.ones_like(mask)


def never_compacted(right, cache, num_kept, path=None):
    return cache._replace(length=cache.length + num_kept)


def one_too_few(right, cache, num_kept, path=None):
    return right(cache, num_kept, path)._replace(length=cache.length + num_kept - 1)


@pytest.mark.slow
@pytest.mark.parametrize("change", [late_positions, everything_seen])
def test_wrong_nodes_are_caught(target: Target, change: Callable[..., tuple]) -> None:
    broken = with_broken_forward(target, change)
    method = Method(broken, DRAFTERS["point_mass_tree"], RULES["target_only"].verify)
    assert_caught("plumbing", sampled(method, BATCHES[0], seed=30))


@pytest.mark.parametrize("commit", [never_compacted, pytest.param(one_too_few, marks=pytest.mark.slow)])
def test_wrong_commits_are_caught(
    target: Target, monkeypatch: pytest.MonkeyPatch, commit: Callable[..., Any]
) -> None:
    right = kv.commit
    monkeypatch.setattr(kv, "commit", functools.partial(commit, right))
    method = Method(target, DRAFTERS["point_mass_tree"], RULES["target_only"].verify)
    assert_caught("plumbing", sampled(method, BATCHES[0], seed=31))
