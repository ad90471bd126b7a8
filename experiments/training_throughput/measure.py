"""What a training step costs beside its matrix products as large ones: run from the repository's root.

    python experiments/training_throughput/measure.py --config=configs/train/eagle_llama.py

Counts the matrix products of the step's program, with their gradients and with features that are not read
from beside the texts; times steps and a large product of the same type in turn; prints medians.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from jax.extend import core
from jax.interpreters import partial_eval

from specjax.build import build_target
from specjax.config import load_config, override, validate
from specjax.data import batches as data
from specjax.tasks import train
from specjax.training import train_loop

SIZE = 2048  # of the large product
ROUNDS = 9


def flops_of(jaxpr: core.Jaxpr) -> float:
    """Operations of all matrix products in a program, those of loops as often as they are run."""
    return sum(_flops_of_equation(equation) for equation in jaxpr.eqns)


def _flops_of_equation(equation: core.JaxprEqn) -> float:
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
    inner = [flops_of(jaxpr) for jaxpr in _jaxprs(list(equation.params.values()))]
    if equation.primitive.name == "cond":
        return max(inner)
    return sum(inner) * equation.params.get("length", 1)


def _jaxprs(values: Any) -> list[core.Jaxpr]:
    found = []
    for value in values:
        if isinstance(value, tuple | list):
            found += _jaxprs(value)
        elif isinstance(value, core.ClosedJaxpr):
            found.append(value.jaxpr)
        elif isinstance(value, core.Jaxpr):
            found.append(value)
    return found


def seconds(call: Callable[[], Any]) -> float:
    """Wall-clock time of a call and what it started."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def main(arguments: list[str]) -> None:
    values = flags.FlagValues()
    flags.DEFINE_string("config", None, "config file", flag_values=values)
    rest = values(["", *arguments], known_only=True)[1:]
    config = override(load_config(values.config), rest)
    validate(config)

    loaded = build_target(config.target, jnp.dtype(config.dtype))
    texts = data.load_texts(config.data, config.max_length, config.supervise, loaded.target.vocab_size)
    subject = train.make_subject(config, loaded, texts)
    batch = jax.device_put(next(train.make_batches(config, subject, texts)))
    step = train_loop.make_step(subject.trainable, loaded.target, subject.settings, subject.units)
    state = train_loop.init_state(subject.learning, subject.settings, subject.units)

    program = jax.make_jaxpr(step)(state, subject.frozen, batch).jaxpr
    # Gradients of what does not learn are in the program, but are never computed.
    program, _ = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
    flops = flops_of(program)

    square = jnp.ones((SIZE, SIZE), loaded.target.dtype)
    product = jax.jit(jnp.matmul)

    def one_step() -> Any:
        nonlocal state
        state, metrics = step(state, subject.frozen, batch)
        return state, metrics

    of_products, of_steps = [], []
    for _ in range(ROUNDS + 1):
        of_products.append(seconds(lambda: product(square, square)))
        of_steps.append(seconds(one_step))
    # The first of each compiles.
    rate = 2 * SIZE**3 / statistics.median(of_products[1:])
    ratio = statistics.median(
        of_step / (flops * of_product / (2 * SIZE**3))
        for of_step, of_product in zip(of_steps[1:], of_products[1:], strict=True)
    )
    step_time = statistics.median(of_steps[1:])
    print(f"batch: {batch.tokens.shape[0]} x {batch.tokens.shape[1]}, {int(batch.length.sum())} tokens")
    print(f"matrix products of a step: {flops / 1e9:.2f} GFLOP")
    print(f"a product of {SIZE} x {SIZE}: {rate / 1e9:.1f} GFLOP/s")
    print(f"step: {step_time * 1e3:.1f} ms, {ratio:.2f} times its products at that rate (median of {ROUNDS})")
    spread = sorted(of_steps[1:])
    print(f"steps from {spread[0] * 1e3:.1f} to {spread[-1] * 1e3:.1f} ms")


if __name__ == "__main__":
    main(sys.argv[1:])
