"""Train an EAGLE drafter (arXiv 2401.15077) for SmolLM2 on its own words.

    python -m specjax.train --config=configs/train/eagle_llama.py --workdir=runs/train/eagle

`data` names what configs/generate_llama.py wrote, with its features beside it.

`--config.drafter.source` goes on from a drafter of your own, of the zoo, or published elsewhere (a folder, or
hf:owner/name). The last keeps its architecture, and what is left is in its published format.
"""

from ml_collections import ConfigDict

from specjax.config import run_config


def get_config() -> ConfigDict:
    config = run_config("train")
    config.drafter = {"name": "eagle", "draft_length": 4}
    config.training = {"unroll_steps": 2, "draft_vocab_size": 8192, "feature_weight": 0.1, "noise": 0.1}
    config.data = ("runs/self_written",)
    config.supervise = "all"
    config.optimizer, config.learning_rate, config.weight_decay = "muon", 2e-3, 0.1
    # Small steps: there is less text than patience.
    config.batch_size, config.max_length = 2, 512
    config.held_out, config.eval_prompts, config.eval_every = 48, 24, 300
    return config
