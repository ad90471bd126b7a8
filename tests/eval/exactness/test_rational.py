"""The rules in fractions: lossless exactly where they say so, and their negative controls.

Equality here is equality of fractions: one wrong term in a rule shows in every digit.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from fractions import Fraction
from functools import partial

import pytest

from specjax.eval.exactness.rational import (
    Instance,
    Node,
    Rule,
    drafts,
    expected_accepted,
    output_law,
    random_instance,
    target_law,
    total_variation,
    toy_instance,
    tree_of,
    verdict_law,
)
from specjax.eval.exactness.rational_rules import (
    RULES,
    block,
    greedy,
    multi_round,
    rejection,
    target_only,
    traversal,
    typical,
    without_replacement,
)
from specjax.types import NO_TOKEN, ProposalLaw

POINT_MASS = ProposalLaw.POINT_MASS
CHAIN = ProposalLaw.CHAIN
IID = ProposalLaw.IID_SIBLINGS
WITHOUT = ProposalLaw.SIBLINGS_WITHOUT_REPLACEMENT

traversal_iid = partial(traversal, is_without_replacement=False)
traversal_without = partial(traversal, is_without_replacement=True)
medusa = partial(typical, epsilon=Fraction("0.09"), delta=Fraction("0.3"))
lenient = partial(rejection, lenience=Fraction(1, 2))

# Every lossless rule above temperature 0 and the laws that it may judge.
LOSSLESS: dict[str, tuple[Rule, tuple[ProposalLaw, ...]]] = {
    "target_only": (target_only, tuple(ProposalLaw)),
    "rejection": (rejection, (CHAIN, POINT_MASS)),
    "block": (block, (CHAIN, POINT_MASS)),
    "multi_round": (multi_round, (POINT_MASS, CHAIN, IID)),
    "without_replacement": (without_replacement, (POINT_MASS, CHAIN, WITHOUT)),
    "traversal_iid": (traversal_iid, (POINT_MASS, CHAIN, IID)),
    "traversal_without": (traversal_without, (POINT_MASS, CHAIN, WITHOUT)),
}
PAIRS = [(name, law) for name, (_, laws) in LOSSLESS.items() for law in laws]
CHAINS_ONLY = {"rejection", "block"}
# Trees whose later siblings have no more below them than the earlier ones.
DEEPEST_FIRST = [(-1, 0, 1, 1), (-1, 0, 0, 1, 1), (-1, 0, 0, 1, 2), (-1, 0, 1, 1, 2)]
INSTANCES = 200


def chain(length: int) -> tuple[int, ...]:
    return tuple(range(-1, length))


def instances(law: ProposalLaw, number: int, only_chains: bool = False, seed: int = 0) -> list[Instance]:
    rng = random.Random(seed)
    return [
        random_instance(rng, law, chain(rng.randint(1, 3)) if only_chains else None) for _ in range(number)
    ]


def toy(law: ProposalLaw, parents: tuple[int, ...] = (-1, 0, 0, 1, 1, 2, 2)) -> Instance:
    """Depth 2 and, unless told otherwise, two children a node."""
    return toy_instance(law, parents)


def variation(rule: Rule, instance: Instance) -> Fraction:
    return total_variation(output_law(rule, instance), target_law(instance))


def as_if_drawn(instance: Instance, node: Node, context: tuple[int, ...] = ()) -> Node:
    """The same tree, but it claims that its point masses were drawn from the draft's law."""
    children = tuple(
        (token, as_if_drawn(instance, child, (*context, token))) for token, child in node.children
    )
    return node._replace(draft=instance.draft[context], children=children)


def assert_lossless(name: str, law: ProposalLaw, number: int, seed: int = 0) -> None:
    rule, _ = LOSSLESS[name]
    for instance in instances(law, number, only_chains=name in CHAINS_ONLY, seed=seed):
        assert variation(rule, instance) == 0, instance


@pytest.mark.parametrize(("name", "law"), PAIRS)
def test_lossless(name: str, law: ProposalLaw) -> None:
    assert_lossless(name, law, INSTANCES)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "law"), PAIRS)
def test_lossless_on_many(name: str, law: ProposalLaw) -> None:
    assert_lossless(name, law, 5 * INSTANCES, seed=1)


def at_temperature_zero(instance: Instance) -> Instance:
    argmax = {
        context: tuple(Fraction(token == law.index(max(law))) for token in range(len(law)))
        for context, law in instance.target.items()
    }
    return instance._replace(target=argmax)


