"""A cascade (arXiv 2308.04623): EAGLE drafts for the target in int8, and that for the target in float32.

    python -m specjax.run --config=configs/cascade_llama.py --workdir=runs/cascade

The model in the middle is SmolLM2 itself with its weights in int8, which agrees with it nearly always and
reads a quarter of the bytes (arXiv 2503.13565). It reads the target's keys and values, and decodes
speculatively under a lossless rule, so its drafts have its law and the target's rule stays exact. Any drafter
may be the inner one, a cascade too, and any model with the target's tokenizer the middle one. The argument
"distilled" takes prompt lookup and the zoo's draft model of two layers
(specjax.zoo.card("draft_model_smollm2")), which is too often wrong to pay.
"""

from ml_collections import ConfigDict

from specjax.config import run_config

EAGLE = {"name": "eagle", "source": "zoo:eagle_smollm2", "draft_length": 2}
NGRAM = {"name": "ngram", "draft_length": 4, "max_ngram": 3}
# The inner drafter, the model in the middle, of which None is the target itself in its own cache, and how far
# that drafts.
VARIANTS = {"quantized": (EAGLE, None, 8), "distilled": (NGRAM, "zoo:draft_model_smollm2", 3)}


def get_config(variant: str = "quantized") -> ConfigDict:
    inner, source, draft_length = VARIANTS[variant]
    config = run_config()
    config.drafter = {
        "name": "cascade",
        "source": source or config.get_ref("target"),
        "draft_length": draft_length,
        "inner": inner,
        "share_cache": source is None,
    }
    config.drafter_dtype = "int8"
    config.verify = "rejection"
    return config
