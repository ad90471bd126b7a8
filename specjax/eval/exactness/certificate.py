"""From drafters and rules to a certificate: what each pair does to the target's law, and a verdict on it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from specjax.eval.exactness.reference import worst_total_variation
from specjax.eval.exactness.sampling import Group, Sampler, counts_of, fit
from specjax.eval.exactness.statistics import holm, kl, smallest_total_variation, total_variation
from specjax.eval.exactness.subjects import Subject
from specjax.modules import Rule, may_judge
from specjax.step import Method
from specjax.testing import side_by_side, unverified
from specjax.types import Drafter, ProposalLaw

LEVEL = 0.05  # the chance that any of the lossless rows is rejected though all are exact
CONTROL_LEVEL = 1e-6  # what a negative control's p-value must stay below
POWER = 0.9
# One row in a thousand has so small a p-value by chance. It is drawn anew, with so many times the samples,
# and the new ones alone count: a certificate of sound rules then fails once in 10 000 seeds, not in 20.
SUSPECT, AGAIN = 1e-3, 2
BATCH_ROWS = 2**16  # rows decoded together, at most
EXACT, LOSSY = "exact", "lossy, as declared"

Row = dict[str, Any]


class Candidate(NamedTuple):
    """A rule that may stand in a certificate, with its options, its module and how it is called there."""

    name: str
    rule: Rule
    options: Mapping[str, Any]
    module: ModuleType

    @property
    def is_greedy(self) -> bool:
        """Whether it is for temperature 0 only."""
        return getattr(self.module, "TEMPERATURE_ZERO_ONLY", False)

    @property
    def goes_by_the_law(self) -> bool:
        """Whether it holds for certain laws of proposals only: those that do not read the law judge any."""
        return not self.module.LAWS.issuperset(ProposalLaw)

    def may_judge(self, drafter: Drafter) -> bool:
        """Whether it is a rule for the drafter's proposals."""
        return may_judge(self.module, drafter.law, not drafter.is_chain)


class Settings(NamedTuple):
    """How much to draw: `samples` a row, `instances` of the rational reference a rule, and the seed."""

    samples: int
    instances: int
    seed: int


def pairs_of(subject: Subject, candidates: Sequence[Candidate]) -> list[tuple[Candidate, Group]]:
    """The rows of a subject: every rule that may judge it, under every warp that the rule is for."""
    return [
        (candidate, group)
        for candidate in candidates
        if candidate.may_judge(subject.drafter)
        for group in subject.groups
        if group.temperature == 0 or not candidate.is_greedy
    ]


