"""EAGLE (arXiv 2401.15077) and EAGLE-2 (arXiv 2406.16858): a head on the target's states drafts.

    python -m specjax.run --config=configs/eagle_llama.py --workdir=runs/eagle

As it stands the target is SmolLM2-135M-Instruct and the drafter the zoo's, whose card says how it was trained
and how good it is (specjax.zoo.card("eagle_smollm2")). It drafts chains of 2 in int8, which is what a pass
over three tokens allows on a CPU: there it is faster than plain decoding. The argument "smollm2_tree" takes
EAGLE-2's trees, of which the best 32 nodes, five levels deep, are judged in one pass: more tokens a pass, and
slower on a CPU, where so many nodes cost four passes. Published pairs go by name, have trees, and want an
accelerator:

    python -m specjax.run --config=configs/eagle_llama.py:llama3_8b --workdir=runs/eagle_llama3 \
        --config.dtype=bfloat16 --config.stacked_layers

Llama's repositories are gated: accept the licence on their page and log in with `hf auth login`. Some
drafters are pickles, which PyTorch reads. Vicuna's target is one too: convert it to safetensors, add
"rope_theta": 10000.0 to its config.json, and give --config.target=FOLDER.
"""

from ml_collections import ConfigDict

from specjax.config import run_config

# Target and drafter; None is the default target.
VARIANTS = {
    "smollm2": (None, "zoo:eagle_smollm2"),
    "smollm2_tree": (None, "zoo:eagle_smollm2"),
    "llama2_7b": ("hf:meta-llama/Llama-2-7b-chat-hf", "hf:yuhuili/EAGLE-llama2-chat-7B"),
    "llama2_13b": ("hf:meta-llama/Llama-2-13b-chat-hf", "hf:yuhuili/EAGLE-llama2-chat-13B"),
    "llama2_70b": ("hf:meta-llama/Llama-2-70b-chat-hf", "hf:yuhuili/EAGLE-llama2-chat-70B"),
    "llama3_8b": ("hf:meta-llama/Meta-Llama-3-8B-Instruct", "hf:yuhuili/EAGLE-LLaMA3-Instruct-8B"),
    "llama3_70b": ("hf:meta-llama/Meta-Llama-3-70B-Instruct", "hf:yuhuili/EAGLE-LLaMA3-Instruct-70B"),
    "vicuna_7b": ("hf:lmsys/vicuna-7b-v1.3", "hf:yuhuili/EAGLE-Vicuna-7B-v1.3"),
    "vicuna_13b": ("hf:lmsys/vicuna-13b-v1.3", "hf:yuhuili/EAGLE-Vicuna-13B-v1.3"),
    "vicuna_33b": ("hf:lmsys/vicuna-33b-v1.3", "hf:yuhuili/EAGLE-Vicuna-33B-v1.3"),
}
CHAIN = {"draft_length": 2}
TREE = {"draft_length": 5, "branching": (8,) * 5, "num_nodes": 32, "proposal": "point_mass"}


def get_config(variant: str = "smollm2") -> ConfigDict:
    target, source = VARIANTS[variant]
    config = run_config()
    config.target = target or config.target
    config.drafter = {"name": "eagle", "source": source, **(CHAIN if variant == "smollm2" else TREE)}
    if variant == "smollm2":
        config.verify, config.drafter_dtype, config.draft_vocab_size = "rejection", "int8", 2048
    else:
        config.verify = "target_only"
    return config
