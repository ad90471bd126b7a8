"""A token tree from one drafter (arXiv 2305.09781), siblings drawn without replacement (arXiv 2402.12374).

    python -m specjax.run --config=configs/token_tree_llama.py --workdir=runs/token_tree

The target without two of its layers drafts trees three tokens deep, with 2, 2 and 1 children a node, for the
whole of it at temperature 1. It accepts more drafts a pass than any chain from the same drafter
(experiments/tree_acceptance), but at the price of a pass per level it is slower than plain decoding: a
comparison of rules and shapes, about 6 minutes on two CPU cores. Try other ones with
--config.drafter.branching='(3,2)', --config.drafter.proposal=iid_siblings and --config.verify=multi_round,
or name a smaller model as in configs/draft_model_llama.py.
"""

from ml_collections import ConfigDict

from specjax.config import run_config


def get_config() -> ConfigDict:
    config = run_config()
    config.drafter = {
        "name": "self_speculative",
        "draft_length": 3,
        "skip_layers": (3, 17),
        "branching": (2, 2, 1),
        "proposal": "siblings_without_replacement",
    }
    config.verify = "without_replacement"
    config.temperature = 1.0
    return config
