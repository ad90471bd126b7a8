"""The GGUF container: metadata and where each tensor lies, with every read kept inside the file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from specjax.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4

_SCALARS = {
    **{0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4"},
    **{6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"},
}
_STRING, _ARRAY = 8, 9


class TensorData(NamedTuple):
    """A tensor as stored: its logical `shape`, and its bytes [rows, bytes a row], still on disk."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: npt.NDArray[np.uint8]


class GGUFFile(NamedTuple):
    """The metadata `fields`, as Python values (arrays of numbers as numpy arrays), and the tensors."""

    fields: dict[str, Any]
    tensors: dict[str, TensorData]


def read_gguf(path: Path) -> GGUFFile:
    """Read a GGUF file's metadata and tensor directory.

    Raises CheckpointError where the file is missing, of another kind, truncated or damaged.
    """
    try:
        size = path.stat().st_size
        data = np.asarray(np.memmap(path, np.uint8, "r")) if size else np.zeros(0, np.uint8)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    cursor = _Cursor(path, data)
    if data[:4].tobytes() != MAGIC:
        raise CheckpointError(f"{path} is no GGUF file: it does not begin with 'GGUF'. Download it again.")
    cursor.take(4)
    version = cursor.number("<u4")
    if version not in VERSIONS:
        what = "big-endian" if version & 0xFFFF == 0 else f"GGUF version {version}"
        raise CheckpointError(f"{path} is {what}; supported are little-endian files of versions 2 and 3.")
    num_tensors, num_fields = cursor.number("<u8"), cursor.number("<u8")

    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        name = cursor.string()
        if name in fields:
            raise cursor.damaged(f"field '{name}' occurs twice")
        fields[name] = cursor.value(cursor.number("<u4"), name)
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.damaged(f"field 'general.alignment' is {alignment!r}, no power of two")

    directory = [_tensor_info(cursor) for _ in range(num_tensors)]
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorData] = {}
    for name, shape, kind, offset in directory:
        if name in tensors:
            raise cursor.damaged(f"tensor '{name}' occurs twice")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise cursor.damaged(
                f"tensor '{name}' has rows of {shape[-1]}, but {kind.name} blocks of {block}"
            )
        row_bytes = shape[-1] // block * block_bytes
        begin, end = start + offset, start + offset + math.prod(shape[:-1]) * row_bytes
        if end > len(data):
            raise cursor.damaged(f"tensor '{name}' ends at byte {end}, but the file at byte {len(data)}")
        tensors[name] = TensorData(shape, kind, data[begin:end].reshape(-1, row_bytes))
    return GGUFFile(fields, tensors)


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = cursor.string()
    dimensions = cursor.number("<u4")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.damaged(f"tensor '{name}' has {dimensions} dimensions")
    shape = tuple(cursor.number("<u8") for _ in range(dimensions))[::-1]  # stored innermost first
    raw_kind, offset = cursor.number("<u4"), cursor.number("<u8")
    if 0 in shape:
        raise cursor.damaged(f"tensor '{name}' has shape {shape}")
    try:
        return name, shape, GGMLQuantizationType(raw_kind), offset
    except ValueError:
        raise cursor.damaged(f"tensor '{name}' has the unknown type {raw_kind}") from None


class _Cursor:
    """A position in the file that never leaves it."""

    def __init__(self, path: Path, data: npt.NDArray[np.uint8]) -> None:
        self.path, self.data, self.position = path, data.data, 0

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is truncated or damaged: {what}. Download it again.")

    def need(self, count: int) -> None:
        if count > len(self.data) - self.position:
            raise self.damaged(f"it ends at byte {len(self.data)}, inside its header")

    def take(self, count: int) -> memoryview:
        self.need(count)
        self.position += count
        return self.data[self.position - count : self.position]

    def number(self, dtype: str) -> Any:
        return self.numbers(dtype, 1)[0].item()

    def numbers(self, dtype: str, count: int) -> npt.NDArray[Any]:
        return np.frombuffer(self.take(count * np.dtype(dtype).itemsize), dtype)

    def string(self) -> str:
        self.need(8)
        (length,) = struct.unpack_from("<Q", self.data, self.position)
        self.position += 8
        try:
            return str(self.take(length), "utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"the text at byte {self.position - length} is not UTF-8") from None

    def value(self, kind: int, name: str) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.damaged(f"field '{name}' has the unknown type {kind}")
        item, count = self.number("<u4"), self.number("<u8")
        if item in _SCALARS:
            return self.numbers(_SCALARS[item], count)
        if item != _STRING:
            raise self.damaged(f"field '{name}' is an array of the unknown type {item}")
        self.need(8 * count)  # a garbled count is not believed: a string takes 8 bytes at least
        return [self.string() for _ in range(count)]
