"""A drafter with a cache of its own: what it proposes is its model's law, after any number of rounds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import draft_vocab
from specjax.decode import row_keys, start
from specjax.drafters import draft_model, self_speculative
from specjax.errors import ConfigError
from specjax.models.functional import init_params, keep_layers, make_target, stack_layers
from specjax.models.llama import LlamaConfig
from specjax.models.quantize import quantize
from specjax.sampling import make_warp, warp_probs
from specjax.step import Method, speculative_round
from specjax.trees.topology import chain_mask
from specjax.types import ROOT, Context, Drafter, ModelParams, Params, Target, TrainingBatch, not_offered
from specjax.verify import multi_round, target_only, without_replacement

pytestmark = pytest.mark.quick_compile

PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7], [9, 8]]
WARP = make_warp(3, temperature=0.8, top_k=20)


def fresh_laws(model: Target, params: Params, texts: np.ndarray) -> jax.Array:
    """The model's warped law after every token of the texts [B, T], read in one pass."""
    batch, size = texts.shape
    positions = jnp.broadcast_to(jnp.arange(size), (batch, size))
    causal, cache = chain_mask(batch, size), model.init_cache(batch, size)
    return warp_probs(model.forward(params, jnp.asarray(texts), positions, causal, cache).logits, WARP)


def check_drafts_over_rounds(
    target: Target, drafter: Drafter, params: ModelParams, laws_of: Callable[[jax.Array], jax.Array]
) -> set[int]:
    """Every draft law is that of a fresh reading of context and draft; returns the accepted lengths.

    `laws_of` gives the warped laws [B, T, V] after every token of the texts [B, T].
    """
    rules = {law: rule.verify for rule in (multi_round, without_replacement) for law in rule.LAWS}
    method = Method(target, drafter, rules[drafter.law])
    keys = row_keys(0, range(3))
    request, state = start(method, params, PROMPTS, max_new_tokens=40, warp=WARP, keys=keys, capacity=96)
    advance = jax.jit(speculative_round, static_argnums=(0, 1, 2))
    read = jax.jit(laws_of)
    accepted = set()
    for _ in range(7):
        texts, lengths = np.array(state.tokens), np.array(state.length)
        done = advance(*method, params, request, state)
        draft, state = jax.device_get(done.draft), done.state
        for node in range(drafter.num_nodes):
            # The path from the root to the node, which may be the root.
            path = [node]
            while path[0] != ROOT:
                path.insert(0, int(draft.parents[0, path[0]]))
            if len(path) > drafter.max_depth:
                continue  # a leaf has no law
            for row, length in enumerate(lengths):
                texts[row, length : length + len(path) - 1] = draft.tokens[row, path[1:]]
            laws = np.asarray(read(texts))
            for row, length in enumerate(lengths):
                np.testing.assert_allclose(
                    draft.probs[row, node], laws[row, length + len(path) - 2], atol=2e-4, err_msg=f"row {row}"
                )
        accepted |= set(done.info.num_accepted.tolist())
    return accepted


def test_law_of_a_draft_model_after_any_number_accepted(
    tiny_config: LlamaConfig, tiny_target: Target, tiny_params: Params
) -> None:
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda w: w * (1 + 0.1 * rng.normal(size=w.shape).astype(w.dtype)), tiny_params)
    drafter = draft_model.build(draft_model.Config("a noisy copy", draft_length=3), tiny_target, tiny_config)
    params = ModelParams(tiny_params, weights)
    accepted = check_drafts_over_rounds(
        tiny_target, drafter, params, lambda texts: fresh_laws(tiny_target, weights, texts)
    )
    assert accepted == {0, 1, 2, 3}  # all, too: then two tokens are missing from its cache


@pytest.mark.parametrize("proposal", ["iid_siblings", "siblings_without_replacement"])
def test_law_of_every_node_of_a_tree(
    tiny_config: LlamaConfig, tiny_target: Target, tiny_params: Params, proposal: str
) -> None:
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda w: w * (1 + 0.05 * rng.normal(size=w.shape).astype(w.dtype)), tiny_params)
    config = draft_model.Config("a noisy copy", draft_length=3, branching=(2, 2), proposal=proposal)
    drafter = draft_model.build(config, tiny_target, tiny_config)
    assert (drafter.num_nodes, drafter.max_depth) == (1 + 2 + 4 + 4, 3)
    params = ModelParams(tiny_params, weights)
    accepted = check_drafts_over_rounds(
        tiny_target, drafter, params, lambda texts: fresh_laws(tiny_target, weights, texts)
    )
    assert {0, 1, 3} <= accepted  # its cache is compacted along paths of every length


