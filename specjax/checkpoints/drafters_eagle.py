"""The published formats of EAGLE and EAGLE-2, and of EAGLE-3, also as speculators writes it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.checkpoints.drafters_files import CONFIG, IS_DRAFTED, OFFSETS, check
from specjax.checkpoints.drafters_found import Found, Published, check_sizes, draft_vocab, offset_shape
from specjax.checkpoints.hf_config import Fields, parse_config
from specjax.checkpoints.validate import Params, expected_shapes
from specjax.errors import CheckpointError
from specjax.models.eagle import EMBEDDING, EagleConfig
from specjax.models.eagle3 import Eagle3Config
from specjax.models.functional import pack
from specjax.models.layers import activation_dtype
from specjax.models.llama import LlamaConfig

DEFAULT_THETA = 10000.0  # what EAGLE's own code takes where its config names no rope_theta
MIDLAYER, SPECULATORS_LAYER = "midlayer", "layers.0"
STATE_LAYERS = "eagle_aux_hidden_state_layer_ids"
# Fields of speculators' that change what the network computes, with the one value that ours computes.
_FLAGS = {"norm_before_fc": False, "fc_norm": False, "norm_output": False}
NORM_BEFORE_RESIDUAL = "norm_before_residual"
# Those that do not, or that are read below.
_SILENT = (
    "speculators_model_type",
    "speculators_version",
    "speculators_config",
    "architectures",
    "transformer_layer_config",
    "draft_vocab_size",
    "target_hidden_size",
    STATE_LAYERS,
    NORM_BEFORE_RESIDUAL,
    "embed_requires_grad",
    "tie_word_embeddings",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "model_type",
    "auto_map",
    "has_no_defaults_at_init",
)


def read_eagle(found: Found) -> Published:
    """EAGLE and EAGLE-2: a layer without a norm at its input, and perhaps an embedding of its own."""
    layer, o_bias = _layer(found, found.config)
    architecture = EagleConfig(layer, fc_bias=found.fields.get("bias", bool, True))
    hidden = layer.hidden_size
    check_sizes(found, hidden, layer.vocab_size)
    shapes = _layer_shapes(layer, "layers.0", hidden, o_bias)
    del shapes["layers.0.input_layernorm.weight"]
    shapes["fc.weight"] = (hidden, 2 * hidden)
    if architecture.fc_bias:
        shapes["fc.bias"] = (hidden,)
    shapes[f"{EMBEDDING}.weight"] = (layer.vocab_size, hidden)
    shapes |= offset_shape(found)
    check(found.tensors, shapes, found.source, optional=(f"{EMBEDDING}.weight",))
    vocab, _ = draft_vocab(found)
    shapes.pop(OFFSETS, None)
    return Published({}, architecture, _packed(found.nest(shapes), layer) | vocab)


def read_eagle3(found: Found) -> Published:
    """EAGLE-3: a layer over fused states, a head of its own, and a draft vocabulary where it is reduced."""
    _check_flags(found)
    own = found.config.get("transformer_layer_config") if _is_speculators(found) else found.config
    layer, o_bias = _layer(found, own)
    hidden, fields = layer.hidden_size, found.fields
    target_hidden = fields.get("target_hidden_size", int, hidden)
    check_sizes(found, target_hidden, layer.vocab_size)
    size = fields.get("draft_vocab_size", int, layer.vocab_size)
    layers = _state_layers(found)
    normed = fields.get(NORM_BEFORE_RESIDUAL, bool, False)
    architecture = Eagle3Config(layer, len(layers) * target_hidden, size, norm_before_residual=normed)

    prefix = MIDLAYER if any(name.startswith(f"{MIDLAYER}.") for name in found.tensors) else SPECULATORS_LAYER
    shapes = _layer_shapes(layer, prefix, 2 * hidden, o_bias)
    shapes |= {f"{prefix}.hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    shapes["lm_head.weight"] = (size, hidden)
    if architecture.state_size != hidden:
        shapes["fc.weight"] = (hidden, architecture.state_size)
    shapes[f"{EMBEDDING}.weight"] = (layer.vocab_size, hidden)
    if size != layer.vocab_size or {OFFSETS, IS_DRAFTED} & found.tensors.keys():
        shapes |= {OFFSETS: (size,), IS_DRAFTED: (layer.vocab_size,)}
    # The target's embedding will do where it is as wide.
    optional = (f"{EMBEDDING}.weight",) if hidden == target_hidden else ()
    check(found.tensors, shapes, found.source, optional)

    vocab, order = draft_vocab(found)
    for name in (OFFSETS, IS_DRAFTED):
        shapes.pop(name, None)
    weights = found.nest(shapes)
    if prefix == SPECULATORS_LAYER:
        weights[MIDLAYER] = weights.pop("layers")[0]
    weights = _packed(weights, layer)
    if order is not None:
        weights["lm_head"]["weight"] = weights["lm_head"]["weight"][order]
    if size == layer.vocab_size:
        vocab = {}
    # States as wide as the drafter pass as they are.
    weights.setdefault("fc", {"weight": np.eye(hidden, dtype=activation_dtype(found.target.dtype))})
    settled = {"state_layers": layers, "draft_vocab_size": size, "own_unembedding": True}
    return Published(settled, architecture, weights | vocab)


def _layer(found: Found, config: Any) -> tuple[LlamaConfig, bool]:
    """The drafter's one layer from its own config, and whether its output projection has a bias."""
    about = f"{found.source}, {CONFIG}"
    fields = Fields(config, about)
    given = dict(fields.config) | {"architectures": ["LlamaForCausalLM"]}
    rope = given.get("rope_parameters") or given.get("rope_scaling")
    if given.get("rope_theta") is None and not (isinstance(rope, Mapping) and "rope_theta" in rope):
        given["rope_theta"] = DEFAULT_THETA
    layer = parse_config(given, about)
    if layer.num_layers != 1:
        raise CheckpointError(f"{about}: 'num_hidden_layers' is {layer.num_layers}; only 1 is supported.")
    qkv_bias = fields.get("qkv_bias", bool, False)
    return dataclasses.replace(layer, attention_bias=layer.attention_bias or qkv_bias), layer.attention_bias


