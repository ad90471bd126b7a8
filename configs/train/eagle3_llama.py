"""Train an EAGLE-3 drafter (arXiv 2503.01840) for SmolLM2 on its own words.

    python -m specjax.train --config=configs/train/eagle3_llama.py --workdir=runs/train/eagle3

`data` names what configs/generate_llama.py wrote, with its last states beside it, which are all that is to be
kept: the head fuses them (layer 30, of which there is none) with the tokens' own embeddings (layer 0), and
starts by copying what followed a token before. `--config.drafter.state_layers='(2,15,27)'` are the published
layers. It shares the target's head.

`--config.drafter.source` goes on from a drafter of your own, of the zoo, or published elsewhere (a folder, or
hf:owner/name). The last keeps its architecture, and what is left is in its published format; so is its draft
vocabulary kept, whose size is then to be given as --config.drafter.draft_vocab_size.
"""

from ml_collections import ConfigDict

from specjax.config import run_config


def get_config() -> ConfigDict:
    config = run_config("train")
    config.drafter = {"name": "eagle3", "draft_length": 4, "draft_vocab_size": 8192}
    config.drafter.update(state_layers=(0, 30), own_unembedding=False)
    config.training = {"unroll_steps": 2}
    config.data = ("runs/self_written",)
    config.supervise = "all"
    config.optimizer, config.learning_rate, config.weight_decay = "muon", 2e-3, 0.1
    config.batch_size, config.max_length = 4, 512
    config.held_out, config.eval_prompts, config.eval_every = 48, 32, 325
    config.steps = 1300
    return config
