"""What the readers of published drafters share: what they are given and return, and what they check."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from specjax.checkpoints.drafters_files import CONFIG, IS_DRAFTED, OFFSETS, nest
from specjax.checkpoints.hf_config import Fields
from specjax.checkpoints.validate import Array, Params, StoredTensor
from specjax.draft_vocab import TOKENS
from specjax.errors import CheckpointError, ConfigError
from specjax.models.eagle import EagleConfig
from specjax.models.eagle3 import Eagle3Config
from specjax.models.layers import activation_dtype
from specjax.types import Target


class Published(NamedTuple):
    """A drafter from its files: the fields of its `Config` that they decide, its network, and its weights.

    The weights are packed, on the host, in the type that the target computes in.
    """

    fields: dict[str, Any]
    architecture: EagleConfig | Eagle3Config | None
    weights: Params

    def settle(self, config: Any, source: str) -> Any:
        """`config` with the fields that the files decide; ConfigError where it says otherwise."""
        for field in dataclasses.fields(config):
            name, given = field.name, getattr(config, field.name)
            if name in self.fields and given not in (field.default, self.fields[name]):
                raise ConfigError(
                    f"drafter.{name} is {given} and '{source}' has {self.fields[name]}: leave the field out"
                )
        return dataclasses.replace(config, **self.fields)


class Found(NamedTuple):
    """The files of a drafter, its tensors unread, and the target that it is for; `source` is for messages."""

    source: str
    config: Mapping[str, Any]
    tensors: dict[str, StoredTensor]
    target: Target

    @property
    def fields(self) -> Fields:
        return Fields(self.config, f"{self.source}, {CONFIG}")

    def nest(self, shapes: Mapping[str, Any]) -> Params:
        return nest(self.tensors, shapes, activation_dtype(self.target.dtype))


def offset_shape(found: Found) -> dict[str, tuple[int, ...]]:
    """Our own extension of EAGLE's and Medusa's formats: a draft vocabulary, as EAGLE-3 writes it."""
    tensor = found.tensors.get(OFFSETS)
    return {} if tensor is None else {OFFSETS: (int(np.prod(tensor.shape)),)}


def draft_vocab(found: Found) -> tuple[Params, Array | None]:
    """The tokens that are drafted, rising, and the rows of the drafter's head in that order."""
    if OFFSETS not in found.tensors:
        return {}, None
    offsets = np.asarray(found.tensors[OFFSETS])
    tokens = offsets.astype(np.int64) + np.arange(len(offsets))
    order = np.argsort(tokens)
    tokens, size = tokens[order], found.target.vocab_size
    if not len(tokens) or tokens[0] < 0 or tokens[-1] >= size or (np.diff(tokens) == 0).any():
        raise CheckpointError(
            f"{found.source}: tensor '{OFFSETS}' names tokens twice or beyond the target's {size}; each of "
            "its numbers is to be an offset, which is added to its own place."
        )
    if IS_DRAFTED in found.tensors:
        drafted = np.flatnonzero(np.asarray(found.tensors[IS_DRAFTED]))
        if not np.array_equal(drafted, tokens):
            raise CheckpointError(
                f"{found.source}: tensors '{OFFSETS}' and '{IS_DRAFTED}' name different tokens; one of them "
                "belongs to another checkpoint."
            )
    return {TOKENS: tokens.astype(np.int32)}, order


def check_sizes(found: Found, hidden: int, vocab_size: int) -> None:
    """Refuse a drafter that is for another target, before its tensors are."""
    target = found.target
    for what, own, wanted in (
        ("states of size", hidden, target.config.hidden_size),
        ("a vocabulary of", vocab_size, target.vocab_size),
    ):
        if own != wanted:
            raise ConfigError(
                f"'{found.source}' is for {what} {own}, and the target has {what} {wanted}: choose a drafter "
                "that was trained for this target"
            )
