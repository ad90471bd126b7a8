"""Drafters, rules and tasks by the names of their modules: a new one is a new file, no registry knows it."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

from specjax.errors import ConfigError, nearest
from specjax.types import Drafter, Parts, ProposalLaw, Target, Verify

# What a module has to offer.
OFFERS = {
    "drafters": ("Config", "build"),
    "verify": ("verify", "LOSSLESS", "LAWS"),
    "tasks": ("FIELDS", "validate", "run"),
}


def module_names(room: str) -> list[str]:
    """The modules of `specjax.drafters`, `specjax.verify` or `specjax.tasks`."""
    return [
        module.name for module in pkgutil.iter_modules(importlib.import_module(f"specjax.{room}").__path__)
    ]


def find_module(room: str, name: str) -> ModuleType:
    """A drafter, rule or task by its module's name or a dotted path of yours; ConfigError if it is none."""
    kind = {"drafters": "drafter", "verify": "rule", "tasks": "task"}[room]
    known = module_names(room)
    if "." not in name and name not in known:
        raise ConfigError(
            f"there is no {kind} '{name}'{nearest(name, known)} (known: {', '.join(known)}; "
            "one of your own is named by its module path, with a dot)"
        )
    try:
        module = importlib.import_module(name if "." in name else f"specjax.{room}.{name}")
    except ImportError as error:
        raise ConfigError(f"the {kind} '{name}' cannot be imported: {error}") from error
    missing = [offer for offer in OFFERS[room] if not hasattr(module, offer)]
    if missing:
        raise ConfigError(f"the {kind} '{name}' has no {' and no '.join(missing)}: define it in the module")
    return module


class Rule(NamedTuple):
    """A rule as configured: its `verify` with its options, and whether it keeps the target's law so."""

    verify: Verify
    lossless: bool


def make_rule(module: ModuleType, options: Mapping[str, Any]) -> Rule:
    """The rule of a module under its options; `is_lossless(**options)` decides where the module has one."""
    verify = functools.partial(module.verify, **options) if options else module.verify
    is_lossless = getattr(module, "is_lossless", None)
    return Rule(verify, is_lossless(**options) if is_lossless and options else module.LOSSLESS)


def compose(module: ModuleType, config: Any, target: Target, inner: Drafter, model: Target | None) -> Drafter:
    """A drafter made of `inner`, which drafts for the target or for `model`, as the module builds it.

    Raises ConfigError where a rule of its own is lossy or may not judge the inner drafter's proposals.
    """
    verify = None
    if (name := getattr(config, "verify", None)) is not None:
        rule, is_tree = find_module("verify", name), not inner.is_chain
        check_fit(config.inner["name"], inner.law, is_tree, name, rule)
        if name not in (fitting := lossless_rules(inner.law, is_tree)) and "." not in name:
            raise ConfigError(
                f"the inner rule is '{name}', which does not keep the law of the model at every temperature, "
                f"and the drafts would not have the law that they claim: choose one of {', '.join(fitting)}"
            )
        verify = make_rule(rule, {}).verify
    return module.build(config, target, Parts(inner, model, verify))


def lossless_rules(law: ProposalLaw | None = None, is_tree: bool = False) -> list[str]:
    """The lossless rules for any temperature that may judge proposals of `law`, or of some law."""

    def fits(rule: ModuleType) -> bool:
        judges = law is None or may_judge(rule, law, is_tree)
        return judges and rule.LOSSLESS and not getattr(rule, "TEMPERATURE_ZERO_ONLY", False)

    return [name for name in module_names("verify") if fits(find_module("verify", name))]


def may_judge(rule: ModuleType, law: ProposalLaw, is_tree: bool) -> bool:
    """Whether the law is one of the rule's, and no tree comes to a rule for chains."""
    return law in rule.LAWS and not (is_tree and getattr(rule, "CHAINS_ONLY", False))


def check_fit(drafter: str, law: ProposalLaw, is_tree: bool, name: str, rule: ModuleType) -> None:
    """Raise ConfigError, naming rules that fit, where the rule may not judge such proposals."""
    if not may_judge(rule, law, is_tree):
        shape = "a tree of " if is_tree else ""
        raise ConfigError(
            f"the rule '{name}' cannot judge the drafter '{drafter}', whose proposals are {shape}"
            f"{law.value}: rules that can are {', '.join(lossless_rules(law, is_tree))}"
        )
