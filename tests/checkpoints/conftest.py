"""Writers of small checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType as Kind
from safetensors.numpy import save_file

from specjax.models.llama import LlamaConfig
from tests.checkpoints.files import TINY, add_tokenizer, hf_config

WriteFolder = Callable[..., Path]


@pytest.fixture
def write_folder(tmp_path: Path) -> Iterator[WriteFolder]:
    """Writes a Hugging Face folder, in `shards` files where more than one is asked for."""

    def write(
        tensors: Mapping[str, np.ndarray], config: Mapping[str, Any] | None = None, shards: int = 1
    ) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(hf_config() if config is None else config))
        if shards == 1:
            save_file(dict(tensors), folder / "model.safetensors")
            return folder
        names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
        weight_map = {tensor: names[i % shards] for i, tensor in enumerate(tensors)}
        for name in names:
            part = {tensor: tensors[tensor] for tensor, file in weight_map.items() if file == name}
            save_file(part, folder / name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder

    yield write
    shutil.rmtree(tmp_path / "model", ignore_errors=True)  # pytest would keep it, and one test's is large


WriteGGUF = Callable[..., Path]


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGGUF:
    """Writes stored arrays (already in GGUF's names, row order and type) and metadata to a file."""

    def write(
        tensors: Mapping[str, tuple[np.ndarray, Kind | None]],
        config: LlamaConfig = TINY,
        arch: str = "llama",
        tokenizer: bool = False,
        **fields: Any,
    ) -> Path:
        path = tmp_path / "model.gguf"
        writer = GGUFWriter(path, arch)
        writer.add_block_count(config.num_layers)
        writer.add_context_length(config.max_positions)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_heads)
        writer.add_head_count_kv(config.num_kv_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(config.vocab_size)
        if "rope_freq_base" not in fields:
            writer.add_rope_freq_base(config.rope_theta)
        for name, value in fields.items():
            if value is not None:
                getattr(writer, f"add_{name}")(value)
        if tokenizer:
            add_tokenizer(writer)
        for name, (data, kind) in tensors.items():
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
