"""What the zoo's drafters gain on Spec-Bench: here, and where a pass costs as much as reading its weights.

    python -m experiments.learning.spec_bench --spec_bench=question.jsonl --workdir=runs/spec_bench \
        --out=experiments/learning

40 prompts of the six tasks, batch 1, decoded plainly and with chains and a dynamic tree of every drafter of
the zoo, at temperature 0 and 1; each is a run of specjax.run, and the same command goes on after an
interruption. Flags --config.FIELD=VALUE hold for all of them. --out receives spec_bench.json, with the counts
of every prompt by its id, and spec_bench.md; nothing in them quotes a prompt or its answer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.learning.runs import ROOT, Run, as_flags, execute, make_run, refuse_both
from specjax import zoo
from specjax.analysis import theory
from specjax.build import build_method
from specjax.checkpoints.names import flatten
from specjax.config import drafter_config
from specjax.data.prompts import load_prompts
from specjax.draft_vocab import HEAD, TOKENS
from specjax.errors import SpecjaxError
from specjax.eval import results, tables
from specjax.eval.compare import PLAIN

CONFIG = ROOT / "configs" / "eagle_llama.py"
NAME = "spec_bench"
# Six tasks of up to 7 prompts.
PROMPTS = {"prompts": NAME, "per_category": 7, "limit": 40}
CHAINS = (2, 4)
DEPTH, WIDTH, NODES = 5, 8, 32
TEMPERATURES = (0.0, 1.0)
# Drafts of all depths come of one reading of the weights.
AT_ONCE = ("medusa",)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0, or 2 after an error of the user's, or 130 after an interruption."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--spec_bench", required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--workdir", type=Path, required=True, help="the folder of the runs' folders")
    parser.add_argument("--drafters", nargs="+", default=zoo.names(), help="of the zoo; default: all")
    parser.add_argument("--out", type=Path, help="the folder of what is written; default: the runs'")
    args, flags = parser.parse_known_args(arguments)
    try:
        load_prompts(NAME, args.spec_bench)
        out = args.out or args.workdir
        results.check_writable(out)
        runs = make_runs(args.drafters, args.spec_bench, args.workdir, flags)
        for run in runs:
            execute("specjax.run", run)
        print(report(runs, out))
    except SpecjaxError as error:
        print(f"specjax: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def make_runs(drafters: Sequence[str], questions: str, workdir: Path, flags: Sequence[str]) -> list[Run]:
    """The runs of every drafter, shape and temperature; ConfigError on a drafter that the zoo has not."""
    runs = []
    for drafter in drafters:
        source = zoo.PREFIX + drafter
        about = json.loads((zoo.folder(source) / "config.json").read_text(encoding="utf-8"))
        trained = drafter_config({"name": about["drafter"], **about["config"]})
        drafts = shapes(min(DEPTH, getattr(trained, "heads", DEPTH)))
        for (shape, fields), temperature in itertools.product(drafts.items(), TEMPERATURES):
            given = {
                "drafter": {"name": about["drafter"], "source": source, **fields},
                "verify": "target_only" if "branching" in fields else "rejection",
                "temperature": temperature,
                "prompts_path": questions,
            }
            refuse_both(flags, [given])
            name = f"{drafter}, {shape}, T={temperature:g}"
            folder = workdir / name.replace(", ", "_").replace(" ", "_")
            runs.append(make_run(name, CONFIG, [*as_flags(PROMPTS), *flags, *as_flags(given)], folder))
    return runs


def shapes(deepest: int) -> dict[str, dict[str, Any]]:
    """The drafts to compare, as fields of a drafter that drafts `deepest` tokens ahead at most."""
    chains = {f"chain of {length}": {"draft_length": length} for length in CHAINS if length <= deepest}
    tree = {
        "draft_length": deepest,
        "branching": (WIDTH,) * deepest,
        "num_nodes": NODES,
        "proposal": "point_mass",
    }
    return {**chains, f"tree of {NODES}": tree}


def report(runs: Sequence[Run], out: Path) -> str:
    """Write the table of all runs, and return it in Markdown."""
    costs: dict[str, float] = {}
    rows = {}
    for run in runs:
        source = run.config.drafter.source
        if source not in costs:
            costs[source] = reading_cost(run)
        rows[run.name] = summary(run, costs[source])
    environment = json.loads((runs[0].folder / results.SUMMARY).read_text(encoding="utf-8"))["environment"]
    content = {"runs": rows, "environment": environment}
    results.write_whole(out / f"{NAME}.json", json.dumps(content, indent=2) + "\n")
    table = tables.Report([as_table(rows)], NOTES).markdown()
    results.write_whole(out / f"{NAME}.md", table)
    return table


def reading_cost(run: Run) -> float:
    """The bytes of weights that one draft step reads, as a share of those that a target pass reads."""
    built = build_method(run.config)
    own = {name: leaf for name, leaf in flatten(built.params.drafter).items() if name != TOKENS}
    draft = sum(leaf.nbytes for leaf in own.values())
    if not any({HEAD, "lm_head"} & set(name.split(".")) for name in own):
        # The target's own head serves.
        target = built.loaded.target
        draft += target.vocab_size * target.config.hidden_size * jnp.dtype(target.dtype).itemsize
    return draft / sum(leaf.nbytes for leaf in jax.tree.leaves(built.loaded.params))


def summary(run: Run, cost: float) -> dict[str, Any]:
    """The figures of a run, from what specjax.run wrote, and what theory expects of it elsewhere."""
    found = json.loads((run.folder / results.SUMMARY).read_text(encoding="utf-8"))
    (method,) = (metrics for name, metrics in found["methods"].items() if name != PLAIN)
    lines = (run.folder / results.GENERATIONS).read_text(encoding="utf-8").splitlines()
    generations = [json.loads(line) for line in lines]
    plain = {line["id"]: line["tokens"] for line in generations if line["method"] == PLAIN}
    own = [line for line in generations if line["method"] != PLAIN]
    steps = 1 if run.config.drafter.name in AT_ONCE else run.config.drafter.draft_length
    kept = ("tokens_per_step", "speedup", "break_even_tokens_per_step", "identical_to_greedy", "lossless")
    return {
        **{name: method[name] for name in kept},
        "tokens_per_step_by_task": {
            task: metrics["tokens_per_step"]
            for task, methods in found["tasks"].items()
            for name, metrics in methods.items()
            if name != PLAIN
        },
        "drafting_cost": steps * cost,
        "memory_bound_speedup": theory.speedup(method["tokens_per_step"], steps, cost, verify_cost=1.0),
        "differing_prompts": [line["id"] for line in own if line["tokens"] != plain[line["id"]]]
        if run.config.temperature == 0
        else None,
        "prompts": {line["id"]: {"tokens": len(line["tokens"]), "steps": line["num_steps"]} for line in own},
    }


NOTES = [
    "Measured: decoding alone on this machine, with the 95 % interval over prompts; a pass, its draft "
    "included, costs so many plain ones there.",
    "Memory-bound, expected: tokens per pass / (1 + drafting), for a device where a pass costs the time of "
    "reading its weights once, whatever its nodes. Drafting is the weights read by the steps of a draft over "
    "the target's. Not measured.",
    "At temperature 1 texts are drawn, and need not be those of plain decoding.",
]


def as_table(rows: dict[str, dict[str, Any]]) -> tables.Table:
    """A row for each run."""
    columns = (
        "drafter, drafts",
        "tokens per pass",
        "identical to greedy",
        "speed-up, measured",
        "95 %",
        "a pass costs, measured",
        "drafting costs, expected",
        "speed-up, memory-bound, expected",
    )
    cells = []
    for name, row in rows.items():
        same, bounds = row["identical_to_greedy"], row["speedup"]["interval"]
        cells.append(
            (
                name,
                f"{row['tokens_per_step']:.2f}",
                "-" if same is None else f"{same['identical']} of {same['of']}",
                f"{row['speedup']['value']:.2f}",
                "-" if bounds is None else f"{bounds[0]:.2f}-{bounds[1]:.2f}",
                f"{row['break_even_tokens_per_step']:.2f}",
                f"{row['drafting_cost']:.2f}",
                f"{row['memory_bound_speedup']:.2f}",
            )
        )
    return tables.Table("The zoo's drafters on Spec-Bench", columns, cells)


if __name__ == "__main__":
    sys.exit(main())
