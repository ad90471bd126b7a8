"""Every compiled rule against its reference in fractions: the joint law of drafts, path and next token.

Half a million rows an instance; the trees are drawn from the instance's exact law and fed to the jitted rule.
Chi-square over all cells (the rarest are pooled), corrected by Holm over the family;
a deviation of total variation 0.01 spread over the cells is found with a power above 0.9 on every
instance (`test_power`), and the rules for the wrong kind of sibling are found on every tree.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from fractions import Fraction
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from specjax.config import rule_options
from specjax.decode import row_keys
from specjax.eval.exactness import rational
from specjax.eval.exactness.reference import reference
from specjax.eval.exactness.statistics import chi_square, holm
from specjax.modules import find_module, may_judge, module_names
from specjax.types import Draft, ProposalLaw
from specjax.verify import multi_round, traversal, without_replacement

pytestmark = pytest.mark.slow

ROWS = 500_000
CHUNK = 100_000
LEVEL = 0.05
SURE = 1e-6
DEVIATION = 0.01

CHAIN, IID, WITHOUT, POINT_MASS = (
    ProposalLaw.CHAIN,
    ProposalLaw.IID_SIBLINGS,
    ProposalLaw.SIBLINGS_WITHOUT_REPLACEMENT,
    ProposalLaw.POINT_MASS,
)
TREE = (-1, 0, 0, 1, 1)
INSTANCES = [
    (POINT_MASS, (-1, 0, 1, 2)),
    (POINT_MASS, TREE),
    (CHAIN, (-1, 0, 1, 2)),
    (IID, TREE),
    (WITHOUT, TREE),
    (WITHOUT, (-1, 0, 0, 0, 3)),
]


def reference_of(name: str) -> rational.Rule:
    """The rule in fractions that the compiled rule of this name implements."""
    rule = reference(name, rule_options(name, {}))
    assert rule is not None, f"specjax.verify.{name} has no reference in fractions"
    return rule


class Case(NamedTuple):
    """An instance, its trees with their probabilities, and the compiled rules that may judge them."""

    instance: rational.Instance
    drawn: list[tuple[Fraction, tuple[int, ...]]]
    rules: dict[str, ModuleType]


@functools.cache
def make_case(number: int) -> Case:
    law, parents = INSTANCES[number]
    # Tables of small integers: zeros and equal laws are among the random ones.
    rng = random.Random(number)
    instance = rational.random_instance(rng, law, parents)
    while instance.vocab_size < 3:
        instance = rational.random_instance(rng, law, parents)
    if parents == TREE:
        instance = rational.toy_instance(law, parents)  # no zeros: here the wrong rules must show
    drawn = list(rational.drafts(instance))
    rules = {}
    for name in module_names("verify"):
        rule = find_module("verify", name)
        if may_judge(rule, law, is_tree=rational.depth(parents) < len(parents) - 1):
            rules[name] = rule
    return Case(instance, drawn, rules)


@functools.cache
def keys_of(seed: int, chunk: int) -> jax.Array:
    """The keys of a chunk's rows, the same for every rule."""
    return row_keys(seed, np.arange(chunk * CHUNK, (chunk + 1) * CHUNK))


def law_at(instance: rational.Instance, tokens: tuple[int, ...], table, node: int) -> tuple[Fraction, ...]:
    """The law of the table at a node of a drawn tree; uniform where the node holds nothing."""
    path = [node]
    while instance.parents[path[0]] >= 0:
        path.insert(0, instance.parents[path[0]])
    context = tuple(tokens[i] for i in path[1:])
    return table.get(context, (Fraction(1, instance.vocab_size),) * instance.vocab_size)


