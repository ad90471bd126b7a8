"""The Llama against transformers on tiny random models, and against itself in other arrangements."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints.validate import expected_shapes
from specjax.errors import ConfigError
from specjax.models.functional import init_params, keep_layers, make_target, pack, stack_layers, unpack
from specjax.models.llama import LlamaConfig, RopeScaling
from specjax.trees.topology import ancestor_mask, depths
from specjax.types import NO_PARENT, ForwardOutput, Params, Target

TOKENS = np.random.default_rng(0).integers(0, 32, size=(2, 40))


def read(
    target: Target, params: Params, tokens: np.ndarray, features: tuple[str, ...] = (), first: int = 0
) -> ForwardOutput:
    """One causal pass over an empty cache, positions from `first` on."""
    batch, size = tokens.shape
    positions = jnp.broadcast_to(first + jnp.arange(size), (batch, size))
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (batch, size, size))

    @jax.jit
    def run(params: Params, tokens: jax.Array) -> ForwardOutput:
        return target.forward(params, tokens, positions, causal, target.init_cache(batch, size), features)

    return run(params, jnp.asarray(tokens))


def tree_of(state: dict[str, Any]) -> Params:
    """A state dict of transformers as nested dicts, layers numbered."""
    params: Params = {}
    for name, tensor in state.items():
        node = params
        *parents, leaf = [int(k) if k.isdigit() else k for k in name.removeprefix("model.").split(".")]
        for key in parents:
            node = node.setdefault(key, {})
        node[leaf] = jnp.asarray(tensor.numpy())
    return params


@pytest.mark.parametrize("variant", ["plain", "llama3_bias_untied"])
def test_logits_equal_those_of_transformers(tiny_config: LlamaConfig, variant: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    config = tiny_config
    if variant == "llama3_bias_untied":
        scaling = RopeScaling(8.0, 1.0, 4.0, 16)
        rope = {"rope_type": "llama3", "rope_theta": 500.0, **dataclasses.asdict(scaling)}
        config = dataclasses.replace(
            tiny_config,
            rope_theta=500.0,
            rope_scaling=scaling,
            attention_bias=True,
            mlp_bias=True,
            tie_embeddings=False,
        )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_positions,
            rope_parameters=rope,
            tie_word_embeddings=config.tie_embeddings,
            attention_bias=config.attention_bias,
            mlp_bias=config.mlp_bias,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, so that each must be in its place
            parameter.normal_(mean=0.3 if parameter.ndim == 1 else 0.0, std=0.3)
        wanted = model(torch.tensor(TOKENS), output_hidden_states=True)
    state = model.state_dict()
    if config.tie_embeddings:
        del state["lm_head.weight"]
    params = pack(tree_of(state))
    assert jax.tree.structure(params) == jax.tree.structure(init_params(config, 0))

    names = ("hidden.0", "hidden.1", "last_hidden")
    out = read(make_target(config), params, TOKENS, names)
    assert wanted.logits.std() > 0.1
    np.testing.assert_allclose(
        out.logits, wanted.logits.numpy(), atol=1e-5 * float(wanted.logits.abs().max())
    )
    for name, hidden in zip(names, wanted.hidden_states, strict=True):
        np.testing.assert_allclose(out.features[name], hidden.numpy(), atol=1e-4)


def test_unpacked_weights_have_their_published_shapes_and_pack_again(
    tiny_config: LlamaConfig, tiny_params: Params
) -> None:
    published = unpack(tiny_params, tiny_config)
    shapes = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(published)
    }
    assert shapes == expected_shapes(tiny_config)
    again = pack(published)
    assert jax.tree.structure(again) == jax.tree.structure(tiny_params)
    for packed, original in zip(jax.tree.leaves(again), jax.tree.leaves(tiny_params), strict=True):
        np.testing.assert_array_equal(packed, original)


def test_stacked_layers_compute_the_same(tiny_config: LlamaConfig, tiny_params: Params) -> None:
    names = ("hidden.0", "hidden.1", "last_hidden")
    apart = read(make_target(tiny_config), tiny_params, TOKENS, names)
    stacked = read(make_target(tiny_config, stacked=True), stack_layers(tiny_params), TOKENS, names)
    np.testing.assert_allclose(stacked.logits, apart.logits, atol=1e-4)
    for name in names:
        np.testing.assert_allclose(stacked.features[name], apart.features[name], atol=1e-4)
    np.testing.assert_allclose(stacked.cache.keys, jnp.stack(apart.cache.keys), atol=1e-4)
    np.testing.assert_allclose(stacked.cache.values, jnp.stack(apart.cache.values), atol=1e-4)


def test_each_branch_of_a_tree_is_the_text_it_spells(tiny_target: Target, tiny_params: Params) -> None:
    parents = jnp.asarray([[NO_PARENT, 0, 0, 1, 2, 3], [NO_PARENT, 0, 1, 1, 1, 4]])
    branches = [[[0, 1, 3, 5], [0, 2, 4]], [[0, 1, 2], [0, 1, 4, 5], [0, 1, 3]]]
    tokens = TOKENS[:, :6]
    mask = ancestor_mask(parents)
    cache = tiny_target.init_cache(2, 8)
    out = jax.jit(tiny_target.forward)(tiny_params, jnp.asarray(tokens), depths(mask), mask, cache)
    for row in range(2):
        for branch in branches[row]:
            alone = read(tiny_target, tiny_params, tokens[row : row + 1, branch])
            np.testing.assert_allclose(out.logits[row, branch], alone.logits[0], atol=1e-4)


def test_scratch_slots_of_earlier_passes_are_seen_where_the_mask_says(
    tiny_target: Target, tiny_params: Params
) -> None:
    tokens = jnp.asarray(TOKENS[:, :6])
    parents = jnp.asarray([[NO_PARENT, 0, 0, 1, 2, 3]] * 2)
    mask = ancestor_mask(parents)
    positions = depths(mask)
    forward = jax.jit(tiny_target.forward)
    whole = forward(tiny_params, tokens, positions, mask, tiny_target.init_cache(2, 8))
    cache = tiny_target.init_cache(2, 8)
    pieces = []
    for begin, end in [(0, 1), (1, 3), (3, 6)]:
        part = slice(begin, end)
        out = forward(tiny_params, tokens[:, part], positions[:, part], mask[:, part, :end], cache)
        cache = out.cache
        pieces.append(out.logits)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole.logits, atol=1e-4)


def test_only_differences_of_positions_matter_but_those_do(tiny_target: Target, tiny_params: Params) -> None:
    near = read(tiny_target, tiny_params, TOKENS).logits
    far = read(tiny_target, tiny_params, TOKENS, first=100).logits
    np.testing.assert_allclose(near, far, atol=2e-3)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((40, 40), bool)), (2, 40, 40))
    stretched = jnp.broadcast_to(2 * jnp.arange(40), (2, 40))
    empty = tiny_target.init_cache(2, 40)
    out = jax.jit(tiny_target.forward)(tiny_params, jnp.asarray(TOKENS), stretched, mask, empty)
    assert jnp.abs(out.logits - near).max() > 0.1


def test_kept_layers_are_renumbered(tiny_config: LlamaConfig, tiny_params: Params) -> None:
    thin = make_target(dataclasses.replace(tiny_config, num_layers=1))
    for layer in (0, 1):
        kept = keep_layers(tiny_params, (layer,))
        assert list(kept["layers"]) == [0]
        from_stack = keep_layers(stack_layers(tiny_params), (layer,))
        jax.tree.map(np.testing.assert_array_equal, kept, from_stack)
    assert (
        jnp.abs(
            read(thin, kept, TOKENS).logits - read(thin, keep_layers(tiny_params, (0,)), TOKENS).logits
        ).max()
        > 0.1
    )


def test_unknown_feature_is_named_with_its_nearest(tiny_target: Target, tiny_params: Params) -> None:
    with pytest.raises(ConfigError, match=r"no feature 'last_hiden'; did you mean 'last_hidden'\?"):
        read(tiny_target, tiny_params, TOKENS, ("last_hiden",))
