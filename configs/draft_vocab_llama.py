"""Drafts of the frequent tokens only: a small head drafts faster, and no token is lost to the text.

FR-Spec (arXiv 2502.14856), VocabTrim (arXiv 2506.22694): what a drafter spends on a large vocabulary goes
mostly into tokens that hardly ever come. Leaving them out needs no training, and the target still writes
them.

    python -m specjax.run --config=configs/draft_vocab_llama.py --workdir=runs/draft_vocab

As it stands SmolLM2 without layers 3 and 17 drafts 4096 of its 49 152 tokens, those that it wrote most often
in experiments/self_written; their counts come with the package. The argument "eagle" prunes the zoo's head,
which has 8192. For another target, --config.draft_vocab_from="('FOLDER',)" names token files that it wrote,
of which python -m specjax.data.generate makes some.

What is lost is in experiments/draft_vocab.
"""

from ml_collections import ConfigDict

from specjax.config import run_config

VARIANTS = {
    "self_speculative": {"name": "self_speculative", "skip_layers": (3, 17), "draft_length": 4},
    "eagle": {"name": "eagle", "source": "zoo:eagle_smollm2", "draft_length": 4},
}


def get_config(variant: str = "self_speculative") -> ConfigDict:
    config = run_config()
    config.drafter = VARIANTS[variant]
    config.draft_vocab_size = 4096
    config.verify = "rejection"
    return config
