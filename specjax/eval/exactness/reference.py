"""The total variation of a rule in exact fractions, over random instances of the rational reference."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from specjax.eval.exactness import rational
from specjax.eval.exactness.rational_rules import RULES
from specjax.types import NO_PARENT, ProposalLaw

WITHOUT_REPLACEMENT = "_without_replacement"
LONGEST_CHAIN = 3


def reference(name: str, options: Mapping[str, Any]) -> rational.Rule | None:
    """The rule of that module in fractions, under its options; None where there is none."""
    is_without = name not in RULES and name.endswith(WITHOUT_REPLACEMENT)
    rule = RULES.get(name.removesuffix(WITHOUT_REPLACEMENT) if is_without else name)
    if rule is None:
        return None
    given: dict[str, Any] = {option: Fraction(str(value)) for option, value in options.items()}
    given["is_without_replacement"] = is_without
    wanted = inspect.signature(rule).parameters
    return functools.partial(rule, **{option: value for option, value in given.items() if option in wanted})


@functools.cache
def worst_total_variation(
    name: str,
    options: tuple[tuple[str, Any], ...],
    law: ProposalLaw,
    *,
    is_chain: bool,
    is_greedy: bool,
    instances: int,
    seed: int,
) -> float | None:
    """The largest over random instances, of point-mass targets if `is_greedy`; None without a reference.

    Nor is there one where the reference of the rule `name` refuses drafts of that law.
    """
    rule = reference(name, dict(options))
    if rule is None:
        return None
    rng = random.Random(seed)
    worst = Fraction(0)
    for _ in range(instances):
        chain = tuple(range(NO_PARENT, rng.randint(1, LONGEST_CHAIN)))
        instance = rational.random_instance(rng, law, chain if is_chain else None)
        if is_greedy:
            instance = instance._replace(target={at: _argmax(p) for at, p in instance.target.items()})
        try:
            found = rational.output_law(rule, instance)
        except ValueError:
            return None
        worst = max(worst, rational.total_variation(found, rational.target_law(instance)))
    return float(worst)


def _argmax(law: rational.Law) -> rational.Law:
    return tuple(Fraction(token == law.index(max(law))) for token in range(len(law)))
