"""Draft & Verify (arXiv 2309.08168) on SmolLM2-135M-Instruct: the target drafts for itself, thinned.

    python -m specjax.run --config=configs/self_speculative_llama.py --workdir=runs/self_speculative

The drafter is the target without `skip_layers`, so it needs no weights of its own. How often its drafts
are accepted, and whether that pays, depends on which layers are left out: configs/search/skip_layers_llama.py
searches them. --config.drafter.confidence=0.6 ends a draft where the thinned model gives no token so much.
Expect it to be slower than plain decoding: without 2 of 30 layers a draft costs nearly a target pass
(experiments/skip_layers).
"""

from ml_collections import ConfigDict

from specjax.config import run_config


def get_config() -> ConfigDict:
    config = run_config()
    config.drafter = {"name": "self_speculative", "draft_length": 3, "skip_layers": (3, 17)}
    config.verify = "rejection"
    return config
