"""Two samples of Spec-Bench without a prompt in common: one to advise on, and one to check the advice with.

    python -m experiments.advice.prompts question.jsonl --out=runs/advice

Of every task whose prompts are short, the first two in `advised.jsonl` and the next two in `checked.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from specjax.data.prompts import load_prompts
from specjax.errors import command
from specjax.eval import results

LONG = ("summarization", "rag")
EACH = 2  # of a task, in either sample
SAMPLES = ("advised.jsonl", "checked.jsonl")


@command()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0, or 2 after an error of the user's, or 130 after an interruption."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", help="Spec-Bench's question.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the two files")
    args = parser.parse_args(arguments)
    found = load_prompts("spec_bench", args.file, per_category=EACH * len(SAMPLES))
    tasks = dict.fromkeys(prompt.task for prompt in found if prompt.task not in LONG)
    results.check_writable(args.out)
    for number, name in enumerate(SAMPLES):
        lines = []
        for task in tasks:
            own = [prompt for prompt in found if prompt.task == task]
            for prompt in own[number * EACH : (number + 1) * EACH]:
                record = {"id": prompt.id, "category": task, "turns": prompt.turns[:1]}
                lines.append(json.dumps(record) + "\n")
        results.write_whole(args.out / name, "".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
