"""Speculative sampling (arXiv 2211.17192, arXiv 2302.01318) with a second language model as drafter.

    python -m specjax.run --config=configs/draft_model_llama.py --workdir=runs/draft_model

As it stands the drafter is the zoo's: two layers between SmolLM2's own embedding and head, distilled from it
(arXiv 2310.08461; configs/train/draft_model_llama.py). Its card says how good it is
(specjax.zoo.card("draft_model_smollm2")). --config.drafter_dtype=int8 drafts faster, from rounded weights.

Any smaller model with the target's tokenizer drafts too: --config.target=SOURCE
--config.drafter.source=SMALLER. With the argument "itself"

    python -m specjax.run --config=configs/draft_model_llama.py:itself --workdir=runs/draft_model_itself

the target drafts for itself: a perfect drafter, at the target's own price. Every draft is accepted, up to
rounding, so this is a check of the machinery and an upper bound of tokens per pass, and it is slower than
plain decoding.
"""

from ml_collections import ConfigDict

from specjax.config import run_config

# Source and length of the drafts; None is the target itself.
VARIANTS = {"smollm2": ("zoo:draft_model_smollm2", 2), "itself": (None, 4)}


def get_config(variant: str = "smollm2") -> ConfigDict:
    source, draft_length = VARIANTS[variant]
    config = run_config()
    config.drafter = {"name": "draft_model", "source": source or config.target, "draft_length": draft_length}
    config.verify = "rejection"
    return config
