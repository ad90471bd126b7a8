"""Errors meant for a person: each message says what is wrong and what to do about it."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any


class SpecjaxError(ValueError):
    """Something the user can put right; command lines print its message without a traceback."""


class CheckpointError(SpecjaxError):
    """A checkpoint or tokenizer that cannot be found, read or trusted."""


class ConfigError(SpecjaxError):
    """An experiment's config that asks for something unknown or contradictory."""


def import_extra(module: str, purpose: str, extra: str) -> Any:
    """Import what comes with an extra of the package; ConfigError naming the extra where it is not there."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise ConfigError(f"{purpose} {name}: pip install 'specjax[{extra}]'") from error


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return e.g. `"; did you mean 'ngram'?"` for the choice nearest to `name`, or "" if none is near."""
    close = difflib.get_close_matches(name, list(choices), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
