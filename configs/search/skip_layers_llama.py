"""Which layers can SmolLM2-135M-Instruct skip when it drafts for itself? (Draft & Verify, arXiv 2309.08168)

    python -m specjax.run --config=configs/search/skip_layers_llama.py --workdir=runs/skip_layers
    python -m specjax.run --config=runs/skip_layers/found.py --workdir=runs/self_speculative

The greedy search tries 212 sets for each of the six tasks and for all prompts, fewer where searches meet.
--config.sampler=bayesian takes Optuna's TPE instead (pip install 'specjax[sweep]'). Verification costs what
a pass over so many nodes took on two CPU cores (experiments/verify_cost). Expect NO GAIN: of 30 layers any
one is missed, and the model without two of them agrees at three positions of four
(experiments/skip_layers); larger models have more to spare.
"""

from ml_collections import ConfigDict

from specjax.config import run_config


def get_config() -> ConfigDict:
    config = run_config("skip_layers")
    config.verify_cost = (1.0, 1.02, 1.08, 1.15, 1.15, 1.27, 1.39, 1.45)
    config.max_draft_length = 7
    return config
