"""Drafters that learn: their losses compare what decoding drafts with what the target would say."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax import draft_vocab
from specjax.decode import row_keys, start
from specjax.drafters import eagle, eagle3, medusa
from specjax.errors import ConfigError
from specjax.models.functional import init_module
from specjax.models.medusa import Head, MedusaConfig, ResBlock
from specjax.sampling import make_warp, warp_probs
from specjax.step import Method, speculative_round
from specjax.trees.topology import chain_mask
from specjax.types import ForwardOutput, ModelParams, Params, Target, Trainable, TrainingBatch
from specjax.verify import rejection

pytestmark = pytest.mark.quick_compile
DEPTH = 3
PROMPTS = [[5, 7], [1, 2, 3, 4, 5, 6, 7], [9, 8, 3]]
WARP = make_warp(3, temperature=0.8, top_k=20)

# The module, its config and its training.
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "eagle reduced": (eagle, {}, {"unroll_steps": DEPTH, "noise": 0.0, "draft_vocab_size": 20}),
    "eagle3 reduced": (eagle3, {"state_layers": (0, 1), "draft_vocab_size": 20}, {"unroll_steps": DEPTH}),
    "eagle3 sharing": (
        eagle3,
        {"state_layers": (0, 2), "draft_vocab_size": 20, "own_unembedding": False},
        {"unroll_steps": DEPTH},
    ),
    "medusa": (medusa, {"num_layers": 2}, {}),
    "medusa own": (medusa, {"own_unembedding": True}, {}),
}


@dataclasses.dataclass
class Learner:
    """A drafter with random weights that matter, and what its loss compares with what."""

    module: Any
    config: Any
    trainable: Trainable
    params: ModelParams
    seen: list[tuple[jax.Array, jax.Array]]  # logits, target logits, in the order of the drafts

    def compare(self, batch: TrainingBatch) -> list[tuple[jax.Array, jax.Array]]:
        """What the loss compares of the batch."""
        self.seen.clear()
        self.trainable.loss(self.params, batch, jax.random.key(0))
        return list(self.seen)


@pytest.fixture(params=CASES)
def learner(
    request: pytest.FixtureRequest, tiny_target: Target, tiny_params: Params, monkeypatch: pytest.MonkeyPatch
) -> Learner:
    module, fields, training = CASES[request.param]
    config = module.Config(draft_length=DEPTH, **fields)
    trainable = module.trainable(config, module.Training(**training), tiny_target)
    counts = np.random.default_rng(1).permutation(tiny_target.vocab_size)
    weights, fixed = trainable.init(jax.random.key(1), tiny_params, counts)
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda w: w + 0.2 * rng.normal(size=w.shape).astype(w.dtype), weights)
    params = ModelParams(tiny_params, draft_vocab.complete(weights | fixed, tiny_target, tiny_params))
    seen: list[tuple[jax.Array, jax.Array]] = []
    original = module.foresight

    def spying(logits, target_logits, *rest):
        seen.append((logits, target_logits))
        return original(logits, target_logits, *rest)

    monkeypatch.setattr(module, "foresight", spying)
    return Learner(module, config, trainable, params, seen)


def read(learner: Learner, target: Target, texts: np.ndarray) -> tuple[TrainingBatch, ForwardOutput]:
    """Texts [B, T] as a batch of training, and what the target makes of them."""
    batch, size = texts.shape
    tokens, positions = jnp.asarray(texts), jnp.broadcast_to(jnp.arange(size)[None], (batch, size))
    cache, mask = target.init_cache(batch, size), chain_mask(batch, size)
    names = learner.trainable.features
    out = target.forward(learner.params.target, tokens, positions, mask, cache, names)
    return TrainingBatch(tokens, tokens >= 0, jnp.full(batch, size), out.features), out


def test_decoding_drafts_what_training_computes(learner: Learner, tiny_target: Target) -> None:
    """Teacher-forced on what decoding did, after any number of rounds, the loss sees decoding's laws."""
    drafter = learner.module.build(learner.config, tiny_target)
    method, params = Method(tiny_target, drafter, rejection.verify), learner.params
    keys = row_keys(0, range(3))
    request, state = start(method, params, PROMPTS, max_new_tokens=12, warp=WARP, keys=keys, capacity=32)
    advance = jax.jit(speculative_round, static_argnums=(0, 1, 2))

    @jax.jit
    def compare(texts: jax.Array) -> list[jax.Array]:
        """The laws [B, T, V], at each depth, that the loss compares with the target's."""
        compared = learner.compare(read(learner, tiny_target, texts)[0])
        whole = [draft_vocab.in_target_vocab(own, params, tiny_target.vocab_size) for own, _ in compared]
        return [warp_probs(logits, WARP) for logits in whole]

    # A head of Medusa's reads the state before the pending token at any depth, the others' go on from there.
    ahead = 0 if learner.module is medusa else 1
    accepted, off_by_one = set(), 0.0
    for _ in range(4):
        texts, lengths = np.array(state.tokens), np.array(state.length)
        done = advance(*method, params, request, state)
        draft, state = jax.device_get(done.draft), done.state
        for row, length in enumerate(lengths):
            # The target's states of drafts are there too, and must not matter.
            texts[row, length : length + DEPTH] = draft.tokens[row, 1:]
        for depth, laws in enumerate(jax.device_get(compare(texts))):
            places = lengths - 2 + ahead * depth
            at, late = (laws[np.arange(3), places + shift] for shift in (0, 1))
            drafted = draft.probs[:, depth]
            np.testing.assert_allclose(drafted, at, atol=2e-4)
            off_by_one = max(off_by_one, np.abs(drafted - late).max())
        accepted |= set(done.info.num_accepted.tolist())
    assert len(accepted) > 1
    assert off_by_one > 0.05, "all places are alike"


