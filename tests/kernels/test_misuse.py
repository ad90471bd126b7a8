"""The C++ kernels called wrongly: each call is refused with what is wrong, and none crashes."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels import cpu_library
from specjax.kernels.small_matmul import small_matmul

DTYPES = {"bool": 1, "int8": 2, "int32": 4, "float32": 11, "bfloat16": 16}  # XLA's numbers for them
Message = Callable[..., str]


@pytest.fixture(scope="module")
def refusal(tmp_path_factory: pytest.TempPathFactory) -> Message:
    """(handler's name, arrays and at last the result, byte offset of the first) -> its error's message."""
    if not cpu_library.is_available():
        pytest.skip("no C++ compiler")
    compiler = os.environ.get("CXX", "c++")
    library = tmp_path_factory.mktemp("raw_call") / "raw_call.so"
    source = Path(__file__).parent / "raw_call.cc"
    command = [compiler, "-shared", "-fPIC", "-std=c++17", "-w", f"-I{jax.ffi.include_dir()}"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    call = ctypes.cdll.LoadLibrary(str(library)).raw_call
    call.restype = ctypes.c_char_p
    kernels = ctypes.cdll.LoadLibrary(str(cpu_library.build(compiler)))

    def message(name: str, *arrays: np.ndarray, odd: int | None = None) -> str:
        # One array, number `odd`, lies one byte off.
        stores = [np.zeros(array.nbytes + 65, np.uint8) for array in arrays]
        pointers = []
        for i, (store, array) in enumerate(zip(stores, arrays, strict=True)):
            start = -store.ctypes.data % 64 + (i == odd)
            store[start : start + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
            pointers.append(store.ctypes.data + start)
        count = len(arrays)
        dims = [(ctypes.c_int64 * max(array.ndim, 1))(*array.shape) for array in arrays]
        return call(
            getattr(kernels, name),
            count,
            (ctypes.c_int * count)(*(DTYPES[array.dtype.name] for array in arrays)),
            (ctypes.c_void_p * count)(*pointers),
            (ctypes.c_int * count)(*(array.ndim for array in arrays)),
            (ctypes.c_void_p * count)(*(ctypes.addressof(shape) for shape in dims)),
        ).decode()

    return message


def zeros(*shape: int, dtype=np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


INT8 = (zeros(2, 7), zeros(5, 7, dtype=np.int8), zeros(5), zeros(2, 5))
FLOAT = (zeros(2, 7), zeros(5, 7), zeros(2, 5))
ATTENTION = (
    zeros(1, 3, 4, 8),
    zeros(2, 9, 8),
    zeros(2, 9, 8),
    zeros(1, dtype=np.int32),
    np.ones((1, 3, 3), bool),
    zeros(1, 3, 4, 8),
)


@pytest.mark.parametrize(
    ("name", "arrays"),
    [
        ("specjax_small_matmul", FLOAT),
        ("specjax_small_matmul", (FLOAT[0], FLOAT[1].astype(jnp.bfloat16), FLOAT[2])),
        ("specjax_scaled_matmul", INT8),
        ("specjax_tree_attention", ATTENTION),
    ],
)
def test_right_calls_pass_and_misaligned_ones_are_refused(
    name: str, arrays: tuple[np.ndarray, ...], refusal: Message
) -> None:
    assert refusal(name, *arrays) == ""
    for i, array in enumerate(arrays):
        expected = "a buffer is not aligned to its elements" if array.dtype.itemsize > 1 else ""
        assert expected in refusal(name, *arrays, odd=i)
        assert bool(expected) == bool(refusal(name, *arrays, odd=i))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({0: zeros(2, 7, dtype=np.int32)}, "dtype"),
        ({1: zeros(5, 7, dtype=np.int8)}, "float32 or bfloat16, or int8 with a scale"),
        ({2: zeros(2, 5).astype(jnp.bfloat16)}, "dtype"),
        ({1: zeros(7, 5)}, "do not fit"),
        ({2: zeros(5, 2)}, "do not fit"),
        ({0: zeros(0, 7), 2: zeros(0, 5)}, "at least one row"),
        ({0: zeros(2, 0), 1: zeros(5, 0)}, "at least one row"),
        ({1: zeros(0, 7), 2: zeros(2, 0)}, "at least one row"),
        ({0: zeros(14)}, "takes x"),
        ({1: zeros(5, 7, 1)}, "takes x"),
        ({2: zeros()}, "takes x"),
    ],
)
def test_products_that_do_not_fit_are_refused(
    change: dict[int, np.ndarray], expected: str, refusal: Message
) -> None:
    arrays = [change.get(i, array) for i, array in enumerate(FLOAT)]
    assert expected in refusal("specjax_small_matmul", *arrays)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({1: zeros(5, 7)}, "dtype"),
        ({2: zeros(5, dtype=np.int32)}, "dtype"),
        ({2: zeros(4)}, "scale"),
        ({2: zeros(5, 1)}, "scale"),
        ({1: zeros(5, 8, dtype=np.int8)}, "do not fit"),
        ({0: zeros(0, 7), 3: zeros(0, 5)}, "at least one row"),
        ({0: zeros(2, 7, 1)}, "takes x"),
    ],
)
def test_int8_products_that_do_not_fit_are_refused(
    change: dict[int, np.ndarray], expected: str, refusal: Message
) -> None:
    arrays = [change.get(i, array) for i, array in enumerate(INT8)]
    assert expected in refusal("specjax_scaled_matmul", *arrays)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({0: zeros(1, 3, 4, 8).astype(jnp.bfloat16)}, "dtype"),
        ({1: zeros(2, 9, 8).astype(jnp.bfloat16)}, "both in"),
        ({1: zeros(2, 9, 8, dtype=np.int8), 2: zeros(2, 9, 8, dtype=np.int8)}, "both in"),
        ({3: zeros(1)}, "dtype"),
        ({4: zeros(1, 3, 3, dtype=np.int8)}, "dtype"),
        ({1: zeros(2, 9, 7)}, "do not fit"),
        ({1: zeros(3, 9, 8), 2: zeros(3, 9, 8)}, "do not fit"),
        ({1: zeros(0, 9, 8), 2: zeros(0, 9, 8)}, "do not fit"),
        ({2: zeros(2, 8, 8)}, "do not fit"),
        ({3: zeros(2, dtype=np.int32)}, "do not fit"),
        ({4: np.ones((1, 2, 3), bool)}, "do not fit"),
        ({5: zeros(1, 3, 4, 7)}, "do not fit"),
        ({0: zeros(1, 0, 4, 8), 4: np.ones((1, 0, 3), bool), 5: zeros(1, 0, 4, 8)}, "at least one"),
        ({0: zeros(0, 3, 4, 8)}, "at least one"),
        ({0: zeros(3, 4, 8)}, "takes queries"),
        ({3: zeros(dtype=np.int32)}, "takes queries"),
    ],
)
def test_attention_that_does_not_fit_is_refused(
    change: dict[int, np.ndarray], expected: str, refusal: Message
) -> None:
    arrays = [change.get(i, array) for i, array in enumerate(ATTENTION)]
    assert expected in refusal("specjax_tree_attention", *arrays)


def test_lengths_out_of_range_stay_inside_the_cache(refusal: Message) -> None:
    for length in (-5, 9, 1000):
        arrays = [*ATTENTION[:3], np.asarray([length], np.int32), *ATTENTION[4:]]
        assert refusal("specjax_tree_attention", *arrays) == ""


@pytest.mark.parametrize(
    ("x", "weight", "scale", "expected"),
    [
        (zeros(2, 7, 1), zeros(5, 7), None, r"takes x \[N, I\]"),
        (zeros(2, 7), zeros(7, 5), None, r"takes x \[N, I\]"),
        (zeros(2, 7), zeros(5, 7).astype(jnp.bfloat16), None, "one dtype"),
        (zeros(2, 7), zeros(5, 7, dtype=np.int8), None, "a scale with int8 weights"),
        (zeros(2, 7), zeros(5, 7), zeros(5), "a scale with int8 weights"),
        (zeros(2, 7), zeros(5, 7, dtype=np.int8), zeros(4), r"float32 scale \[5\]"),
        (zeros(2, 7), zeros(5, 7, dtype=np.int8), zeros(5, dtype=np.int32), r"float32 scale \[5\]"),
    ],
)
def test_the_function_says_what_does_not_fit(x, weight, scale, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        small_matmul(jnp.asarray(x), jnp.asarray(weight), None if scale is None else jnp.asarray(scale))


def test_no_rows_give_no_rows() -> None:
    assert small_matmul(jnp.zeros((0, 7)), jnp.zeros((5, 7))).shape == (0, 5)
    assert small_matmul(jnp.zeros((0, 7)), jnp.zeros((5, 7), jnp.int8), jnp.ones(5)).shape == (0, 5)
