"""Texts that the target did not write, with the states that drafters learn from.

    python -m specjax.data.prepare --config=configs/prepare_llama.py --workdir=runs/prepared \
        --config.documents='("a.txt",)' --config.conversations='("chat.jsonl",)' \
        --config.features='("last_hidden",)'

As it stands it takes the files of tokens that come with the project, 2048 texts, whose states were not kept:
1.2 kB a token for each feature. Another line may leave them out with --config.tokens='()'. A run can be
interrupted and goes on with the shard that it was at. A folder of `data` of specjax.train is what comes out.
"""

from ml_collections import ConfigDict

from specjax.config import run_config


def get_config() -> ConfigDict:
    config = run_config("prepare")
    config.tokens = ("experiments/self_written",)
    return config
