"""What the advice rests on, measured on prompts of one's own: acceptance by depth, and what passes take.

Drafters and plain decoding answer the prompts in turns (`specjax.tasks.evaluate`, in DIR/measured), then
passes over 1 to 9 nodes take turns (DIR/passes.json). Both are kept: the same command goes on from them.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from specjax import zoo
from specjax.advice import devices
from specjax.advice.predict import Candidate, Costs, RelativeCost, calibrate
from specjax.analysis import memory, theory
from specjax.build import build_drafter
from specjax.checkpoints.names import flatten
from specjax.config import Options, check_at_least_1, run_config, validate
from specjax.data.prompts import Prompt
from specjax.errors import ConfigError, nearest
from specjax.eval import results
from specjax.eval.compare import PLAIN
from specjax.eval.timing import PARTS, ROUNDS
from specjax.modules import find_module, module_names
from specjax.targets import LoadedTarget, build_target
from specjax.tasks import evaluate
from specjax.tasks.compare import encode, load_tokenizer, tell
from specjax.trees.topology import chain_mask

MEASURED, PASSES, SIZES = "measured", "passes.json", "sizes.json"
DRAFT_LENGTH = 4  # of the run that measures a drafter
MOST_NODES = 9  # of a pass that is timed, so 8 drafts at most
# The smallest tree that suffix decoding has.
WITHOUT_WEIGHTS = {
    "ngram": {"name": "ngram", "draft_length": DRAFT_LENGTH, "max_ngram": 3},
    "suffix": {"name": "suffix", "draft_length": DRAFT_LENGTH, "num_nodes": DRAFT_LENGTH + 2},
}
AT_ONCE = ("medusa",)  # draft all depths at once, and none beyond their heads


class Question(NamedTuple):
    """What is asked: a command line's fields. `device` None is the machine at hand."""

    target: str
    prompts: str = "default"
    prompts_path: str | None = None
    num_prompts: int = 8
    temperature: float = 0.0
    max_new_tokens: int = 64
    batch_size: int = 1
    drafters: tuple[str, ...] = ()
    device: str | None = None
    dtype: str = "float32"


class Measured(NamedTuple):
    """The candidates, the drafter's fields and rule of each, and the machine that the costs are of.

    `prompts` are in the order of the candidates' rows; `cost_at` is v of any batch and nodes by a model.
    """

    candidates: tuple[Candidate, ...]
    methods: Mapping[str, Mapping[str, Any]]
    prompts: tuple[Prompt, ...]
    plain_seconds: float
    cost_at: RelativeCost | None


def candidates(names: Sequence[str], target: str) -> dict[str, dict[str, Any]]:
    """The drafters' fields by name: ngram, suffix, the zoo's, all of the zoo's of a kind, or KIND=SOURCE.

    Without names all that need no files of yours. ConfigError, with the nearest name, on an unknown one.
    """
    trained = {name: about for name in zoo.names() if (about := _about(name))["target"] == target}
    known = [*WITHOUT_WEIGHTS, *trained]
    found: dict[str, dict[str, Any]] = {}
    for name in names or known:
        kind, _, source = name.partition("=")
        if source:
            find_module("drafters", kind)
            found[kind] = {"name": kind, "source": source, "draft_length": DRAFT_LENGTH}
            continue
        chosen = [n for n, about in trained.items() if name in (n, about["drafter"])]
        if name in WITHOUT_WEIGHTS:
            found[name] = dict(WITHOUT_WEIGHTS[name])
        elif chosen:
            found |= {n: _trained(n, trained[n]) for n in chosen}
        elif name in zoo.names() or name in module_names("drafters"):
            raise ConfigError(
                f"the zoo has no '{name}' for the target '{target}': give its weights, {name}=FOLDER or "
                f"{name}=hf:OWNER/NAME, or choose from {', '.join(known)}"
            )
        else:
            raise ConfigError(
                f"there is no drafter '{name}'{nearest(name, known)}: choose from {', '.join(known)}, or "
                "KIND=SOURCE for weights of yours"
            )
    return found


def _about(name: str) -> dict[str, Any]:
    return json.loads((zoo.folder(zoo.PREFIX + name) / "config.json").read_text(encoding="utf-8"))


