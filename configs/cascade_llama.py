"""A cascade (arXiv 2308.04623): prompt lookup drafts for a distilled model, and that for the target.

    python -m specjax.run --config=configs/cascade_llama.py --workdir=runs/cascade

The model in the middle is the zoo's draft model (specjax.zoo.card("draft_model_smollm2")): two layers between
SmolLM2's own embedding and head. It decodes speculatively itself, under a lossless rule, so its drafts have
its law and the target's rule stays exact. Any drafter may be the inner one, a cascade too.
"""

from ml_collections import ConfigDict

from specjax.config import run_config


def get_config() -> ConfigDict:
    config = run_config()
    config.drafter = {
        "name": "cascade",
        "source": "zoo:draft_model_smollm2",
        "draft_length": 3,
        "inner": {"name": "ngram", "draft_length": 4, "max_ngram": 3},
    }
    config.verify = "rejection"
    return config