def _layer_shapes(layer: LlamaConfig, prefix: str, in_size: int, o_bias: bool) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer like Llama's that attends over vectors of `in_size`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in expected_shapes(layer).items():
        if not name.startswith("layers.0.") or (name.endswith("o_proj.bias") and not o_bias):
            continue
        if re.search(r"[qkv]_proj\.weight", name):
            shape = (shape[0], in_size)
        shapes[prefix + name.removeprefix("layers.0")] = shape
    return shapes


def _packed(weights: Params, layer: LlamaConfig) -> Params:
    """The layer's products as the modules hold them; a bias that the format lacks is 0."""
    block = weights["layers"][0] if "layers" in weights else weights[MIDLAYER]
    out = block["self_attn"]["o_proj"]
    if layer.attention_bias and "bias" not in out:
        out["bias"] = np.zeros(layer.hidden_size, out["weight"].dtype)
    layers = pack({"layers": {0: block}})["layers"]
    return weights | ({"layers": layers} if "layers" in weights else {MIDLAYER: layers[0]})


def _state_layers(found: Found) -> tuple[int, ...]:
    """The layers whose inputs an EAGLE-3 drafter reads: the published choice, unless it says otherwise."""
    num_layers = found.target.config.num_layers
    layers = found.config.get(STATE_LAYERS) or [2, num_layers // 2, num_layers - 3]
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise CheckpointError(
            f"{found.source}, {CONFIG}: '{STATE_LAYERS}' is {layers!r}; give numbers of layers."
        )
    if not all(0 <= layer < num_layers for layer in layers):
        raise CheckpointError(
            f"{found.source}, {CONFIG}: '{STATE_LAYERS}' is {layers!r}; the target has layers 0 to "
            f"{num_layers - 1}."
        )
    return tuple(layers)


def _is_speculators(found: Found) -> bool:
    return "speculators_model_type" in found.config


def _check_flags(found: Found) -> None:
    """Refuse what a config can express and our network does not compute."""
    about, config = f"{found.source}, {CONFIG}", found.config
    if (kind := config.get("speculators_model_type", "eagle3")) != "eagle3":
        raise CheckpointError(f"{about}: 'speculators_model_type' is {kind!r}; only 'eagle3' is supported.")
    if "eagle_config" in config:
        raise CheckpointError(
            f"{about}: 'eagle_config' is not supported, for engines count its layers differently; remove it "
            f"and set '{STATE_LAYERS}' to the layers whose inputs the drafter reads."
        )
    if _is_speculators(found) and config.get(NORM_BEFORE_RESIDUAL) is None:
        raise CheckpointError(
            f"{about}: field '{NORM_BEFORE_RESIDUAL}' is absent, and engines differ in what that means; "
            "set it to true if the drafter was trained with the normalised state as residual, else to false."
        )
    for name, value in config.items():
        if name in _FLAGS and value not in (_FLAGS[name], None):
            raise CheckpointError(f"{about}: '{name}' is {value!r}; only {_FLAGS[name]} is supported.")
        if _is_speculators(found) and name not in _FLAGS and name not in _SILENT:
            raise CheckpointError(f"{about}: '{name}' is {value!r}, a field that is not known here.")
