"""Speculative sampling (arXiv 2211.17192, arXiv 2302.01318) with a second language model as drafter.

    python -m specjax.run --config=configs/draft_model_llama.py --workdir=runs/draft_model

As it stands the drafter is the zoo's: two layers between SmolLM2's own embedding and head, distilled from it
(arXiv 2310.08461; configs/train/draft_model_llama.py). Its card says how good it is
(specjax.zoo.card("draft_model_smollm2")). --config.drafter_dtype=int8 drafts faster, from rounded weights.

Any smaller model with the target's tokenizer drafts too: --config.target=SOURCE
--config.drafter.source=SMALLER. With the argument "itself"

    python -m specjax.run --config=configs/draft_model_llama.py:itself --workdir=runs/draft_model_itself

the target drafts for itself: a perfect drafter, at the target's own price. Every draft is accepted, up to
rounding, so this is a check of the machinery and an upper bound of tokens per pass, and it is slower than
plain decoding. With the argument "quantized" it drafts with its own weights in int8 (arXiv 2502.10424,
arXiv 2503.13565) and reads its own keys and values: nearly as good, at a third of the price, and without any
training. That is the fastest way known here to decode a float32 target on a CPU (experiments/all_methods).
"""

from ml_collections import ConfigDict

from specjax.config import run_config

# Source, length and type of the drafts; None is the target's own.
VARIANTS = {
    "smollm2": ("zoo:draft_model_smollm2", 2, None),
    "itself": (None, 4, None),
    "quantized": (None, 5, "int8"),
}


def get_config(variant: str = "smollm2") -> ConfigDict:
    source, draft_length, dtype = VARIANTS[variant]
    config = run_config()
    source = source or config.get_ref("target")
    config.drafter = {"name": "draft_model", "source": source, "draft_length": draft_length}
    if dtype is not None:
        config.drafter_dtype, config.drafter.share_cache = dtype, True
    config.verify = "rejection"
    return config
