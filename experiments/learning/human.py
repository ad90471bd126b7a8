"""What people answered, as chats for specjax.data.prepare: GSM8K's solutions and Self-Instruct's outputs.

    python -m experiments.learning.human gsm8k_train.jsonl --out=runs/human/gsm8k.jsonl

The marks of GSM8K's calculator are left out.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from specjax.data.documents import read_text
from specjax.data.instructions import load_instructions
from specjax.errors import ConfigError, command
from specjax.eval import results

CALCULATION = re.compile(r"<<[^>]*>>")


@command()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0, or 2 after an error of the user's, or 130 after an interruption."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="instruction sets with answers (.jsonl)")
    parser.add_argument("--out", type=Path, required=True, help="the file of chats (.jsonl)")
    args = parser.parse_args(arguments)
    results.check_writable(args.out.parent)
    chats = [chat for path in args.files for chat in load_chats(path)]
    results.write_whole(args.out, "".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    print(f"{len(chats)} chats in {args.out}")
    return 0


def load_chats(path: Path) -> list[list[dict[str, str]]]:
    """Every request of a file with its answer; ConfigError, with file and line, where it has none."""
    lines = [(n, line) for n, line in enumerate(read_text(path).split("\n"), start=1) if line.strip()]
    chats = []
    for request, (number, line) in zip(load_instructions(path), lines, strict=True):
        answer = _answer(json.loads(line))
        if not answer:
            raise ConfigError(f"{path}:{number}: no answer: give 'answer', or 'instances' with an 'output'")
        chats.append([{"role": "user", "content": request}, {"role": "assistant", "content": answer}])
    return chats


def _answer(record: object) -> str:
    if not isinstance(record, dict):
        return ""
    instances = record.get("instances") or [{}]
    return CALCULATION.sub("", record.get("answer") or instances[0].get("output", "")).strip()


if __name__ == "__main__":
    sys.exit(main())
