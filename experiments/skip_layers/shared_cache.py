"""What would a drafter that skips layers gain if it read the target's keys and values of the layers it keeps?

    python experiments/skip_layers/shared_cache.py --search runs/skip_layers

Of every set on the frontier of a search: the agreement of drafts whose context is the thinned model's own, as
now, and of first drafts whose context is the target's; the bytes that the drafter's own cache takes; and how
many of its layers come before the first one skipped, whose keys and values are the target's anyway. Writes
shared_cache.json beside this file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specjax.analysis import memory
from specjax.build import LoadedTarget, build_target
from specjax.data.prompts import load_prompts
from specjax.models.functional import keep_layers, make_target
from specjax.tasks import compare, skip_layers
from specjax.types import KVCache, Params


def read_on_its_own(loaded: LoadedTarget, tokens: np.ndarray) -> KVCache:
    """The target's keys and values of whole texts, with as many free slots behind them."""
    batch, size = tokens.shape
    target = loaded.target
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (batch, size, size))
    positions = jnp.broadcast_to(jnp.arange(size), (batch, size))
    empty = target.init_cache(batch, 2 * size)
    read = jax.jit(lambda params: target.forward(params, tokens, positions, causal, empty).cache)
    return read(loaded.params)


def best_tokens(
    loaded: LoadedTarget, kept: tuple[int, ...], tokens: np.ndarray, context: KVCache
) -> np.ndarray:
    """The thinned model's best token after each, which sees itself and the target's states before it."""
    batch, size = tokens.shape
    model = make_target(dataclasses.replace(loaded.config, num_layers=len(kept)), dtype=loaded.target.dtype)
    # The first slots hold the target's texts, the last ones the thinned model's.
    seen = jnp.concatenate((jnp.tril(jnp.ones((size, size), bool), -1), jnp.eye(size, dtype=bool)), axis=1)
    mask = jnp.broadcast_to(seen, (batch, size, 2 * size))
    positions = jnp.broadcast_to(jnp.arange(size), (batch, size))

    @jax.jit
    def predict(params: Params, cache: KVCache) -> jax.Array:
        return model.forward(params, tokens, positions, mask, cache).logits.argmax(-1)

    own = KVCache(
        tuple(context.keys[i] for i in kept), tuple(context.values[i] for i in kept), context.length
    )
    return np.asarray(predict(keep_layers(loaded.params, kept), own))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--search", type=Path, required=True, help="the workdir of a finished search")
    parser.add_argument("--slots", type=int, default=512, help="the cache slots of a row")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "shared_cache.json")
    args = parser.parse_args()

    summary = json.loads((args.search / skip_layers.FILES.summary).read_text(encoding="utf-8"))
    answers = json.loads((args.search / skip_layers.ANSWERS).read_text(encoding="utf-8"))
    config = summary["config"]
    loaded = build_target(config["target"], jnp.dtype(config["dtype"]))
    prompts = load_prompts(*(config[name] for name in ("prompts", "prompts_path", "limit", "per_category")))
    encoded = compare.encode(prompts, compare.load_tokenizer(loaded), config["chat"])
    texts = skip_layers.make_texts(encoded, answers)
    context = read_on_its_own(loaded, texts.tokens)
    slots = {"batch": 1, "capacity": args.slots, "dtype": config["dtype"]}
    rows = []
    for candidate in summary["frontier"][skip_layers.OVERALL]:
        skipped = candidate["skip_layers"]
        kept = tuple(layer for layer in range(loaded.config.num_layers) if layer not in skipped)
        best = best_tokens(loaded, kept, texts.tokens, context)
        same = (best[:, :-1] == texts.tokens[:, 1:])[texts.answered[:, :-1]]
        thinned = dataclasses.replace(loaded.config, num_layers=len(kept))
        rows.append(
            {
                "skip_layers": skipped,
                "agreement": candidate["agreement"],
                "agreement_with_the_targets_context": float(same.mean()),
                "own_cache_bytes": memory.cache_bytes(thinned, **slots),
                "target_cache_bytes": memory.cache_bytes(loaded.config, **slots),
                "layers_before_the_first_skipped": min(skipped),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    args.out.write_text(json.dumps({"slots": args.slots, "sets": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
