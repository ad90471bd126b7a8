"""The real target against transformers on the same weights: logits, and the greedy text they lead to."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints.export import save_folder
from specjax.checkpoints.source import Checkpoint, load
from specjax.data.prompts import load_prompts
from specjax.decode import generate, new_tokens, prefill, prepare, row_keys
from specjax.models.functional import make_target, pack
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.trees.topology import chain_mask
from specjax.types import ModelParams, Params, Target

NEW_TOKENS = 32
PROMPT_SIZE, CAPACITY = 768, 832  # one for all, so that everything compiles once
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(smollm2: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("exported") / "model"
    save_folder(smollm2, place)
    return place


@pytest.fixture(scope="module")
def prompts(smollm2: Checkpoint) -> list[list[int]]:
    """Three prompts of 50 to 700 tokens, the last one made of all the packaged prompts in a row."""
    assert smollm2.tokenizer is not None
    texts = [prompt.turns[0] for prompt in load_prompts("default")]
    by_length = sorted(texts, key=len)
    chosen = [by_length[4], by_length[-2]]
    chat = [smollm2.tokenizer.chat([{"role": "user", "content": text}]) for text in chosen]
    encoded = [smollm2.tokenizer.encode(text) for text in chat]
    encoded.append(smollm2.tokenizer.encode("\n\n".join(texts))[:700])
    assert all(50 <= len(tokens) <= 700 for tokens in encoded), [len(tokens) for tokens in encoded]
    assert max(map(len, encoded)) > 650
    return encoded


@pytest.fixture(scope="module")
def target(smollm2: Checkpoint) -> Target:
    return make_target(smollm2.config)


def test_logits_and_greedy_text_equal_those_of_transformers(
    smollm2: Checkpoint, target: Target, folder: Path, prompts: list[list[int]]
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    params = ModelParams(jax.device_put(pack(smollm2.params)), {})
    method = Method(target)
    for prompt in prompts:
        with torch.inference_mode():
            theirs = peer(torch.tensor([prompt])).logits[0].numpy()
            text = peer.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0, len(prompt) :].tolist()
        ours = logits_of(target, params.target, prompt)
        assert np.isfinite(ours).all()
        assert np.abs(ours - theirs).max() < 2e-3
        request, tokens, lengths = prepare(
            method, [prompt], max_new_tokens=NEW_TOKENS, warp=make_warp(1), capacity=CAPACITY
        )
        state = prefill(method, params, request, tokens, lengths, row_keys(0, [0]), PROMPT_SIZE)
        state, _ = generate(method, params, request, state)
        assert new_tokens(state, [prompt]) == [text]


def test_logits_do_not_depend_on_the_file_format(
    smollm2: Checkpoint, target: Target, folder: Path, prompts: list[list[int]]
) -> None:
    converted = load(str(folder))
    assert converted.config == smollm2.config
    first, second = (logits_of(target, pack(found.params), prompts[0]) for found in (smollm2, converted))
    np.testing.assert_array_equal(first, second)
    assert converted.tokenizer is not None and smollm2.tokenizer is not None
    assert converted.tokenizer.stop_tokens == smollm2.tokenizer.stop_tokens
    messages = [{"role": "user", "content": "Does the tokenizer come along?"}]
    assert converted.tokenizer.chat(messages) == smollm2.tokenizer.chat(messages)


def logits_of(target: Target, params: Params, prompt: list[int]) -> np.ndarray:
    """The logits after every token, read in one pass; what stands behind a prompt is not seen from within."""
    size = len(prompt)
    return np.asarray(read(target, params, jnp.asarray([prompt + [0] * (PROMPT_SIZE - size)]))[0, :size])


@functools.partial(jax.jit, static_argnums=0)
def read(target: Target, params: Params, tokens: jax.Array) -> jax.Array:
    positions, mask = jnp.arange(PROMPT_SIZE)[None], chain_mask(1, PROMPT_SIZE)
    return target.forward(params, tokens, positions, mask, target.init_cache(1, PROMPT_SIZE)).logits
