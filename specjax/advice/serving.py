"""The advice as settings: of vLLM, of SGLang, and of specjax itself.

Option names are those of vLLM's `SpeculativeConfig` and of SGLang's speculative decoding guide, both of 2026.
Neither serves static trees of these drafters, so theirs are chains of the same length.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specjax import zoo
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
    target: str,
    drafter: Mapping[str, Any],
    rule: str,
    temperature: float,
    round_costs: Sequence[float],
) -> Serving:
    """The settings for a drafter with these fields, whose rounds of 1, 2, ... drafts cost `round_costs`."""
    name, length = drafter["name"], drafter["draft_length"]
    drafter = {"name": name, **drafter}  # its name first
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
    if name not in VLLM:
        notes.append(f"vLLM has no counterpart of '{name}'.")
    if name not in ALGORITHMS and name != "ngram":
        close = "; the nearest is --speculative-algorithm NGRAM" if name == "suffix" else ""
        notes.append(f"SGLang has no counterpart of '{name}'{close}.")
    if name == "ngram":
        notes.append("SGLang's NGRAM looks in a cache of all requests, on CUDA only: it may accept more.")
    if name == "suffix":
        notes.append("vLLM's suffix decoding drafts chains, and of past requests too.")
    costs = tuple(round(float(cost), 3) for cost in round_costs[:length])
    adaptive = {"name": "adaptive", "inner": drafter, "costs": costs}
    return Serving(
        vllm=_vllm(drafter, model, temperature) if name in VLLM else None,
        sglang=_sglang(drafter, model),
        specjax=_command(target, drafter, rule, temperature),
        adaptive=_command(target, adaptive, rule, temperature),
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
    nodes = f"--speculative-num-draft-tokens {length + 1}"  # the pending token is one of them
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
        f"--speculative-eagle-topk 1 {nodes}"
    )


def _command(target: str, drafter: Mapping[str, Any], rule: str, temperature: float) -> str:
    flags = {"target": target, "drafter": drafter, "verify": rule, "temperature": f"{temperature:g}"}
    given = [f"--config.{name}={_quoted(str(value))}" for name, value in flags.items()]
    fixed = "python -m specjax.run --config=configs/ngram_llama.py --workdir=runs/advised"
    return " ".join([fixed, *given])


def _quoted(value: str) -> str:
    """For a shell, in double quotes where single ones would make it unreadable."""
    return f'"{value}"' if "'" in value and not set(value) & set('"$`\\!') else shlex.quote(value)