def _trained(name: str, about: Mapping[str, Any]) -> dict[str, Any]:
    most = about["config"]["draft_length"] if about["drafter"] in AT_ONCE else DRAFT_LENGTH
    length = min(DRAFT_LENGTH, most)
    return {"name": about["drafter"], "source": zoo.PREFIX + name, "draft_length": length}


def rule_of(drafter: Mapping[str, Any], temperature: float) -> str:
    """The lossless rule to serve a drafter with: `block` never accepts less than `rejection`.

    (arXiv 2403.10444.) At temperature 0 they are one.
    """
    if "num_nodes" in drafter:
        return "target_only"
    return "block" if temperature > 0 else "rejection"


def evaluation(question: Question) -> ConfigDict:
    """The config of the run that measures; ConfigError on whatever in the question cannot be measured."""
    config = run_config("evaluate")
    config.target, config.dtype = question.target, question.dtype
    config.prompts, config.prompts_path = (question.prompts,), question.prompts_path
    config.limit = question.num_prompts
    config.temperatures = (question.temperature,)
    config.batch_sizes, config.max_new_tokens = (question.batch_size,), (question.max_new_tokens,)
    # Under `rejection` what a depth accepts does not depend on how many follow it.
    config.methods = {
        name: {"drafter": fields, "verify": "target_only" if "num_nodes" in fields else "rejection"}
        for name, fields in candidates(question.drafters, question.target).items()
    }
    check_at_least_1(config, ("limit",))
    validate(config)
    evaluate.load_sets(config)
    return config


def measure(question: Question, workdir: Path) -> Measured:
    """Measure what is not measured yet, and put it together; ConfigError before any long work."""
    config = evaluation(question)
    known = None if question.device is None else devices.find_device(question.device)
    results.check_writable(workdir / MEASURED)
    evaluate.run(Options(config, workdir / MEASURED, False))
    (prompts,) = evaluate.load_sets(config).values()
    lines = _read(workdir / MEASURED / "generations.jsonl")
    parts = {line["method"]: line["seconds"] for line in _read(workdir / MEASURED / "costs.jsonl")}
    fields = {name: method.drafter.to_dict() for name, method in config.methods.items()}
    about = {"config": json.loads(config.to_json()), "environment": results.environment()}
    batch, cost_at = question.batch_size, None
    if known is None:
        verify_costs = _kept(workdir / PASSES, about, lambda: time_passes(config, prompts))
        plain = _round_seconds(lines, PLAIN)
    else:
        about["dtype"] = known.dtype
        sizes = _kept(workdir / SIZES, about, lambda: count_work(config, prompts, known.dtype))
        work = theory.Work(*sizes["target"])
        cost_at = devices.roofline(work, known.device, sizes["context"])
        verify_costs = [cost_at(batch, nodes) for nodes in range(1, MOST_NODES + 1)]
        plain = theory.pass_seconds(work, known.device, batch, 1, sizes["context"])

    found = []
    for name, drafter in fields.items():
        candidate = _counted(lines, name, drafter)
        depth, nodes = drafter["draft_length"], drafter.get("num_nodes", drafter["draft_length"] + 1)
        if known is None:
            whole = _round_seconds(lines, name) / plain
            share = parts[name]["draft"] / sum(parts[name][part] for part in PARTS)
            costs = calibrate(whole, share, depth, nodes, verify_costs)
        else:
            draft = sizes["drafters"][name]
            step = 0.0
            if draft is not None:
                step = theory.pass_seconds(theory.Work(*draft), known.device, batch, 1, 0)
            step /= depth if drafter["name"] in AT_ONCE else 1
            costs = Costs(step / plain, tuple(verify_costs))
            candidate = candidate._replace(prefill_seconds=0.0, compile_seconds=0.0)
        found.append(candidate._replace(costs=costs))
    return Measured(tuple(found), fields, tuple(prompts), plain, cost_at)


