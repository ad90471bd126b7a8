"""A tiny Llama, its tensors, and what its files hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType as Kind

from specjax.checkpoints.validate import expected_shapes
from specjax.models.llama import LlamaConfig

# Row lengths are multiples of 256, the largest block of any GGUF type.
TINY = LlamaConfig(
    vocab_size=16,
    hidden_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=256,
    rope_theta=10000.0,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    max_positions=128,
    tie_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
)
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "model.layers": "blk",
}


def random_tensors(config: LlamaConfig = TINY, seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 tensors by their published names."""
    rng = np.random.default_rng(seed)
    return {
        name if name.startswith("lm_head") else f"model.{name}": rng.standard_normal(shape, np.float32)
        for name, shape in expected_shapes(config).items()
    }


def published(params: Any, prefix: str = "") -> dict[str, np.ndarray]:
    """The tensors of a nested tree by their published names."""
    if isinstance(params, np.ndarray):
        return {prefix if prefix.startswith("lm_head") else f"model.{prefix}": params}
    return {
        name: tensor
        for key, child in params.items()
        for name, tensor in published(child, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def hf_config(config: LlamaConfig = TINY, **changes: Any) -> dict[str, Any]:
    """A config.json as transformers 5 writes it; a change to None leaves the field out."""
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }
    return {name: value for name, value in {**fields, **changes}.items() if value is not None}


def gguf_name(name: str) -> str:
    for ours, theirs in GGUF_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order that GGUF converters give Q and K, written row by row."""
    head_dim = len(weight) // heads
    order = [
        head * head_dim + half * (head_dim // 2) + pair
        for head in range(heads)
        for pair in range(head_dim // 2)
        for half in (0, 1)
    ]
    return weight[order]


def add_tokenizer(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["<end>", *"abcdefghijklmn", "ab"])
    writer.add_token_types([3] + [1] * 15)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)


def stored(
    tensors: Mapping[str, np.ndarray], config: LlamaConfig = TINY
) -> dict[str, tuple[np.ndarray, Kind | None]]:
    """Float32 tensors as a converter stores them."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    result: dict[str, tuple[np.ndarray, Kind | None]] = {}
    for name, tensor in tensors.items():
        count = heads.get(name.split(".")[-2])
        result[gguf_name(name)] = (tensor if count is None else interleave(tensor, count), None)
    return result
