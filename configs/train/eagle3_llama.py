"""Train an EAGLE-3 drafter (arXiv 2503.01840) for SmolLM2 on its own words.

    python -m specjax.train --config=configs/train/eagle3_llama.py --workdir=runs/train/eagle3

`data` names what configs/generate_llama.py wrote; its features are those of layers 2, 15 and 27 and the last.

`--config.drafter.source` goes on from a drafter of your own, of the zoo, or published elsewhere (a folder, or
hf:owner/name). The last keeps its architecture, and what is left is in its published format; so is its draft
vocabulary kept, whose size is then to be given as --config.drafter.draft_vocab_size.
"""

from ml_collections import ConfigDict

from specjax.config import run_config


def get_config() -> ConfigDict:
    config = run_config("train")
    config.drafter = {"name": "eagle3", "draft_length": 4, "draft_vocab_size": 4096}
    config.training = {"unroll_steps": 3}
    config.data = ("runs/self_written",)
    config.supervise = "all"
    return config
