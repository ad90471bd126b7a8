"""The real target against transformers on the same weights: logits, and the greedy text they lead to."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints.export import save_folder
from specjax.checkpoints.source import Checkpoint, load
from specjax.data.prompts import load_prompts
from specjax.decode import generate, new_tokens, row_keys, start
from specjax.models.functional import make_target, pack
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.types import ModelParams

NEW_TOKENS = 64
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(smollm2: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("exported") / "model"
    save_folder(smollm2, place)
    return place


@pytest.fixture(scope="module")
def prompts(smollm2: Checkpoint) -> list[list[int]]:
    """Five prompts of 50 to 700 tokens, the last one made of all the packaged prompts in a row."""
    assert smollm2.tokenizer is not None
    texts = [prompt.turns[0] for prompt in load_prompts("default")]
    by_length = sorted(texts, key=len)
    chosen = [by_length[4], by_length[6], by_length[-2], by_length[-1]]
    chat = [smollm2.tokenizer.chat([{"role": "user", "content": text}]) for text in chosen]
    encoded = [smollm2.tokenizer.encode(text) for text in chat]
    encoded.append(smollm2.tokenizer.encode("\n\n".join(texts))[:700])
    assert all(50 <= len(tokens) <= 700 for tokens in encoded), [len(tokens) for tokens in encoded]
    assert max(map(len, encoded)) > 650
    return encoded


def test_logits_and_greedy_text_equal_those_of_transformers(
    smollm2: Checkpoint, folder: Path, prompts: list[list[int]]
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    target = make_target(smollm2.config)
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
        request, state = start(
            method, params, [prompt], max_new_tokens=NEW_TOKENS, warp=make_warp(1), keys=row_keys(0, [0])
        )
        state, _ = generate(method, params, request, state)
        assert new_tokens(state, [prompt]) == [text]


def test_logits_do_not_depend_on_the_file_format(
    smollm2: Checkpoint, folder: Path, prompts: list[list[int]]
) -> None:
    converted = load(str(folder))
    assert converted.config == smollm2.config
    first = logits_of(make_target(smollm2.config), jax.device_put(pack(smollm2.params)), prompts[0])
    second = logits_of(make_target(converted.config), jax.device_put(pack(converted.params)), prompts[0])
    np.testing.assert_array_equal(first, second)
    assert converted.tokenizer is not None and smollm2.tokenizer is not None
    assert converted.tokenizer.stop_tokens == smollm2.tokenizer.stop_tokens
    messages = [{"role": "user", "content": "Does the tokenizer come along?"}]
    assert converted.tokenizer.chat(messages) == smollm2.tokenizer.chat(messages)


def logits_of(target, params, prompt: list[int]) -> np.ndarray:
    size = len(prompt)
    mask = jnp.tril(jnp.ones((1, size, size), bool))
    positions = jnp.arange(size)[None]
    out = jax.jit(target.forward)(params, jnp.array([prompt]), positions, mask, target.init_cache(1, size))
    return np.asarray(out.logits[0])
