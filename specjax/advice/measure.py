"""What the advice rests on, measured on prompts of one's own: acceptance by depth, and what passes take.

Passes over 1 to 9, 16 and 32 nodes take turns (DIR/passes.json), then drafters and plain decoding answer the
prompts in turns (`specjax.tasks.evaluate`, in DIR/measured), and so does every tree that may pay after that,
in a folder of its own. All is kept: the same command goes on from it.
"""

from __future__ import annotations

import functools
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

from specjax.advice import devices
from specjax.advice.candidates import AT_ONCE, HEADS, Fields, Question, candidates, tree_of
from specjax.advice.predict import Candidate, Costs, RelativeCost, calibrate, predictions, promising_trees
from specjax.analysis import memory, theory
from specjax.build import build_drafter
from specjax.config import Options, check_at_least_1, run_config, validate
from specjax.data.prompts import Prompt
from specjax.eval import results
from specjax.eval.compare import PLAIN
from specjax.eval.timing import PARTS, ROUNDS
from specjax.targets import LoadedTarget, build_target
from specjax.tasks import evaluate
from specjax.tasks.compare import encode, load_tokenizer, tell
from specjax.trees.topology import chain_mask

MEASURED, PASSES, SIZES = "measured", "passes.json", "sizes.json"
LONGEST = 8  # chain that is considered
TREES = (8, 16, 32)  # nodes that are considered
TIMED = (*range(1, LONGEST + 2), *TREES[1:])  # nodes of the passes that are timed
MOST_NODES = TIMED[-1]


class Measured(NamedTuple):
    """The candidates, the fields of each one's method, and the machine that the costs are of.

    `prompts` are in the order of the candidates' rows; `cost_at` is v of any batch and nodes by a model.
    `no_trees` says why no tree was measured, where one could have been.
    """

    candidates: tuple[Candidate, ...]
    methods: Mapping[str, Fields]
    prompts: tuple[Prompt, ...]
    plain_seconds: float
    cost_at: RelativeCost | None
    no_trees: str | None = None


class Run(NamedTuple):
    """A run of `specjax.tasks.evaluate`: its answers, and the seconds of a step's parts by method."""

    lines: Sequence[results.Line]
    parts: Mapping[str, Mapping[str, float]]

    def round_seconds(self, name: str) -> float:
        """Seconds of a round, of whole batches: these go on until their last row has ended."""
        seconds: dict[int, float] = {}
        rounds: dict[int, int] = {}
        for line in self.lines:
            if line["method"] == name:
                seconds[line["batch"]] = seconds.get(line["batch"], 0.0) + line["decode_seconds"]
                rounds[line["batch"]] = max(rounds.get(line["batch"], 0), line["num_steps"])
        return sum(seconds.values()) / sum(rounds.values())


def evaluation(question: Question, methods: Mapping[str, Fields] | None = None) -> ConfigDict:
    """The config of the run that measures methods, by default all candidates.

    Raises ConfigError on whatever in the question cannot be measured.
    """
    config = run_config("evaluate")
    config.target, config.dtype = question.target, question.dtype
    config.prompts, config.prompts_path = (question.prompts,), question.prompts_path
    config.limit = question.num_prompts
    config.temperatures = (question.temperature,)
    config.batch_sizes, config.max_new_tokens = (question.batch_size,), (question.max_new_tokens,)
    config.methods = candidates(question) if methods is None else methods
    check_at_least_1(config, ("limit",))
    validate(config)
    evaluate.load_sets(config)
    return config


