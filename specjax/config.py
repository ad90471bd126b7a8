"""An experiment's config: its task's fields and defaults, its file, and the checks before any long work."""

from __future__ import annotations

import dataclasses
import inspect
import re
import runpy
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from ml_collections import ConfigDict, config_dict, config_flags

from specjax.errors import ConfigError, nearest
from specjax.modules import find_module, module_names


class Field(NamedTuple):
    """A field of a config: its type, its default (None is "not set") and what it means."""

    kind: type
    default: Any
    meaning: str


class Options(NamedTuple):
    """A command line, parsed and checked: what a task is run with."""

    config: ConfigDict
    workdir: Path
    stream: bool


def run_config(task: str = "compare") -> ConfigDict:
    """The defaults of a task (a module of specjax.tasks or yours); ConfigError if there is no such task."""
    config = ConfigDict()
    for name, field in find_module("tasks", task).FIELDS.items():
        default = ConfigDict() if field.kind is ConfigDict else field.default
        config[name] = config_dict.placeholder(field.kind) if default is None else default
    return config


def load_config(path: str) -> ConfigDict:
    """What `get_config()` of a Python file returns, or `get_config(ARGUMENT)` for a path "FILE.py:ARGUMENT".

    A file whose `get_config` takes an argument lists the known ones in `VARIANTS`. ConfigError if there is
    no such file or argument, or if the file fails.
    """
    file, _, argument = path.partition(".py:")
    file = f"{file}.py" if argument else path.removesuffix(":")
    if not Path(file).is_file():
        raise ConfigError(f"there is no config file {file}: give the path of one, as in configs/")
    try:
        content = runpy.run_path(file)
        get_config = content.get("get_config")
        arguments = _arguments(file, argument, content) if callable(get_config) else ()
        config = get_config(*arguments) if callable(get_config) else None
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"the config file {file} fails with {type(error).__name__}: {error}") from error
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"the config file {file} has no get_config() that returns a ConfigDict: add one")
    return config


def _arguments(file: str, argument: str, content: Mapping[str, Any]) -> tuple[str, ...]:
    """What a file's `get_config` is called with; ConfigError where it does not know the argument."""
    if not argument:
        return ()
    if not inspect.signature(content["get_config"]).parameters:
        raise ConfigError(
            f"the config file {file} takes no argument, and is given '{argument}': leave it out"
        )
    known = content.get("VARIANTS")
    if known is not None and argument not in known:
        raise ConfigError(
            f"the config file {file} knows no '{argument}'{nearest(argument, known)}: choose one of "
            f"{', '.join(known)}"
        )
    return (argument,)


