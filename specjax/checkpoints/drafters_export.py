"""Writing a drafter in its published format, which other engines load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from specjax.checkpoints.drafters_eagle import MIDLAYER, NORM_BEFORE_RESIDUAL, STATE_LAYERS
from specjax.checkpoints.drafters_files import CONFIG, IS_DRAFTED, MEDUSA_WEIGHTS, OFFSETS, named
from specjax.checkpoints.export import new_folder, write_json
from specjax.checkpoints.huggingface import WEIGHTS
from specjax.checkpoints.validate import Array, Params
from specjax.draft_vocab import TOKENS
from specjax.errors import CheckpointError
from specjax.models.eagle import EMBEDDING, EagleConfig
from specjax.models.eagle3 import Eagle3Config
from specjax.models.functional import unpack
from specjax.models.llama import LlamaConfig


def to_published(
    folder: Path,
    weights: Params,
    architecture: EagleConfig | Eagle3Config | None,
    *,
    base: str,
    state_layers: Sequence[int] = (),
) -> None:
    """Write config.json and the weights, in their own type, of a drafter into a new `folder`, all or nothing.

    The architecture says which drafter it is, None that it is Medusa's heads on the target `base`. EAGLE-3
    names the `state_layers` whose inputs it reads. A draft vocabulary of EAGLE's or Medusa's goes along as
    EAGLE-3 writes it, as the offsets "d2t", which is our extension of their formats.

    Raises CheckpointError where the folder exists already, cannot be written, or the format cannot say what
    the drafter computes.
    """
    if isinstance(architecture, Eagle3Config):
        config, tensors = _eagle3(weights, architecture, state_layers)
    elif isinstance(architecture, EagleConfig):
        config, tensors = _eagle(weights, architecture)
    else:
        config, tensors = _medusa(weights, base)
    name = MEDUSA_WEIGHTS if architecture is None else WEIGHTS
    with new_folder(folder) as staging:
        save_file(tensors, staging / name, metadata={"format": "pt"})
        (staging / name).chmod(0o644)  # the library leaves it to the owner alone
        write_json(staging / CONFIG, config)


def _eagle(weights: Params, architecture: EagleConfig) -> tuple[dict[str, Any], dict[str, Array]]:
    layer = architecture.layer
    block, config = _unpacked(weights["layers"][0], layer)
    parts = {name: weights[name] for name in ("fc", EMBEDDING) if name in weights}
    tensors = named({**parts, "layers": {0: block}}) | _offsets(weights)
    return {"architectures": ["LlamaForCausalLM"], **config, "bias": architecture.fc_bias}, tensors


def _eagle3(
    weights: Params, architecture: Eagle3Config, state_layers: Sequence[int]
) -> tuple[dict[str, Any], dict[str, Array]]:
    layer, size = architecture.layer, architecture.draft_vocab_size
    block, config = _unpacked(weights[MIDLAYER], layer)
    names = ["fc", "norm", "lm_head", EMBEDDING]
    if architecture.state_size == layer.hidden_size:
        names.remove("fc")
        if not np.array_equal(weights["fc"]["weight"], np.eye(layer.hidden_size)):
            raise CheckpointError(
                "tensor 'fc.weight' cannot be written: the format has none where the states are as wide as "
                "the drafter, and engines would leave it out; fuse the states of more layers."
            )
    parts = {name: weights[name] for name in names if name in weights}
    tensors = named({**parts, MIDLAYER: block}) | _offsets(weights)
    if TOKENS in weights:
        tensors[IS_DRAFTED] = np.isin(np.arange(layer.vocab_size), weights[TOKENS])
    about = {
        "draft_vocab_size": size,
        "target_hidden_size": architecture.state_size // len(state_layers),
        STATE_LAYERS: list(state_layers),
        NORM_BEFORE_RESIDUAL: architecture.norm_before_residual,
    }
    return {"architectures": ["LlamaForCausalLMEagle3"], **config, **about}, tensors


def _medusa(weights: Params, base: str) -> tuple[dict[str, Any], dict[str, Array]]:
    heads, tensors = weights["heads"], _offsets(weights)
    for number, head in heads.items():
        parts = dict(head["blocks"])
        if "lm_head" in head:
            parts[len(parts)] = head["lm_head"]
        tensors |= named({number: parts})
    first = heads[0]["blocks"]
    about = {
        "medusa_num_heads": len(heads),
        "medusa_num_layers": len(first),
        "base_model_name_or_path": base,
        "hidden_size": len(first[0]["linear"]["bias"]),
    }
    return about, tensors


def _unpacked(block: Params, layer: LlamaConfig) -> tuple[Params, dict[str, Any]]:
    """A layer's weights by their published names, and the config of what is like Llama's."""
    block = unpack({"layers": {0: block}}, layer)["layers"][0]
    out = block["self_attn"]["o_proj"]
    # EAGLE's own code has no such bias: written only where it does something.
    o_bias = layer.attention_bias and bool(np.any(np.asarray(out["bias"])))
    if not o_bias:
        attention = block["self_attn"] | {"o_proj": {"weight": out["weight"]}}
        block = block | {"self_attn": attention}
    return block, _config(layer) | {
        "qkv_bias": layer.attention_bias,
        "attention_bias": o_bias,
        "torch_dtype": str(out["weight"].dtype),
    }


def _config(layer: LlamaConfig) -> dict[str, Any]:
    scaling = layer.rope_scaling
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": layer.vocab_size,
        "hidden_size": layer.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "intermediate_size": layer.intermediate_size,
        "rms_norm_eps": layer.rms_norm_eps,
        "max_position_embeddings": layer.max_positions,
        "tie_word_embeddings": False,
        "mlp_bias": layer.mlp_bias,
        "rope_theta": layer.rope_theta,
        "rope_scaling": None if scaling is None else {"rope_type": "llama3", **vars(scaling)},
    }


def _offsets(weights: Params) -> dict[str, Array]:
    if TOKENS not in weights:
        return {}
    tokens = np.asarray(weights[TOKENS], np.int64)
    return {OFFSETS: tokens - np.arange(len(tokens))}
