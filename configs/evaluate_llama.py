"""Several methods side by side on SmolLM2-135M-Instruct: tokens per pass, time, where it goes, and memory.

    python -m specjax.run --config=configs/evaluate_llama.py --workdir=runs/evaluate

As it stands it takes the twelve packaged prompts at temperatures 0 and 1. The usual sets want their files:
the `data` folder of Spec-Bench's or EAGLE's repository, or all files in one folder
(specjax.data.prompts.PUBLISHED has their names). With --config.multi_turn MT-bench's second turns are asked
after the method's own answers.

    --config.prompts_path=DIR --config.prompts="('mt_bench', 'humaneval', 'gsm8k', 'alpaca', 'cnn_dm')"
    --config.batch_sizes="(1, 4)" --config.methods.eagle_chain.drafter.draft_length=4

Expect at temperature 0 that the lossless methods write plain decoding's tokens, that prompt lookup gains
where texts repeat their input, and that the tree has most tokens a pass but is slower than plain decoding
on a CPU.
"""

from ml_collections import ConfigDict

from specjax.config import run_config

EAGLE = {"name": "eagle", "source": "zoo:eagle_smollm2"}
TREE = {"draft_length": 5, "branching": (8,) * 5, "num_nodes": 32, "proposal": "point_mass"}


def get_config() -> ConfigDict:
    config = run_config("evaluate")
    config.methods = {
        "prompt_lookup": {
            "drafter": {"name": "ngram", "draft_length": 4, "max_ngram": 3},
            "verify": "rejection",
        },
        "eagle_chain": {
            "drafter": {**EAGLE, "draft_length": 2},
            "verify": "rejection",
            "drafter_dtype": "int8",
        },
        "eagle_tree": {"drafter": {**EAGLE, **TREE}, "verify": "target_only"},
    }
    config.temperatures = (0.0, 1.0)
    return config