def measure(question: Question, workdir: Path) -> Measured:
    """Measure what is not measured yet, and put it together; ConfigError before any long work."""
    config, methods = evaluation(question), candidates(question)
    known = None if question.device is None else devices.find_device(question.device)
    (prompts,) = evaluate.load_sets(config).values()
    about = {"config": json.loads(config.to_json()), "environment": results.environment()}
    batch = question.batch_size
    cost_at: RelativeCost | None = None
    modelled: dict[str, Costs] = {}

    @functools.cache
    def load() -> LoadedTarget:
        return build_target(config.target, jnp.dtype(config.dtype), config.stacked_layers)

    def run(config: ConfigDict, folder: str) -> Run:
        own = workdir / folder
        results.check_writable(own)
        evaluate.run(Options(config, own, False), lambda asked: evaluate.load(asked, load()))
        parts = {line["method"]: line["seconds"] for line in _read(own / evaluate.COSTS.lines)}
        return Run(_read(own / results.GENERATIONS), parts)

    if known is None:
        about["nodes"] = list(TIMED)
        timed = _kept(workdir / PASSES, about, lambda: time_passes(config, prompts, load()))
        verify_costs = np.interp(range(1, MOST_NODES + 1), TIMED, timed).tolist()
        chains = run(config, MEASURED)
        plain = chains.round_seconds(PLAIN)
    else:
        about["dtype"] = known.dtype
        sizes = _kept(workdir / SIZES, about, lambda: count_work(config, prompts, load(), known.dtype))
        work, context = theory.Work(*sizes["target"]), sizes["context"]
        cost_at = devices.roofline(work, known.device, context)
        verify_costs = [cost_at(batch, nodes) for nodes in range(1, MOST_NODES + 1)]
        chains = run(config, MEASURED)
        plain = theory.pass_seconds(work, known.device, batch, 1, context)
        for name, draft in sizes["drafters"].items():
            step = theory.pass_seconds(theory.Work(*draft), known.device, batch, 1, 0) if draft else 0.0
            drafter = methods[name]["drafter"]
            step /= drafter["draft_length"] if drafter["name"] in AT_ONCE else 1
            modelled[name] = Costs(step / plain, tuple(verify_costs))

    def candidate(found: Run, name: str, costs: Costs | None) -> Candidate:
        """As it was counted, at these costs or at those of the run."""
        drafter = methods[name]["drafter"]
        counted = _counted(found.lines, name, drafter)
        if costs is not None:
            return counted._replace(costs=costs, prefill_seconds=0.0, compile_seconds=0.0)
        return counted._replace(costs=_calibrated(found, name, drafter, verify_costs))

    found = [candidate(chains, name, modelled.get(name)) for name in methods]
    heads = [c for c in found if methods[c.name]["drafter"]["name"] in HEADS]
    best = max(1.0, *(p.factor for c in found for p in predictions(c, plain, question.max_new_tokens)))
    trees = promising_trees(heads, TREES, best)
    for name, num_nodes in trees.items():
        tree = f"{name}_tree_{num_nodes}"
        methods[tree] = tree_of(methods[name], num_nodes)
        own = run(evaluation(question, {tree: methods[tree]}), f"{MEASURED}_{tree}")
        found.append(candidate(own, tree, modelled.get(name)))
    no_trees = None
    if heads and not trees:
        prices = " and ".join(f"v({nodes}) = {verify_costs[nodes - 1]:.2f}" for nodes in TREES[1:])
        no_trees = (
            f"Trees of the heads were not measured: passes cost {prices} plain steps, and whatever siblings "
            f"add, none is expected to gain more than the best of the others, {best:.2f}."
        )
    return Measured(tuple(found), methods, tuple(prompts), plain, cost_at, no_trees)


def _calibrated(found: Run, name: str, drafter: Fields, verify_costs: Sequence[float]) -> Costs:
    """The costs by which a round costs what it did in the run, beside plain decoding."""
    depth, parts = drafter["draft_length"], found.parts[name]
    share = parts["draft"] / sum(parts[part] for part in PARTS)
    whole = found.round_seconds(name) / found.round_seconds(PLAIN)
    return calibrate(whole, share, depth, drafter.get("num_nodes", depth + 1), verify_costs)


def _counted(lines: Sequence[results.Line], name: str, drafter: Fields) -> Candidate:
    own, plain = ({line["row"]: line for line in lines if line["method"] == m} for m in (name, PLAIN))

    def beyond_plain(kind: str) -> list[float]:
        return [own[row][kind] - plain[row][kind] for row in own]

    depth, is_tree = drafter["draft_length"], "num_nodes" in drafter
    fixed = (depth,) if is_tree else tuple(range(1, LONGEST + 1))
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


def time_passes(
    config: ConfigDict, prompts: Sequence[Prompt], loaded: LoadedTarget, num_rounds: int = ROUNDS
) -> list[float]:
    """v(N) for the N of `TIMED`: medians of the ratios to N = 1 of the same round, all N taking turns."""
    target, (batch,), context = loaded.target, config.batch_sizes, _context(config, prompts, loaded)
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

    tell(f"timing passes over {TIMED[0]} to {MOST_NODES} nodes")
    # The first round compiles.
    rounds = [[seconds(nodes) for nodes in TIMED] for _ in range(num_rounds + 1)][1:]
    costs = [statistics.median(r[i] / r[0] for r in rounds) for i in range(len(TIMED))]
    # A pass does not get cheaper by more nodes; what says so is noise.
    return np.maximum.accumulate(costs).tolist()


def count_work(
    config: ConfigDict, prompts: Sequence[Prompt], loaded: LoadedTarget, dtype: str
) -> dict[str, Any]:
    """What passes of the target and of every drafter read and compute, weights in `dtype` or the method's."""
    unembedding = loaded.config.vocab_size * loaded.config.hidden_size
    drafters = {}
    for name, method in config.methods.to_dict().items():
        own, size = method.get("drafter_dtype"), method.get("draft_vocab_size")
        _, weights = build_drafter(method["drafter"], loaded, own, size)
        drafters[name] = devices.draft_work(weights, unembedding, own or dtype)
    context = _context(config, prompts, loaded)
    return {"context": context, "target": memory.work(loaded.config, dtype), "drafters": drafters}


def _context(config: ConfigDict, prompts: Sequence[Prompt], loaded: LoadedTarget) -> int:
    """The tokens that stand in the target's cache in the middle of an answer to a usual prompt."""
    lengths = map(len, encode(prompts, load_tokenizer(loaded), config.chat))
    return int(statistics.median(lengths)) + config.max_new_tokens[0] // 2


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
