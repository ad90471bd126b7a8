"""Jacobi decoding (arXiv 2305.10427) on SmolLM2-135M-Instruct: the target alone, several tokens at a time.

    python -m specjax.run --config=configs/jacobi_llama.py --workdir=runs/jacobi

Four tokens are iterated at once; tokens per pass says how many passes their fixed points take. It is the base
of lookahead decoding (configs/lookahead_llama.py) and gains little by itself: 1.10 tokens per pass on
8 HumanEval prompts of 64 new tokens.
"""

from ml_collections import ConfigDict

from specjax.config import run_config


def get_config() -> ConfigDict:
    config = run_config()
    config.drafter = {"name": "jacobi", "draft_length": 4}
    config.verify = "target_only"
    return config
