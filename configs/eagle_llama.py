"""EAGLE-2 (arXiv 2406.16858): trees of an EAGLE drafter, grown where it is confident.

    python -m specjax.run --config=configs/eagle_llama.py --workdir=runs/eagle

As it stands the target is SmolLM2-135M-Instruct and the drafter the zoo's, whose card says how it was trained
and how good it is (specjax.zoo.card("eagle_smollm2")). One pass of the target judges the best 32 nodes of a
tree five levels deep: 1.9 tokens a pass on Spec-Bench, and slower than plain decoding on a CPU, where 32
nodes cost four passes. It takes some 3 minutes there. Published pairs go by name, and want an accelerator:

    python -m specjax.run --config=configs/eagle_llama.py:llama3_8b --workdir=runs/eagle_llama3 \
        --config.dtype=bfloat16 --config.stacked_layers

Llama's repositories are gated: accept the licence on their page and log in with `hf auth login`. Some
drafters are pickles, which PyTorch reads. Vicuna's target is one too: convert it to safetensors, add
"rope_theta": 10000.0 to its config.json, and give --config.target=FOLDER.

EAGLE-1's chains instead of trees, which gain time on a CPU (1.14 of plain decoding's speed):
--config.verify=rejection --config.drafter_dtype=int8
--config.drafter="{'name': 'eagle', 'source': 'zoo:eagle_smollm2', 'draft_length': 2}".
"""

from ml_collections import ConfigDict

from specjax.config import run_config

# Target and drafter; None is the default target.
VARIANTS = {
    "smollm2": (None, "zoo:eagle_smollm2"),
    "llama2_7b": ("hf:meta-llama/Llama-2-7b-chat-hf", "hf:yuhuili/EAGLE-llama2-chat-7B"),
    "llama2_13b": ("hf:meta-llama/Llama-2-13b-chat-hf", "hf:yuhuili/EAGLE-llama2-chat-13B"),
    "llama2_70b": ("hf:meta-llama/Llama-2-70b-chat-hf", "hf:yuhuili/EAGLE-llama2-chat-70B"),
    "llama3_8b": ("hf:meta-llama/Meta-Llama-3-8B-Instruct", "hf:yuhuili/EAGLE-LLaMA3-Instruct-8B"),
    "llama3_70b": ("hf:meta-llama/Meta-Llama-3-70B-Instruct", "hf:yuhuili/EAGLE-LLaMA3-Instruct-70B"),
    "vicuna_7b": ("hf:lmsys/vicuna-7b-v1.3", "hf:yuhuili/EAGLE-Vicuna-7B-v1.3"),
    "vicuna_13b": ("hf:lmsys/vicuna-13b-v1.3", "hf:yuhuili/EAGLE-Vicuna-13B-v1.3"),
    "vicuna_33b": ("hf:lmsys/vicuna-33b-v1.3", "hf:yuhuili/EAGLE-Vicuna-33B-v1.3"),
}


def get_config(variant: str = "smollm2") -> ConfigDict:
    target, source = VARIANTS[variant]
    config = run_config()
    config.target = target or config.target
    config.drafter = {
        "name": "eagle",
        "source": source,
        "draft_length": 5,
        "branching": (8,) * 5,
        "num_nodes": 32,
        "proposal": "point_mass",
    }
    config.verify = "target_only"
    return config
