"""What the adviser foresees, measured: its drafters at several draft lengths, on prompts it never saw.

    python -m experiments.advice.prompts question.jsonl --out=runs/advice
    python -m specjax.run --config=experiments/advice/config.py --workdir=runs/advice/measured_usual \
        --config.prompts='("runs/advice/checked.jsonl",)'

The argument "short" asks what is hard for speculation: answers of 15 tokens at temperature 1.5.
"""

from typing import Any

from ml_collections import ConfigDict

from specjax.advice.candidates import Question, candidates, rule_of
from specjax.config import run_config

# Besides the length that the adviser measures; of drafters of one length there is no other.
LENGTHS = {"ngram": (2, 8), "draft_model_smollm2": (2,), "eagle_smollm2": (1, 2), "quantized": (3, 6)}
VARIANTS = {"usual": (0.0, 64), "short": (1.5, 15)}


def methods(target: str, temperature: float) -> dict[str, dict[str, Any]]:
    """The adviser's candidates as it measures them, and at other lengths."""
    found = {}
    for name, method in candidates(Question(target)).items():
        drafter = method["drafter"]
        for length in (drafter["draft_length"], *LENGTHS.get(name, ())):
            own = {**drafter, "draft_length": length}
            found[f"{name}_{length}"] = {**method, "drafter": own, "verify": rule_of(own, temperature)}
    return found


def get_config(variant: str = "usual") -> ConfigDict:
    temperature, max_new_tokens = VARIANTS[variant]
    config = run_config("evaluate")
    config.methods = methods(config.target, temperature)
    config.temperatures, config.max_new_tokens = (temperature,), (max_new_tokens,)
    return config
