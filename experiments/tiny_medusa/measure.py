"""Medusa's heads, trained jointly with a tiny target, beside a shrunken copy of it: what is each worth?

    python -m experiments.tiny_medusa.measure --text tinyshakespeare.txt

Trains target and heads together, the target alone and the copy (tiny.py), decodes held-out prompts one by
one at temperatures 0 and 1, prices drafts and passes in turns, and writes results.json, tables.md and the
plots. Weights and generations are kept in --workdir: the same command goes on with the part that is missing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.tiny_medusa import tiny
from specjax.analysis import plots, theory, tree_plot
from specjax.decode import row_keys, start
from specjax.drafters import medusa
from specjax.eval import results
from specjax.eval.compare import PLAIN, Generation, Settings, compare, make_batches
from specjax.eval.metrics import summarize
from specjax.models.functional import LAST_HIDDEN, pure
from specjax.modules import find_module
from specjax.prefill import read_prompt
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.storage import cache_folder
from specjax.trees import static
from specjax.trees.optimal import expected_tokens
from specjax.trees.topology import chain_mask
from specjax.types import Context, DecodeState, Drafter, ModelParams

HERE = Path(__file__).parent
TEMPERATURES = (0.0, 1.0)
NUM_RANKS, TREE_NODES = 8, 16
HEADS, TREE, COPY = "Medusa, chain", "Medusa, tree", "copy, chain"
CAPACITY, CONTEXT = 512, 112  # of the passes that are priced: what the comparison uses, half-way
REPEATS, IN_TURN = 20, 16

TABLE_HEAD = (
    "| method | tokens a pass | accepted at 1 | at 2 | at 3 | predicted | measured | by weights | identical |"
)

Methods = dict[str, tuple[Method, ModelParams]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    tiny.add_arguments(parser)
    parser.add_argument("--out", type=Path, default=HERE, help="the folder of what is written")
    parser.add_argument("--prompts", type=int, default=48)
    args = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))

    corpus, _, weights = tiny.open_workdir(args)
    accuracies = head_accuracies(weights, corpus.prompts(args.prompts, offset=0.5))
    tree = static.sparse(accuracies, TREE_NODES)
    prompts = corpus.prompts(args.prompts)
    params = ModelParams(weights.target, weights.heads), ModelParams(weights.target, weights.copy)
    found: dict[str, Any] = {
        "weights": {name: size_of(getattr(weights, name)) for name in ("target", "heads", "copy")},
        "target_loss": target_loss(weights, corpus.held_out),
        "accuracy_by_rank": accuracies.tolist(),
        "tree": {"paths": tree.paths[1:], "expected_T0": expected_tokens(tree, accuracies)},
    }
    for temperature in TEMPERATURES:
        methods = make_methods(tree, temperature, *params)
        file = args.workdir / f"generations_{args.prompts}_T{temperature:g}.json"
        if not file.exists():
            generations = decode_all(methods, prompts, temperature)
            results.write_whole(file, json.dumps([generation._asdict() for generation in generations]))
        generations = [Generation(**fields) for fields in json.loads(file.read_text())]
        priced = prices(methods, prompts[0], temperature)
        by_method = summary(generations, greedy=temperature == 0)
        predict(by_method, priced, methods)
        found[f"T{temperature:g}"] = {"methods": by_method, "prices": priced}

    args.out.mkdir(parents=True, exist_ok=True)
    results.write_whole(args.out / "results.json", json.dumps(found, indent=1) + "\n")
    text = tables(found)
    results.write_whole(args.out / "tables.md", text)
    print(text)
    draw(found, tree, args.out)


def make_methods(
    tree: static.StaticTree, temperature: float, heads: ModelParams, copy: ModelParams
) -> Methods:
    """Plain decoding, Medusa as a chain and as a tree, and the copy with as many drafts.

    At temperature 0 the tree holds the likeliest tokens; above it siblings are drawn, which accepts more.
    """
    greedy = temperature == 0
    proposal = "point_mass" if greedy else "siblings_without_replacement"
    of_tree = medusa.Config(
        draft_length=tree.max_depth, num_heads=tiny.NUM_HEADS, paths=tree.paths[1:], proposal=proposal
    )
    chain_rule, tree_rule = ("greedy", "greedy") if greedy else ("rejection", "without_replacement")

    def speculative(drafter: Drafter, rule: str) -> Method:
        return Method(tiny.MODEL, drafter, find_module("verify", rule).verify)

    return {
        PLAIN: (Method(tiny.MODEL), heads),
        HEADS: (speculative(medusa.build(tiny.HEADS, tiny.MODEL), chain_rule), heads),
        TREE: (speculative(medusa.build(of_tree, tiny.MODEL), tree_rule), heads),
        COPY: (speculative(tiny.copy_drafter(tiny.NUM_HEADS), chain_rule), copy),
    }


def size_of(params: Any) -> int:
    """The number of weights."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def target_loss(weights: tiny.Weights, held_out: np.ndarray) -> dict[str, Any]:
    """The loss on held-out text of the target trained with the heads and of the one trained alone."""
    joint, alone = (tiny.text_loss(params, held_out) for params in (weights.target, weights.alone))
    ones = np.ones(len(joint))
    return {
        "joint": tiny.interval(joint, ones),
        "alone": tiny.interval(alone, ones),
        "joint - alone": tiny.interval(joint - alone, ones),
    }


