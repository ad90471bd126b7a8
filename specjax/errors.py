"""Errors meant for a person: each message says what is wrong and what to do about it."""

from __future__ import annotations

import difflib
import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec

P = ParamSpec("P")

RESUMABLE = "interrupted; the same command goes on after the last finished batch"


class SpecjaxError(ValueError):
    """Something the user can put right; command lines print its message without a traceback."""


class CheckpointError(SpecjaxError):
    """A checkpoint or tokenizer that cannot be found, read or trusted."""


class ConfigError(SpecjaxError):
    """An experiment's config that asks for something unknown or contradictory."""


def command(interrupted: str = "interrupted") -> Callable[[Callable[P, int]], Callable[P, int]]:
    """A decorator for mains: a SpecjaxError becomes one line on stderr and the exit code 2.

    A KeyboardInterrupt becomes the line `interrupted`, none where that is empty, and 130.
    """

    def decorate(main: Callable[P, int]) -> Callable[P, int]:
        @functools.wraps(main)
        def run(*args: P.args, **kwargs: P.kwargs) -> int:
            try:
                return main(*args, **kwargs)
            except SpecjaxError as error:
                print(f"specjax: error: {error}", file=sys.stderr)
                return 2
            except KeyboardInterrupt:
                if interrupted:
                    print(f"specjax: {interrupted}", file=sys.stderr)
                return 130

        return run

    return decorate


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