def test_loss_compares_with_the_laws_that_the_target_decodes_by(
    learner: Learner, tiny_target: Target
) -> None:
    """With the final norm, of the tokens that are drafted, and of none else."""
    texts = np.random.default_rng(0).integers(0, tiny_target.vocab_size, (2, 9))
    batch, out = jax.jit(lambda: read(learner, tiny_target, texts))()
    compare = jax.jit(lambda batch: learner.compare(batch))
    tokens = np.asarray(learner.params.drafter.get("d2t", np.arange(tiny_target.vocab_size)))
    expected = np.asarray(out.logits)[..., tokens]
    for _, found in compare(batch):
        np.testing.assert_allclose(found, expected, atol=1e-4)
    # The control: states as they are before the norm, longer or shorter than after it.
    unnormed = batch.features["last_hidden"] * jnp.linspace(0.5, 2.0, texts.shape[1])[None, :, None]
    features = batch.features | {"last_hidden": unnormed}
    _, found = compare(batch._replace(features=features))[0]
    assert np.abs(found - expected).max() > 0.1


def test_heads_and_their_blocks_share_no_weights(tiny_target: Target) -> None:
    make = medusa.module_of(medusa.Config(draft_length=3, num_layers=2), tiny_target)
    weights = init_module(make, jax.random.key(0))
    assert list(weights["heads"]) == [0, 1, 2]
    assert all(list(head["blocks"]) == [0, 1] for head in weights["heads"].values())

    class Multiplied(Head):
        """The fault: one block, listed twice."""

        def __init__(self, config: MedusaConfig, **options: Any):
            super().__init__(config, **options)
            self.blocks = nnx.List([ResBlock(config.hidden_size, **options)] * config.num_layers)

    sizes = MedusaConfig(8, 1, 2, None)
    shared = init_module(lambda rngs: Multiplied(sizes, dtype=jnp.float32, rngs=rngs), jax.random.key(0))
    assert list(shared["blocks"]) == [0]


@pytest.mark.parametrize(
    ("module", "field", "values"),
    [
        (eagle, "unroll_steps", (0, -1)),
        (eagle, "noise", (-0.1, math.nan, math.inf)),
        (eagle, "feature_weight", (-0.1, math.nan)),
        (eagle, "draft_vocab_size", (0,)),
        (eagle3, "unroll_steps", (0,)),
        (eagle3, "decay", (0.0, -1.0, math.nan)),
        (medusa, "decay", (0.0, math.inf)),
        (medusa, "draft_vocab_size", (0,)),
        (medusa, "lm_weight", (-1.0,)),
    ],
)
def test_impossible_training_is_refused_by_its_field(module: Any, field: str, values: tuple) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"training\.{field} is {value}: give"):
            module.Training(**{field: value})


def test_heads_are_remembered_whatever_length_is_drafted_later() -> None:
    """A file of four heads is one of four heads to a drafter that uses two of them."""
    trained = medusa.Config(draft_length=4).decided
    assert trained.num_heads == 4
    assert medusa.Config(draft_length=2, num_heads=trained.num_heads).heads == 4
    assert medusa.Config(draft_length=2).heads == 2
