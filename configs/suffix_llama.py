"""Suffix decoding (arXiv 2411.04975) on SmolLM2-135M-Instruct: prompt lookup that counts what follows.

    python -m specjax.run --config=configs/suffix_llama.py --workdir=runs/suffix

Every earlier occurrence of the text's own ending says how it goes on, and a tree of the likeliest eight nodes
is judged in one pass: 1.54 tokens a pass on Spec-Bench, where prompt lookup's chain of eight gives 1.47
(experiments/suffix). Texts that repeat their input gain most, and free writing hardly anything. Fewer drafts
where little matches, as in the paper: --config.drafter.nodes_per_match=1.0. Outputs of earlier runs are
searched too where they are named: --config.drafter.earlier="('runs/suffix/generations.jsonl',)"
"""

from ml_collections import ConfigDict

from specjax.config import run_config


def get_config() -> ConfigDict:
    config = run_config()
    config.drafter = {"name": "suffix", "draft_length": 7, "num_nodes": 9}
    config.verify = "target_only"
    return config
