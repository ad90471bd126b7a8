"""Train Medusa heads (arXiv 2401.10774) for SmolLM2 on its own words, the target frozen (Medusa-1).

    python -m specjax.train --config=configs/train/medusa_llama.py --workdir=runs/train/medusa

`data` names what configs/generate_llama.py wrote, with its features beside it. Medusa-2 trains the target
along, with --config.training.lm_weight=1.0, in a workdir of its own, which then receives its weights too.

`--config.drafter.source` goes on from a drafter of your own, of the zoo, or published elsewhere (a folder, or
hf:owner/name). The last keeps its architecture, and what is left is in its published format.
"""

from ml_collections import ConfigDict

from specjax.config import run_config


def get_config() -> ConfigDict:
    config = run_config("train")
    config.drafter = {"name": "medusa", "draft_length": 4}
    config.training = {"draft_vocab_size": 8192}
    config.data = ("runs/self_written",)
    config.supervise = "all"
    return config
