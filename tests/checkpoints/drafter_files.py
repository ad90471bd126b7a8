"""Published drafters as the formats describe them, and what they compute, written again in NumPy.

Nothing here comes from the package: `fault` names one deliberate mistake, the negative control of a test.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCAB, HIDDEN, EPS = 20, 16, 0.01
DRAFTED = (1, 3, 4, 9, 11, 17)
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
Tensors = dict[str, np.ndarray]


def config(**changes: Any) -> dict[str, Any]:
    """A drafter's config.json; nothing but the width and the vocabulary is as in the tests' target."""
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "rms_norm_eps": EPS,
        "rope_theta": 700.0,
        "rope_scaling": SCALING,
        "max_position_embeddings": 256,
    }
    return {name: value for name, value in {**fields, **changes}.items() if value is not None}


def _random(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Tensors:
    """Weights that matter, all of them, and make laws that are not sharp."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(float("norm" in name), 0.4, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def _layer(prefix: str, hidden: int, in_size: int) -> dict[str, tuple[int, ...]]:
    mlp, keys = 40, hidden // 2
    return {
        f"{prefix}.self_attn.q_proj.weight": (hidden, in_size),
        f"{prefix}.self_attn.k_proj.weight": (keys, in_size),
        f"{prefix}.self_attn.v_proj.weight": (keys, in_size),
        f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
        f"{prefix}.mlp.gate_proj.weight": (mlp, hidden),
        f"{prefix}.mlp.up_proj.weight": (mlp, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, mlp),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
    }


