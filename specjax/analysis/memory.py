"""What decoding keeps in memory, counted from an architecture before any weight is loaded.

A count is what the arrays need, a bound from below: what a compiler adds for its own purposes is not known
here. All amounts are in bytes, and dtypes are named as configs name them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from specjax.analysis.theory import Work
from specjax.errors import ConfigError, nearest

Shape = tuple[int, ...]

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
LAW_BYTES = 4  # of a logit or a probability: laws are judged in float32
MOST_SHARE = 0.15  # of plain decoding's memory, beyond which speculation is worth a warning


class Architecture(Protocol):
    """The sizes of a Llama-like model; `specjax.models.llama.LlamaConfig` is one."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def tie_embeddings(self) -> bool: ...
    @property
    def attention_bias(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...


class DrafterSize(NamedTuple):
    """The shapes of a drafter's own weights, and the numbers it caches and reads for each token.

    `cache_numbers` are keys and values of all its layers, `feature_numbers` the target's states it reads.
    """

    shapes: tuple[Shape, ...]
    cache_numbers: int
    feature_numbers: int


NO_WEIGHTS = DrafterSize((), 0, 0)  # n-grams, suffixes, lookahead, and layers that are skipped


class Footprint(NamedTuple):
    """Bytes of plain decoding, the first three, and what speculation adds to them, the others."""

    target_weights: int
    target_cache: int
    plain_buffers: int
    draft_weights: int
    draft_cache: int
    node_slots: int  # of the target's cache, for nodes that are not decided yet
    buffers: int  # laws [B, N, V] and states [B, N, F] beyond the plain ones

    @property
    def plain(self) -> int:
        """Bytes of decoding without speculation."""
        return sum(self[:3])

    @property
    def extra(self) -> int:
        """Bytes that speculation adds."""
        return sum(self[3:])

    @property
    def share(self) -> float:
        """What speculation adds, as a share of plain decoding's bytes."""
        return self.extra / self.plain


def model_shapes(model: Architecture) -> tuple[Shape, ...]:
    """The shapes of all weights of a model, the embedding first."""
    embedding = (model.vocab_size, model.hidden_size)
    layers = _layer_shapes(model, model.hidden_size, num_norms=2) * model.num_layers
    head = () if model.tie_embeddings else (embedding,)
    return (embedding, *layers, (model.hidden_size,), *head)


def draft_model(model: Architecture) -> DrafterSize:
    """A complete model as drafter, with a cache of its own."""
    return DrafterSize(model_shapes(model), _cache_numbers(model), 0)


def eagle(target: Architecture, *, fc_bias: bool, draft_vocab_size: int | None = None) -> DrafterSize:
    """EAGLE's layer of the target's sizes (arXiv 2401.15077); it shares embedding and head.

    With a draft vocabulary the rows of the head that it needs are kept apart.
    """
    hidden = target.hidden_size
    fc = ((hidden, 2 * hidden), *([(hidden,)] if fc_bias else []))
    head = () if draft_vocab_size is None else ((draft_vocab_size, hidden),)
    layer = _layer_shapes(target, hidden, num_norms=1)
    return DrafterSize((*fc, *layer, *head), _cache_numbers(target) // target.num_layers, hidden)


def eagle3(target: Architecture, draft_vocab_size: int) -> DrafterSize:
    """EAGLE-3's layer of the target's sizes with its own head (arXiv 2503.01840); it shares the embedding."""
    hidden = target.hidden_size
    own = ((hidden, 3 * hidden), (hidden,), (draft_vocab_size, hidden))
    layer = _layer_shapes(target, 2 * hidden, num_norms=3)
    return DrafterSize((*own, *layer), _cache_numbers(target) // target.num_layers, 3 * hidden)


def medusa(target: Architecture, num_heads: int, num_layers: int, *, own_unembedding: bool) -> DrafterSize:
    """Medusa's heads of so many residual blocks each (arXiv 2401.10774); they cache nothing."""
    hidden = target.hidden_size
    blocks = ((hidden, hidden), (hidden,)) * num_layers
    unembedding = ((target.vocab_size, hidden),) if own_unembedding else ()
    return DrafterSize((*blocks, *unembedding) * num_heads, 0, hidden)


def num_parameters(shapes: Iterable[Shape]) -> int:
    """How many numbers arrays of these shapes hold."""
    return sum(math.prod(shape) for shape in shapes)


def weight_bytes(shapes: Iterable[Shape], dtype: str) -> int:
    """Bytes of weights; in int8 every row of a matrix has a float32 scale, and vectors stay float32.

    Raises ConfigError on an unknown dtype.
    """
    size = _bytes(dtype)
    if dtype != "int8":
        return size * num_parameters(shapes)
    return sum(math.prod(s) + 4 * s[0] if len(s) == 2 else 4 * math.prod(s) for s in shapes)


def cache_bytes(model: Architecture, *, batch: int, capacity: int, dtype: str) -> int:
    """Bytes of the keys and values of `batch` rows of `capacity` slots; int8 weights cache in float32."""
    _check_at_least_1(batch=batch, capacity=capacity)
    return batch * capacity * _cache_numbers(model) * _activation_bytes(dtype)


def law_bytes(batch: int, num_nodes: int, vocab_size: int) -> int:
    """Bytes of one array [B, N, V] of logits or probabilities."""
    _check_at_least_1(batch=batch, num_nodes=num_nodes, vocab_size=vocab_size)
    return batch * num_nodes * vocab_size * LAW_BYTES


def footprint(
    target: Architecture,
    drafter: DrafterSize,
    *,
    batch: int,
    capacity: int,
    num_nodes: int,
    dtype: str,
    draft_dtype: str,
    has_law: bool,
) -> Footprint:
    """What `batch` rows of `capacity` tokens keep, and what drafts of `num_nodes` nodes, the root one, add.

    A pass holds the target's logits and law for every node, and the draft's law where the drafter `has_law`
    and is no point mass. Raises ConfigError on sizes below 1 and unknown dtypes.
    """
    law = law_bytes(batch, num_nodes, target.vocab_size)
    plain = 2 * law_bytes(batch, 1, target.vocab_size)
    features = batch * num_nodes * drafter.feature_numbers * _activation_bytes(dtype)
    draft_slots = batch * (capacity + num_nodes) * drafter.cache_numbers
    return Footprint(
        target_weights=weight_bytes(model_shapes(target), dtype),
        target_cache=cache_bytes(target, batch=batch, capacity=capacity, dtype=dtype),
        plain_buffers=plain,
        draft_weights=weight_bytes(drafter.shapes, draft_dtype),
        draft_cache=draft_slots * _activation_bytes(draft_dtype),
        node_slots=cache_bytes(target, batch=batch, capacity=num_nodes, dtype=dtype),
        buffers=(3 if has_law else 2) * law - plain + features,
    )


def warning(found: Footprint, most_share: float = MOST_SHARE) -> str | None:
    """A sentence for a person where speculation adds more than this share to plain decoding, else None."""
    if found.share <= most_share:
        return None
    parts = {name.replace("_", " "): value for name, value in found._asdict().items()}
    largest = max(list(parts)[3:], key=lambda name: parts[name])
    return (
        f"speculation needs {found.share:.0%} more memory than plain decoding ({megabytes(found.extra)} "
        f"beside {megabytes(found.plain)}; at most {most_share:.0%} is usual), most of it {largest}: "
        "choose a smaller drafter, fewer nodes or a smaller batch"
    )


def megabytes(count: float) -> str:
    """A count of bytes in units of 10^6."""
    return f"{count / 1e6:.1f} MB"


def work(model: Architecture, dtype: str) -> Work:
    """What a pass of the model reads and computes, for `specjax.analysis.theory`'s roofline.

    Of an embedding that is no head at the same time, only single rows are read.
    """
    shapes = model_shapes(model)
    used = shapes if model.tie_embeddings else shapes[1:]
    return Work(
        weight_bytes=weight_bytes(used, dtype),
        cache_bytes=cache_bytes(model, batch=1, capacity=1, dtype=dtype),
        operations=2 * num_parameters(shape for shape in used if len(shape) == 2),
        attention_operations=4 * model.num_layers * model.num_heads * model.head_dim,
    )


def _layer_shapes(model: Architecture, in_size: int, num_norms: int) -> tuple[Shape, ...]:
    """One decoder layer whose attention reads `in_size` numbers a token."""
    hidden, inner, width = model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim
    packed = width + 2 * model.num_kv_heads * model.head_dim
    attention: tuple[Shape, ...] = ((packed, in_size), (hidden, width))
    mlp: tuple[Shape, ...] = ((2 * inner, hidden), (hidden, inner))
    biases = (attention if model.attention_bias else ()) + (mlp if model.mlp_bias else ())
    return (*attention, *mlp, *((rows,) for rows, _ in biases), *[(hidden,)] * num_norms)


def _cache_numbers(model: Architecture) -> int:
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim


def _bytes(dtype: str) -> int:
    if dtype not in BYTES:
        raise ConfigError(f"the dtype is '{dtype}'{nearest(dtype, BYTES)}: choose one of {', '.join(BYTES)}")
    return BYTES[dtype]


def _activation_bytes(dtype: str) -> int:
    """Of a number computed or cached by a model whose weights have this dtype."""
    return _bytes("float32" if dtype == "int8" else dtype)


def _check_at_least_1(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name} is {size}: give at least 1")