def _counted(lines: Sequence[results.Line], name: str, drafter: Mapping[str, Any]) -> Candidate:
    own, plain = ({line["row"]: line for line in lines if line["method"] == m} for m in (name, PLAIN))

    def beyond_plain(kind: str) -> list[float]:
        return [own[row][kind] - plain[row][kind] for row in own]

    depth, is_tree = drafter["draft_length"], "num_nodes" in drafter
    fixed = (depth,) if is_tree else tuple(range(1, MOST_NODES))
    return Candidate(
        name=name,
        num_steps=np.array([own[row]["num_steps"] for row in sorted(own)]),
        accepted=np.array([own[row]["accepted_at_depth"] for row in sorted(own)]),
        costs=Costs(0.0, (1.0,)),
        lengths=fixed[:depth] if drafter["name"] in AT_ONCE else fixed,
        num_nodes=drafter["num_nodes"] if is_tree else None,
        prefill_seconds=max(0.0, statistics.median(beyond_plain("prefill_seconds"))),
        compile_seconds=max(0.0, sum(beyond_plain("compile_seconds"))),
    )


def _round_seconds(lines: Sequence[results.Line], name: str) -> float:
    """Seconds of a round, of whole batches: these go on until their last row has ended."""
    seconds: dict[int, float] = {}
    rounds: dict[int, int] = {}
    for line in lines:
        if line["method"] == name:
            seconds[line["batch"]] = seconds.get(line["batch"], 0.0) + line["decode_seconds"]
            rounds[line["batch"]] = max(rounds.get(line["batch"], 0), line["num_steps"])
    return sum(seconds.values()) / sum(rounds.values())


def time_passes(config: ConfigDict, prompts: Sequence[Prompt], num_rounds: int = ROUNDS) -> list[float]:
    """v(N) for N = 1, ..., 9: medians of the ratios to N = 1 of the same round, all N taking turns."""
    loaded, context = _load(config, prompts)
    target, (batch,) = loaded.target, config.batch_sizes
    cache = target.init_cache(batch, context + MOST_NODES)
    # What stands in the cache does not change the time.
    cache = cache._replace(length=jnp.full((batch,), context, jnp.int32))

    @jax.jit
    def forward(params: Any, tokens: Any, cache: Any) -> Any:
        nodes = tokens.shape[1]
        positions = cache.length[:, None] + jnp.arange(nodes)[None, :]
        return target.forward(params, tokens, positions, chain_mask(batch, nodes), cache).logits

    def seconds(nodes: int) -> float:
        tokens = jnp.ones((batch, nodes), jnp.int32)
        started = time.perf_counter()
        jax.block_until_ready(forward(loaded.params, tokens, cache))
        return time.perf_counter() - started

    tell(f"timing passes over 1 to {MOST_NODES} nodes")
    # The first round compiles.
    rounds = [[seconds(nodes) for nodes in range(1, MOST_NODES + 1)] for _ in range(num_rounds + 1)][1:]
    costs = [statistics.median(r[i] / r[0] for r in rounds) for i in range(MOST_NODES)]
    # A pass does not get cheaper by more nodes; what says so is noise.
    return np.maximum.accumulate(costs).tolist()


def count_work(config: ConfigDict, prompts: Sequence[Prompt], dtype: str) -> dict[str, Any]:
    """What passes of the target and of every drafter read and compute with weights of `dtype`."""
    loaded, context = _load(config, prompts)
    unembedding = loaded.config.vocab_size * loaded.config.hidden_size
    drafters = {
        name: devices.draft_work(
            flatten(build_drafter(method.drafter.to_dict(), loaded)[1]), unembedding, dtype
        )
        for name, method in config.methods.items()
    }
    return {"context": context, "target": memory.work(loaded.config, dtype), "drafters": drafters}


def _load(config: ConfigDict, prompts: Sequence[Prompt]) -> tuple[LoadedTarget, int]:
    """The target, and the tokens that stand in its cache in the middle of an answer to a usual prompt."""
    loaded = build_target(config.target, jnp.dtype(config.dtype), config.stacked_layers)
    lengths = map(len, encode(prompts, load_tokenizer(loaded), config.chat))
    return loaded, int(statistics.median(lengths)) + config.max_new_tokens[0] // 2


def _kept(path: Path, about: Mapping[str, Any], compute: Callable[[], Any]) -> Any:
    """What an earlier call for the same `about` computed and kept in the file, or what is computed now."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        stored = {}
    if stored.get("about") != about:
        stored = {"about": about, "found": compute()}
        results.write_whole(path, json.dumps(stored, indent=2) + "\n")
    return stored["found"]


def _read(path: Path) -> list[results.Line]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
