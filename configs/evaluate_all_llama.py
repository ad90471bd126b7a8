"""Every drafter of the package on SmolLM2-135M-Instruct, each with the shape that suits it, side by side.

    python -m specjax.run --config=configs/evaluate_all_llama.py --workdir=runs/evaluate_all \
        --config.prompts_path=DIR --config.per_category=7

DIR holds Spec-Bench's question.jsonl. --config.prompts="('mt_bench', 'humaneval', 'gsm8k', 'alpaca',
'cnn_dm')" takes the five sets of EAGLE's tables. Chains of 2 in int8 are what a pass over three tokens allows
on a CPU; the trees show what the same heads accept where nodes cost nothing. `quantized` drafts with the
target itself in int8, `cascade` has EAGLE draft for that. The argument names some of them, as in
configs/evaluate_all_llama.py:eagle+cascade. What came out is in experiments/all_methods; the
papers' tables set it beside theirs (python -m specjax.tables --results=DIR).
"""

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from specjax.config import load_config, run_config
from specjax.errors import ConfigError, nearest

ADAPTIVE = Path(__file__).with_name("adaptive_llama.py")
TREE = {"branching": (8,) * 5, "draft_length": 5, "num_nodes": 32, "proposal": "point_mass"}
MEDUSA_TREE = {**TREE, "branching": (8,) * 3, "draft_length": 3}


def zoo(name: str, **shape: Any) -> dict[str, Any]:
    """The zoo's drafter of that kind."""
    return {"name": name, "source": f"zoo:{name}_smollm2", **shape}


def method(drafter: dict[str, Any], verify: str = "rejection", **cheaper: Any) -> dict[str, Any]:
    """A drafter with its rule, made cheaper where that is wanted."""
    return {"drafter": drafter, "verify": verify, **cheaper}


def adaptive(variant: str, inner: dict[str, Any]) -> dict[str, Any]:
    """The inner drafter as long as it pays, with the costs of that variant of adaptive_llama.py."""
    return {**load_config(f"{ADAPTIVE}:{variant}").drafter.to_dict(), "inner": inner}


# What a draft costs on a CPU is mostly the weights that it reads; few drafts are lost by either.
INT8 = {"drafter_dtype": "int8"}
CHEAPER = {**INT8, "draft_vocab_size": 2048}


def methods(target: Any) -> dict[str, dict[str, Any]]:
    """All of them; three draft with `target` itself, its weights in int8."""
    itself = {"source": target, "share_cache": True}
    rounded = {"name": "draft_model", **itself}
    return {
        "prompt_lookup": method({"name": "ngram", "draft_length": 4, "max_ngram": 3}),
        "suffix": method({"name": "suffix", "draft_length": 4, "num_nodes": 6}, verify="target_only"),
        "jacobi": method({"name": "jacobi", "draft_length": 4}, verify="target_only"),
        "lookahead": method(
            {"name": "lookahead", "window": 5, "ngram": 4, "num_guesses": 5}, verify="target_only"
        ),
        "self_speculative": method({"name": "self_speculative", "draft_length": 3, "skip_layers": (3, 17)}),
        "draft_model": method(zoo("draft_model", draft_length=2), **CHEAPER),
        "medusa": method(zoo("medusa", draft_length=2), **CHEAPER),
        "medusa_tree": method(zoo("medusa", **MEDUSA_TREE), verify="target_only"),
        "eagle": method(zoo("eagle", draft_length=2), **CHEAPER),
        "eagle_chain_4": method(zoo("eagle", draft_length=4), **CHEAPER),
        "eagle_tree": method(zoo("eagle", **TREE), verify="target_only"),
        "eagle3": method(zoo("eagle3", draft_length=2), **CHEAPER),
        "eagle3_chain_4": method(zoo("eagle3", draft_length=4), **CHEAPER),
        "eagle3_tree": method(zoo("eagle3", **TREE), verify="target_only"),
        "quantized": method({**rounded, "draft_length": 5}, **INT8),
        "cascade": method(
            {"name": "cascade", **itself, "draft_length": 8, "inner": zoo("eagle", draft_length=2)}, **INT8
        ),
        "adaptive": method(adaptive("quantized", {**rounded, "draft_length": 6}), **INT8),
        "adaptive_eagle3": method(adaptive("eagle", zoo("eagle3", draft_length=3)), **CHEAPER),
    }


def get_config(names: str = "") -> ConfigDict:
    config = run_config("evaluate")
    known = methods(config.get_ref("target"))
    chosen = names.split("+") if names else list(known)
    for name in chosen:
        if name not in known:
            raise ConfigError(
                f"there is no method '{name}'{nearest(name, known)}: known are {', '.join(known)}"
            )
    config.methods = {name: known[name] for name in chosen}
    config.prompts = ("spec_bench",)
    return config
