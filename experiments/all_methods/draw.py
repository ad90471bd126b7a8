"""What every drafter gains over plain decoding, for each setting of the results: a picture and tables.md.

    python -m experiments.all_methods.draw runs/evaluate_all/summary.json

Takes summaries of `evaluate`, several for several temperatures, such as results_T0.json beside this file. The
prompt sets of a setting are taken together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax.analysis import plots, theory
from specjax.errors import ConfigError, command
from specjax.eval import results, tables
from specjax.eval.compare import PLAIN
from specjax.eval.metrics import Metrics
from specjax.eval.timing import PARTS, STEP
from specjax.storage import replacing

PICTURE, TABLES = Path(__file__).with_name("speedup.png"), "tables.md"
SETTING = ("temperature", "batch_size", "max_new_tokens")
LABEL = "speed-up over plain decoding with its 95 % interval; behind the bar, tokens per pass"
NOTES = [
    "Speed-up: of decoding, without prefill, with its 95 % interval by bootstrap over prompts. A pass costs: "
    "in plain ones, drafting included. By prompt set: tokens per pass; speed-up.",
    "Memory-bound is a model, not a measurement: tokens per pass / (1 + the time of a draft over that of a "
    "plain pass, as measured), for a device where a pass over any draft costs a plain one. It is of the "
    "prompt sets whose steps were timed by parts, all together: those that the parts' table names.",
    "A drafter that adapts has no step that stands for all its rounds: it has neither parts nor that model.",
]


class Setting(NamedTuple):
    """The `methods` of a setting by prompt set and of all sets together, and which of them adapt."""

    whole: Mapping[str, Any]
    sets: Mapping[str, Mapping[str, Metrics]]
    adaptive: frozenset[str]

    @property
    def ranked(self) -> list[str]:
        """The drafters' names, the largest speed-up first."""
        methods = self.whole["methods"]
        names = (name for name in methods if name != PLAIN)
        return sorted(names, key=lambda name: methods[name]["speedup"]["value"], reverse=True)

    def timed(self, name: str = PLAIN) -> dict[str, Mapping[str, Metrics]]:
        """The prompt sets where a method's step was timed; none for a drafter that adapts."""
        if name in self.adaptive:
            return {}
        return {label: methods for label, methods in self.sets.items() if "step" in methods[name]}


@command()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0, or 2 after an error of the user's, or 130 after an interruption."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="a summary.json, or several")
    parser.add_argument("--out", type=Path, default=PICTURE, help="a PNG; default: beside this file")
    args = parser.parse_args(arguments)
    if args.out.suffix != ".png":
        raise ConfigError(f"--out is {args.out}: give a name that ends in .png")
    results.check_writable(args.out.parent)
    settings = read_all(args.results)
    panels = {title.replace(", ", "\n", 1): bars(setting) for title, setting in settings.items()}
    picture = plots.png(plots.ranking(panels, x_label=LABEL, reference=1.0))
    report = tables.Report(
        [make(title, setting) for title, setting in settings.items() for make in (gains, parts)], NOTES
    )
    with replacing(args.out) as draft:
        draft.write_bytes(picture)
    results.write_whole(args.out.with_name(TABLES), report.markdown())
    return 0


def read_all(paths: Sequence[Path]) -> dict[str, Setting]:
    """Every setting by its title; ConfigError where two results have the same."""
    settings: dict[str, Setting] = {}
    for path in paths:
        for found in read(path):
            prompts = f"{found.whole['methods'][PLAIN]['prompts']} prompts"
            title = tables.section_title({**found.whole, "prompts": prompts})
            if title in settings:
                raise ConfigError(f"{path} has once more: {title}: name one result of it")
            settings[title] = found
    return settings