def head_accuracies(weights: tiny.Weights, prompts: list[list[int]]) -> np.ndarray:
    """How often each rank of each head is the token of the target's greedy text, a head a row [D, R]."""
    params = ModelParams(weights.target, weights.heads)
    texts, _, _ = tiny.write(Method(tiny.MODEL), params, prompts, temperature=0.0)
    run = pure(medusa.module_of(tiny.HEADS, tiny.MODEL))

    @jax.jit
    def ranks_of(params: ModelParams, tokens: jax.Array) -> list[jax.Array]:
        empty = tiny.MODEL.init_cache(*tokens.shape)
        _, read = read_prompt(tiny.MODEL.forward, params.target, tokens, empty, (LAST_HIDDEN,))
        ranks = []
        for ahead, output in enumerate(run(medusa.heads_of(params), read[LAST_HIDDEN]), start=2):
            logits = medusa.scores_of(tiny.MODEL, params, output)[:, tiny.PROMPT - 1 : -ahead]
            own = jnp.take_along_axis(logits, tokens[:, tiny.PROMPT - 1 + ahead :, None], axis=-1)
            ranks.append((logits > own).sum(-1))
        return ranks

    found = [np.asarray(ranks) for ranks in ranks_of(params, jnp.asarray(texts))]
    table = np.array([[(ranks == rank).mean() for rank in range(NUM_RANKS)] for ranks in found])
    # Far ranks are rare and their order is noise, but drawn siblings leave no gaps.
    return -np.sort(-table, axis=1)


def decode_all(methods: Methods, prompts: list[list[int]], temperature: float) -> list[Generation]:
    """Every method on every prompt, in turns, one prompt at a time."""
    settings = Settings(tiny.NEW_TOKENS, temperature, 0, 1.0, 0.0, seed=0, repeats=1, stop_tokens=())
    batches = dict(enumerate(make_batches(prompts, 1)))
    found = [generation for batch in compare(methods, batches, settings) for generation in batch]
    print(f"decoded {len(prompts)} prompts at temperature {temperature:g}", flush=True)
    return found


def summary(generations: list[Generation], *, greedy: bool) -> dict[str, Any]:
    """The metrics of each method, with intervals over prompts."""
    methods = summarize(generations, greedy=greedy)
    for name, metrics in methods.items():
        own = [generation for generation in generations if generation.method == name]
        metrics["tokens_per_step"] = tiny.interval([len(g.tokens) for g in own], [g.num_steps for g in own])
        metrics["acceptance_at_depth"] = [
            tiny.interval([g.accepted_at_depth[d] for g in own], [g.tried_at_depth[d] for g in own])
            for d in range(len(own[0].tried_at_depth))
        ]
    return methods


