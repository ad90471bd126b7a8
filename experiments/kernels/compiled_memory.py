"""What a Llama-3-8B pass over N nodes needs on a TPU, compiled without one, and a roofline beside it.

    pip install 'libtpu==0.0.42.*'    # the version that fits this jax
    TPU_SKIP_MDS_QUERY=1 JAX_PLATFORMS=cpu python experiments/kernels/compiled_memory.py

Memory is the compiler's account of the whole pass (bfloat16, batch 1, 32 unrolled layers) with the Pallas
kernel and with the jnp reference. The roofline is a model, not a measurement: the larger of bytes over the
chip's bandwidth and operations over its peak.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from specjax.kernels.tree_attention import tree_attention
from specjax.models import llama
from specjax.models.functional import init_params, make_target
from specjax.models.llama import LlamaConfig, RopeScaling

LLAMA_3_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
    rms_norm_eps=1e-5,
    max_positions=131072,
    tie_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
)
# A v6e: 32 GB, for a v5e's 16 GB do not hold the weights. Bytes and operations a second, as published.
TOPOLOGY, BANDWIDTH, PEAK = "v6e:2x2", 1.64e12, 9.18e14
NODES = (1, 8, 32, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--capacity", type=int, default=8192)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices[0]
    rows = []
    for num_nodes in NODES:
        row: dict[str, Any] = {"nodes": num_nodes} | roofline(num_nodes, args.capacity - num_nodes)
        for implementation in ("pallas_tpu", "reference"):
            started = time.perf_counter()
            memory = compile_pass(device, num_nodes, args.capacity, implementation)
            row[implementation] = {
                "arguments": memory.argument_size_in_bytes,
                "temporaries": memory.temp_size_in_bytes,
                "compile_seconds": time.perf_counter() - started,
            }
        rows.append(row)
        print(json.dumps(row), flush=True)
    if args.out:
        found = {"device": device.device_kind, "capacity": args.capacity, "rows": rows}
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def compile_pass(device: Any, num_nodes: int, capacity: int, implementation: str) -> Any:
    """The compiler's account of memory, the cache given away to its successor."""
    llama.tree_attention = functools.partial(tree_attention, implementation=implementation)
    target = make_target(LLAMA_3_8B, dtype=jnp.bfloat16)
    abstract = jax.sharding.AbstractDevice(device.device_kind, 1, "tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=abstract)
    sharding = jax.sharding.SingleDeviceSharding(device)

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    arguments = jax.tree.map(
        place,
        (
            jax.eval_shape(lambda: init_params(LLAMA_3_8B, 0, dtype=jnp.bfloat16)),
            jax.ShapeDtypeStruct((1, num_nodes), jnp.int32),
            jax.ShapeDtypeStruct((1, num_nodes), jnp.int32),
            jax.ShapeDtypeStruct((1, num_nodes, num_nodes), jnp.bool_),
            jax.eval_shape(lambda: target.init_cache(1, capacity)),
        ),
    )
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(target.forward, donate_argnums=4).lower(*arguments)
    return lowered.compile().memory_analysis()


def roofline(num_nodes: int, length: int) -> dict[str, float]:
    """Seconds of the pass, and of its attention alone, by bandwidth and peak: a model."""
    c = LLAMA_3_8B
    matrices = c.hidden_size * (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    matrices += 3 * c.hidden_size * c.intermediate_size
    weights = c.num_layers * matrices + c.vocab_size * c.hidden_size
    cache = 2 * c.num_layers * c.num_kv_heads * c.head_dim * (length + num_nodes)
    attention_flops = 4 * c.num_layers * num_nodes * c.num_heads * c.head_dim * (length + num_nodes)
    attention = max(2 * cache / BANDWIDTH, attention_flops / PEAK)
    return {
        "attention_seconds": attention,
        "pass_seconds": max(2 * weights / BANDWIDTH, 2 * num_nodes * weights / PEAK) + attention,
    }


if __name__ == "__main__":
    main()
