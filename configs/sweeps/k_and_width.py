"""Draft length and tree width of prompt lookup: which pair gains most on which task.

    python -m specjax.sweep --config=configs/sweeps/k_and_width.py --workdir=runs/k_and_width

Twelve settings on the twelve packaged prompts. `--config.base.limit=4` is quicker, and
`--config.space.drafter.draft_length="(2, 4)"` tries fewer. More branches are more nodes a pass, which a CPU
pays for: on the first three prompts, 32 new tokens each, 2 drafts gave 1.33 tokens a pass and 4 gave 1.43,
and with three branches no more than with one.
"""

from pathlib import Path

from ml_collections import ConfigDict

from specjax.config import load_config, run_config
from specjax.sweeps.space import dotted


def get_config() -> ConfigDict:
    config = run_config("sweep")
    config.base = load_config(str(Path(__file__).parent.parent / "ngram_llama.py"))
    # Unlike `rejection` it judges trees too.
    config.base.verify = "target_only"
    config.space = dotted({"drafter.draft_length": (2, 3, 4, 8), "drafter.num_branches": (1, 2, 4)})
    return config
