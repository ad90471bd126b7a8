"""How long tree attention takes on the accelerator at hand, beside what its memory allows.

    python experiments/kernels/device_times.py

Attention of one Llama-3-8B pass (32 query and 8 key heads of 128, bfloat16), as many layers as hold 1 GB of
keys and values, so that no cache on the chip keeps them. Each time is the fastest of several passes, divided
by the layers. The bound is the time to read the keys and values once, at the speed of a plain copy measured
beforehand. XLA's own attention gets a cache without a slot to spare, the others one of twice the length.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax.kernels.tree_attention import tree_attention

HEADS, KV_HEADS, HEAD_DIM, DTYPE = 32, 8, 128, jnp.bfloat16
NODES, LENGTHS, BATCHES = (1, 8, 32, 64), (2048, 16384), (1, 8)
TOTAL_BYTES = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180, help="start no further row after this long")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()

    device = jax.devices()[0]
    if device.platform == "cpu":
        print("no accelerator: nothing is timed")
        return
    started = time.perf_counter()
    bytes_per_second = copy_speed(TOTAL_BYTES)
    print(f"{device.device_kind}, a copy moves {bytes_per_second / 1e9:.0f} GB/s")
    print(HEADER)
    rows = []
    for batch in BATCHES:
        for length in LENGTHS:
            for num_nodes in NODES:
                if time.perf_counter() - started < args.seconds:
                    rows.append(measure(batch, length, num_nodes, bytes_per_second, TOTAL_BYTES))
                    print(line(rows[-1]), flush=True)
    skipped = len(BATCHES) * len(LENGTHS) * len(NODES) - len(rows)
    if skipped:
        print(f"{skipped} rows left out: out of time")
    if args.out:
        found = {"device": device.device_kind, "copy_bytes_per_second": bytes_per_second, "rows": rows}
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def measure(
    batch: int, length: int, num_nodes: int, bytes_per_second: float, total_bytes: int
) -> dict[str, Any]:
    """The microseconds a layer takes in each implementation, and the bound."""
    used = length + num_nodes
    layer_bytes = 2 * batch * KV_HEADS * used * HEAD_DIM * jnp.dtype(DTYPE).itemsize
    num_layers = max(1, min(32, total_bytes // layer_bytes))
    keys = jax.random.split(jax.random.key(0), 2 * num_layers + 1)
    queries = jax.random.normal(keys[0], (batch, num_nodes, HEADS, HEAD_DIM), DTYPE)
    slots = (batch * KV_HEADS, 2 * length, HEAD_DIM)
    layers = [
        (jax.random.normal(a, slots, DTYPE), jax.random.normal(b, slots, DTYPE))
        for a, b in zip(keys[1::2], keys[2::2], strict=True)
    ]
    lengths = jnp.full((batch,), length, jnp.int32)
    mask = jnp.broadcast_to(jnp.tri(num_nodes, dtype=bool), (batch, num_nodes, num_nodes))

    def tree(q: jax.Array, k: jax.Array, v: jax.Array, *, implementation: Any = None) -> jax.Array:
        return tree_attention(q, k, v, lengths, mask, implementation)

    row: dict[str, Any] = {"batch": batch, "length": length, "nodes": num_nodes, "layers": num_layers}
    row["bound"] = 1e6 * layer_bytes / bytes_per_second
    row["kernel"] = 1e6 * fastest(tree, queries, layers)
    row["reference"] = 1e6 * fastest(functools.partial(tree, implementation="reference"), queries, layers)
    trimmed = [tuple(_trimmed(x, batch, used) for x in layer) for layer in layers]
    del layers
    seen = jnp.concatenate([jnp.ones((batch, num_nodes, length), bool), mask], axis=2)[:, None]
    xla = functools.partial(jax.nn.dot_product_attention, mask=seen)
    row["xla"] = 1e6 * fastest(xla, queries, trimmed)
    return row


def _trimmed(slots: jax.Array, batch: int, used: int) -> jax.Array:
    """[B * Hkv, S, Dh] -> [B, used, Hkv, Dh], as XLA's attention wants it."""
    return slots.reshape(batch, -1, *slots.shape[1:])[:, :, :used].swapaxes(1, 2)


def fastest(attend: Callable[..., jax.Array], queries: jax.Array, layers: list[Any]) -> float:
    """Seconds a layer, of the fastest of ten passes over all of them, each fed by the one before."""

    @jax.jit
    def run(queries: jax.Array, layers: list[Any]) -> jax.Array:
        for keys, values in layers:
            queries = attend(queries, keys, values).astype(queries.dtype)
        return queries

    jax.block_until_ready(run(queries, layers))
    times = []
    for _ in range(10):
        started = time.perf_counter()
        jax.block_until_ready(run(queries, layers))
        times.append(time.perf_counter() - started)
    return min(times) / len(layers)


def copy_speed(size: int) -> float:
    """Bytes a second, read and written, of adding one to an array of `size` bytes."""
    x = jnp.zeros(size // 4, jnp.float32)
    add = jax.jit(lambda x: x + 1)
    jax.block_until_ready(add(x))
    times = []
    for _ in range(10):
        started = time.perf_counter()
        jax.block_until_ready(add(x))
        times.append(time.perf_counter() - started)
    return 2 * size / min(times)


HEADER = (
    "microseconds a layer\n"
    "| batch | length | nodes | bound | kernel | of bound | reference | XLA attention |\n"
    "|---|---|---|---|---|---|---|---|"
)


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    shape = f"| {row['batch']} | {row['length']} | {row['nodes']} |"
    times = f" {row['bound']:.1f} | {row['kernel']:.1f} | {row['bound'] / row['kernel']:.0%} |"
    return f"{shape}{times} {row['reference']:.1f} | {row['xla']:.1f} |"


if __name__ == "__main__":
    main()
