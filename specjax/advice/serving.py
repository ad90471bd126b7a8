"""The advice as settings: of vLLM, of SGLang, and of specjax itself.

Option names are those of vLLM's `SpeculativeConfig` and of SGLang's speculative decoding guide, both of 2026.
vLLM's are chains throughout, and SGLang grows trees as EAGLE-2 does.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specjax import zoo
from specjax.advice.candidates import weights_of
from specjax.checkpoints.drafters_files import HUB

EXPORTED = "EXPORTED_DRAFTER"
# Whose drafts come from weights, and what SGLang calls them.
ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3", "draft_model": "STANDALONE"}
VLLM = ("ngram", "suffix", "medusa", *ALGORITHMS)


class Serving(NamedTuple):
    """Settings by system; None where a system has no counterpart, and `notes` say what has to be known."""

    vllm: str | None
    sglang: str | None
    specjax: str
    adaptive: str
    notes: tuple[str, ...]


def serving(
    target: str, method: Mapping[str, Any], temperature: float, round_costs: Sequence[float]
) -> Serving:
    """The settings for a method with these fields, whose rounds of 1, 2, ... drafts cost `round_costs`."""
    drafter = {"name": method["drafter"]["name"], **method["drafter"]}  # its name first
    name, length, cheaper = drafter["name"], drafter["draft_length"], weights_of(method)
    is_copy = drafter.get("source") == target and bool(cheaper)
    what = f"the target ({cheaper}) as its own drafter" if is_copy else f"'{name}'"
    notes = []
    model = None
    if drafter.get("source") is not None:
        model = drafter["source"].removeprefix(HUB)
        if drafter["source"].startswith(zoo.PREFIX):
            model = EXPORTED
            notes.append(
                f"{EXPORTED} is a folder to which specjax.build.export_drafter writes {drafter['source']} in "
                "its published format."
            )
            if name == "eagle3":
                notes.append(
                    "Its format names inputs of layers alone: a drafter that reads what enters the target's "
                    "head, as the zoo's for SmolLM2, is refused there. Train one over other state_layers."
                )
    vllm = None if is_copy or name not in VLLM else _vllm(drafter, model, temperature)
    sglang = None if is_copy else _sglang(drafter, model)
    if vllm is None:
        notes.append(f"vLLM has no counterpart of {what}.")
    elif "branching" in drafter:
        notes.append("vLLM drafts chains of the same length, which accept less than the tree.")
    if sglang is None:
        close = "; the nearest is --speculative-algorithm NGRAM" if name == "suffix" else ""
        notes.append(f"SGLang has no counterpart of {what}{close}.")
    if cheaper and (vllm or sglang):
        notes.append(f"What makes the drafter cheaper here ({cheaper}) is not in the settings of the others.")
    if name == "ngram":
        notes.append("SGLang's NGRAM looks in a cache of all requests, on CUDA only: it may accept more.")
    if name == "suffix":
        notes.append("vLLM's suffix decoding drafts chains, and of past requests too.")
    costs = tuple(round(float(cost), 3) for cost in round_costs[:length])
    adaptive = {"name": "adaptive", "inner": drafter, "costs": costs}
    return Serving(
        vllm=vllm,
        sglang=sglang,
        specjax=_command(target, {**method, "drafter": drafter}, temperature),
        adaptive=_command(target, {**method, "drafter": adaptive}, temperature),
        notes=tuple(notes),
    )


def _vllm(drafter: Mapping[str, Any], model: str | None, temperature: float) -> str:
    settings: dict[str, Any] = {
        "method": drafter["name"],
        "num_speculative_tokens": drafter["draft_length"],
    }
    if drafter["name"] == "ngram":
        settings |= {
            "prompt_lookup_max": drafter["max_ngram"],
            "prompt_lookup_min": drafter.get("min_ngram", 1),
        }
    if model is not None:
        settings["model"] = model
    if temperature > 0:
        settings["rejection_sample_method"] = "block"
        if drafter["name"] in ALGORITHMS:
            # Its default drafts the likeliest token, and what was measured are draws from its law.
            settings["draft_sample_method"] = "probabilistic"
    return f"--speculative-config {shlex.quote(json.dumps(settings))}"


def _sglang(drafter: Mapping[str, Any], model: str | None) -> str | None:
    name, length = drafter["name"], drafter["draft_length"]
    # The pending token is one of them.
    nodes = f"--speculative-num-draft-tokens {drafter.get('num_nodes', length + 1)}"
    if name == "ngram":
        largest, smallest = drafter["max_ngram"], drafter.get("min_ngram", 1)
        return (
            f"--speculative-algorithm NGRAM {nodes} --speculative-ngram-min-match-window-size {smallest} "
            f"--speculative-ngram-max-match-window-size {largest} --speculative-ngram-max-bfs-breadth 1"
        )
    if name not in ALGORITHMS:
        return None
    path = f"--speculative-draft-model-path {shlex.quote(str(model))}"
    return (
        f"--speculative-algorithm {ALGORITHMS[name]} {path} --speculative-num-steps {length} "
        f"--speculative-eagle-topk {max(drafter.get('branching', (1,)))} {nodes}"
    )


def _command(target: str, method: Mapping[str, Any], temperature: float) -> str:
    fields = {"target": target, **method, "temperature": f"{temperature:g}"}
    given = [f"--config.{name}={_quoted(str(value))}" for name, value in fields.items()]
    fixed = "python -m specjax.run --config=configs/ngram_llama.py --workdir=runs/advised"
    return " ".join([fixed, *given])


def _quoted(value: str) -> str:
    """For a shell, in double quotes where single ones would make it unreadable."""
    return f'"{value}"' if "'" in value and not set(value) & set('"$`\\!') else shlex.quote(value)
