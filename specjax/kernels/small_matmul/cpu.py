"""Builds the C++ kernel at its first use and registers it with XLA; without a compiler there is none."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import jax
from jaxtyping import Array, Float

from specjax.storage import cache_folder

NAME = "specjax_small_matmul"
SOURCE = Path(__file__).with_name("cpu.cc")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-std=c++17", "-shared", "-fPIC", "-pthread")


def small_matmul(x: Float[Array, "N I"], weight: Float[Array, "O I"]) -> Float[Array, "N O"]:
    """x @ weight.T in float32; a row's result does not depend, to the bit, on how many rows there are."""
    result = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), x.dtype)
    return jax.ffi.ffi_call(NAME, result, vmap_method="sequential")(x, weight)


@functools.cache
def is_available() -> bool:
    """Whether the kernel is there, built if need be; says once why not."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        warnings.warn("no C++ compiler found: products of few rows run on XLA, slower", stacklevel=2)
        return False
    try:
        library = ctypes.cdll.LoadLibrary(str(_build(compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or error
        warnings.warn(
            f"the CPU kernel cannot be built, products of few rows run on XLA, slower: {detail}", stacklevel=2
        )
        return False
    jax.ffi.register_ffi_target(NAME, jax.ffi.pycapsule(library.specjax_small_matmul), platform="cpu")
    return True


def _build(compiler: str) -> Path:
    """The shared library for this source, compiler, processor and jax, compiled unless it is there already."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    parts = (SOURCE.read_text(), version, " ".join(FLAGS), _processor(), jax.__version__)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = cache_folder() / "kernels"
    library = folder / f"{NAME}-{digest}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as staging:
            built = Path(staging) / library.name
            command = [compiler, *FLAGS, f"-I{jax.ffi.include_dir()}", str(SOURCE), "-o", str(built)]
            subprocess.run(command, capture_output=True, text=True, check=True)
            os.replace(built, library)
    return library


def _processor() -> str:
    """What -march=native depends on: a cache folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
