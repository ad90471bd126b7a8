"""A random Llama of two layers, with a tokenizer and a chat template, as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from specjax.checkpoints.export import save_folder
from specjax.checkpoints.source import Checkpoint
from specjax.data.tokenizer import Tokenizer
from specjax.models.functional import init_params, unpack
from specjax.models.llama import LlamaConfig

TEXT = ["the cat sat on the mat and the dog sat on the log", "one two three four five six seven"]
END = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_model(folder: Path, *, seed: int = 0, text: list[str] = TEXT, num_layers: int = 2) -> Path:
    """Write a model whose outputs vary; `text` decides the tokenizer, of 320 tokens at any rate."""
    special = [END, "<|user|>", "<|assistant|>"]
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    inner.train_from_iterator(text, trainer)
    inner.add_tokens([f"<|unused-{i}|>" for i in range(320 - inner.get_vocab_size())])
    tokenizer = Tokenizer(inner, (inner.token_to_id(END),), {"eos_token": END}, TEMPLATE)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        rope_theta=10000.0,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        max_positions=256,
        tie_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
    )
    drawn = unpack(init_params(config, seed), config)
    # Large matrices make texts that repeat themselves, and so drafts that are accepted.
    params = jax.tree.map(lambda leaf: np.asarray(4 * leaf if leaf.ndim > 1 else leaf), drawn)
    save_folder(Checkpoint(config, params, tokenizer, str(folder)), folder)
    return folder


def write_prompts(path: Path) -> Path:
    """Write three prompts of two tasks."""
    prompts = [
        {"id": "a", "category": "animals", "prompt": "the cat sat on the mat and the cat sat"},
        {"id": "b", "category": "numbers", "prompt": "one two three one two three one two"},
        {"id": "c", "category": "animals", "prompt": "the dog"},
    ]
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return path
