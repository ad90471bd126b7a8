"""Every verification rule in fractions, as short as the papers state it: the reference for `specjax.verify`.

A rule takes one drawn tree and returns the probability of each outcome. Inside, it yields where it may
end: the accepted path, the probability of ending there, and the law of the token that follows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal, localcontext
from fractions import Fraction

from specjax.eval.exactness.rational import ONE, ZERO, Law, Node, Outcome, normalised, without

Path = tuple[int, ...]
Ends = Iterator[tuple[Path, Fraction, Law]]

DIGITS = 50  # of the one irrational number, the exponential of an entropy


def greedy(root: Node) -> dict[Outcome, Fraction]:
    """Follow the target's argmax, of equals the first (arXiv 2211.17192, temperature 0)."""
    return _outcomes(_matched(root, (root.index,), ONE, _argmax_law))


def target_only(root: Node) -> dict[Outcome, Fraction]:
    """Draw from the target; descend while a child carries the draw, else emit it (arXiv 2305.09781)."""
    return _outcomes(_matched(root, (root.index,), ONE, lambda node: node.target))


def rejection(root: Node, lenience: Fraction = ONE) -> dict[Outcome, Fraction]:
    """On a chain: accept with min(1, p / (lenience q)), else draw from norm(max(0, p - q)).

    arXiv 2211.17192, algorithm 1 and appendix; arXiv 2302.01318. ValueError on a tree.
    """
    _chain(root)
    return _outcomes(_sequential(root, (root.index,), ONE, lenience=lenience))


def multi_round(root: Node) -> dict[Outcome, Fraction]:
    """Judge iid siblings in turn, the target's law becoming the residual of each refusal (arXiv 2305.09781).

    Children that are point masses are judged by laws of their own, of one token each.
    """
    return _outcomes(_sequential(root, (root.index,), ONE))


def without_replacement(root: Node) -> dict[Outcome, Fraction]:
    """`multi_round`, each sibling's law being the draft's without the siblings before (arXiv 2402.12374)."""
    return _outcomes(_sequential(root, (root.index,), ONE, is_without_replacement=True))


def block(root: Node) -> dict[Outcome, Fraction]:
    """Block verification of a chain: the largest i with u_i <= h_i is accepted (arXiv 2403.10444).

    ValueError on a tree.
    """
    return _outcomes(_block(_chain(root)))


def traversal(root: Node, *, is_without_replacement: bool) -> dict[Outcome, Fraction]:
    """Judge whole paths, leaf by leaf in depth-first order; a refused leaf is cut off (arXiv 2505.12398).

    Siblings are iid, point masses or, as the argument says, drawn without replacement.
    """
    ends, refused = [], ONE
    for path, weight, law in _traversed(root, (root.index,), ONE, is_without_replacement):
        ends.append((path, refused * weight, law))
        refused *= 1 - weight
    return _outcomes(ends)


def typical(root: Node, epsilon: Fraction, delta: Fraction) -> dict[Outcome, Fraction]:
    """Accept where p(x) > min(epsilon, delta exp(-H(p))) and take the deepest node (arXiv 2401.10774).

    Of equally deep nodes the lowest index counts. The exponential is rounded to 50 digits, so a tie to
    that precision may fall either way.
    """
    _, _, path, law = min(_typical(root, (root.index,), epsilon, delta))
    return _outcomes([(path, ONE, law)])


RULES: dict[str, Callable[..., dict[Outcome, Fraction]]] = {
    rule.__name__: rule
    for rule in (
        greedy,
        target_only,
        rejection,
        multi_round,
        without_replacement,
        block,
        traversal,
        typical,
    )
}


def _outcomes(ends: Iterable[tuple[Path, Fraction, Law]]) -> dict[Outcome, Fraction]:
    law: defaultdict[Outcome, Fraction] = defaultdict(Fraction)
    for path, reached, next_law in ends:
        for token, probability in enumerate(next_law):
            if reached and probability:
                law[path, token] += reached * probability
    return dict(law)


def _matched(node: Node, path: Path, reached: Fraction, law_at: Callable[[Node], Law]) -> Ends:
    rest = list(law_at(node))
    for token, child in node.children:
        yield from _matched(child, (*path, child.index), reached * rest[token], law_at)
        rest[token] = ZERO  # a later child with the same token is never visited
    yield path, reached, tuple(rest)


