"""What is asked, and the methods to choose among: drafters by name, how cheap their weights are, and trees.

A method has the fields of `specjax.tasks.evaluate`: `drafter`, `verify` and, where they make it cheaper,
`drafter_dtype` and `draft_vocab_size`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from specjax import zoo
from specjax.errors import ConfigError, nearest
from specjax.modules import find_module, module_names

Fields = dict[str, Any]

DRAFT_LENGTH = 4  # of the run that measures a drafter
# The smallest tree that suffix decoding has.
WITHOUT_WEIGHTS = {
    "ngram": {"name": "ngram", "draft_length": DRAFT_LENGTH, "max_ngram": 3},
    "suffix": {"name": "suffix", "draft_length": DRAFT_LENGTH, "num_nodes": DRAFT_LENGTH + 2},
}
AT_ONCE = ("medusa",)  # draft all depths at once, and none beyond their heads
HEADS = ("eagle", "eagle3", "medusa")  # draft from the target's states: a tree costs no more passes
QUANTIZED = "quantized"  # the target itself drafts, its weights in int8, in its own cache
INT8 = "int8"
DRAFTED_TOKENS = 2048  # of the zoo's drafters in int8; the package has counted the tokens of their targets
TREE_WIDTH = 8  # children that a node has before the best nodes are chosen


class Question(NamedTuple):
    """What is asked: a command line's fields. `device` None is the machine at hand."""

    target: str
    prompts: str = "default"
    prompts_path: str | None = None
    num_prompts: int = 8
    temperature: float = 0.0
    max_new_tokens: int = 64
    batch_size: int = 1
    drafters: tuple[str, ...] = ()
    device: str | None = None
    dtype: str = "float32"
    drafter_dtype: str | None = None

    @property
    def weights(self) -> str | None:
        """The type of drafters' weights, None for the target's: int8 beside float32 on this machine."""
        is_cheaper = self.drafter_dtype is None and self.device is None and self.dtype == "float32"
        return INT8 if is_cheaper else self.drafter_dtype


def candidates(question: Question) -> dict[str, Fields]:
    """The methods by name: ngram, suffix, quantized, the zoo's, all of the zoo's of a kind, or KIND=SOURCE.

    Without names all that need no files of yours. ConfigError, with the nearest name, on an unknown one.
    """
    target, weights = question.target, question.weights
    trained = {name: about for name in zoo.names() if (about := _about(name))["target"] == target}
    usual = [*WITHOUT_WEIGHTS, *trained]
    known = usual if question.dtype == INT8 else [*usual, QUANTIZED]
    found: dict[str, Fields] = {}
    for name in question.drafters or (known if weights == INT8 else usual):
        kind, _, source = name.partition("=")
        if source:
            find_module("drafters", kind)
            drafter = {"name": kind, "source": source, "draft_length": DRAFT_LENGTH}
            found[kind] = _method(drafter, drafter_dtype=weights)
            continue
        chosen = [n for n, about in trained.items() if name in (n, about["drafter"])]
        if name in WITHOUT_WEIGHTS:
            found[name] = _method(WITHOUT_WEIGHTS[name])
        elif name == QUANTIZED and name in known:
            # Nearly always right, it is worth longer drafts.
            drafter = {"name": "draft_model", "source": target, "share_cache": True}
            drafter["draft_length"] = DRAFT_LENGTH + 1
            found[name] = _method(drafter, drafter_dtype=INT8)
        elif chosen:
            tokens = DRAFTED_TOKENS if weights == INT8 else None
            cheaper = {"drafter_dtype": weights, "draft_vocab_size": tokens}
            found |= {n: _method(_trained(n, trained[n]), **cheaper) for n in chosen}
        elif name in zoo.names() or name in module_names("drafters"):
            raise ConfigError(
                f"the zoo has no '{name}' for the target '{target}': give its weights, {name}=FOLDER or "
                f"{name}=hf:OWNER/NAME, or choose from {', '.join(known)}"
            )
        else:
            raise ConfigError(
                f"there is no drafter '{name}' for a target in {question.dtype}{nearest(name, known)}: "
                f"choose from {', '.join(known)}, or KIND=SOURCE for weights of yours"
            )
    return found


def tree_of(method: Mapping[str, Any], num_nodes: int) -> Fields:
    """The same drafter with trees of so many nodes, which grow where it is confident (arXiv 2406.16858)."""
    drafter = method["drafter"]
    branching = (TREE_WIDTH,) * drafter["draft_length"]
    shape = {"branching": branching, "num_nodes": num_nodes, "proposal": "point_mass"}
    return {**method, **_method({**drafter, **shape})}


def rule_of(drafter: Mapping[str, Any], temperature: float) -> str:
    """The lossless rule to serve a drafter with: `block` never accepts less than `rejection`.

    (arXiv 2403.10444.) At temperature 0 they are one.
    """
    if "num_nodes" in drafter:
        return "target_only"
    return "block" if temperature > 0 else "rejection"


def weights_of(method: Mapping[str, Any]) -> str:
    """What makes a method's drafter cheaper, as a table has it: "int8, 2048 tokens", or nothing."""
    tokens = method.get("draft_vocab_size")
    said = (method.get("drafter_dtype"), f"{tokens} tokens" if tokens else None)
    return ", ".join(filter(None, said))


def _method(drafter: Mapping[str, Any], **cheaper: Any) -> Fields:
    """The fields that measure a drafter; under `rejection` depths accept the same whatever follows them."""
    given = {name: value for name, value in cheaper.items() if value is not None}
    return {"drafter": dict(drafter), "verify": rule_of(drafter, temperature=0.0), **given}


def _about(name: str) -> Fields:
    return json.loads((zoo.folder(zoo.PREFIX + name) / "config.json").read_text(encoding="utf-8"))


def _trained(name: str, about: Mapping[str, Any]) -> Fields:
    most = about["config"]["draft_length"] if about["drafter"] in AT_ONCE else DRAFT_LENGTH
    length = min(DRAFT_LENGTH, most)
    return {"name": about["drafter"], "source": zoo.PREFIX + name, "draft_length": length}