@pytest.mark.parametrize("law", list(ProposalLaw))
def test_greedy_is_lossless_at_temperature_zero(law: ProposalLaw) -> None:
    for instance in instances(law, INSTANCES):
        assert variation(greedy, at_temperature_zero(instance)) == 0


def test_block_verification_is_no_worse_than_rejection() -> None:
    gains = [
        expected_accepted(block, i) - expected_accepted(rejection, i) for i in instances(CHAIN, INSTANCES)
    ]
    assert min(gains) >= 0
    assert max(gains) > 0


def gain_of_traversal(instance: Instance) -> Fraction:
    by_path, in_turn = {
        IID: (traversal_iid, multi_round),
        WITHOUT: (traversal_without, without_replacement),
    }[instance.law]
    return expected_accepted(by_path, instance) - expected_accepted(in_turn, instance)


@pytest.mark.parametrize("law", [IID, WITHOUT])
@pytest.mark.parametrize("parents", DEEPEST_FIRST)
def test_traversal_is_no_worse_than_judging_in_turn(law: ProposalLaw, parents: tuple[int, ...]) -> None:
    rng = random.Random(3)
    gains = [gain_of_traversal(random_instance(rng, law, parents)) for _ in range(INSTANCES // 4)]
    assert min(gains) >= 0
    assert max(gains) > 0


@pytest.mark.parametrize("law", [IID, WITHOUT])
def test_traversal_may_be_worse_where_a_leaf_comes_before_a_deeper_sibling(law: ProposalLaw) -> None:
    # The leaf is judged by the weight of its path and leaves less for what could have gone deeper.
    rng = random.Random(3)
    gains = [gain_of_traversal(random_instance(rng, law, (-1, 0, 1, 1, 3))) for _ in range(INSTANCES // 2)]
    assert min(gains) < 0 < max(gains)


def test_block_on_two_tokens() -> None:
    contexts = [context for length in range(3) for context in itertools.product(range(2), repeat=length)]
    target, draft = (Fraction(1, 3), Fraction(2, 3)), (Fraction(2, 3), Fraction(1, 3))
    instance = Instance(2, chain(2), CHAIN, dict.fromkeys(contexts, target), dict.fromkeys(contexts, draft))
    assert expected_accepted(block, instance) == Fraction(11, 9)
    assert expected_accepted(rejection, instance) == Fraction(10, 9)


@pytest.mark.parametrize(
    ("rule", "instance", "expected"),
    [
        (rejection, toy(CHAIN, chain(2)), "11279/13104"),  # 0.861
        (block, toy(CHAIN, chain(2)), "905/1008"),  # 0.898
        (multi_round, toy(IID), "1574389/1589952"),  # 0.990
        (without_replacement, toy(WITHOUT), "60631/54600"),  # 1.1105
        (traversal_iid, toy(IID), "9781/9408"),  # 1.040
        (traversal_without, toy(WITHOUT), "3273/2800"),  # 1.169
        (target_only, toy(POINT_MASS), "55/91"),  # 0.604
        (target_only, toy(IID), "2710150049/4629940224"),  # 0.585
        (target_only, toy(WITHOUT), "4593314293/5509183680"),  # 0.834
    ],
)
def test_toy(rule: Rule, instance: Instance, expected: str) -> None:
    assert expected_accepted(rule, instance) == Fraction(expected)
    assert variation(rule, instance) == 0


def test_top_tokens_judged_by_the_ratio_are_caught() -> None:
    instance = toy(POINT_MASS)
    for rule in (multi_round, without_replacement):
        wrong = variation(lambda node, rule=rule: rule(as_if_drawn(instance, node)), instance)
        assert wrong == Fraction(33, 104)  # 0.317


def test_siblings_without_replacement_judged_as_iid_are_caught() -> None:
    instance = toy(WITHOUT)
    assert variation(multi_round, instance) == Fraction(13, 1200)  # 0.0108
    # It looks better for being wrong.
    assert expected_accepted(multi_round, instance) > expected_accepted(without_replacement, instance)
    assert variation(traversal_iid, instance) == Fraction(6451, 270000)


def test_lossy_rules_are_caught() -> None:
    assert variation(medusa, toy(POINT_MASS)) == Fraction(49, 52)  # nothing is refused
    assert variation(lenient, toy(CHAIN, chain(2))) == Fraction(17, 56)
    assert expected_accepted(lenient, toy(CHAIN, chain(2))) > expected_accepted(block, toy(CHAIN, chain(2)))


@pytest.mark.parametrize("law", list(ProposalLaw))
def test_probabilities_add_up_and_trees_are_drawn_as_the_law_says(law: ProposalLaw) -> None:
    for instance in instances(law, 50):
        drawn = list(drafts(instance))
        assert sum(probability for probability, _ in drawn) == 1
        assert len({tokens for _, tokens in drawn}) == len(drawn)
        assert sum(verdict_law(target_only, instance).values()) == 1
        for _, tokens in drawn:
            siblings = Counter(
                (parent, token)
                for parent, token in zip(instance.parents[1:], tokens[1:], strict=True)
                if token != NO_TOKEN
            )
            if law in (POINT_MASS, WITHOUT):
                assert max(siblings.values()) == 1
            if law in (CHAIN, IID):
                assert NO_TOKEN not in tokens


def test_siblings_run_out_of_tokens() -> None:
    half = (Fraction(1, 2), Fraction(1, 2), Fraction(0))
    contexts = [context for length in range(3) for context in itertools.product(range(3), repeat=length)]
    table = dict.fromkeys(contexts, half)
    instance = Instance(3, (-1, 0, 0, 0, 3), WITHOUT, table, table)
    assert [tokens[1:] for _, tokens in drafts(instance)] == [(0, 1, -1, -1), (1, 0, -1, -1)]
    root = tree_of(instance, (0, 1, 0, -1, -1))
    assert [(token, child.index) for token, child in root.children] == [(1, 1), (0, 2)]
    assert [tokens for _, tokens in drafts(instance._replace(law=POINT_MASS))] == [(0, 0, 1, -1, -1)]


def test_rules_agree_where_they_should() -> None:
    for instance in instances(CHAIN, 50):
        sequential, by_path = verdict_law(rejection, instance), verdict_law(block, instance)
        assert sequential == verdict_law(multi_round, instance)
        assert sequential == verdict_law(without_replacement, instance)
        assert by_path == verdict_law(traversal_iid, instance) == verdict_law(traversal_without, instance)
        assert verdict_law(greedy, instance) == verdict_law(target_only, at_temperature_zero(instance))
        # A point mass refused with 1 - p(x) is a draw of something else.
        certain = instance._replace(law=POINT_MASS)
        assert verdict_law(rejection, certain) == verdict_law(target_only, certain)
    for instance in instances(POINT_MASS, 50):
        in_turn = verdict_law(target_only, instance)
        assert in_turn == verdict_law(multi_round, instance) == verdict_law(without_replacement, instance)


def test_typical_takes_the_deepest_node_and_the_first_of_equals() -> None:
    likely, even = (Fraction(9, 10), Fraction(1, 10)), (Fraction(1, 2), Fraction(1, 2))
    leaf = Node(even, None, (), 3)
    first, second = Node(even, None, (), 1), Node(likely, None, ((0, leaf), (0, leaf._replace(index=4))), 2)
    root = Node(even, None, ((0, first), (1, second)), 0)
    rule = partial(typical, epsilon=Fraction(1, 2), delta=Fraction(1, 2))
    assert rule(root) == {((0, 2, 3), 0): Fraction(1, 2), ((0, 2, 3), 1): Fraction(1, 2)}
    shallow = root._replace(children=((0, first), (1, second._replace(children=()))))
    assert {path for path, _ in rule(shallow)} == {(0, 1)}
    # exp(-H) of an even pair is 1/2: delta 1.1 asks for more than 0.55, epsilon 1/2 for more than 1/2.
    assert {path for path, _ in typical(root, Fraction(1), Fraction(11, 10))} == {(0,)}
    assert {path for path, _ in typical(root, Fraction(1, 2), Fraction(11, 10))} == {(0,)}


def test_rules_refuse_what_they_cannot_judge() -> None:
    tree = tree_of(toy(IID), next(drafts(toy(IID)))[1])
    for rule in (rejection, block):
        with pytest.raises(ValueError, match="chains"):
            rule(tree)


def test_every_rule_is_listed() -> None:
    assert set(RULES) == {
        "greedy",
        "target_only",
        "rejection",
        "multi_round",
        "without_replacement",
        "block",
        "traversal",
        "typical",
    }