def prices(methods: Methods, prompt: list[int], temperature: float) -> dict[str, Any]:
    """Seconds of each draft and of passes over as many nodes, in turns, and their ratios to a plain pass."""
    programs: dict[str, Callable[[], Any]] = {}
    for name, (method, params) in methods.items():
        programs.setdefault(_pass(method.num_nodes), one_pass(params, method.num_nodes))
        if method.drafter is not None:
            programs[_draft(name)] = one_draft(method, params, prompt, temperature)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for repeat in range(REPEATS + 2):
        for name, program in programs.items():
            begin = time.perf_counter()
            jax.block_until_ready(program())
            if repeat >= 2:  # the first one compiles
                seconds[name].append(time.perf_counter() - begin)
    plain = np.array(seconds[_pass(1)])
    return {
        name: {
            "milliseconds": 1e3 * statistics.median(times) / IN_TURN,
            "cost": float(np.median(times / plain)),
        }
        for name, times in seconds.items()
    }


def one_pass(params: ModelParams, num_nodes: int) -> Callable[[], Any]:
    """Target passes over `num_nodes` nodes behind a context, IN_TURN of them."""
    cache = tiny.MODEL.init_cache(1, CAPACITY)._replace(length=jnp.asarray([CONTEXT]))
    positions, mask = CONTEXT + jnp.arange(num_nodes)[None], chain_mask(1, num_nodes)

    @jax.jit
    def run(params: ModelParams, carry: Any) -> Any:
        def again(carry: Any, _: None) -> tuple[Any, None]:
            out = tiny.MODEL.forward(params.target, carry[0], positions, mask, carry[1])
            return (out.logits.argmax(-1), out.cache), None

        return jax.lax.scan(again, carry, length=IN_TURN)[0]

    first = jnp.ones((1, num_nodes), jnp.int32), cache
    return lambda: run(params, first)[0]


def one_draft(
    method: Method, params: ModelParams, prompt: list[int], temperature: float
) -> Callable[[], Any]:
    """Whole drafts behind a prompt, IN_TURN of them."""
    assert method.drafter is not None
    keys, warp, propose = row_keys(0, [0]), make_warp(1, temperature), method.drafter.propose
    _, state = start(
        method, params, [prompt], max_new_tokens=tiny.NEW_TOKENS, warp=warp, keys=keys, capacity=CAPACITY
    )

    @jax.jit
    def run(params: ModelParams, state: DecodeState) -> Any:
        def again(carry: Any, _: None) -> tuple[Any, None]:
            # A draft that does not wait for the one before would be made once.
            tokens, draft_state = jax.lax.optimization_barrier((state.tokens, carry[1]))
            draft, draft_state = propose(params, keys, draft_state, Context(tokens, state.length, warp))
            return (draft.tokens, draft_state), None

        first = jnp.zeros((1, method.num_nodes), jnp.int32), state.draft_state
        return jax.lax.scan(again, first, length=IN_TURN)[0]

    return lambda: run(params, state)[0]


def predict(by_method: dict[str, Any], priced: Mapping[str, Any], methods: Methods) -> None:
    """Add the speed-up that tokens a pass and the prices of draft and pass predict, here and by weights.

    By weights a draft costs those that it multiplies with, in the target's, and every pass the same: a
    device that does nothing but read them.
    """
    for name, metrics in by_method.items():
        method, params = methods[name]
        tokens = metrics["tokens_per_step"]["value"]
        draft = 0.0 if name == PLAIN else priced[_draft(name)]["cost"]
        whole = priced[_pass(method.num_nodes)]["cost"]
        metrics["predicted_speedup"] = theory.speedup(tokens, 1, draft_cost=draft, verify_cost=whole)
        metrics["draft_weights"] = draft_weights(method, params) / size_of(params.target)
        metrics["predicted_by_weights"] = theory.speedup(tokens, 1, metrics["draft_weights"], verify_cost=1.0)


