"""EAGLE-3 (arXiv 2503.01840): trees of a drafter that reads the target's states of several layers.

    python -m specjax.run --config=configs/eagle3_llama.py --workdir=runs/eagle3

As it stands the target is SmolLM2-135M-Instruct and the drafter the zoo's, whose card says how it was trained
and how good it is (specjax.zoo.card("eagle3_smollm2")). One pass of the target judges the best 32 nodes of a
tree five levels deep. Published pairs go by name, and want an accelerator:

    python -m specjax.run --config=configs/eagle3_llama.py:llama31_8b --workdir=runs/eagle3_llama31 \
        --config.dtype=bfloat16 --config.stacked_layers

Llama's repositories are gated: accept the licence on their page and log in with `hf auth login`. Some
drafters are pickles, which PyTorch reads. Vicuna's target is one too: convert it to safetensors, add
"rope_theta": 10000.0 to its config.json, and give --config.target=FOLDER.
"""

from ml_collections import ConfigDict

from specjax.config import run_config

# Target and drafter; None is the default target.
VARIANTS = {
    "smollm2": (None, "zoo:eagle3_smollm2"),
    "llama31_8b": ("hf:meta-llama/Llama-3.1-8B-Instruct", "hf:yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
    "llama33_70b": ("hf:meta-llama/Llama-3.3-70B-Instruct", "hf:yuhuili/EAGLE3-LLaMA3.3-Instruct-70B"),
    "deepseek_r1_8b": (
        "hf:deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        "hf:yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",
    ),
    "vicuna_13b": ("hf:lmsys/vicuna-13b-v1.3", "hf:yuhuili/EAGLE3-Vicuna1.3-13B"),
}


def get_config(variant: str = "smollm2") -> ConfigDict:
    target, source = VARIANTS[variant]
    config = run_config()
    config.target = target or config.target
    config.drafter = {
        "name": "eagle3",
        "source": source,
        "draft_length": 5,
        "branching": (8,) * 5,
        "num_nodes": 32,
        "proposal": "point_mass",
    }
    config.verify = "target_only"
    return config