def override(config: ConfigDict, arguments: Sequence[str]) -> ConfigDict:
    """`config` with the `--config.field=value` of a command line; ConfigError on anything else in it."""
    _fill_in_defaults(config, arguments)
    for argument in arguments:
        given = re.match(r"--?(?:no)?config\.([^=]+)", argument)
        if given and given[1] not in _paths(config):
            raise ConfigError(f"the config has no field '{given[1]}'{nearest(given[1], _paths(config))}")
    values = flags.FlagValues()
    values.set_gnu_getopt(True)
    argv = ["", *arguments]
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
    try:
        rest = values(argv)[1:]
    except flags.UnrecognizedFlagError as error:
        raise ConfigError(f"there is no flag --{error.flagname}: --help lists them") from error
    except (flags.Error, TypeError, ValueError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    if rest:
        raise ConfigError(f"'{rest[0]}' is not a flag: write --config.field=value")
    return config


def _fill_in_defaults(config: ConfigDict, arguments: Sequence[str]) -> None:
    """Fields that the chosen drafter and rule would default, so that a command line can override them."""
    words = " ".join(arguments)
    for room, path, fields, offer in (
        ("drafters", "drafter.name", "drafter", "Config"),
        ("drafters", "drafter.name", "training", "Training"),
        ("verify", "verify", "verify_options", "Config"),
    ):
        name: Any = config
        for part in path.split("."):
            name = name.get(part) if isinstance(name, ConfigDict) else None
        name = (re.findall(rf"--?config\.{re.escape(path)}[= ](\S+)", words) or [name])[-1]
        if not isinstance(name, str) or not isinstance(config.get(fields), ConfigDict):
            continue
        try:
            kind = getattr(find_module(room, name), offer, NoOptions)
        except ConfigError:
            continue  # validation names what is wrong with it
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if field.name in config[fields] or field.default is dataclasses.MISSING:
                continue
            # A bare None has no type that a value on the command line could be given.
            is_unset = field.default is None
            default = config_dict.placeholder(_without_none(hints[field.name])) if is_unset else field.default
            config[fields][field.name] = default


def validate(config: ConfigDict) -> types.ModuleType:
    """Check all that can be checked without the models and return the task's module.

    ConfigError names the field and the remedy.
    """
    if "task" not in config:
        raise ConfigError("the config misses 'task': start from specjax.config.run_config()")
    check_type("task", config.task, str)
    task = find_module("tasks", config.task)
    for name in config:
        if name not in task.FIELDS:
            raise ConfigError(f"the config has no field '{name}'{nearest(name, task.FIELDS)}")
    for name, field in task.FIELDS.items():
        if name not in config:
            raise ConfigError(f"the config misses '{name}': start from specjax.config.run_config()")
        if config[name] is not None or field.default is not None:
            check_type(name, config[name], field.kind)
    task.validate(config)
    return task


def check_at_least_1(config: ConfigDict, names: Sequence[str]) -> None:
    """Raise ConfigError where a field of these names is set and below 1."""
    for name in names:
        if config[name] is not None and config[name] < 1:
            raise ConfigError(f"{name} is {config[name]}: give at least 1")


def check_seed(config: ConfigDict) -> None:
    """Raise ConfigError where the seed is none."""
    if not 0 <= config.seed < 2**32:
        raise ConfigError(f"seed is {config.seed}: give a number from 0 to 2**32 - 1")


def drafter_config(fields: Mapping[str, Any]) -> Any:
    """The `Config` of the drafter that `fields` names; ConfigError on a field that it refuses."""
    given = dict(fields)
    if "name" not in given:
        raise ConfigError(f"drafter.name is missing: choose one of {', '.join(module_names('drafters'))}")
    name = given.pop("name")
    check_type("drafter.name", name, str)
    drafter = dataclass_of(find_module("drafters", name).Config, given, f"the drafter '{name}'", "drafter")
    if getattr(drafter, "draft_length", 1) < 1:
        raise ConfigError(f"drafter.draft_length is {drafter.draft_length}: draft at least 1 token a pass")
    if hasattr(drafter, "inner"):
        drafter_config(drafter.inner)
    return drafter


def rule_options(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of the rule's `verify`; ConfigError on a field that its `Config` refuses."""
    kind = getattr(find_module("verify", name), "Config", NoOptions)
    options = dataclass_of(kind, dict(fields), f"the rule '{name}'", "verify_options")
    return dataclasses.asdict(options)


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """The `Config` of a rule that has none."""


def dataclass_of(kind: Any, given: dict[str, Any], owner: str, prefix: str) -> Any:
    """An instance of a module's `Config`; ConfigError on an unknown, missing or wrong field."""
    known = {field.name: field for field in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    for field, value in given.items():
        if field not in known:
            raise ConfigError(f"{owner} has no field '{field}'{nearest(field, known)}")
        wanted = hints[field] if value is None else _without_none(hints[field])
        if wanted is tuple and isinstance(value, list):
            given[field] = value = tuple(value)
        if wanted in (bool, int, float, str, tuple):
            check_type(f"{prefix}.{field}", value, wanted)
    for field, entry in known.items():
        required = entry.default is entry.default_factory is dataclasses.MISSING
        if required and field not in given:
            raise ConfigError(f"{owner} needs the field '{field}': set config.{prefix}.{field}")
    return kind(**given)


def _without_none(hint: Any) -> Any:
    """The class of a type hint: X for X | None, tuple for tuple[int, ...]."""
    if isinstance(hint, types.UnionType):
        hint = typing.get_args(hint)[0]
    return typing.get_origin(hint) or hint


def check_type(name: str, value: Any, kind: type) -> None:
    """Raise ConfigError where a value is not of its field's type; an int will do for a float."""
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name} is {value!r}: give a value of type {kind.__name__}")


def _paths(config: ConfigDict) -> list[str]:
    """The dotted names of all fields, sub-configs included."""
    paths = []
    for name in config:
        paths.append(name)
        if isinstance(config[name], ConfigDict):
            paths += [f"{name}.{path}" for path in _paths(config[name])]
    return paths
