"""Tiny instances of speculative sampling and the exact law of what a rule does with them, in fractions.

An instance tabulates the target's and the draft's law after every context. All trees that can be drawn
from it are enumerated with their probabilities and every outcome of a rule with its own, so that a rule
that leaves the target's law alone has a total variation of exactly 0. The rules are in `rational_rules`.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

from specjax.types import NO_PARENT, NO_TOKEN, ROOT, ProposalLaw

Law = tuple[Fraction, ...]
Tokens = tuple[int, ...]
# The accepted nodes from the root on, and the token that follows them.
Outcome = tuple[tuple[int, ...], int]

ZERO, ONE = Fraction(0), Fraction(1)
# What the root of a tree holds: laws depend on what was drafted since, so any token will do.
PENDING = 0

# Of random instances; few enough trees to judge all of them by one rule within about 50 ms.
MAX_VOCAB, MAX_DEPTH, MAX_SIBLINGS, MAX_DRAFTED, MAX_TREES = 4, 3, 4, 6, 81
LARGEST_WEIGHT = 4


class Node(NamedTuple):
    """One drawn tree: the laws at its root, and its children, token and subtree, in the order drawn.

    `index` is the node's number in `Draft.tokens`; `draft` is None where children are point masses.
    """

    target: Law
    draft: Law | None
    children: tuple[tuple[int, Node], ...]
    index: int  # type: ignore[assignment]  # hides the method of tuples


Rule = Callable[[Node], dict[Outcome, Fraction]]


class Instance(NamedTuple):
    """A tree to fill and how: `target` and `draft` map the tokens drafted since the root to a law.

    `parents` is numbered like `Draft.parents`. Both tables hold every context up to the tree's depth.
    """

    vocab_size: int
    parents: tuple[int, ...]
    law: ProposalLaw
    target: Mapping[Tokens, Law]
    draft: Mapping[Tokens, Law]


def normalised(weights: Iterable[Fraction]) -> Law:
    """The weights over their sum; all zeros where the sum is."""
    weights = tuple(weights)
    mass = sum(weights, ZERO)
    return tuple(weight / mass if weight else ZERO for weight in weights)


def without(law: Law, taken: Iterable[int]) -> Law:
    """The law given that none of the `taken` tokens came; all zeros where nothing is left."""
    excluded = set(taken)
    return normalised(ZERO if token in excluded else mass for token, mass in enumerate(law))


def depth(parents: tuple[int, ...]) -> int:
    """The number of drafted tokens on the longest path."""
    return max(len(_lineage(parents, node)) - 1 for node in range(len(parents)))


def drafts(instance: Instance) -> Iterator[tuple[Fraction, Tokens]]:
    """Every tree that can be drawn and its probability; its tokens [N] are numbered like `parents`.

    Siblings without replacement and point masses run out of tokens: `NO_TOKEN` where none of positive
    probability is left, and below.
    """
    yield from _grown(instance, ONE, (PENDING,))


def _grown(instance: Instance, probability: Fraction, tokens: Tokens) -> Iterator[tuple[Fraction, Tokens]]:
    if len(tokens) == len(instance.parents):
        yield probability, tokens
        return
    for token, mass in _choices(instance, tokens):
        yield from _grown(instance, probability * mass, (*tokens, token))


def _choices(instance: Instance, tokens: Tokens) -> list[tuple[int, Fraction]]:
    """What the next node may hold, given the tokens of all nodes before it."""
    parent = instance.parents[len(tokens)]
    nothing = [(NO_TOKEN, ONE)]
    if tokens[parent] == NO_TOKEN:
        return nothing
    siblings = [token for token, other in zip(tokens, instance.parents, strict=False) if other == parent]
    law = instance.draft[_context(instance.parents, tokens, parent)]
    if instance.law in (ProposalLaw.SIBLINGS_WITHOUT_REPLACEMENT, ProposalLaw.POINT_MASS):
        law = without(law, siblings)
    if not any(law):
        return nothing
    if instance.law is ProposalLaw.POINT_MASS:
        return [(law.index(max(law)), ONE)]
    return [(token, mass) for token, mass in enumerate(law) if mass]


def _lineage(parents: tuple[int, ...], node: int) -> tuple[int, ...]:
    """The nodes from the root to `node`."""
    return () if node == NO_PARENT else (*_lineage(parents, parents[node]), node)


def _context(parents: tuple[int, ...], tokens: Tokens, node: int) -> Tokens:
    return tuple(tokens[ancestor] for ancestor in _lineage(parents, node)[1:])


def tree_of(instance: Instance, tokens: Tokens, node: int = ROOT) -> Node:
    """The drawn tree below `node`; nodes that hold `NO_TOKEN` are no children at all."""
    context = _context(instance.parents, tokens, node)
    children = tuple(
        (tokens[child], tree_of(instance, tokens, child))
        for child, parent in enumerate(instance.parents)
        if parent == node and tokens[child] != NO_TOKEN
    )
    is_point_mass = instance.law is ProposalLaw.POINT_MASS
    return Node(instance.target[context], None if is_point_mass else instance.draft[context], children, node)


def verdict_law(rule: Rule, instance: Instance) -> dict[tuple[Tokens, tuple[int, ...], int], Fraction]:
    """The joint law of the drawn tokens, the accepted path and the token after it."""
    return {
        (tokens, path, next_token): probability * mass
        for probability, tokens in drafts(instance)
        for (path, next_token), mass in rule(tree_of(instance, tokens)).items()
    }


def output_law(rule: Rule, instance: Instance) -> dict[Tokens, Fraction]:
    """The law of the first depth + 1 tokens: what the rule emits, completed by the target."""
    emitted: defaultdict[Tokens, Fraction] = defaultdict(Fraction)
    for (tokens, path, next_token), mass in verdict_law(rule, instance).items():
        emitted[(*(tokens[node] for node in path[1:]), next_token)] += mass
    return _completed(instance, emitted)


def target_law(instance: Instance) -> dict[Tokens, Fraction]:
    """The law of the first depth + 1 tokens that the target alone would emit."""
    return _completed(instance, {(): ONE})


def _completed(instance: Instance, emitted: Mapping[Tokens, Fraction]) -> dict[Tokens, Fraction]:
    """The law after the target has added to every prefix what it lacks of depth + 1 tokens."""
    law = defaultdict(Fraction, emitted)
    for length in range(depth(instance.parents) + 1):
        for prefix in [tokens for tokens in law if len(tokens) == length]:
            mass = law.pop(prefix)
            for token, probability in enumerate(instance.target[prefix]):
                if probability:
                    law[(*prefix, token)] += mass * probability
    return dict(law)


def total_variation(a: Mapping[Tokens, Fraction], b: Mapping[Tokens, Fraction]) -> Fraction:
    """Half the sum of absolute differences."""
    return sum((abs(a.get(key, ZERO) - b.get(key, ZERO)) for key in a.keys() | b.keys()), ZERO) / 2


def expected_accepted(rule: Rule, instance: Instance) -> Fraction:
    """The mean number of accepted draft tokens; tokens per step are one more."""
    return sum((mass * (len(path) - 1) for (_, path, _), mass in verdict_law(rule, instance).items()), ZERO)


def random_instance(rng: random.Random, law: ProposalLaw, parents: tuple[int, ...] | None = None) -> Instance:
    """Tables of small integers over 2 to 4 tokens, with zeros and rows where both laws are the same.

    The tree is random unless `parents` says otherwise: few nodes, of depth 1 to 3, with up to 4 siblings.
    """
    if parents is None:
        parents = _random_parents(rng, law)
    fitting = [size for size in range(3, MAX_VOCAB + 1) if size ** (len(parents) - 1) <= MAX_TREES]
    vocab_size = rng.choice([2, *fitting])
    target, draft = {}, {}
    for length in range(depth(parents) + 1):
        for context in itertools.product(range(vocab_size), repeat=length):
            target[context] = _random_law(rng, vocab_size)
            same = rng.random() < 0.2
            draft[context] = target[context] if same else _random_law(rng, vocab_size)
    return Instance(vocab_size, parents, law, target, draft)


def toy_instance(law: ProposalLaw, parents: tuple[int, ...]) -> Instance:
    """Three tokens and six integers from 1 to 6 a context, the target's first: no zeros, one for all laws."""
    rng = random.Random(1)
    target, draft = {}, {}
    for length in range(depth(parents) + 1):
        for context in itertools.product(range(3), repeat=length):
            target[context], draft[context] = (
                normalised([Fraction(rng.randint(1, 6)) for _ in range(3)]) for _ in range(2)
            )
    return Instance(3, parents, law, target, draft)


def _random_parents(rng: random.Random, law: ProposalLaw) -> tuple[int, ...]:
    if law is ProposalLaw.CHAIN:
        return tuple(range(NO_PARENT, rng.randint(1, MAX_DEPTH)))
    parents: tuple[int, ...] = (NO_PARENT,)
    for _ in range(rng.randint(1, MAX_DRAFTED)):
        open_nodes = [
            node
            for node in range(len(parents))
            if len(_lineage(parents, node)) <= MAX_DEPTH and parents.count(node) < MAX_SIBLINGS
        ]
        parents = (*parents, rng.choice(open_nodes))
    return parents


def _random_law(rng: random.Random, vocab_size: int) -> Law:
    weights = [Fraction(rng.randint(0, LARGEST_WEIGHT)) for _ in range(vocab_size)]
    if not any(weights):
        weights[rng.randrange(vocab_size)] = ONE
    return normalised(weights)
