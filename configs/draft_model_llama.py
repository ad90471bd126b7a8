"""Speculative sampling (arXiv 2211.17192, arXiv 2302.01318) with a second language model as drafter.

    python -m specjax.run --config=configs/draft_model_llama.py --workdir=runs/draft_model \
        --config.target=SOURCE --config.drafter.source=SMALLER

As it stands the target drafts for itself: a perfect drafter, at the target's own price. Every draft is
accepted, up to rounding, so this is a check of the machinery and an upper bound of tokens per pass, and
it is slower than plain decoding. Name a smaller model with the same tokenizer to gain by it.
"""

from ml_collections import ConfigDict

from specjax.config import run_config


def get_config() -> ConfigDict:
    config = run_config()
    config.drafter = {"name": "draft_model", "source": config.target, "draft_length": 4}
    config.verify = "rejection"
    return config
