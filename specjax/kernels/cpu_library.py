"""Builds the C++ kernels at their first use and registers them with XLA; no compiler, no kernels."""

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

from specjax.storage import cache_folder

HERE = Path(__file__).parent
SOURCES = (HERE / "small_matmul" / "cpu.cc", HERE / "tree_attention" / "cpu.cc")
HEADERS = (HERE / "claimed_chunks.h", HERE / "vectors.h")
SYMBOLS = ("specjax_small_matmul", "specjax_scaled_matmul", "specjax_tree_attention")
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-w", "-shared", "-fPIC", "-pthread")


@functools.cache
def is_available() -> bool:
    """Whether the kernels are there, built if need be; says once why not."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        warnings.warn("no C++ compiler found: passes over a few tokens run on XLA, slower", stacklevel=2)
        return False
    try:
        library = ctypes.cdll.LoadLibrary(str(build(compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or error
        warnings.warn(
            f"the CPU kernels cannot be built, passes over a few tokens run on XLA, slower: {detail}",
            stacklevel=2,
        )
        return False
    for symbol in SYMBOLS:
        jax.ffi.register_ffi_target(symbol, jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu")
    return True


def build(compiler: str) -> Path:
    """The shared library for these sources, compiler, processor and jax, compiled unless it is there already.

    The environment variable SPECJAX_CXXFLAGS adds flags for the compiler.
    Raises CalledProcessError where the compiler fails, OSError where the cache folder cannot be written.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    texts = [path.read_text() for path in (*SOURCES, *HEADERS)]
    flags = (*FLAGS, *os.environ.get("SPECJAX_CXXFLAGS", "").split())
    parts = (*texts, version, " ".join(flags), _processor(), jax.__version__)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = cache_folder() / "kernels"
    library = folder / f"cpu-{digest}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as staging:
            built = Path(staging) / library.name
            includes = [f"-I{HERE}", f"-I{jax.ffi.include_dir()}"]
            command = [compiler, *flags, *includes, *map(str, SOURCES), "-o", str(built)]
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