def eagle(bias: bool = True, embedding: bool = False, seed: int = 0) -> tuple[dict[str, Any], Tensors]:
    """EAGLE: its config, and its tensors; with `bias`, of fc and of queries, keys and values."""
    shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN)} | _layer("layers.0", HIDDEN, HIDDEN)
    if bias:
        shapes["fc.bias"] = (HIDDEN,)
        sizes = {"q": HIDDEN, "k": HIDDEN // 2, "v": HIDDEN // 2}
        shapes |= {f"layers.0.self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    if embedding:
        shapes["embed_tokens.weight"] = (VOCAB, HIDDEN)
    return config(qkv_bias=bias, bias=None if bias else False), _random(shapes, seed)


def eagle3(
    hidden: int = HIDDEN, reduced: bool = True, seed: int = 0, **changes: Any
) -> tuple[dict[str, Any], Tensors]:
    """EAGLE-3: its config and its tensors; only where it is `reduced` it drafts a part of the vocabulary."""
    prefix, size = "midlayer", len(DRAFTED) if reduced else VOCAB
    shapes = _layer(prefix, hidden, 2 * hidden)
    shapes |= {f"{prefix}.{name}.weight": (hidden,) for name in ("hidden_norm", "input_layernorm")}
    shapes |= {"norm.weight": (hidden,), "lm_head.weight": (size, hidden), "fc.weight": (hidden, 3 * HIDDEN)}
    if hidden != HIDDEN:
        shapes["embed_tokens.weight"] = (VOCAB, hidden)
    tensors = _random(shapes, seed)
    if reduced:
        tensors["d2t"] = np.array(DRAFTED) - np.arange(size)
        tensors["t2d"] = np.isin(np.arange(VOCAB), DRAFTED)
    own = {"draft_vocab_size": size if reduced else None, "target_hidden_size": HIDDEN}
    return config(hidden_size=hidden, **own, **changes), tensors


def eagle3_without_fusion() -> tuple[dict[str, Any], Tensors]:
    """EAGLE-3 as wide as the states that it reads."""
    about, tensors = eagle3(3 * HIDDEN)
    return about, {name: tensor for name, tensor in tensors.items() if name != "fc.weight"}


def speculators(about: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """EAGLE-3's config as speculators writes it."""
    own = {"norm_before_residual": False}
    own |= {name: about[name] for name in (*own, "draft_vocab_size", "target_hidden_size") if name in about}
    return {
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {"algorithm": "eagle3"},
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": {name: value for name, value in about.items() if name not in own},
        "embed_requires_grad": False,
        **own,
        **changes,
    }


def out_of_order(tensors: Tensors) -> Tensors:
    """The same drafted tokens and rows of the head, listed otherwise."""
    order = np.array([3, 0, 5, 1, 2, 4])
    offsets = np.array(DRAFTED)[order] - np.arange(len(DRAFTED))
    return {"d2t": offsets, "lm_head.weight": tensors["lm_head.weight"][order]}


def respelled(tensors: Tensors) -> Tensors:
    """The names that speculators gives."""
    return {name.replace("midlayer", "layers.0"): tensor for name, tensor in tensors.items()}


def medusa(
    heads: int = 3, layers: int = 2, own: bool = True, seed: int = 0
) -> tuple[dict[str, Any], Tensors]:
    """Medusa, with a config that miscounts its heads; `own` are heads with unembeddings."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for layer in range(layers):
            shapes[f"{head}.{layer}.linear.weight"] = (HIDDEN, HIDDEN)
            shapes[f"{head}.{layer}.linear.bias"] = (HIDDEN,)
        if own:
            shapes[f"{head}.{layers}.weight"] = (VOCAB, HIDDEN)
    about = {
        "medusa_num_heads": heads + 2,
        "medusa_num_layers": layers,
        "base_model_name_or_path": "some/model",
    }
    return about, _random(shapes, seed)


KINDS = {"eagle": eagle, "eagle3": eagle3, "medusa": medusa}


def write(folder: Path, about: Mapping[str, Any], tensors: Tensors, name: str = "model.safetensors") -> Path:
    """Write a folder as it is published."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(about))
    save_file({key: np.ascontiguousarray(tensor) for key, tensor in tensors.items()}, folder / name)
    return folder


def rms(x: np.ndarray, weight: np.ndarray, eps: float = EPS) -> np.ndarray:
    return weight * x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def _rotate(x: np.ndarray, about: Mapping[str, Any]) -> np.ndarray:
    """Half-split rotary embedding of [T, heads, size] at positions 0, 1, ..."""
    size = x.shape[-1]
    frequencies = []
    for pair in range(size // 2):
        frequency = about["rope_theta"] ** (-2 * pair / size)
        scaling = about.get("rope_scaling")
        if scaling:
            wavelength, old = 2 * np.pi / frequency, scaling["original_max_position_embeddings"]
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            if wavelength > old / low:
                frequency /= scaling["factor"]
            elif wavelength > old / high:
                smooth = (old / wavelength - low) / (high - low)
                frequency = (1 - smooth) * frequency / scaling["factor"] + smooth * frequency
        frequencies.append(frequency)
    angles = np.arange(len(x))[:, None] * np.array(frequencies)[None]
    cos, sin = (np.tile(f(angles), 2)[:, None] for f in (np.cos, np.sin))
    return x * cos + np.concatenate((-x[..., size // 2 :], x[..., : size // 2]), -1) * sin


def _attention(x: np.ndarray, tensors: Tensors, prefix: str, about: Mapping[str, Any]) -> np.ndarray:
    """Causal attention of [T, F], one query head at a time."""

    def project(name: str, heads: int) -> np.ndarray:
        y = x @ tensors[f"{prefix}.{name}_proj.weight"].T + tensors.get(f"{prefix}.{name}_proj.bias", 0.0)
        return y.reshape(len(x), heads, -1)

    heads, groups = about["num_attention_heads"], about["num_key_value_heads"]
    queries, keys = _rotate(project("q", heads), about), _rotate(project("k", groups), about)
    values, mixed = project("v", groups), []
    for head in range(heads):
        group = head // (heads // groups)
        scores = queries[:, head] @ keys[:, group].T / np.sqrt(queries.shape[-1])
        scores = np.where(np.tril(np.ones_like(scores)) > 0, scores, -np.inf)
        mixed.append(softmax(scores) @ values[:, group])
    return np.concatenate(mixed, -1) @ tensors[f"{prefix}.o_proj.weight"].T


def _mlp(x: np.ndarray, tensors: Tensors, prefix: str) -> np.ndarray:
    gate, up = (x @ tensors[f"{prefix}.{name}_proj.weight"].T for name in ("gate", "up"))
    return (gate / (1 + np.exp(-gate)) * up) @ tensors[f"{prefix}.down_proj.weight"].T


def _about(about: Mapping[str, Any], fault: str) -> Mapping[str, Any]:
    changed = {"theta of the target": {"rope_theta": 10000.0}, "no rope scaling": {"rope_scaling": None}}
    return {**about, **changed.get(fault, {})}


def eagle_states(
    about: Mapping[str, Any], tensors: Tensors, embedded: np.ndarray, states: np.ndarray, fault: str = ""
) -> np.ndarray:
    """EAGLE's outputs [T, H], which enter the target's head as they are."""
    if fault == "biases dropped":
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("bias")}
    parts = (states, embedded) if fault == "state before embedding" else (embedded, states)
    x = np.concatenate(parts, -1) @ tensors["fc.weight"].T + tensors.get("fc.bias", 0.0)
    read = rms(x, np.ones(x.shape[-1])) if fault == "norm at the input" else x
    mixed = _attention(read, tensors, "layers.0.self_attn", _about(about, fault))
    x = mixed if fault == "residual dropped" else x + mixed
    x = x + _mlp(rms(x, tensors["layers.0.post_attention_layernorm.weight"]), tensors, "layers.0.mlp")
    return rms(x, np.ones(x.shape[-1])) if fault == "norm at the output" else x


def eagle3_states(
    about: Mapping[str, Any], tensors: Tensors, embedded: np.ndarray, states: np.ndarray, fault: str = ""
) -> np.ndarray:
    """EAGLE-3's outputs [T, H] before `norm`, of states that `fc` has fused."""
    normed = rms(states, tensors["midlayer.hidden_norm.weight"])
    parts = [rms(embedded, tensors["midlayer.input_layernorm.weight"]), normed]
    if fault == "state not normed":
        parts[1] = states
    if fault == "state before embedding":
        parts.reverse()
    mixed = _attention(np.concatenate(parts, -1), tensors, "midlayer.self_attn", _about(about, fault))
    is_normed = about.get("norm_before_residual", False) != (fault == "other residual")
    x = mixed + (0.0 if fault == "residual dropped" else normed if is_normed else states)
    return x + _mlp(rms(x, tensors["midlayer.post_attention_layernorm.weight"]), tensors, "midlayer.mlp")


def eagle3_logits(tensors: Tensors, states: np.ndarray, fault: str = "") -> np.ndarray:
    """Logits [T, V] of outputs, -inf where nothing is drafted."""
    weight = tensors["norm.weight"]
    times = {"norm never": 0, "norm twice": 2}.get(fault, 1)
    for _ in range(times):
        states = rms(states, weight)
    scores = states @ tensors["lm_head.weight"].T
    if "d2t" not in tensors or fault == "ids not mapped":
        return np.pad(scores, ((0, 0), (0, VOCAB - scores.shape[1])), constant_values=-np.inf)
    everywhere = np.full((len(states), VOCAB), -np.inf)
    for row, offset in enumerate(tensors["d2t"]):
        everywhere[:, row + offset] = scores[:, row]
    return everywhere
