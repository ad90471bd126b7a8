"""Distil a draft model (arXiv 2310.08461) for SmolLM2 from two of its own layers, on its own words.

    python -m specjax.train --config=configs/train/draft_model_llama.py --workdir=runs/train/draft_model

`data` names what configs/generate_llama.py wrote, with its features beside it. The embedding and the head are
the target's and stay as they are: 7 M weights learn. --config.training.layers="(0, 14, 29)" with
--config.training.num_layers=3 starts from other layers.
"""

from ml_collections import ConfigDict

from specjax.config import run_config


def get_config() -> ConfigDict:
    config = run_config("train")
    config.drafter = {"name": "draft_model", "draft_length": 4}
    config.training = {"num_layers": 2, "draft_vocab_size": 8192}
    config.data = ("runs/self_written",)
    config.supervise = "all"
    # Small steps: there is less text than patience.
    config.batch_size, config.max_length = 2, 512
    config.held_out, config.eval_prompts, config.eval_every = 48, 24, 300
    return config
