"""The output law of decoding, sampled through the step itself, against exact enumeration.

Every row of a batch is one sample of the first three new tokens. Their joint law is enumerated in float64
from the target's logits alone, by code that shares nothing with `specjax.sampling`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from specjax.decode import generate, prefill, prepare, row_keys
from specjax.eval.exactness.statistics import IMPOSSIBLE, Fit, chi_square
from specjax.step import Method
from specjax.trees.topology import chain_mask
from specjax.types import ModelParams, Params, Target, Warp

NEW_TOKENS = 3
# A quarter off the time to compile, which is most of a quick certificate's; it runs no slower.
QUICK_TO_COMPILE: dict[str, Any] = {"xla_backend_optimization_level": 1}
_prefill = jax.jit(prefill, static_argnames=("method", "prompt_size"))  # for toys one program is enough


class Group(NamedTuple):
    """Rows that share a law: their warp and prompt, and how many they are."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    prompt: tuple[int, ...]
    rows: int = 0

    @property
    def warp_name(self) -> str:
        """What the warp does, such as "T=0.7 top-k=4"."""
        cuts = (("top-k", self.top_k, 0), ("top-p", self.top_p, 1), ("min-p", self.min_p, 0))
        return " ".join([f"T={self.temperature:g}", *(f"{n}={v:g}" for n, v, off in cuts if v != off)])


def warped(logits: np.ndarray, group: Group) -> np.ndarray:
    """One law [V], by sorting and in float64: temperature, top-k, top-p, min-p."""
    logits = logits.astype(np.float64)
    if group.temperature == 0:
        return (np.arange(len(logits)) == logits.argmax()).astype(np.float64)
    probs = np.exp((logits - logits.max()) / group.temperature)
    probs /= probs.sum()
    order = np.argsort(-probs)
    if group.top_k:
        probs[order[group.top_k :]] = 0.0
    mass_before = np.cumsum(probs[order]) - probs[order]
    probs[order[mass_before >= group.top_p * probs.sum()]] = 0.0
    probs[probs < group.min_p * probs.max()] = 0.0
    return probs / probs.sum()


def joint_law(first: np.ndarray, second: np.ndarray, third: np.ndarray, group: Group) -> np.ndarray:
    """The law [V, V, V] of three tokens from their logits [V], [V, V] and [V, V, V], given those before."""
    law = functools.partial(np.apply_along_axis, warped, -1, group=group)
    return law(arr=first)[:, None, None] * law(arr=second)[:, :, None] * law(arr=third)


def tabulated_law(table: np.ndarray, group: Group) -> np.ndarray:
    """The law of three tokens after the group's prompt, of `testing.tabulated_target(table)`."""
    vocab_size = table.shape[-1]
    previous = group.prompt[-2] if len(group.prompt) > 1 else vocab_size
    last = group.prompt[-1]
    return joint_law(table[previous, last], table[last], table[:vocab_size], group)


def model_law(target: Target, params: Params, group: Group, width: int) -> np.ndarray:
    """The same of any target: its plain pass over every context; texts are padded to `width` tokens."""
    vocab_size, size = target.vocab_size, len(group.prompt)
    pairs = np.indices((vocab_size, vocab_size)).reshape(2, -1).T
    texts = np.zeros((len(pairs), width), np.int32)
    texts[:, :size] = group.prompt
    texts[:, size : size + 2] = pairs
    logits = np.asarray(_read(target, params, jnp.asarray(texts)))[:, size - 1 : size + 2]
    first, second, third = logits.reshape(vocab_size, vocab_size, 3, vocab_size).transpose(2, 0, 1, 3)
    return joint_law(first[0, 0], second[:, 0], third, group)


@functools.partial(jax.jit, static_argnames="target")
def _read(target: Target, params: Params, texts: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    batch, size = texts.shape
    positions = jnp.broadcast_to(jnp.arange(size), (batch, size))
    mask = chain_mask(batch, size)
    return target.forward(params, texts, positions, mask, target.init_cache(batch, size)).logits


class Sampler:
    """Draws new tokens for groups of rows, all in one batch; what is compiled serves every draw."""

    def __init__(self, method: Method, params: ModelParams, groups: Sequence[Group]) -> None:
        self._method, self._params = method, params
        self._rows = [group.rows for group in groups]
        self._programs: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        prompts = [group.prompt for group in groups for _ in range(group.rows)]
        self._start = np.array([len(prompt) for prompt in prompts])
        self._prompt_size = int(self._start.max())
        self._request, self._tokens, self._lengths = prepare(
            method,
            prompts,
            max_new_tokens=NEW_TOKENS,
            warp=self._warp(groups),
            stop_tokens=(method.target.vocab_size,),  # which no row meets
            capacity=self._prompt_size + NEW_TOKENS + method.num_slots,
        )

    def _warp(self, groups: Sequence[Group]) -> Warp:
        def column(name: str, dtype: type) -> Array:
            return jnp.asarray(np.repeat([getattr(group, name) for group in groups], self._rows), dtype)

        return Warp(*(column(name, jnp.int32 if name == "top_k" else jnp.float32) for name in Warp._fields))

    def draw(self, seed: int) -> list[np.ndarray]:
        """The new tokens [rows, 3] of every group."""
        keys = row_keys(seed, range(len(self._start)))
        if self._programs is None:
            self._programs = self._compile(keys)
        read, write = self._programs
        state = read(self._params, self._request, self._tokens, self._lengths, keys)
        state, _ = write(self._params, self._request, state)
        tokens = np.asarray(state.tokens)
        new = np.take_along_axis(tokens, self._start[:, None] + np.arange(NEW_TOKENS)[None, :], axis=1)
        return np.split(new, np.cumsum(self._rows)[:-1])

    def _compile(self, keys: Key[Array, "B"]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The prefill and the loop as programs."""
        inputs = (self._method, self._params, self._request)
        reading = _prefill.lower(*inputs, self._tokens, self._lengths, keys, self._prompt_size)
        writing = generate.lower(*inputs, reading.out_info)
        return reading.compile(QUICK_TO_COMPILE), writing.compile(QUICK_TO_COMPILE)


def counts_of(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each triple [V, V, V] came among tokens of the vocabulary."""
    number = tokens @ [vocab_size**2, vocab_size, 1]
    return np.bincount(number, minlength=vocab_size**3).reshape((vocab_size,) * 3)


def fit(tokens: np.ndarray, law: np.ndarray) -> Fit:
    """How well the triples [rows, 3] fit their joint law."""
    if tokens.min() < 0 or tokens.max() >= len(law):
        return IMPOSSIBLE
    return chi_square(counts_of(tokens, len(law)), law)
