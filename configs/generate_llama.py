"""Self-written text for distillation: the target answers instructions, and prompts of its own.

    python -m specjax.data.generate --config=configs/generate_llama.py --workdir=runs/self_written \
        --config.instructions='("data/questions.jsonl",)'

Half of the answers are greedy, half drawn at temperature 1. As it stands the target first writes 4000
prompts itself, of which it answers those that it ended, none twice. On two CPU cores SmolLM2 writes some
200 tokens a second, so that this takes about two hours; it can be interrupted and goes on with the shard
that it was at. `features` keeps the states that EAGLE and Medusa learn from, 1.2 kB a token each.
"""

from ml_collections import ConfigDict

from specjax.config import run_config


def get_config() -> ConfigDict:
    config = run_config("generate")
    config.self_prompts = 4000
    return config