def draft_weights(method: Method, params: ModelParams) -> float:
    """How many weights a whole draft multiplies with, those of the target's head among them."""
    if "heads" not in params.drafter:
        return method.max_depth * size_of(params.drafter)
    unembedding = tiny.TARGET_SIZES.vocab_size * tiny.TARGET_SIZES.hidden_size
    return method.max_depth * (size_of(params.drafter) / tiny.NUM_HEADS + unembedding)


def _pass(num_nodes: int) -> str:
    return f"pass over {num_nodes}"


def _draft(name: str) -> str:
    return f"draft of {name}"


def tables(found: Mapping[str, Any]) -> str:
    """All tables as Markdown."""
    lines = ["| held-out loss, nats a token | value (95 %) |", "|---|---|"]
    lines += [f"| {name} | {tiny.shown(value, 4)} |" for name, value in found["target_loss"].items()]
    for temperature in TEMPERATURES:
        lines += ["", f"T = {temperature:g}", ""]
        lines += [TABLE_HEAD, "|---" * 9 + "|"]
        for name, metrics in found[f"T{temperature:g}"]["methods"].items():
            by_depth = [tiny.shown(share, 2) for share in metrics["acceptance_at_depth"]]
            by_depth += ["-"] * (tiny.NUM_HEADS - len(by_depth))
            low, high = metrics["speedup"]["interval"] or (1.0, 1.0)
            same = metrics["identical_to_greedy"]
            cells = [
                name,
                tiny.shown(metrics["tokens_per_step"], 2),
                *by_depth,
                f"{metrics['predicted_speedup']:.2f}",
                f"{metrics['speedup']['value']:.2f} ({low:.2f}-{high:.2f})",
                f"{metrics['predicted_by_weights']:.2f}",
                f"{same['identical']} of {same['of']}" if same else "-",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| head | " + " | ".join(f"rank {rank}" for rank in range(NUM_RANKS)) + " |"]
    lines += ["|---" * (NUM_RANKS + 1) + "|"]
    for ahead, shares in enumerate(found["accuracy_by_rank"], start=2):
        lines.append(f"| t+{ahead} | " + " | ".join(f"{share:.3f}" for share in shares) + " |")
    lines += ["", "| price at T = | " + " | ".join(f"{t:g}: ms | passes" for t in TEMPERATURES) + " |"]
    lines += ["|---" * (1 + 2 * len(TEMPERATURES)) + "|"]
    for name in found["T0"]["prices"]:
        both = (found[f"T{temperature:g}"]["prices"][name] for temperature in TEMPERATURES)
        row = " | ".join(f"{price['milliseconds']:.2f} | {price['cost']:.2f}" for price in both)
        lines.append(f"| {name} | {row} |")
    sizes = ", ".join(f"{name} {size}" for name, size in found["weights"].items())
    lines += ["", f"Weights: {sizes}."]
    return "\n".join(lines) + "\n"


def draw(found: Mapping[str, Any], tree: static.StaticTree, folder: Path) -> None:
    """Acceptance by depth, and the tree with the accuracies along each path."""
    series = {}
    for temperature in TEMPERATURES:
        for name in (HEADS, COPY):
            shares = found[f"T{temperature:g}"]["methods"][name]["acceptance_at_depth"]
            depths = range(1, len(shares) + 1)
            series[f"{name}, T = {temperature:g}"] = tiny.series(depths, shares)
    figure = plots.lines(series, x_label="depth", y_label="accepted, of those tried there")
    figure.axes[0].set_xticks(range(1, tiny.NUM_HEADS + 1))
    plots.save(figure, folder / "acceptance_by_depth.png")
    reach = [np.prod([found["accuracy_by_rank"][d][r] for d, r in enumerate(path)]) for path in tree.paths]
    title = f"Medusa's tree by products of accuracies: {sum(reach):.2f} tokens a pass"
    plots.save(tree_plot.tree(tree.parents, reach, weights=reach, title=title), folder / "tree.png")


if __name__ == "__main__":
    main()
