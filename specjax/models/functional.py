"""From modules to pure functions: the only place that splits and merges them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from specjax import cache as kv
from specjax.errors import ConfigError, nearest
from specjax.models.layers import activation_dtype
from specjax.models.llama import Llama, LlamaConfig, node_inputs
from specjax.models.quantize import quantize
from specjax.types import ForwardOutput, KVCache, Params, Target

# States a drafter may ask for by name; "hidden.i" is the input of layer i.
LAST_HIDDEN = "last_hidden"  # after the final norm: what enters the head
LOGITS = "logits"  # what leaves it
LAYER_INPUT = "hidden."


def make_target(config: LlamaConfig, *, dtype: Any = jnp.float32, stacked: bool = False) -> Target:
    """A Llama as a pure `Target`; `stacked` scans over one block, for models that compile too long.

    With weights in int8, `dtype`, activations and caches are float32.
    """
    template = nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, _ = nnx.split(template)
    block_graph, _ = nnx.split(template.layers[0])

    def whole(params: Params) -> Llama:
        """The model without its blocks: one set of weights stands for all."""
        first = params["layers"] if stacked else params["layers"][0]
        return _merge(graph, params | {"layers": dict.fromkeys(range(config.num_layers), first)})

    def forward(
        params: Params,
        tokens: Int[Array, "B N"],
        positions: Int[Array, "B N"],
        mask: Bool[Array, "B N M"],
        cache: KVCache,
        features: tuple[str, ...] = (),
    ) -> ForwardOutput:
        # The graph wants one entry a layer; stacked blocks come from the stack below.
        model = whole(params) if stacked else _merge(graph, params)
        nodes = node_inputs(config, positions, cache.length, mask)
        x = model.embed_tokens(tokens)

        if stacked:

            def body(x: Float[Array, "B N H"], layer: tuple) -> tuple[Float[Array, "B N H"], tuple]:
                weights, keys, values = layer
                out, keys, values = _merge(block_graph, weights)(x, nodes, keys, values)
                return out, (keys, values, x)

            x, (keys, values, inputs) = jax.lax.scan(body, x, (params["layers"], cache.keys, cache.values))
        else:
            layers = []
            for block, layer_keys, layer_values in zip(model.layers, cache.keys, cache.values, strict=True):
                out, layer_keys, layer_values = block(x, nodes, layer_keys, layer_values)
                layers.append((layer_keys, layer_values, x))
                x = out
            keys, values, inputs = (tuple(part) for part in zip(*layers, strict=True))

        last = model.norm(x)
        logits = model.unembed(last).astype(jnp.float32)
        known = {LAST_HIDDEN: last, LOGITS: logits}
        known |= {f"{LAYER_INPUT}{i}": inputs[i] for i in range(config.num_layers)}
        return ForwardOutput(
            logits=logits,
            cache=KVCache(keys, values, cache.length),
            features={name: _feature(known, name) for name in features},
        )

    init_cache = functools.partial(
        kv.init_cache,
        num_layers=config.num_layers,
        num_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=activation_dtype(dtype),
        stacked=stacked,
    )

    def head_rows(params: Params, tokens: Int[Array, "K"]) -> Float[Array, "K H"]:
        return whole(params).head_rows(tokens)

    return Target(
        forward,
        init_cache,
        config.vocab_size,
        config,
        dtype,
        embed=lambda params, tokens: whole(params).embed_tokens(tokens),
        unembed=lambda params, hidden: whole(params).unembed(hidden).astype(jnp.float32),
        head_rows=head_rows,
    )


def init_params(config: LlamaConfig, seed: int, *, dtype: Any = jnp.float32) -> Params:
    """Random weights as a nested dict, drawn from a normal law of deviation 0.02, then quantised for int8."""
    if dtype == jnp.int8:
        return quantize(init_params(config, seed))
    return init_module(lambda rngs: Llama(config, dtype=dtype, rngs=rngs), jax.random.key(seed))


def pure(make: Callable[[nnx.Rngs], nnx.Module], method: str = "__call__") -> Callable[..., Any]:
    """A module's method as a function of its weights, a nested dict, and of the method's arguments."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    return lambda params, *arguments: getattr(_merge(graph, params), method)(*arguments)


def init_module(make: Callable[[nnx.Rngs], nnx.Module], key: Key[Array, ""]) -> Params:
    """The first weights of a module, a nested dict."""
    return nnx.to_pure_dict(nnx.split(make(nnx.Rngs(key)))[1])


def pack(params: Params) -> Params:
    """Published weights, on the host, as the modules hold them: qkv in one array, gate and up in another."""

    def packed(parts: Params, module: str, sources: tuple[str, ...]) -> Params:
        kinds = parts[sources[0]]
        joined = {kind: np.concatenate([parts[source][kind] for source in sources]) for kind in kinds}
        rest = {name: part for name, part in parts.items() if name not in sources}
        return {module: joined} | rest

    def pack_layer(layer: Params) -> Params:
        return layer | {
            "self_attn": packed(layer["self_attn"], "qkv_proj", ("q_proj", "k_proj", "v_proj")),
            "mlp": packed(layer["mlp"], "gate_up_proj", ("gate_proj", "up_proj")),
        }

    return params | {"layers": {i: pack_layer(layer) for i, layer in params["layers"].items()}}


def unpack(params: Params, config: LlamaConfig) -> Params:
    """The inverse of `pack`: unstacked weights under their published names."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    cuts = {"q_proj": (0, queries), "k_proj": (queries, keys), "v_proj": (queries + keys, keys)}
    halves = {"gate_proj": (0, config.intermediate_size), "up_proj": (config.intermediate_size,) * 2}

    def unpacked(parts: Params, module: str, cuts: dict[str, tuple[int, int]]) -> Params:
        rest = {name: part for name, part in parts.items() if name != module}
        joined = parts[module]
        return rest | {
            name: {kind: array[first : first + size] for kind, array in joined.items()}
            for name, (first, size) in cuts.items()
        }

    def unpack_layer(layer: Params) -> Params:
        return layer | {
            "self_attn": unpacked(layer["self_attn"], "qkv_proj", cuts),
            "mlp": unpacked(layer["mlp"], "gate_up_proj", halves),
        }

    return params | {"layers": {i: unpack_layer(layer) for i, layer in params["layers"].items()}}


def stack_layers(params: Params) -> Params:
    """The weights of all layers as single arrays [L, ...], as a stacked target wants them."""
    layers = params["layers"]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(layers[i] for i in range(len(layers))))
    return params | {"layers": stacked}


def keep_layers(params: Params, kept: tuple[int, ...]) -> Params:
    """The same weights with only the layers `kept`, renumbered from 0; unstacked ones are not copied."""
    layers = params["layers"]
    if 0 in layers:
        return params | {"layers": {new: layers[old] for new, old in enumerate(kept)}}
    by_layer = {new: jax.tree.map(lambda leaf, i=old: leaf[i], layers) for new, old in enumerate(kept)}
    return params | {"layers": by_layer}


def _merge(graph: nnx.GraphDef, params: Params) -> Any:
    return nnx.merge(graph, nnx.State(params))


def _feature(known: dict[str, jax.Array], name: str) -> Float[Array, "B N F"]:
    if name not in known:
        raise ConfigError(f"the target has no feature '{name}'{nearest(name, list(known))}")
    return known[name]
