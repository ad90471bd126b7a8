"""GGUF: every stored type, the row order of Q and K, the real default model, and damaged files."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, quants
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

from specjax.checkpoints.gguf import KINDS
from specjax.checkpoints.gguf_file import read_gguf
from specjax.checkpoints.source import Checkpoint, load
from specjax.errors import CheckpointError
from specjax.models.llama import LlamaConfig
from tests.checkpoints.files import TINY, interleave, published, random_tensors, stored

WriteGGUF = Callable[..., Path]
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def test_config_of_the_default_model(smollm2: Checkpoint) -> None:
    assert smollm2.config == LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        rope_theta=100000.0,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        max_positions=8192,
        tie_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
    )
    tensors = published(smollm2.params)
    assert sum(tensor.size for tensor in tensors.values()) == 134_515_008
    assert all(np.isfinite(tensor).all() and tensor.any() for tensor in tensors.values())


def test_float32_file_comes_back_in_our_row_order(write_gguf: WriteGGUF) -> None:
    tensors = random_tensors()
    loaded = load(str(write_gguf(stored(tensors))))
    assert loaded.config == TINY
    assert loaded.tokenizer is None
    assert published(loaded.params).keys() == tensors.keys()
    for name, tensor in published(loaded.params).items():
        np.testing.assert_array_equal(tensor, tensors[name], err_msg=name)


def test_untied_head_and_biases_are_read(write_gguf: WriteGGUF) -> None:
    config = dataclasses.replace(TINY, tie_embeddings=False, attention_bias=True, mlp_bias=True)
    tensors = random_tensors(config)
    loaded = load(str(write_gguf(stored(tensors, config))))
    assert loaded.config == config
    for name, tensor in published(loaded.params).items():
        np.testing.assert_array_equal(tensor, tensors[name], err_msg=name)


def raw_blocks(kind: Kind, rows: int, columns: int) -> np.ndarray:
    """Random blocks whose half-precision scales are finite, as they are in any real file."""
    block, size = GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(1).integers(0, 256, (rows, columns // block, size), np.uint8)
    scales = {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}
    for offset in scales[kind]:
        data[..., offset : offset + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_stored_type(write_gguf: WriteGGUF, kind: Kind) -> None:
    tensors = random_tensors()
    files = stored(tensors)
    if kind.name.endswith("_K"):  # the library reads these but does not write them
        data = raw_blocks(kind, 256, 256)
    else:
        data = quants.quantize(interleave(tensors[Q_PROJ], TINY.num_heads), kind)
    files["blk.1.attn_q.weight"] = (data, kind)
    q_proj = published(load(str(write_gguf(files))).params)[Q_PROJ]
    assert q_proj.dtype == np.float32
    np.testing.assert_array_equal(interleave(q_proj, TINY.num_heads), quants.dequantize(data, kind))
    if not kind.name.endswith("_K"):
        bits = {Kind.F32: 24, Kind.F16: 11, Kind.BF16: 8, Kind.Q8_0: 7}.get(kind, int(kind.name[1:2], 36))
        error = np.abs(q_proj - tensors[Q_PROJ]).max() / np.abs(tensors[Q_PROJ]).max()
        assert error <= 2.0 ** (1 - bits)


def test_type_beyond_those_is_refused_by_tensor(write_gguf: WriteGGUF) -> None:
    files = stored(random_tensors())
    block, size = GGML_QUANT_SIZES[Kind.IQ4_NL]
    files["blk.0.ffn_up.weight"] = (np.zeros((256, 256 // block * size), np.uint8), Kind.IQ4_NL)
    with pytest.raises(CheckpointError, match=re.escape("'blk.0.ffn_up.weight' has type IQ4_NL")):
        load(str(write_gguf(files)))


def test_our_reader_agrees_with_the_librarys(write_gguf: WriteGGUF) -> None:
    path = write_gguf(stored(random_tensors()), tokenizer=True)
    ours, theirs = read_gguf(path), GGUFReader(path)
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            np.testing.assert_array_equal(ours.fields[name], field.contents(), err_msg=name)
    assert set(ours.fields) == {name for name in theirs.fields if not name.startswith("GGUF.")}
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.shape, mine.kind) == (tuple(tensor.shape.tolist()[::-1]), tensor.tensor_type)
        assert mine.data.tobytes() == tensor.data.tobytes()


@pytest.mark.parametrize(
    ("arch", "fields", "words"),
    [
        ("qwen2", {}, "the architecture is 'qwen2'; only 'llama'"),
        ("llama", {"rope_freq_base": None}, "'llama.rope.freq_base' is absent"),
        ("llama", {"rope_scaling_factor": 2.0}, "'llama.rope.scaling.factor' is 2.0"),
        ("llama", {"expert_count": 8}, "'llama.expert_count' is 8"),
        ("llama", {"sliding_window": 4096}, "'llama.attention.sliding_window' is 4096"),
        ("llama", {"rope_dimension_count": 32}, "'llama.rope.dimension_count' is 32"),
    ],
)
def test_field_beyond_us_is_named(
    write_gguf: WriteGGUF, arch: str, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(words)):
        load(str(write_gguf(stored(random_tensors()), arch=arch, **fields)))


def test_rope_factors_are_refused(write_gguf: WriteGGUF) -> None:
    files = stored(random_tensors()) | {"rope_freqs.weight": (np.ones(32, np.float32), None)}
    with pytest.raises(CheckpointError, match=re.escape("'rope_freqs.weight'")):
        load(str(write_gguf(files)))


def test_misfits_are_named_as_in_the_file(write_gguf: WriteGGUF) -> None:
    files = stored(random_tensors())
    del files["blk.1.attn_k.weight"]
    with pytest.raises(CheckpointError, match=re.escape("'blk.1.attn_k.weight' is missing")):
        load(str(write_gguf(files)))
    files = stored(random_tensors()) | {"blk.0.attn_q_norm.weight": (np.ones(64, np.float32), None)}
    with pytest.raises(CheckpointError, match=re.escape("'blk.0.attn_q_norm.weight' is not part")):
        load(str(write_gguf(files)))
    files = stored(random_tensors()) | {"blk.0.ffn_norm.weight": (np.ones(64, np.float32), None)}
    with pytest.raises(CheckpointError, match=re.escape("'blk.0.ffn_norm.weight' has shape (64,)")):
        load(str(write_gguf(files)))


SMALL = dataclasses.replace(
    TINY, num_layers=1, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, intermediate_size=8
)


def small_file(write_gguf: WriteGGUF) -> tuple[Path, bytes, int]:
    """A file that loads in a moment, its bytes, and how many of them come before the first tensor's."""
    tensors = random_tensors(SMALL)
    path = write_gguf(stored(tensors, SMALL), SMALL, tokenizer=True)
    data = path.read_bytes()
    return path, data, data.index(tensors["model.embed_tokens.weight"].tobytes())


