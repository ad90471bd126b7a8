"""Writing a model as a Hugging Face folder, which other libraries and serving engines load."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from specjax.checkpoints.huggingface import WEIGHTS, published_name
from specjax.checkpoints.source import Checkpoint
from specjax.checkpoints.validate import expected_shapes
from specjax.errors import CheckpointError
from specjax.models.llama import LlamaConfig


def save_folder(checkpoint: Checkpoint, folder: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files into a new `folder`, all or nothing.

    Raises CheckpointError where the folder exists already or cannot be written.
    """
    with new_folder(folder) as staging:
        write_json(staging / "config.json", _config_json(checkpoint))
        tensors = {
            published_name(name): np.ascontiguousarray(_leaf(checkpoint.params, name))
            for name in expected_shapes(checkpoint.config)
        }
        save_file(tensors, staging / WEIGHTS, metadata={"format": "pt"})
        if checkpoint.tokenizer is not None:
            checkpoint.tokenizer.inner.save(str(staging / "tokenizer.json"))
            settings = {"tokenizer_class": "PreTrainedTokenizerFast", **checkpoint.tokenizer.special_tokens}
            if checkpoint.tokenizer.chat_template is not None:
                settings["chat_template"] = checkpoint.tokenizer.chat_template
            write_json(staging / "tokenizer_config.json", settings)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Where to write what becomes `folder` once it is whole; nothing stays of what fails.

    Raises CheckpointError where the folder exists already or cannot be written.
    """
    folder = Path(folder)
    if folder.exists():
        raise CheckpointError(f"{folder} exists already; name a new folder, or remove this one first.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f"{folder.name}.unfinished-", dir=folder.parent))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written ({error.strerror or error}).") from error
    try:
        yield staging
        staging.chmod(0o755)  # it was made for its owner alone
        os.replace(staging, folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written ({error.strerror or error}).") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _config_json(checkpoint: Checkpoint) -> dict[str, Any]:
    config: LlamaConfig = checkpoint.config
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **vars(config.rope_scaling)}
    stop = () if checkpoint.tokenizer is None else checkpoint.tokenizer.stop_tokens
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "rope_parameters": rope,
        # Older readers look for the two apart.
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "eos_token_id": list(stop) or None,
        "torch_dtype": str(checkpoint.params["norm"]["weight"].dtype),
    }


def _leaf(params: Any, name: str) -> np.ndarray:
    for part in name.split("."):
        params = params[int(part) if part.isdigit() else part]
    return params


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object as people read it."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
