"""Published drafters: EAGLE and EAGLE-2, EAGLE-3, and Medusa."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.checkpoints.drafters_eagle import MIDLAYER, read_eagle, read_eagle3
from specjax.checkpoints.drafters_files import CONFIG, OFFSETS, check, stored_tensors
from specjax.checkpoints.drafters_found import Found, Published, check_sizes, draft_vocab, offset_shape
from specjax.checkpoints.hf_config import Fields
from specjax.checkpoints.validate import Params
from specjax.data.tokenizer import read_json
from specjax.errors import CheckpointError, ConfigError
from specjax.types import Target


def load_drafter(folder: Path, name: str, target: Target, source: str) -> Published:
    """Read the published drafter `name` (eagle, eagle3 or medusa) in a folder; `source` is for messages.

    Raises CheckpointError naming what is broken or does not fit in the files, and ConfigError where they
    hold another drafter or one that is not for this target.
    """
    tensors = stored_tensors(folder)
    config = read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}
    config = Fields(config, f"{source}, {CONFIG}").config
    kind = kind_of(tensors)
    if kind is None:
        raise CheckpointError(
            f"'{source}' holds none of the drafters {', '.join(_READERS)}: its first tensor is "
            f"'{min(tensors, default='')}'; name a folder of one of them."
        )
    if kind != name:
        raise ConfigError(f"'{source}' holds weights for the drafter '{kind}', not for '{name}'")
    return _READERS[kind](Found(source, config, tensors, target))


def kind_of(tensors: Mapping[str, Any]) -> str | None:
    """The drafter whose tensors these are, or None."""
    if tensors and all(re.match(r"\d+\.\d+\.", name) or name == OFFSETS for name in tensors):
        return "medusa"
    if any(name.startswith(f"{MIDLAYER}.") or name.endswith(".hidden_norm.weight") for name in tensors):
        return "eagle3"
    return "eagle" if any(name.startswith("fc.") for name in tensors) else None


def read_medusa(found: Found) -> Published:
    """Medusa: heads of residual blocks, with unembeddings of their own or, in older files, the target's."""
    # Counted from the tensors: published configs have disagreed with their files.
    numbers = {int(name.split(".")[0]) for name in found.tensors if name != OFFSETS}
    num_layers = sum(bool(re.fullmatch(r"0\.\d+\.linear\.weight", name)) for name in found.tensors)
    vocab_size = found.target.vocab_size
    has_own = any(re.fullmatch(r"\d+\.\d+\.weight", name) for name in found.tensors)
    first = found.tensors.get("0.0.linear.weight")
    hidden = found.target.config.hidden_size if first is None or not first.shape else first.shape[0]
    head = found.tensors.get(f"0.{num_layers}.weight")
    check_sizes(found, hidden, vocab_size if head is None or not head.shape else head.shape[0])
    shapes: dict[str, tuple[int, ...]] = {}
    for number in range(len(numbers)):
        for block in range(max(num_layers, 1)):
            shapes[f"{number}.{block}.linear.weight"] = (hidden, hidden)
            shapes[f"{number}.{block}.linear.bias"] = (hidden,)
        if has_own:
            shapes[f"{number}.{num_layers}.weight"] = (vocab_size, hidden)
    if not has_own:
        shapes |= offset_shape(found)
    check(found.tensors, shapes, found.source)
    vocab, _ = draft_vocab(found)
    shapes.pop(OFFSETS, None)
    heads: Params = {}
    for number, parts in found.nest(shapes).items():
        own = {"lm_head": parts.pop(num_layers)} if has_own else {}
        heads[number] = {"blocks": parts, **own}
    fields = {"num_heads": len(numbers), "num_layers": num_layers, "own_unembedding": has_own}
    return Published(fields, None, {"heads": heads, **vocab})


_READERS = {"eagle": read_eagle, "eagle3": read_eagle3, "medusa": read_medusa}
