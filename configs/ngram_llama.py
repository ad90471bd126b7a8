"""Prompt lookup on SmolLM2-135M-Instruct: what speculation gains without a draft model.

    python -m specjax.run --config=configs/ngram_llama.py --workdir=runs/ngram

Drafts are whatever followed the last occurrence of the text's own ending, so tasks that repeat their
input (summaries, code, retrieval) gain and free writing gains nothing.
"""

from ml_collections import ConfigDict

from specjax.config import run_config


def get_config() -> ConfigDict:
    config = run_config()
    config.drafter = {"name": "ngram", "draft_length": 4, "max_ngram": 3, "min_ngram": 1}
    config.verify = "rejection"
    return config