def rules_in_turn(subjects: Sequence[Subject], candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """One rule for each subject: the lossless ones that go by the law of its proposals take turns."""
    turns: Counter[tuple[str, ...]] = Counter()
    chosen = []
    for subject in subjects:
        fitting = [
            candidate
            for candidate in candidates
            if candidate.rule.lossless and candidate.goes_by_the_law and candidate.may_judge(subject.drafter)
        ]
        names = tuple(candidate.name for candidate in fitting)
        chosen.append([fitting[turns[names] % len(fitting)]])
        turns[names] += 1
    return chosen


def measure(
    subject: Subject,
    candidates: Sequence[Candidate],
    settings: Settings,
    report: Callable[[str], None] = lambda what: None,
) -> list[Row]:
    """A row for each rule and warp, yet without verdict; `report` hears what is going on."""
    pairs = pairs_of(subject, candidates)
    rules = [candidate for candidate in candidates if candidate.may_judge(subject.drafter)]
    numbers = [rules.index(candidate) for candidate, _ in pairs] + [len(rules)] * len(subject.groups)
    groups = [group for _, group in pairs] + list(subject.groups)  # the negative controls last

    num_draws = math.ceil(settings.samples * len(groups) / BATCH_ROWS)
    rows = math.ceil(settings.samples / num_draws)
    judge = side_by_side([*(c.rule.verify for c in rules), unverified], np.repeat(numbers, rows).tolist())
    method = Method(subject.target, subject.drafter, judge)
    report(f"compiling {subject.name}")
    sampler = Sampler(method, subject.params, [group._replace(rows=rows) for group in groups])

    def draw(first: int, repeats: int) -> list[np.ndarray]:
        drawn = []
        for number in range(first, first + repeats * num_draws):
            drawn.append(sampler.draw(settings.seed + number))
            report(f"sampling {subject.name}")
        return [np.concatenate(parts)[: repeats * settings.samples] for parts in zip(*drawn, strict=True)]

    laws = {group: subject.law_of(group) for group in subject.groups}
    tokens = draw(0, 1)
    controls = {
        group: fit(own, laws[group]).p_value
        for group, own in zip(subject.groups, tokens[len(pairs) :], strict=True)
    }
    suspects = [
        place
        for place, (candidate, group) in enumerate(pairs)
        if candidate.rule.lossless and fit(tokens[place], laws[group]).p_value < SUSPECT
    ]
    if suspects:
        again = draw(num_draws, AGAIN)
        tokens = [again[place] if place in suspects else own for place, own in enumerate(tokens)]
    exact = {candidate.name: _exact(candidate, subject.drafter, settings) for candidate in rules}
    return [
        {
            "drafter": subject.name,
            "rule": candidate.name,
            "lossless": candidate.rule.lossless,
            "warp": group.warp_name,
            **_distances(own, laws[group]),
            "negative_control_p_value": controls[group],
            "exact_total_variation": exact[candidate.name],
        }
        for (candidate, group), own in zip(pairs, tokens, strict=False)
    ]


def _distances(tokens: np.ndarray, law: np.ndarray) -> Row:
    """How far the sampled law is from the exact one; what is infinite or has no value is None."""
    fitted = fit(tokens, law)
    is_known = tokens.min() >= 0 and tokens.max() < len(law)
    sampled = counts_of(tokens, len(law)) / len(tokens) if is_known else None
    divergence = math.inf if sampled is None else kl(sampled, law)
    return {
        "samples": len(tokens),
        "chi_square": fitted.chi_square if math.isfinite(fitted.chi_square) else None,
        "degrees_of_freedom": fitted.degrees_of_freedom,
        "p_value": fitted.p_value,
        "total_variation": None if sampled is None else total_variation(sampled, law),
        "kl": divergence if math.isfinite(divergence) else None,
    }


def _exact(candidate: Candidate, drafter: Drafter, settings: Settings) -> float | None:
    return worst_total_variation(
        candidate.name,
        tuple(candidate.options.items()),
        drafter.law,
        is_chain=drafter.is_chain,
        is_greedy=candidate.is_greedy,
        instances=settings.instances,
        seed=settings.seed,
    )


def judged(rows: Sequence[Row]) -> list[Row]:
    """The rows with their verdicts, Holm's correction over all rules that claim to be lossless."""
    lossless = [index for index, row in enumerate(rows) if row["lossless"]]
    rejected = holm([rows[index]["p_value"] for index in lossless], LEVEL)
    refused = {index for index, is_rejected in zip(lossless, rejected, strict=True) if is_rejected}
    return [{**row, "verdict": _verdict(row, index in refused)} for index, row in enumerate(rows)]


def _verdict(row: Row, is_rejected: bool) -> str:
    reasons = []
    if row["lossless"] and is_rejected:
        reasons.append("not the target's law")
    if row["lossless"] and row["exact_total_variation"]:
        reasons.append("not exact in the rational reference")
    if row["negative_control_p_value"] >= CONTROL_LEVEL and not _has_nothing_to_be_wrong_about(row):
        reasons.append("control not rejected")
    if reasons:
        return f"FAILED: {', '.join(reasons)}"
    return EXACT if row["lossless"] else LOSSY


def _has_nothing_to_be_wrong_about(row: Row) -> bool:
    """At temperature 0 the drafts were the argmax throughout: unverified, they are what they should be."""
    is_point_mass = row["degrees_of_freedom"] == 0 and row["p_value"] == 1
    return is_point_mass and row["negative_control_p_value"] == 1


def has_failed(row: Row) -> bool:
    """Whether the verdict is bad."""
    return row["verdict"].startswith("FAILED")


def power_of(rows: Sequence[Row]) -> float:
    """The total variation that every lossless row would have shown with probability `POWER`."""
    family = [row for row in rows if row["lossless"] and row["p_value"] > 0]
    return max(
        (
            smallest_total_variation(row["samples"], row["degrees_of_freedom"], LEVEL / len(family), POWER)
            for row in family
        ),
        default=1.0,
    )
