"""The tree of configs/top3_llama.py on a small model: what is drafted, seen and accepted."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.config import drafter_config, load_config
from specjax.decode import row_keys, start
from specjax.drafters import self_speculative
from specjax.models.functional import keep_layers, make_target
from specjax.modules import find_module
from specjax.sampling import make_warp
from specjax.step import Method, step
from specjax.trees.static import balanced
from specjax.trees.topology import ancestor_mask, chain_mask, children_of, depths
from specjax.types import Context, ModelParams, Params, Target

pytestmark = pytest.mark.quick_compile

CONFIG = Path(__file__).parent.parent / "configs" / "top3_llama.py"
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
LONGEST = 12
TOP = 3
TREE = balanced((TOP, TOP, TOP))


@functools.partial(jax.jit, static_argnums=0)
def read(target: Target, params: Params, tokens: jax.Array) -> jax.Array:
    batch, size = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(size), tokens.shape)
    mask = chain_mask(batch, size)
    return target.forward(params, tokens, positions, mask, target.init_cache(batch, size)).logits


def last_logits(target: Target, params: Params, texts: list[list[int]]) -> np.ndarray:
    """The logits after each text, read from scratch."""
    padded = np.array([text + [0] * (LONGEST - len(text)) for text in texts])
    ends = np.array([len(text) - 1 for text in texts])
    return np.asarray(read(target, params, jnp.asarray(padded)))[np.arange(len(texts)), ends]


@pytest.mark.slow
def test_top_3_at_every_depth_and_the_longest_correct_branch(
    tiny_target: Target, tiny_params: Params
) -> None:
    config = load_config(str(CONFIG))
    fields = config.drafter.to_dict() | {"skip_layers": (1,)}
    drafter = self_speculative.build(drafter_config(fields), tiny_target)
    assert (drafter.num_nodes, drafter.max_depth) == (40, 3)
    # A second layer that says little, so that the target often agrees with the first one alone.
    layers = tiny_params["layers"]
    weights = tiny_params | {"layers": layers | {1: jax.tree.map(lambda leaf: 0.5 * leaf, layers[1])}}
    method = Method(tiny_target, drafter, find_module("verify", config.verify).verify)
    params = ModelParams(weights, {})
    keys, warp = row_keys(0, range(3)), make_warp(3, config.temperature)
    request, state = start(method, params, PROMPTS, max_new_tokens=8, warp=warp, keys=keys)

    context = Context(state.tokens, state.length, warp)
    draft, _ = jax.jit(drafter.propose)(params, keys, state.draft_state, context)
    np.testing.assert_array_equal(draft.parents, np.tile(TREE.parents, (3, 1)))

    # Every node's children are the drafter's top 3 after the branch that leads to it, read by itself.
    tokens = np.array(draft.tokens)
    branches = [[*text, *branch(tokens[row], n)] for row, text in enumerate(PROMPTS) for n in range(40)]
    laws = last_logits(*thin(tiny_target, weights), branches).reshape(3, 40, -1)
    for node, children in enumerate(children_of(TREE.parents)):
        if children:
            likeliest = np.argsort(-laws[:, node], kind="stable")[:, :TOP]
            np.testing.assert_array_equal(tokens[:, children], likeliest)

    # In the target's one pass under the tree's mask each node is judged as if its branch stood alone.
    tokens[:, 0] = [text[-1] for text in PROMPTS]
    mask = ancestor_mask(draft.parents)
    positions = state.cache.length[:, None] + depths(mask)
    forward = jax.jit(tiny_target.forward)
    in_tree = forward(weights, jnp.asarray(tokens), positions, mask, state.cache).logits
    alone = last_logits(tiny_target, weights, branches).reshape(in_tree.shape)
    np.testing.assert_allclose(in_tree, alone, atol=1e-4)
    # The negative control: nodes that see all before them, as in a chain.
    chain = forward(weights, jnp.asarray(tokens), positions, chain_mask(3, 40), state.cache).logits
    assert (np.abs(chain - alone).max(-1)[:, 2:] > 1e-2).mean() > 0.9

    # Accepted is the longest branch of the target's own text, and the target's next token follows it.
    written, info = jax.jit(step, static_argnums=0)(method, params, request, state)
    accepted = []
    for row, text in enumerate(PROMPTS):
        own = greedy_text(tiny_target, weights, text, 4)
        correct = [b for b in branches[40 * row : 40 * (row + 1)] if b == own[: len(b)]]
        accepted.append(max(map(len, correct)) - len(text))
        end = int(written.length[row])
        assert written.tokens[row, :end].tolist() == own[: len(text) + accepted[row] + 1]
    assert info.num_accepted.tolist() == accepted
    assert max(accepted) > 0, "nothing was accepted: the test shows nothing"


def thin(target: Target, params: Params) -> tuple[Target, Params]:
    """The drafter as a model of its own: the first layer alone."""
    return make_target(dataclasses.replace(target.config, num_layers=1)), keep_layers(params, (0,))


def branch(tokens: np.ndarray, node: int) -> list[int]:
    """The drafted tokens from the root, which is left out, to a node."""
    return [int(tokens[TREE.paths.index(TREE.paths[node][:d])]) for d in range(1, TREE.depths[node] + 1)]


def greedy_text(target: Target, params: Params, text: list[int], num_new: int) -> list[int]:
    """The text with the target's likeliest tokens appended, each after reading all anew."""
    for _ in range(num_new):
        text = [*text, int(last_logits(target, params, [text])[0].argmax())]
    return text