def test_the_most_probable_children_come_first(
    tiny_config: LlamaConfig, tiny_target: Target, tiny_params: Params
) -> None:
    config = draft_model.Config("itself", draft_length=2, branching=(3,), proposal="point_mass")
    drafter = draft_model.build(config, tiny_target, tiny_config)
    keys = row_keys(0, range(3))
    params = ModelParams(tiny_params, tiny_params)
    method = Method(tiny_target, drafter, target_only.verify)
    options = {"max_new_tokens": 8, "warp": WARP, "keys": keys, "capacity": 64}
    _, state = start(method, params, PROMPTS, **options)
    context = Context(state.tokens, state.length, WARP)
    draft = jax.device_get(jax.jit(drafter.propose)(params, keys, state.draft_state, context)[0])
    assert draft.probs is None
    read = jax.jit(functools.partial(fresh_laws, tiny_target))
    laws = np.asarray(read(tiny_params, np.asarray(state.tokens)[:, :8]))
    for row, prompt in enumerate(PROMPTS):
        best = np.argsort(-laws[row, len(prompt) - 1])[:3]
        assert draft.tokens[row, 1:4].tolist() == best.tolist()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"draft_length": 0}, "draft_length is 0"),
        ({"branching": (2,)}, "siblings are iid_siblings or siblings_without_replacement"),
        ({"branching": (2, 2, 2), "proposal": "iid_siblings"}, "at most draft_length = 2"),
        ({"branching": (0,), "proposal": "iid_siblings"}, "each at least 1"),
        ({"num_nodes": 4, "proposal": "iid_siblings", "branching": (2,)}, "drawn siblings lose their law"),
        ({"num_nodes": 9, "proposal": "point_mass", "branching": (2, 2)}, "give 4 to 7"),
        ({"proposal": "iid_sibling"}, "did you mean 'iid_siblings'"),
    ],
)
def test_trees_that_cannot_be_are_named(fields: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        draft_model.Config(**{"source": "elsewhere", "draft_length": 2} | fields)


def test_law_of_the_thinned_target(tiny_config: LlamaConfig) -> None:
    config = dataclasses.replace(tiny_config, num_layers=3)
    target, weights = make_target(config), init_params(config, seed=1)
    weights = jax.tree.map(lambda leaf: 6 * leaf if leaf.ndim > 1 else leaf, weights)
    drafter = self_speculative.build(self_speculative.Config(draft_length=3, skip_layers=(1,)), target)
    thinned = make_target(dataclasses.replace(config, num_layers=2))
    kept = keep_layers(weights, (0, 2))
    check_drafts_over_rounds(
        target, drafter, ModelParams(weights, {}), lambda texts: fresh_laws(thinned, kept, texts)
    )


def test_another_vocabulary_is_refused(tiny_config: LlamaConfig, tiny_target: Target) -> None:
    other = dataclasses.replace(tiny_config, vocab_size=33)
    with pytest.raises(
        ConfigError, match="'elsewhere' has a vocabulary of 33 tokens and the target one of 32"
    ):
        draft_model.build(draft_model.Config("elsewhere", draft_length=2), tiny_target, other)


@pytest.mark.parametrize(
    ("skipped", "named"),
    [((2,), r"layers \[2\]: the target has layers 0 to 1"), ((), "0 of 2 layers"), ((0, 1), "2 of 2 layers")],
)
def test_layers_that_cannot_be_skipped_are_named(
    tiny_target: Target, skipped: tuple[int, ...], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        self_speculative.build(self_speculative.Config(draft_length=2, skip_layers=skipped), tiny_target)


def learned_params(target: Target, target_params: Params, noise: float, **training) -> ModelParams:
    """The weights that a learned draft model starts from, each off by a factor."""
    settings = draft_model.Training(**training)
    trainable = draft_model.trainable(draft_model.Config(draft_length=1), settings, target)
    weights, fixed = trainable.init(jax.random.key(0), target_params, np.arange(target.vocab_size))
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda w: w * (1 + noise * rng.normal(size=w.shape)).astype(w.dtype), weights)
    return ModelParams(target_params, draft_vocab.complete(weights | fixed, target, target_params))


def training_laws(target: Target, params: ModelParams, texts: jax.Array) -> jax.Array:
    """What the forward pass of training makes of the texts."""
    scores = draft_model.text_scores(target, params, jnp.asarray(texts))
    return warp_probs(draft_vocab.in_target_vocab(scores, params, target.vocab_size), WARP)


LEARNED = {
    "chain of few tokens": ({}, {"draft_vocab_size": 24}),
    "tree": ({"branching": (2, 2), "proposal": "siblings_without_replacement"}, {}),
}


@pytest.mark.parametrize("case", LEARNED)
def test_decoding_drafts_what_training_computes(tiny_target: Target, tiny_params: Params, case: str) -> None:
    """Teacher-forced on what decoding did, the training forward gives decoding's laws."""
    shape, training = LEARNED[case]
    params = learned_params(tiny_target, tiny_params, 0.05, **training)
    drafter = draft_model.build(draft_model.Config(draft_length=3, **shape), tiny_target)
    accepted = check_drafts_over_rounds(
        tiny_target, drafter, params, lambda texts: training_laws(tiny_target, params, texts)
    )
    assert len(accepted) > 1


def test_layers_in_another_order_are_found(tiny_target: Target, tiny_params: Params) -> None:
    """The negative control: decoding with layers that training has the other way round."""
    params = learned_params(tiny_target, tiny_params, 0.05)
    swapped = params._replace(drafter=keep_layers(params.drafter, (1, 0)))
    drafter = draft_model.build(draft_model.Config(draft_length=3), tiny_target)
    with pytest.raises(AssertionError, match="row"):
        check_drafts_over_rounds(
            tiny_target, drafter, params, lambda texts: training_laws(tiny_target, swapped, texts)
        )


@pytest.mark.parametrize(
    ("dtype", "tied", "stacked"),
    [("float32", True, False), ("float32", False, True), ("bfloat16", True, False), ("int8", True, False)],
)
def test_with_all_layers_it_starts_as_the_target(
    tiny_config: LlamaConfig, dtype: str, tied: bool, stacked: bool
) -> None:
    config = dataclasses.replace(tiny_config, tie_embeddings=tied)
    weights = jax.tree.map(lambda leaf: 6 * leaf if leaf.ndim > 1 else leaf, init_params(config, seed=0))
    if dtype == "int8":
        weights = quantize(weights)
    weights = jax.tree.map(lambda leaf: leaf if leaf.dtype == np.int8 else jnp.asarray(leaf), weights)
    if dtype == "bfloat16":
        weights = jax.tree.map(lambda leaf: leaf.astype(dtype), weights)
    target_params = stack_layers(weights) if stacked else weights
    target = make_target(config, dtype=jnp.dtype(dtype), stacked=stacked)
    params = learned_params(target, target_params, 0.0)
    texts = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 12)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(12)[None], (2, 12))
    cache = target.init_cache(2, 12)
    forward = jax.jit(target.forward, static_argnums=5)
    read = forward(target_params, texts, positions, chain_mask(2, 12), cache, ("last_hidden",))
    scores = jax.jit(functools.partial(draft_model.text_scores, target))(params, texts)
    tolerance = 0.05 if dtype == "bfloat16" else 1e-4
    np.testing.assert_allclose(scores, read.logits, atol=tolerance * float(jnp.abs(read.logits).max()))

    trainable = draft_model.trainable(draft_model.Config(draft_length=1), draft_model.Training(), target)
    batch = TrainingBatch(texts, jnp.ones((2, 12), bool), jnp.asarray([12, 7]), read.features)
    loss = jax.jit(trainable.loss)
    _, report = loss(params, batch, jax.random.key(0))
    assert report["overlap"] > 0.95
    other = params._replace(drafter=keep_layers(params.drafter, (1, 0)))
    assert loss(other, batch, jax.random.key(0))[1]["overlap"] < 0.9


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (0, 29)),
        ({"num_layers": 1}, (0,)),
        ({"num_layers": 3}, (0, 14, 29)),
        ({"num_layers": 30}, tuple(range(30))),
        ({"num_layers": 3, "layers": (5, 0, 7)}, (5, 0, 7)),
    ],
)
def test_layers_it_starts_from(
    tiny_config: LlamaConfig, tiny_target: Target, fields: dict, expected: tuple[int, ...]
) -> None:
    target = tiny_target._replace(config=dataclasses.replace(tiny_config, num_layers=30))
    assert draft_model.first_layers(draft_model.Training(**fields), target) == expected


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_layers": 0}, "num_layers is 0: give 1 to 2"),
        ({"num_layers": 3}, "num_layers is 3: give 1 to 2"),
        ({"layers": (0,)}, "layers names 1 layers and training.num_layers is 2"),
        ({"layers": (0, 2)}, r"layers are \(0, 2\): the target has layers 0 to 1"),
        ({"layers": (-1, 1)}, "the target has layers 0 to 1"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0: give 1 to 32"),
        ({"draft_vocab_size": 33}, "draft_vocab_size is 33: give 1 to 32"),
        ({"distance": "forward_lk"}, "did you mean 'forward_kl'"),
    ],
)
def test_training_that_cannot_be_is_named(
    tiny_target: Target, tiny_params: Params, fields: dict, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        learned_params(tiny_target, tiny_params, 0.0, **fields)


def test_target_without_ends_is_refused(tiny_target: Target) -> None:
    with pytest.raises(ConfigError, match="no embedding and head"):
        draft_model.build(draft_model.Config(draft_length=2), tiny_target._replace(embed=not_offered))
