"""The real target on real prompts: greedy speculative text is the plain greedy text, token for token.

Drafters decode a ragged batch here, plain decoding every prompt alone; `experiments/greedy_identity` shows
the same on 40 Spec-Bench prompts, with the drafters at batch 1 as well.
"""

from __future__ import annotations

import jax
import pytest

from specjax.checkpoints.source import Checkpoint
from specjax.data.prompts import load_prompts
from specjax.decode import generate, new_tokens, prefill, prepare, row_keys
from specjax.drafters import draft_model, ngram, self_speculative
from specjax.models.functional import make_target, pack
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.types import ModelParams
from specjax.verify import greedy, rejection, target_only

NEW_TOKENS = 24
PROMPT_SIZE, CAPACITY = 256, 320  # one for all, so that a method compiles once for each batch size
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prompts(smollm2: Checkpoint) -> list[list[int]]:
    """Four of the packaged prompts, of very different lengths."""
    assert smollm2.tokenizer is not None
    messages = [[{"role": "user", "content": p.turns[0]}] for p in load_prompts("default")]
    encoded = [smollm2.tokenizer.encode(smollm2.tokenizer.chat(message)) for message in messages]
    fitting = sorted((tokens for tokens in encoded if len(tokens) <= PROMPT_SIZE), key=len)
    chosen = [fitting[-1], fitting[0], fitting[len(fitting) // 2], fitting[1]]
    assert max(map(len, chosen)) > 3 * min(map(len, chosen))
    return chosen


def decode(
    method: Method,
    params: ModelParams,
    prompts: list[list[int]],
    rows: list[int],
    stop_tokens: tuple[int, ...],
) -> tuple[list[list[int]], list[int], list[int]]:
    batch = [prompts[row] for row in rows]
    request, tokens, lengths = prepare(
        method,
        batch,
        max_new_tokens=NEW_TOKENS,
        warp=make_warp(len(rows)),
        stop_tokens=stop_tokens,
        capacity=CAPACITY,
    )
    state = prefill(method, params, request, tokens, lengths, row_keys(0, rows), PROMPT_SIZE)
    state, stats = generate(method, params, request, state)
    return new_tokens(state, batch), stats.num_steps.tolist(), stats.num_emitted.tolist()


def test_every_drafter_reproduces_the_greedy_text(smollm2: Checkpoint, prompts: list[list[int]]) -> None:
    assert smollm2.tokenizer is not None
    stop_tokens = smollm2.tokenizer.stop_tokens
    target, weights = make_target(smollm2.config), jax.device_put(pack(smollm2.params))
    thinned = self_speculative.Config(draft_length=3, skip_layers=(3, 12, 17))
    itself = draft_model.Config(source=smollm2.source, draft_length=4)
    lookup = ngram.build(ngram.Config(draft_length=4, max_ngram=3), target)
    methods = {
        "ngram": (Method(target, lookup, rejection.verify), {}),
        "self_speculative": (Method(target, self_speculative.build(thinned, target), greedy.verify), {}),
        "draft_model": (
            Method(target, draft_model.build(itself, target, smollm2.config), target_only.verify),
            weights,
        ),
    }
    plain = Method(target)
    rows = list(range(len(prompts)))
    reference = [decode(plain, ModelParams(weights, {}), prompts, [row], stop_tokens)[0][0] for row in rows]
    assert all(reference)
    everything = (plain, {})
    for name, (method, drafter_weights) in {"plain": everything, **methods}.items():
        params = ModelParams(weights, drafter_weights)
        together, steps, emitted = decode(method, params, prompts, rows, stop_tokens)
        assert together == reference, f"{name} in a ragged batch of {len(rows)}"
        assert emitted == [len(tokens) for tokens in reference]
        if name == "plain":
            assert steps == emitted
        else:
            assert sum(steps) < sum(emitted), f"{name} had no draft accepted"