def test_truncation_anywhere_is_an_error_of_ours(write_gguf: WriteGGUF) -> None:
    path, data, header = small_file(write_gguf)
    assert load(str(path)).config == SMALL
    for size in [*range(0, header, 5), header, (header + len(data)) // 2, len(data) - 33]:
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            load(str(path))


def test_garbled_bytes_never_surface_as_a_librarys_error(write_gguf: WriteGGUF) -> None:
    path, data, header = small_file(write_gguf)
    refused = 0
    for position in range(0, header, 3):
        path.write_bytes(data[:position] + b"\xff" * 3 + data[position + 3 :])
        try:
            load(str(path))
        except CheckpointError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > header // 3 // 2  # the rest fell on padding, texts and numbers that any value fits


def test_another_kind_of_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 and so on, for longer than a header")
    with pytest.raises(CheckpointError, match="is no GGUF file"):
        load(str(path))
    with pytest.raises(CheckpointError, match=re.escape("absent.gguf cannot be read: No such file")):
        load(str(tmp_path / "absent.gguf"))


@pytest.mark.parametrize(("version", "words"), [(b"\x01\0\0\0", "version 1"), (b"\0\0\0\x03", "big-endian")])
def test_other_versions_are_named(write_gguf: WriteGGUF, version: bytes, words: str) -> None:
    path = write_gguf(stored(random_tensors()))
    data = path.read_bytes()
    path.write_bytes(data[:4] + version + data[8:])
    with pytest.raises(CheckpointError, match=words):
        load(str(path))
