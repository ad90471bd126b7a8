"""Where speculation loses: one axis at a time, the others as a user would have them.

    python -m specjax.run --config=experiments/failure_modes/config.py:temperature \
        --workdir=runs/failure/temperature

The arguments are in VARIANTS. "batch" wants MT-bench's question.jsonl and "domain" Spec-Bench's
(--config.prompts_path=DIR); the others take the packaged prompts.
"""

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from specjax.config import load_config, run_config

CONFIGS = Path(__file__).parents[2] / "configs"
ALL_METHODS, ADAPTIVE = CONFIGS / "evaluate_all_llama.py", CONFIGS / "adaptive_llama.py"
INT8 = {"drafter_dtype": "int8"}
SMALL = {**INT8, "draft_vocab_size": 2048}
EAGLE = {"name": "eagle", "source": "zoo:eagle_smollm2", "draft_length": 3}


def method(drafter: dict[str, Any], **cheaper: Any) -> dict[str, Any]:
    """A drafter under rejection sampling, made cheaper where that is wanted."""
    return {"drafter": drafter, "verify": "rejection", **cheaper}


def usual() -> dict[str, dict[str, Any]]:
    """A drafter without weights, a cheap one, a good one, both together, and either while it pays."""
    known = load_config(str(ALL_METHODS)).methods.to_dict()
    eagle = load_config(f"{ADAPTIVE}:eagle").drafter.to_dict()
    names = ("prompt_lookup", "eagle", "quantized", "cascade", "adaptive")
    return {name: known[name] for name in names} | {"adaptive_eagle": method(eagle, **SMALL)}


def of_every_size(target: str) -> dict[str, dict[str, Any]]:
    """Chains of 3; the drafter's bytes are from a hundredth of the target's to all of them."""
    distilled = {"name": "draft_model", "source": "zoo:draft_model_smollm2", "draft_length": 3}
    thinned = {"name": "self_speculative", "draft_length": 3, "skip_layers": (3, 17)}
    return {
        "eagle_int8": method(EAGLE, **SMALL),
        "two_layers_int8": method(distilled, **INT8),
        "target_int8": method(itself(target, 3), **INT8),
        "target_bfloat16": method(itself(target, 3), drafter_dtype="bfloat16"),
        "target_28_layers": method(thinned),
        "target_itself": method(itself(target, 3)),
    }


def itself(target: str, draft_length: int) -> dict[str, Any]:
    """The target as its own drafter."""
    return {"name": "draft_model", "source": target, "draft_length": draft_length}


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
    config.methods = of_every_size(config.target) if axis == "drafter" else usual()
    for name, value in VARIANTS[axis].items():
        config[name] = value
    return config
