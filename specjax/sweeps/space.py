"""What a sweep varies: fields of a run's config, each with its values or its range."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from specjax.config import override, validate
from specjax.errors import ConfigError

Value = bool | int | float | str
Point = dict[str, Value]  # dotted name of a field -> its value

SAMPLERS = ("grid", "random", "tpe")
RANGE = ("low", "high", "step", "log")
# One target and one set of prompts for all trials.
SHARED = (
    "task",
    "target",
    "dtype",
    "stacked_layers",
    "prompts",
    "prompts_path",
    "limit",
    "per_category",
    "chat",
)
# These change no program, so that trials that differ in nothing else compile nothing.
LAW = ("temperature", "top_k", "top_p", "min_p", "seed", "repeats")


class Axis(NamedTuple):
    """A field by its dotted name, and its `values`, or where they are none its range from `low` to `high`.

    Values that are no plain ones (tuples, whole drafters) are held as a command line would have them.
    """

    name: str
    values: tuple[Value, ...] = ()
    low: float = 0
    high: float = 0
    step: float | None = None
    log: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether a range is one of whole numbers."""
        return all(isinstance(bound, int) for bound in (self.low, self.high, self.step or 1))

    @property
    def listed(self) -> tuple[Value, ...]:
        """All values; none for a range without steps."""
        step = self.step or (1 if self.is_whole and not self.log else None)
        if self.values or step is None:
            return self.values
        # Half a millionth of a step is rounding.
        count = math.floor((self.high - self.low) / step + 1e-6) + 1
        return tuple(self.low + number * step for number in range(count))


def dotted(fields: Mapping[str, Any]) -> dict[str, Any]:
    """{"drafter.draft_length": values} in the nested form that a config can hold."""
    nested: dict[str, Any] = {}
    for name, values in fields.items():
        *parents, last = name.split(".")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = values
    return nested


def parse(space: Mapping[str, Any]) -> tuple[Axis, ...]:
    """The axes of a config's `space`, in its order; ConfigError on one without values or with wrong ones."""
    axes = tuple(_axes(space, ""))
    if not axes:
        raise ConfigError("space is empty: name a field and its values, e.g. {'temperature': (0.0, 1.0)}")
    for axis in axes:
        if axis.name in SHARED:
            raise ConfigError(f"space names '{axis.name}', which all trials share: make a sweep of each")
    return axes


def check(base: ConfigDict, axes: tuple[Axis, ...]) -> None:
    """Raise ConfigError, naming the nearest known field, where the base has no such field or value."""
    names = next((axis.values for axis in axes if axis.name == "drafter.name"), ())
    # A field need not be one of every drafter.
    drafters: list[Point] = [{"drafter.name": name} for name in names] or [{}]
    for axis in axes:
        for value in axis.values or (axis.low, axis.high):
            errors = []
            for drafter in drafters:
                try:
                    apply(base, {**drafter, axis.name: value})
                except ConfigError as error:
                    errors.append(error)
            if len(errors) == len(drafters):
                raise ConfigError(f"space: {errors[0]}") from errors[0]


def apply(base: ConfigDict, point: Point) -> ConfigDict:
    """A copy of the base with the point's values; ConfigError where a field cannot have its value."""
    config = copy.deepcopy(base)
    config.unlock()  # whoever overrode it has locked it
    return override(config, flags(point))


def validated(base: ConfigDict, point: Point) -> ConfigDict:
    """The run of one point; ConfigError where it is impossible."""
    config = apply(base, point)
    validate(config)
    return config


def flags(point: Point) -> list[str]:
    """What has to be added to a command line of the base to run one point."""
    return [f"--config.{name}={value}" for name, value in point.items()]


def grid(axes: tuple[Axis, ...]) -> list[Point]:
    """All combinations; those that can share a program follow each other.

    Raises ConfigError on a range without steps.
    """
    for axis in axes:
        if not axis.listed:
            raise ConfigError(
                f"space.{axis.name} is a range without steps, of which a grid has no points: list its "
                "values, give it a step, or take the sampler random or tpe"
            )
    ordered = sorted(axes, key=lambda axis: axis.name in LAW)
    points = itertools.product(*(axis.listed for axis in ordered))
    by_name = [dict(zip([axis.name for axis in ordered], values, strict=True)) for values in points]
    return [{axis.name: point[axis.name] for axis in axes} for point in by_name]


def _axes(space: Mapping[str, Any], prefix: str) -> Iterator[Axis]:
    for key, values in space.items():
        name = f"{prefix}{key}"
        if isinstance(values, (Mapping, ConfigDict)):
            if "low" in values or "high" in values:
                yield _range(name, values)
            else:
                yield from _axes(values, f"{name}.")
        elif isinstance(values, (list, tuple)) and values:
            plain = tuple(
                value if isinstance(value, (bool, int, float, str)) else repr(value) for value in values
            )
            twice = next((value for value in plain if plain.count(value) > 1), None)
            if twice is not None:
                raise ConfigError(f"space.{name} has {twice!r} twice: give every value once")
            yield Axis(name, plain)
        else:
            raise ConfigError(
                f"space.{name} is {values!r}: give a list of values, or a range {{'low': 1, 'high': 8}}"
            )


def _range(name: str, bounds: Mapping[str, Any]) -> Axis:
    if not {"low", "high"} <= set(bounds) <= set(RANGE):
        raise ConfigError(
            f"space.{name} has the fields {', '.join(bounds)}: a range has low, high, and maybe step or log"
        )
    axis = Axis(name, (), **dict(bounds))
    given = [axis.low, axis.high, *([] if axis.step is None else [axis.step])]
    is_numeric = all(isinstance(bound, (int, float)) and not isinstance(bound, bool) for bound in given)
    if not is_numeric or not axis.low < axis.high or (axis.step is not None and axis.step <= 0):
        raise ConfigError(
            f"space.{name} goes from {axis.low!r} to {axis.high!r} in steps of {axis.step!r}: give numbers, "
            "low below high, and a step above 0"
        )
    if axis.log and (axis.low <= 0 or axis.step is not None):
        raise ConfigError(f"space.{name} is logarithmic: give low above 0 and no step")
    return axis
