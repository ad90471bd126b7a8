"""Trained drafters that come with the package: a folder each, with weights, their settings and a card.

    from specjax import zoo
    zoo.names()                     # what there is
    print(zoo.card("eagle_smollm2"))  # how it came about, and how good it is

A config names one as `source = "zoo:eagle_smollm2"`.
"""

from __future__ import annotations

from pathlib import Path

from specjax.errors import ConfigError, nearest

PREFIX = "zoo:"
_FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The drafters of the zoo."""
    return sorted(path.parent.name for path in _FOLDER.glob("*/config.json"))


def card(name: str) -> str:
    """What is to be known of a drafter: its data, cost, measurements and licence; ConfigError if unknown."""
    return (folder(PREFIX + name) / "README.md").read_text(encoding="utf-8")


def folder(source: str) -> Path:
    """Where weights lie: "zoo:NAME" is one of the zoo's, all else a path. ConfigError if there is none."""
    name = source.removeprefix(PREFIX)
    if name == source:
        return Path(source)
    if name not in names():
        known = ", ".join(names()) or "none yet"
        raise ConfigError(f"the zoo has no drafter '{name}'{nearest(name, names())}: it has {known}")
    return _FOLDER / name
