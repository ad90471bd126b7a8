"""The names and shapes of a Llama checkpoint, and the check that every importer applies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from specjax.errors import CheckpointError
from specjax.models.llama import LlamaConfig

FLOAT_DTYPES = ("float32", "float16", "bfloat16")

Params = dict[Any, Any]  # nested; the keys are names, and ints for layers
Array = npt.NDArray[Any]


class ArrayLike(Protocol):
    """What a tensor must offer: its facts at once, its numbers through `np.asarray` when asked."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    def __array__(self) -> Array: ...


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor still in its file: `read` fetches it, so that only one at a time is held twice in memory."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Array]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self.read(), dtype=dtype)


def expected_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return each parameter's shape by its name, Hugging Face's less `model.`; weights are [out, in]."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab_size, hidden)}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    for i in range(config.num_layers):
        layer = f"layers.{i}"
        linear(f"{layer}.self_attn.q_proj", queries, hidden, config.attention_bias)
        linear(f"{layer}.self_attn.k_proj", keys, hidden, config.attention_bias)
        linear(f"{layer}.self_attn.v_proj", keys, hidden, config.attention_bias)
        linear(f"{layer}.self_attn.o_proj", hidden, queries, config.attention_bias)
        linear(f"{layer}.mlp.gate_proj", mlp, hidden, config.mlp_bias)
        linear(f"{layer}.mlp.up_proj", mlp, hidden, config.mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, mlp, config.mlp_bias)
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    shapes["norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_and_nest(
    tensors: Mapping[str, ArrayLike],
    config: LlamaConfig,
    source: str,
    dtype: npt.DTypeLike = np.float32,
    spell: Callable[[str], str] = str,
) -> Params:
    """Return `tensors` as a nested dict of `dtype` arrays, read one by one once all of them fit `config`.

    `spell` turns a name into the source's own spelling, for messages. Raises CheckpointError, with the
    tensor's name, on a missing or unused tensor, a shape that does not fit, or a dtype that is no float.
    """
    check_num_layers(config, len(tensors), source)
    shapes = expected_shapes(config)
    _check_names(tensors, shapes, source, spell)
    for name, shape in shapes.items():
        _check_tensor(spell(name), tensors[name], shape, source)

    params: Params = {}
    for name in shapes:
        *parents, leaf = (int(part) if part.isdigit() else part for part in name.split("."))
        node = params
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = np.asarray(tensors[name]).astype(dtype, copy=False)

    if config.tie_embeddings and "lm_head.weight" in tensors:
        head, embedding = tensors["lm_head.weight"], params["embed_tokens"]["weight"]
        _check_tensor(spell("lm_head.weight"), head, embedding.shape, source)
        if not np.array_equal(np.asarray(head).astype(dtype, copy=False), embedding):
            raise CheckpointError(
                f"{source}: the config ties the output head to the embedding, yet tensor "
                f"'{spell('lm_head.weight')}' differs from '{spell('embed_tokens.weight')}'; set "
                "tie_word_embeddings to false in config.json to use the head."
            )
    return params


def check_num_layers(config: LlamaConfig, num_tensors: int, source: str) -> None:
    """Refuse an absurd count of layers before their names are listed, which could fill the memory."""
    if config.num_layers > num_tensors:
        raise CheckpointError(
            f"{source}: the config counts {config.num_layers} layers, but there are only {num_tensors} "
            "tensors; the weights and the config belong to different models."
        )


def _check_names(
    tensors: Mapping[str, ArrayLike], shapes: Mapping[str, Any], source: str, spell: Callable[[str], str]
) -> None:
    missing = [name for name in shapes if name not in tensors]
    unused = [name for name in tensors if name not in shapes and not name.endswith("rotary_emb.inv_freq")]
    if "lm_head.weight" in unused:
        unused.remove("lm_head.weight")  # a tied duplicate, compared once it has been read
    for names, fault, remedy in (
        (missing, "is missing", "the file is incomplete or belongs to another architecture"),
        (unused, "is not part of this architecture", "leaving it out would compute something else"),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise CheckpointError(f"{source}: tensor '{spell(names[0])}'{more} {fault}; {remedy}.")


def _check_tensor(name: str, tensor: ArrayLike, shape: tuple[int, ...], source: str) -> None:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"{source}: tensor '{name}' has shape {tuple(tensor.shape)}, but the config makes it {shape}; "
            "the weights and the config belong to different models."
        )
    if str(tensor.dtype) not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{source}: tensor '{name}' has dtype {tensor.dtype}; known are {', '.join(FLOAT_DTYPES)}. "
            "Convert the checkpoint to one of them first."
        )
