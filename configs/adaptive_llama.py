"""Drafts as long as they pay, and none while they lose, for SmolLM2-135M-Instruct.

    python -m specjax.run --config=configs/adaptive_llama.py --workdir=runs/adaptive

As it stands the target's int8 copy drafts up to six tokens (configs/draft_model_llama.py:quantized). The
argument "eagle" adapts EAGLE's chain, "ngram" prompt lookup.

`costs` are those of a round with 1, 2, ... drafts in plain passes, the means of what was measured on two CPU
cores with 80 and with 900 tokens of context, which makes drafts and passes dearer by a tenth or two; a run of
the inner drafter alone prints its own ("a pass costs ... plain ones"). `prior` is what is believed of
the acceptance before anything was seen. A row whose drafts lose decodes plainly, at the cost of a plain pass,
and tries again every `probe_every` rounds.
"""

from ml_collections import ConfigDict

from specjax.config import run_config

EAGLE = {"name": "eagle", "source": "zoo:eagle_smollm2", "draft_length": 3}
NGRAM = {"name": "ngram", "draft_length": 4, "max_ngram": 3}
QUANTIZED = {"name": "draft_model", "draft_length": 6, "share_cache": True}
# The inner drafter, what its rounds cost, what is believed of it, and the type of its weights.
VARIANTS = {
    "quantized": (QUANTIZED, (1.5, 2.0, 2.45, 2.9, 3.5, 4.05), 0.9, "int8"),
    "eagle": (EAGLE, (1.08, 1.19, 1.26), 0.35, "int8"),
    "ngram": (NGRAM, (1.04, 1.08, 1.12, 1.16), 0.35, None),
}


def get_config(variant: str = "quantized") -> ConfigDict:
    inner, costs, prior, dtype = VARIANTS[variant]
    config = run_config()
    if inner is QUANTIZED:
        inner = {**inner, "source": config.get_ref("target")}
    config.drafter = {"name": "adaptive", "inner": inner, "costs": costs, "prior": prior}
    if dtype is not None:
        config.drafter_dtype = dtype
    if variant == "eagle":
        config.draft_vocab_size = 2048
    config.verify = "rejection"
    return config
