"""The best tree of a given size for what was measured of the drafter (Sequoia's programme, arXiv 2402.12374).

    python -m specjax.run --config=configs/optimal_tree_llama.py --workdir=runs/optimal_tree

The thinned target drafts its likeliest tokens; experiments/tree_acceptance measured how often each of them is
the accepted one, by depth and rank. Of all trees of 26 nodes, as many as EAGLE-1's, this one has the most
expected tokens a pass: 4.8 at temperature 0, where EAGLE-1's has 4.2 and a chain 4.0. Like every tree of this
drafter it is slower than plain decoding on a CPU, where it would have to be free to pay. Medusa's choice is
`static.sparse(table, NUM_NODES)`, EAGLE-1's `static.eagle_1()`; any other list of paths will do as well.
"""

import json
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from specjax.config import run_config
from specjax.trees import optimal

MEASURED = Path(__file__).parent.parent / "experiments" / "tree_acceptance" / "acceptance_by_rank.json"
NUM_NODES = 26


def get_config() -> ConfigDict:
    table = np.asarray(json.loads(MEASURED.read_text())["0.0"]["acceptance"])
    tree = optimal.optimal_tree(table, NUM_NODES, max_depth=len(table))
    config = run_config()
    config.drafter = {
        "name": "self_speculative",
        "draft_length": tree.max_depth,
        "skip_layers": (3, 17),
        "paths": tree.paths[1:],
        "proposal": "point_mass",
    }
    config.verify = "target_only"
    return config
