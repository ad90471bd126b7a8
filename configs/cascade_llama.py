"""A cascade (arXiv 2308.04623): prompt lookup drafts for a distilled model, and that for the target.

    python -m specjax.run --config=configs/cascade_llama.py --workdir=runs/cascade

The model in the middle is the zoo's draft model (specjax.zoo.card("draft_model_smollm2")): two layers between
SmolLM2's own embedding and head. It decodes speculatively itself, under a lossless rule, so its drafts have
its law and the target's rule stays exact. Any drafter may be the inner one, a cascade too.

With the argument "eagle", an EAGLE drafter of your own for a complete model of your own is at the bottom:

    python -m specjax.run --config=configs/cascade_llama.py:eagle --workdir=runs/cascade_eagle \
        --config.target=LARGE --config.drafter.source=SMALLER --config.drafter.inner.source=ITS_DRAFTER
"""

from ml_collections import ConfigDict

from specjax.config import run_config

# The inner drafter and the model for which it drafts.
VARIANTS = {
    "smollm2": ({"name": "ngram", "draft_length": 4, "max_ngram": 3}, "zoo:draft_model_smollm2"),
    "eagle": ({"name": "eagle", "source": "runs/train/eagle/drafter", "draft_length": 2}, "MODEL"),
}


def get_config(variant: str = "smollm2") -> ConfigDict:
    inner, source = VARIANTS[variant]
    config = run_config()
    config.drafter = {"name": "cascade", "inner": inner, "source": source, "draft_length": 3}
    config.verify = "rejection"
    return config
