"""Drafts as long as they pay, and none while they lose, for SmolLM2-135M-Instruct.

    python -m specjax.run --config=configs/adaptive_llama.py --workdir=runs/adaptive

As it stands the target's int8 copy drafts up to six tokens (configs/draft_model_llama.py:quantized). The
argument "eagle" adapts EAGLE's chain, "ngram" prompt lookup.

`costs` are those of a round with 1, 2, ... drafts in plain passes, and `context_costs` what a thousand tokens
of context add, as measured within generations on two CPU cores behind 80 and 900 tokens; a run of the inner
drafter alone prints its own ("a pass costs ... plain ones"). `prior` is what is believed of
the acceptance before anything was seen. A row whose drafts lose decodes plainly, at the cost of a plain pass,
and tries again every `probe_every` rounds.
"""

from ml_collections import ConfigDict

from specjax.config import run_config

EAGLE = {"name": "eagle", "source": "zoo:eagle_smollm2", "draft_length": 3}
NGRAM = {"name": "ngram", "draft_length": 4, "max_ngram": 3}
QUANTIZED = {"name": "draft_model", "draft_length": 6, "share_cache": True}
# The inner drafter, what its rounds cost and context adds, what is believed of it, its weights' type.
VARIANTS = {
    "quantized": (
        QUANTIZED,
        (1.38, 1.78, 2.28, 2.68, 3.27, 3.45),
        (0.2, 0.5, 0.6, 0.85, 1.2, 1.95),
        0.9,
        "int8",
    ),
    "eagle": (EAGLE, (1.1, 1.25, 1.35), (0.05, 0.1, 0.12), 0.35, "int8"),
    "ngram": (NGRAM, (1.04, 1.08, 1.12, 1.16), (), 0.35, None),
}


def get_config(variant: str = "quantized") -> ConfigDict:
    inner, costs, context_costs, prior, dtype = VARIANTS[variant]
    config = run_config()
    if inner is QUANTIZED:
        inner = {**inner, "source": config.get_ref("target")}
    config.drafter = {
        "name": "adaptive",
        "inner": inner,
        "costs": costs,
        "context_costs": context_costs,
        "prior": prior,
    }
    if dtype is not None:
        config.drafter_dtype = dtype
    if variant == "eagle":
        config.draft_vocab_size = 2048
    config.verify = "rejection"
    return config
