"""Run what a config asks for, and keep what comes out.

    python -m specjax.run --config=configs/ngram_llama.py --workdir=runs/ngram

  --config=FILE[:ARGUMENT] a Python file whose get_config() starts from specjax.config.run_config(task)
  --config.FIELD=VALUE     override a field, e.g. --config.limit=2 --config.drafter.draft_length=8
  --workdir=DIR            where the results go; the same command goes on from an interruption
  --[no]stream             print the first prompt's text as it comes
  --help                   this text

Nothing in DIR is overwritten by a run of another config.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags
from ml_collections import ConfigDict

from specjax.config import Options, load_config, override, validate
from specjax.errors import RESUMABLE, ConfigError, command
from specjax.eval import results
from specjax.modules import find_module, module_names
from specjax.storage import cache_folder


@command(interrupted=RESUMABLE)
def main(arguments: Sequence[str] | None = None) -> int:
    """The command: the task's exit code, or 2 after an error of the user's, or 130 after an interruption."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help", "--helpfull", "--helpshort"} & set(arguments):
        print(help_text())
        return 0
    # Before anything is compiled; a second run of the same shapes then compiles little.
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    options = parse(arguments)
    return find_module("tasks", options.config.task).run(options)


def help_text() -> str:
    """What --help prints: the module's docstring and, for every task, its own and its fields."""
    parts = [str(__doc__)]
    for name in module_names("tasks"):
        task = find_module("tasks", name)
        lines = [
            f"  {field:<16} {about.meaning}{_default(about.default)}" for field, about in task.FIELDS.items()
        ]
        parts.append(
            "\n".join([f"Task '{name}'. {task.__doc__}", "Its fields, and their defaults:", "", *lines])
        )
    return "\n\n".join(parts)


def parse(arguments: Sequence[str]) -> Options:
    """Read a command line; everything that can be checked at once is, the workdir first."""
    values = flags.FlagValues()
    values.set_gnu_getopt(True)
    flags.DEFINE_string("config", None, "config file", flag_values=values)
    flags.DEFINE_string("workdir", None, "folder for the results", flag_values=values)
    flags.DEFINE_boolean("stream", False, "print the first text as it comes", flag_values=values)
    try:
        rest = values(["", *arguments], known_only=True)[1:]
    except flags.Error as error:
        raise ConfigError(f"{error}: --help lists the flags") from error
    for name in ("config", "workdir"):
        if not values[name].value:
            raise ConfigError(f"--{name} is missing: --help shows an example")
    workdir = Path(values.workdir).expanduser()
    results.check_writable(workdir)
    config = override(load_config(values.config), rest)
    validate(config)
    return Options(config, workdir, values.stream)


def _default(value: Any) -> str:
    return "" if value is None or value == ConfigDict() else f" ({value})"


if __name__ == "__main__":
    sys.exit(main())
