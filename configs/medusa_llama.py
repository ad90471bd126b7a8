"""Medusa (arXiv 2401.10774): heads on the target's last state draft all depths at once.

    python -m specjax.run --config=configs/medusa_llama.py --workdir=runs/medusa

As it stands the target is SmolLM2-135M-Instruct and the heads are the zoo's, whose card says how they were
trained and how good they are (specjax.zoo.card("medusa_smollm2")). Their tree has the 32 nodes of which each
head's choices were right most often (section 2.3.3; experiments/medusa_tree). The argument "dynamic" keeps
in each pass the likeliest 32 of three levels instead, as do published pairs, which go by name, on an
accelerator:

    python -m specjax.run --config=configs/medusa_llama.py:vicuna_7b --workdir=runs/medusa_vicuna \
        --config.target=FOLDER --config.dtype=bfloat16 --config.stacked_layers

Vicuna is a pickle: FOLDER holds it converted to safetensors, with "rope_theta": 10000.0 in its config.json.
The heads are one too, which PyTorch reads. Medusa's own, lossy rule is --config.verify=typical.
"""

import json
from pathlib import Path

from ml_collections import ConfigDict

from specjax.config import run_config
from specjax.trees import static

MEASURED = Path(__file__).parent.parent / "experiments" / "medusa_tree" / "accuracies.json"
NUM_NODES = 32
# Target and heads; None is the default target.
VARIANTS = {
    "smollm2": (None, "zoo:medusa_smollm2"),
    "dynamic": (None, "zoo:medusa_smollm2"),
    "vicuna_7b": ("hf:lmsys/vicuna-7b-v1.3", "hf:FasterDecoding/medusa-vicuna-7b-v1.3"),
    "vicuna_13b": ("hf:lmsys/vicuna-13b-v1.3", "hf:FasterDecoding/medusa-vicuna-13b-v1.3"),
    "vicuna_33b": ("hf:lmsys/vicuna-33b-v1.3", "hf:FasterDecoding/medusa-vicuna-33b-v1.3"),
}


def get_config(variant: str = "smollm2") -> ConfigDict:
    target, source = VARIANTS[variant]
    config = run_config()
    config.target = target or config.target
    if variant == "smollm2":
        tree = static.sparse(json.loads(MEASURED.read_text())["accuracies"], NUM_NODES)
        shape = {"draft_length": tree.max_depth, "paths": tree.paths[1:]}
    else:
        shape = {"draft_length": 3, "branching": (8,) * 3, "num_nodes": NUM_NODES}
    config.drafter = {"name": "medusa", "source": source, "proposal": "point_mass", **shape}
    config.verify = "target_only"
    return config