def _sequential(
    node: Node, path: Path, reached: Fraction, lenience: Fraction = ONE, is_without_replacement: bool = False
) -> Ends:
    target = node.target
    for number, (token, child) in enumerate(node.children):
        draft = _sibling_law(node, number, is_without_replacement)
        accepted = _ratio(target[token], lenience * draft[token])
        yield from _sequential(
            child, (*path, child.index), reached * accepted, lenience, is_without_replacement
        )
        if accepted == 1:
            return  # nothing beyond is ever reached
        reached *= 1 - accepted
        target, _ = _residual(target, draft)
    yield path, reached, target


def _block(chain: list[Node]) -> Ends:
    weights = [ONE]  # p_i
    for node in chain[:-1]:
        token, _ = node.children[0]
        weights.append(_ratio(weights[-1] * node.target[token], _draft_of(node, token)[token]))

    beyond = ONE  # the probability that u_j > h_j for every j > i
    for i in reversed(range(len(chain))):
        node, accepted, law = chain[i], weights[i], chain[i].target
        if node.children:
            draft = _draft_of(node, node.children[0][0])
            law, mass = _residual(node.target, draft, weights[i])
            accepted = _weight_after(mass, weights[i])
        yield tuple(node.index for node in chain[: i + 1]), beyond * accepted, law
        beyond *= 1 - accepted


def _traversed(node: Node, path: Path, weight: Fraction, is_without_replacement: bool) -> Ends:
    """The leaves in the order of their trials, each with its weight and law once all before are refused."""
    target = node.target
    for number, (token, child) in enumerate(node.children):
        draft = _sibling_law(node, number, is_without_replacement)
        child_weight = _ratio(weight * target[token], draft[token])
        yield from _traversed(child, (*path, child.index), child_weight, is_without_replacement)
        target, mass = _residual(target, draft, weight)
        weight = _weight_after(mass, weight)
    yield path, weight, target  # with no children left it is a leaf


def _typical(
    node: Node, path: Path, epsilon: Fraction, delta: Fraction
) -> Iterator[tuple[int, int, Path, Law]]:
    """Every accepted node: the negative length of its path, its index, its path and its law."""
    yield -len(path), node.index, path, node.target
    threshold = min(epsilon, delta * _exp_of_negative_entropy(node.target))
    for token, child in node.children:
        if node.target[token] > threshold:
            yield from _typical(child, (*path, child.index), epsilon, delta)


def _exp_of_negative_entropy(law: Law) -> Fraction:
    with localcontext() as context:
        context.prec = DIGITS
        terms = [Decimal(p.numerator) / Decimal(p.denominator) for p in law if p]
        return Fraction(sum((p * p.ln() for p in terms), Decimal(0)).exp())


def _residual(target: Law, draft: Law, weight: Fraction = ONE) -> tuple[Law, Fraction]:
    """norm(max(weight * target - draft, 0)) and its mass before that; without mass, the target's law."""
    excess = [max(weight * p - q, ZERO) for p, q in zip(target, draft, strict=True)]
    mass = sum(excess, ZERO)
    return (normalised(excess) if mass else target), mass


def _weight_after(mass: Fraction, weight: Fraction) -> Fraction:
    """S / (S + 1 - weight); a weight of 1 stays, even where the residual has no mass."""
    return ONE if weight == 1 else mass / (mass + 1 - weight)


def _ratio(p: Fraction, q: Fraction) -> Fraction:
    """min(1, p / q); a token that the draft cannot have drawn is refused."""
    return min(ONE, p / q) if q else ZERO


def _point_mass(token: int, vocab_size: int) -> Law:
    return tuple(Fraction(other == token) for other in range(vocab_size))


def _argmax_law(node: Node) -> Law:
    return _point_mass(node.target.index(max(node.target)), len(node.target))


def _draft_of(node: Node, token: int) -> Law:
    """The law from which `token`, a child of the node, was drawn."""
    return _point_mass(token, len(node.target)) if node.draft is None else node.draft


def _sibling_law(node: Node, number: int, is_without_replacement: bool) -> Law:
    """The law from which a child was drawn, given the siblings before it."""
    law = _draft_of(node, node.children[number][0])
    earlier = [token for token, _ in node.children[:number]] if is_without_replacement else []
    return without(law, earlier)


def _chain(root: Node) -> list[Node]:
    chain = [root]
    while chain[-1].children:
        if len(chain[-1].children) > 1:
            raise ValueError("this rule judges chains, not trees")
        chain.append(chain[-1].children[0][1])
    return chain
