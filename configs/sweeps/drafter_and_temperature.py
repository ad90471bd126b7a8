"""Drafters without weights at three temperatures: which one gains how much where texts are less certain.

    python -m specjax.sweep --config=configs/sweeps/drafter_and_temperature.py --workdir=runs/drafters

Whole drafters are values like any others. A drafter's trials follow each other, and those that differ in the
temperature alone share their programs: only the first one compiles.
"""

from pathlib import Path

from ml_collections import ConfigDict

from specjax.config import load_config, run_config
from specjax.sweeps.space import dotted

DRAFTERS = (
    {"name": "ngram", "draft_length": 2, "max_ngram": 3},
    {"name": "ngram", "draft_length": 4, "max_ngram": 3},
    {"name": "suffix", "draft_length": 4, "num_nodes": 8},
)


def get_config() -> ConfigDict:
    config = run_config("sweep")
    config.base = load_config(str(Path(__file__).parent.parent / "ngram_llama.py"))
    config.base.verify = "target_only"
    config.space = dotted({"drafter": DRAFTERS, "temperature": (0.0, 0.6, 1.0)})
    return config
