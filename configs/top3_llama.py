"""The top 3 tokens at every depth of a tree, drafted by the thinned target (arXiv 2401.15077, 2305.09781).

    python -m specjax.run --config=configs/top3_llama.py --workdir=runs/top3

As in EAGLE's trees the drafts are the likeliest tokens, none is drawn: 3, 9 and 27 nodes at three depths.
The target, without two of its layers the drafter, reads all 40 in one pass under the tree's mask and accepts
the longest branch that it would have written itself. Expect 3.2 to 3.5 tokens a pass, of at most 4, at
temperature 0 and texts identical to greedy decoding; at temperature 1 about 2, where drawn siblings do better
(configs/token_tree_llama.py). It is three times slower than plain decoding: on two CPU cores 40 nodes cost
more than 4 passes over one, and each level one more. With --config.limit=3 --config.max_new_tokens=48 it
takes about 2 minutes. Which of the nodes are ever accepted, and which tree of as many accepts more:
experiments/tree_acceptance.
"""

from ml_collections import ConfigDict

from specjax.config import run_config


def get_config() -> ConfigDict:
    config = run_config()
    config.drafter = {
        "name": "self_speculative",
        "draft_length": 3,
        "skip_layers": (3, 17),
        "branching": (3, 3, 3),
        "proposal": "point_mass",
    }
    config.verify = "target_only"
    return config
