"""The names and shapes of a Llama checkpoint, and the check that every importer applies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from specjax.checkpoints.names import unflatten
from specjax.errors import CheckpointError
from specjax.models.llama import LlamaConfig

TIED_HEAD = "lm_head.weight"
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
    # A head may stand there twice where it is tied: it is compared once it has been read.
    check_names([name for name in tensors if name != TIED_HEAD or name in shapes], shapes, source, spell)
    for name, shape in shapes.items():
        check_tensor(spell(name), tensors[name], shape, source)
    params = unflatten({name: np.asarray(tensors[name]).astype(dtype, copy=False) for name in shapes})

    if config.tie_embeddings and TIED_HEAD in tensors:
        head, embedding = tensors[TIED_HEAD], params["embed_tokens"]["weight"]
        check_tensor(spell(TIED_HEAD), head, embedding.shape, source)
        if not np.array_equal(np.asarray(head).astype(dtype, copy=False), embedding):
            raise CheckpointError(
                f"{source}: the config ties the output head to the embedding, yet tensor "
                f"'{spell(TIED_HEAD)}' differs from '{spell('embed_tokens.weight')}'; set "
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


def check_names(
    given: Collection[str],
    wanted: Collection[str],
    source: str,
    spell: Callable[[str], str] = str,
    optional: Collection[str] = (),
) -> None:
    """CheckpointError where a tensor that is not optional is missing, or where one is not wanted."""
    missing = [name for name in wanted if name not in given and name not in optional]
    unused = [name for name in given if name not in wanted and not name.endswith("rotary_emb.inv_freq")]
    for names, fault, remedy in (
        (missing, "is missing", "the file is incomplete or belongs to another architecture"),
        (unused, "is not part of this architecture", "leaving it out would compute something else"),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise CheckpointError(f"{source}: tensor '{spell(names[0])}'{more} {fault}; {remedy}.")


def check_tensor(
    name: str,
    tensor: ArrayLike,
    shape: tuple[int, ...],
    source: str,
    dtypes: Collection[str] = FLOAT_DTYPES,
) -> None:
    """Raise CheckpointError where a tensor has another shape or none of the dtypes."""
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"{source}: tensor '{name}' has shape {tuple(tensor.shape)}, but the config makes it {shape}; "
            "the weights and the config belong to different models."
        )
    if str(tensor.dtype) not in dtypes:
        raise CheckpointError(
            f"{source}: tensor '{name}' has dtype {tensor.dtype}; known are {', '.join(dtypes)}. "
            "Convert the checkpoint to one of them first."
        )
