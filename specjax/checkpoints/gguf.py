"""GGUF files of the Llama family: architecture, dequantised weights and tokenizer from one file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import quants
from gguf.constants import GGMLQuantizationType as Kind

from specjax.checkpoints.gguf_file import TensorData, read_gguf
from specjax.checkpoints.validate import (
    Params,
    StoredTensor,
    check_and_nest,
    check_num_layers,
    expected_shapes,
)
from specjax.data.gguf_tokenizer import from_gguf_fields
from specjax.data.tokenizer import Tokenizer
from specjax.errors import CheckpointError
from specjax.models.llama import LlamaConfig

KINDS = (
    *(Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0),
    *(Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K),
)
# Fields that change what is computed, and the value at which they do not.
_NEUTRAL = {"llama.expert_count": 0, "llama.attention.sliding_window": 0, "split.count": 1}
_NAMES = {
    "embed_tokens": "token_embd",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "norm": "output_norm",
    "lm_head": "output",
}


def load_gguf(path: Path, dtype: npt.DTypeLike = np.float32) -> tuple[LlamaConfig, Params, Tokenizer | None]:
    """Read a GGUF file's config, weights and tokenizer (None where it carries none).

    Raises CheckpointError naming the field or tensor that is missing, damaged or not supported.
    """
    file = read_gguf(path)
    config = _config(file.fields, file.tensors, str(path))
    check_num_layers(config, len(file.tensors), str(path))
    published = {_spell(name): name for name in expected_shapes(config)}
    tensors = {
        published.get(name, name): _stored(name, tensor, config, str(path))
        for name, tensor in file.tensors.items()
    }
    params = check_and_nest(tensors, config, str(path), dtype, spell=_spell)
    tokenizer = from_gguf_fields(file.fields, str(path)) if "tokenizer.ggml.model" in file.fields else None
    return config, params, tokenizer


def _config(fields: Mapping[str, Any], tensors: Mapping[str, TensorData], source: str) -> LlamaConfig:
    def get(name: str, kind: type, default: Any = None) -> Any:
        value = fields.get(name, default)
        if value is None:
            raise CheckpointError(
                f"{source}: field '{name}' is absent; convert the model with a current converter."
            )
        if type(value) is not kind or not value > kind(0):
            raise CheckpointError(f"{source}: field '{name}' is {value!r}, not a positive {kind.__name__}.")
        return value

    if (architecture := fields.get("general.architecture")) != "llama":
        raise CheckpointError(f"{source}: the architecture is {architecture!r}; only 'llama' is supported.")
    unscaled = fields.get("llama.rope.scaling.type") == "none"
    for name, value in fields.items():
        scaled = name.startswith("llama.rope.scal") and not unscaled
        if scaled or not np.array_equal(value, _NEUTRAL.get(name, value)):
            raise CheckpointError(f"{source}: field '{name}' is {value!r}, which is not supported.")
    if "rope_freqs.weight" in tensors:
        raise CheckpointError(
            f"{source}: tensor 'rope_freqs.weight' (Llama-3.1 rope scaling) is not supported in GGUF; "
            "use the Hugging Face folder of the same model."
        )
    tokens = fields.get("tokenizer.ggml.tokens")
    heads, hidden = get("llama.attention.head_count", int), get("llama.embedding_length", int)
    head_dim = get("llama.attention.key_length", int, hidden // heads)
    for name in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if get(name, int, head_dim) != head_dim:
            raise CheckpointError(
                f"{source}: field '{name}' is {fields[name]}, but the head dimension is {head_dim}; "
                "only full rotation and equal dimensions are supported."
            )
    return LlamaConfig(
        vocab_size=get("llama.vocab_size", int, len(tokens) if isinstance(tokens, list) else None),
        hidden_size=hidden,
        num_layers=get("llama.block_count", int),
        num_heads=heads,
        num_kv_heads=get("llama.attention.head_count_kv", int, heads),
        head_dim=head_dim,
        intermediate_size=get("llama.feed_forward_length", int),
        rope_theta=_decimal(get("llama.rope.freq_base", float)),
        rope_scaling=None,
        rms_norm_eps=_decimal(get("llama.attention.layer_norm_rms_epsilon", float)),
        max_positions=get("llama.context_length", int),
        tie_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
    )


def _decimal(value: float) -> float:
    """Undo the rounding to float32 in the file: 9.99999974e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _spell(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{_NAMES.get(module, module)}.{kind}"
    _, layer, module = module.split(".", 2)
    return f"blk.{layer}.{_NAMES.get(module, module)}.{kind}"


def _stored(name: str, tensor: TensorData, config: LlamaConfig, source: str) -> StoredTensor:
    if tensor.kind not in KINDS:
        known = ", ".join(kind.name for kind in KINDS)
        raise CheckpointError(
            f"{source}: tensor '{name}' has type {tensor.kind.name}; supported are {known}."
        )
    rotated = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    heads = next((count for part, count in rotated.items() if f".{part}." in name), None)
    return StoredTensor(tensor.shape, "float32", partial(_dequantize, tensor, heads))


def _dequantize(tensor: TensorData, heads: int | None) -> npt.NDArray[np.float32]:
    # Blocks are independent, so rows may be joined: the library takes few rows at a time.
    rows, row_bytes = tensor.data.shape
    data = tensor.data.reshape(-1, row_bytes * math.gcd(rows, 16))
    values = quants.dequantize(data, tensor.kind).reshape(tensor.shape)
    if heads is None:
        return values.copy() if tensor.kind is Kind.F32 else values  # float32 is still a view of the file
    # GGUF interleaves each rotated head's halves: its [heads, dim/2, 2, in] is our [heads, 2, dim/2, in].
    pairs = values.reshape(heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)
