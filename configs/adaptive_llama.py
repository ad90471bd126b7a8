"""Drafts as long as they pay, and none while they lose: EAGLE's chain on SmolLM2-135M-Instruct, adapted.

    python -m specjax.run --config=configs/adaptive_llama.py --workdir=runs/adaptive

`costs` are those of a round with 1, 2, ... drafts in plain passes, as they were measured on two CPU cores
with `drafter_dtype=int8`; a run of the inner drafter alone prints its own ("a pass costs ... plain ones"). A
row whose drafts lose decodes plainly, at the cost of a plain pass, and tries again every `probe_every`
rounds.

With the argument "ngram" it is prompt lookup that is adapted.
"""

from ml_collections import ConfigDict

from specjax.config import run_config

EAGLE = {"name": "eagle", "source": "zoo:eagle_smollm2", "draft_length": 3}
NGRAM = {"name": "ngram", "draft_length": 4, "max_ngram": 3}
# The inner drafter, what its rounds cost, and the type of its weights.
VARIANTS = {
    "eagle": (EAGLE, (1.08, 1.14, 1.20), "int8"),
    "ngram": (NGRAM, (1.04, 1.08, 1.12, 1.16), None),
}


def get_config(variant: str = "eagle") -> ConfigDict:
    inner, costs, dtype = VARIANTS[variant]
    config = run_config()
    config.drafter = {"name": "adaptive", "inner": inner, "costs": costs}
    if dtype is not None:
        config.drafter_dtype = dtype
    config.verify = "rejection"
    return config
