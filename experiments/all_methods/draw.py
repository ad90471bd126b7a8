"""What every drafter gains over plain decoding, in one picture: a panel for each setting of the results.

    python -m experiments.all_methods.draw runs/evaluate_all/summary.json

Takes summaries of `evaluate`, several for several temperatures, such as results_T0.json beside this file. The
prompt sets of a setting are taken together.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.analysis import plots
from specjax.errors import ConfigError, SpecjaxError
from specjax.eval import results, tables
from specjax.eval.compare import PLAIN
from specjax.storage import replacing

PICTURE = Path(__file__).with_name("speedup.png")
SETTING = ("temperature", "batch_size", "max_new_tokens")
LABEL = "speed-up over plain decoding with its 95 % interval; behind the bar, tokens per pass"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0, or 2 after an error of the user's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="a summary.json, or several")
    parser.add_argument("--out", type=Path, default=PICTURE, help="a PNG; default: beside this file")
    args = parser.parse_args(arguments)
    try:
        if args.out.suffix != ".png":
            raise ConfigError(f"--out is {args.out}: give a name that ends in .png")
        results.check_writable(args.out.parent)
        panels = make_panels(args.results)
        picture = plots.png(plots.ranking(panels, x_label=LABEL, reference=1.0))
        with replacing(args.out) as draft:
            draft.write_bytes(picture)
    except SpecjaxError as error:
        print(f"specjax: error: {error}", file=sys.stderr)
        return 2
    return 0


def make_panels(paths: Sequence[Path]) -> dict[str, dict[str, plots.Bar]]:
    """The bars of every setting by its title; ConfigError where two results have the same."""
    panels: dict[str, dict[str, plots.Bar]] = {}
    for path in paths:
        for section in read(path):
            if (name := title(section)) in panels:
                raise ConfigError(f"{path} has once more: {' '.join(name.split())}: name one result of it")
            panels[name] = bars(section)
    return panels


def read(path: Path) -> list[dict[str, Any]]:
    """The settings of a result, each with its methods over all prompt sets; ConfigError for another file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        # The last of a setting is the whole; where it has one prompt set only, that is.
        wholes = {setting(section): section for section in found["sections"] + found["overall"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no result of `evaluate` ({error}): name the summary.json of a run"
        ) from error
    return list(wholes.values())


def setting(section: Mapping[str, Any]) -> tuple[float, ...]:
    """What a panel is for."""
    return tuple(section[name] for name in SETTING)


def title(section: Mapping[str, Any]) -> str:
    """The number of prompts, and the setting."""
    prompts = f"{section['methods'][PLAIN]['prompts']} prompts"
    return tables.section_title({**section, "prompts": prompts}).replace(", ", "\n", 1)


def bars(section: Mapping[str, Any]) -> dict[str, plots.Bar]:
    """A bar for every method but plain decoding."""
    return {
        name.replace("_", " "): plots.Bar(
            own["speedup"]["value"], own["speedup"]["interval"], f"{own['tokens_per_step']:.2f}"
        )
        for name, own in section["methods"].items()
        if name != PLAIN
    }


if __name__ == "__main__":
    sys.exit(main())
