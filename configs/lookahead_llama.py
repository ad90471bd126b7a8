"""Lookahead decoding (arXiv 2402.02057) on SmolLM2-135M-Instruct: n-grams of its own, and no draft model.

    python -m specjax.run --config=configs/lookahead_llama.py --workdir=runs/lookahead

A pass takes 30 nodes: the pending token, 5 continuations by 3 tokens, and a window of 5 columns and 3 levels.
It writes 1.30 tokens on 8 HumanEval prompts of 64 new tokens at temperature 0, Jacobi decoding
(configs/jacobi_llama.py) 1.10; more nodes write more, 1.37 with --config.drafter.window=7
--config.drafter.ngram=5 --config.drafter.num_guesses=7 (56 nodes). So many nodes are nearly free where
reading the weights is the limit, as at batch 1 on an accelerator; on a CPU they cost more than they gain.
"""

from ml_collections import ConfigDict

from specjax.config import run_config


def get_config() -> ConfigDict:
    config = run_config()
    config.drafter = {"name": "lookahead", "window": 5, "ngram": 4, "num_guesses": 5}
    config.verify = "target_only"
    return config
