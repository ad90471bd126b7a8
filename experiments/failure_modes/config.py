"""Where speculation loses: one axis at a time, the others as a user would have them.

    python -m specjax.run --config=experiments/failure_modes/config.py:temperature \
        --workdir=runs/failure/temperature

The arguments are in VARIANTS. "batch" wants MT-bench's question.jsonl and "domain" Spec-Bench's
(--config.prompts_path=DIR); the others take the packaged prompts.
"""

from typing import Any

from ml_collections import ConfigDict

from specjax.config import run_config

INT8 = {"drafter_dtype": "int8"}
SMALL = {**INT8, "draft_vocab_size": 2048}
EAGLE = {"name": "eagle", "source": "zoo:eagle_smollm2"}


def method(drafter: dict[str, Any], **cheaper: Any) -> dict[str, Any]:
    """A drafter under rejection sampling, made cheaper where that is wanted."""
    return {"drafter": drafter, "verify": "rejection", **cheaper}


def usual(target: str) -> dict[str, dict[str, Any]]:
    """A drafter without weights, a cheap one, a good one, both together, and either while it pays."""
    return {
        "prompt_lookup": method({"name": "ngram", "draft_length": 4, "max_ngram": 3}),
        "eagle": method({**EAGLE, "draft_length": 2}, **SMALL),
        "quantized": method({**itself(target, 5), "share_cache": True}, **INT8),
        "cascade": method(
            {"name": "cascade", "source": target, "draft_length": 8, "inner": {**EAGLE, "draft_length": 2}},
            **INT8,
        ),
        "adaptive_eagle": method(
            adaptive({**EAGLE, "draft_length": 3}, costs=(1.08, 1.14, 1.2), prior=0.35), **SMALL
        ),
        "adaptive": method(
            adaptive(itself(target, 6), costs=(1.6, 2.05, 2.5, 3.0, 3.45, 3.95), prior=0.9), **INT8
        ),
    }


def of_every_size(target: str) -> dict[str, dict[str, Any]]:
    """Chains of 3; the drafter's bytes are from a hundredth of the target's to all of them."""
    distilled = {"name": "draft_model", "source": "zoo:draft_model_smollm2", "draft_length": 3}
    thinned = {"name": "self_speculative", "draft_length": 3, "skip_layers": (3, 17)}
    return {
        "eagle_int8": method({**EAGLE, "draft_length": 3}, **SMALL),
        "two_layers_int8": method(distilled, **INT8),
        "target_int8": method(itself(target, 3), **INT8),
        "target_bfloat16": method(itself(target, 3), drafter_dtype="bfloat16"),
        "target_28_layers": method(thinned),
        "target_itself": method(itself(target, 3)),
    }


def itself(target: str, draft_length: int) -> dict[str, Any]:
    """The target as its own drafter."""
    return {"name": "draft_model", "source": target, "draft_length": draft_length}


def adaptive(inner: dict[str, Any], costs: tuple[float, ...], prior: float) -> dict[str, Any]:
    """A drafter as far as it pays."""
    return {"name": "adaptive", "inner": inner, "costs": costs, "prior": prior}


VARIANTS = {
    "temperature": {"temperatures": (0.0, 0.5, 1.0, 1.5, 2.0), "limit": 6},
    "length": {"max_new_tokens": (8, 32, 128, 512), "limit": 3},
    "batch": {"batch_sizes": (1, 4, 16, 32), "prompts": ("mt_bench",), "limit": 32, "max_new_tokens": (32,)},
    "drafter": {"limit": 4},
    "domain": {
        "prompts": ("spec_bench",),
        "per_category": 2,
        "temperatures": (0.0, 1.0),
        "max_new_tokens": (40,),
    },
}


def get_config(axis: str) -> ConfigDict:
    config = run_config("evaluate")
    config.methods = (of_every_size if axis == "drafter" else usual)(config.target)
    for name, value in VARIANTS[axis].items():
        config[name] = value
    return config