def read(path: Path) -> list[Setting]:
    """The settings of a result; ConfigError for another file."""

    def place(section: Mapping[str, Any]) -> tuple[float, ...]:
        return tuple(section[name] for name in SETTING)

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        methods = found["config"]["methods"].items()
        adaptive = frozenset(name for name, own in methods if own["drafter"]["name"] == "adaptive")
        sets: dict[tuple[float, ...], dict[str, Mapping[str, Metrics]]] = {}
        for section in found["sections"]:
            sets.setdefault(place(section), {})[section["prompts"]] = section["methods"]
        # The last of a setting is the whole; where it has one prompt set only, that is.
        wholes = {place(section): section for section in found["sections"] + found["overall"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no result of `evaluate` ({error}): name the summary.json of a run"
        ) from error
    return [Setting(whole, sets[at], adaptive) for at, whole in wholes.items()]


def bars(setting: Setting) -> dict[str, plots.Bar]:
    """A bar for every method but plain decoding."""
    methods = setting.whole["methods"]
    return {
        shown(name): plots.Bar(
            methods[name]["speedup"]["value"],
            methods[name]["speedup"]["interval"],
            f"{methods[name]['tokens_per_step']:.2f}",
        )
        for name in setting.ranked
    }


def gains(title: str, setting: Setting) -> tables.Table:
    """A row for every drafter: what it gains, and would under the model, overall, and by prompt set."""
    methods, names, sets = setting.whole["methods"], setting.ranked, setting.sets
    gained = {name: methods[name]["speedup"] for name in names}
    modelled = {name: if_memory_bound(name, setting) for name in names}
    cells = {
        "method": [shown(name) for name in names],
        "tokens per pass": [f"{methods[name]['tokens_per_step']:.2f}" for name in names],
        "a pass costs": [f"{methods[name]['break_even_tokens_per_step']:.2f}" for name in names],
        "speed-up (95 %)": [f"{s['value']:.2f} ({tables.interval(s['interval'])})" for s in gained.values()],
        "memory-bound (model)": ["-" if value is None else f"{value:.2f}" for value in modelled.values()],
    }
    for label, own in sets.items() if len(sets) > 1 else ():
        cells[label] = [f"{own[n]['tokens_per_step']:.2f}; {own[n]['speedup']['value']:.2f}" for n in names]
    if setting.whole["temperature"] == 0:
        counts = [methods[name]["identical_to_greedy"] for name in names]
        cells["identical"] = [f"{count['identical']} of {count['of']}" for count in counts]
    return tables.Table(title, tuple(cells), list(zip(*cells.values(), strict=True)))


def if_memory_bound(name: str, setting: Setting) -> float | None:
    """The speed-up if any pass cost a plain one, computed where a summary lacks it; None without parts."""
    if not (timed := setting.timed(name).values()):
        return None
    stored = setting.whole["methods"][name].get("speedup_if_memory_bound")
    if stored is not None:
        return float(stored["value"])
    tokens, steps = (sum(methods[name][count] for methods in timed) for count in ("tokens", "steps"))
    drafting = statistics.mean(
        methods[name]["step"]["seconds"]["draft"] / methods[PLAIN]["step"]["seconds"][STEP]
        for methods in timed
    )
    return theory.speedup(tokens / steps, 1, drafting, verify_cost=1.0)


def parts(title: str, setting: Setting) -> tables.Table:
    """A row for every drafter: the share of each part in a step, the mean of the prompt sets that have it."""
    rows = []
    for name in setting.ranked:
        if shares := [methods[name]["step"]["shares"] for methods in setting.timed(name).values()]:
            means = (statistics.mean(share[part] for share in shares) for part in PARTS)
            rows.append((shown(name), *(f"{mean:.2f}" for mean in means)))
    sets = ", ".join(setting.timed()) or "no set"
    where = title.partition(", ")[2]  # not all of the prompts
    return tables.Table(f"Where a step's time goes, mean of {sets}: {where}", ("method", *PARTS), rows)


def shown(name: str) -> str:
    """A method's name as people read it."""
    return name.replace("_", " ")


if __name__ == "__main__":
    sys.exit(main())