def sampled_counts(case: Case, verify: Callable, seed: int) -> np.ndarray:
    """How often each (tree, last accepted node, next token) came, [trees, N, V]."""
    instance, drawn, _ = case
    num_nodes, vocab_size = len(instance.parents), instance.vocab_size
    tokens = np.array([tree for _, tree in drawn], np.int32)
    laws = [
        np.array(
            [[law_at(instance, tree, table, i) for i in range(num_nodes)] for _, tree in drawn], np.float64
        ).astype(np.float32)
        for table in (instance.target, instance.draft)
    ]
    shares = np.array([float(probability) for probability, _ in drawn])
    which = np.random.default_rng(seed).choice(len(drawn), size=ROWS, p=shares / shares.sum())
    max_depth = rational.depth(instance.parents)
    parents = jnp.broadcast_to(jnp.asarray(instance.parents, jnp.int32)[None], (CHUNK, num_nodes))

    @jax.jit
    def judge(keys, which):
        draft_probs = None if instance.law is POINT_MASS else jnp.asarray(laws[1])[which]
        draft = Draft(jnp.asarray(tokens)[which], parents, draft_probs)
        verdict = verify(keys, draft, jnp.asarray(laws[0])[which], max_depth=max_depth)
        last = jnp.take_along_axis(verdict.path, verdict.num_accepted[:, None], axis=1)[:, 0]
        return (which * num_nodes + last) * vocab_size + verdict.next_token

    counts = np.zeros(len(drawn) * num_nodes * vocab_size, np.int64)
    for chunk, part in enumerate(which.reshape(-1, CHUNK)):
        keys = keys_of(seed, chunk)
        counts += np.bincount(np.asarray(judge(keys, jnp.asarray(part))), minlength=len(counts))
    return counts.reshape(len(drawn), num_nodes, vocab_size)


def exact_law(case: Case, rule: rational.Rule) -> np.ndarray:
    """The same cells' probabilities, exactly."""
    instance, drawn, _ = case
    number = {tokens: i for i, (_, tokens) in enumerate(drawn)}
    law = np.zeros((len(drawn), len(instance.parents), instance.vocab_size))
    for (tokens, path, next_token), mass in rational.verdict_law(rule, instance).items():
        law[number[tokens], path[-1], next_token] += float(mass)
    assert abs(law.sum() - 1) < 1e-12
    return law


def test_every_rule_has_the_joint_law_of_its_reference() -> None:
    found = {}
    for number in range(len(INSTANCES)):
        case = make_case(number)
        for name, rule in case.rules.items():
            law = exact_law(case, reference_of(name))
            counts = sampled_counts(case, rule.verify, seed=number)
            found[f"{name} {case.instance.law.value} {number}"] = chi_square(counts, law).p_value
    assert len(found) > 25
    rejected = holm(list(found.values()), LEVEL)
    assert not any(rejected), [pair for pair, bad in zip(found.items(), rejected, strict=True) if bad]


def test_rules_for_other_siblings_are_found() -> None:
    drawn_apart, drawn_together = make_case(3), make_case(4)
    assert drawn_apart.instance.law is IID and drawn_together.instance.law is WITHOUT
    for case, right, wrong in [
        (drawn_together, "without_replacement", multi_round),
        (drawn_together, "traversal_without_replacement", traversal),
        (drawn_apart, "multi_round", without_replacement),
    ]:
        counts = sampled_counts(case, wrong.verify, seed=9)
        assert chi_square(counts, exact_law(case, reference_of(right))).p_value < SURE


@pytest.mark.parametrize("number", range(len(INSTANCES)))
def test_power(number: int) -> None:
    case = make_case(number)
    for name in case.rules:
        law = exact_law(case, reference_of(name)).ravel()
        law = np.sort(law[law * ROWS >= 5])
        if len(law) < 2:
            continue  # a certain outcome: any other is found at once
        signs = np.where(np.arange(len(law)) % 2 == 0, 1.0, -1.0)
        gain, loss = law[signs > 0].sum(), law[signs < 0].sum()
        moved = np.where(signs > 0, DEVIATION * law / gain, -DEVIATION * law / loss)
        noncentrality = ROWS * (moved**2 / law).sum()
        degrees = len(law) - 1
        critical = stats.chi2.isf(LEVEL / 40, degrees)
        assert stats.ncx2.sf(critical, degrees, noncentrality) > 0.9, name
