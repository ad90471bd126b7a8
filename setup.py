"""Packaging. The lower bounds are versions that both ends of the supported range can resolve."""

from pathlib import Path

from setuptools import find_packages, setup

PLOTS = ["matplotlib>=3.10"]

# jax's own extras name the compilers that fit it: libtpu, and the CUDA plug-in without the CUDA libraries.
# Of those, compiling needs ptxas and libdevice, which come with nvcc.
AOT = ["jax[tpu,cuda12-local]", 'nvidia-cuda-nvcc-cu12>=12.8; sys_platform == "linux"']

SWEEP = ["optuna>=5.0", *PLOTS]

TRAIN = ["grain>=0.2.12", "array-record>=0.7", "tensorboardX>=2.6"]

TEST = [
    "pytest>=8.3",
    "pytest-xdist>=3.6",
    "chex>=0.1.90",
    "hypothesis>=6.130",
    "playwright>=1.64",
    *SWEEP,
    *TRAIN,
    # The parity tests compare with one version of torch; elsewhere they skip themselves.
    'torch==2.13.0; python_version < "3.12"',
    'transformers>=5.0,<6; python_version < "3.12"',
]

setup(
    name="specjax",
    version="0.1.0",
    description="A JAX/Flax research framework for speculative sampling",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The specjax authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["specjax", "specjax.*"]),
    package_data={
        "specjax.analysis": ["page/*"],
        "specjax.data": ["prompts/*.jsonl", "prompts/*.txt", "token_counts/*.npz"],
        "specjax.zoo": ["*/*"],
        "specjax.kernels": ["*.h", "*/*.cc"],
    },
    install_requires=[
        "jax>=0.10.2",
        "jaxlib>=0.10.2",
        "flax>=0.12.8",
        "optax>=0.2.6",
        "orbax-checkpoint>=0.11.25",
        "numpy>=2.0",
        "absl-py>=2.1",
        "ml-collections>=1.0",
        "gguf>=0.17",
        "jaxtyping>=0.3.2",
        "jinja2>=3.1",
        "rich>=14.0",
        "safetensors>=0.5",
        "scipy>=1.15",
        "tokenizers>=0.22",
    ],
    extras_require={
        "cuda": ["jax[cuda12]"],
        "tpu": ["jax[tpu]"],
        "aot": AOT,
        "hub": ["huggingface_hub>=1.0"],
        "train": TRAIN,
        "plots": PLOTS,
        "sweep": SWEEP,
        "test": TEST,
        # A new minor version of ruff may format differently, so it is held within one.
        "dev": ["mypy>=2.4,<3", "ruff>=0.17,<0.18", *TEST],
    },
)
