"""What a certificate is about: toys that know their laws, and every drafter module on a tiny random Llama."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import draft_vocab
from specjax.config import drafter_config
from specjax.eval.exactness.sampling import NEW_TOKENS, Group, model_law, tabulated_law
from specjax.models.functional import init_params, make_target
from specjax.models.llama import LlamaConfig
from specjax.modules import compose, find_module, module_names
from specjax.testing import tabulated_target, tree_drafter
from specjax.types import NO_PARENT, Drafter, ModelParams, Params, ProposalLaw, Target

VOCAB = 8
# Two drafts deep, so that the bonus token and cuts at the limit are among the three new tokens.
CHAIN = (NO_PARENT, 0, 1)
TREE = (NO_PARENT, 0, 0, 1, 1, 2)
TOYS = {
    "chain": (CHAIN, ProposalLaw.CHAIN),
    "point_mass_chain": (CHAIN, ProposalLaw.POINT_MASS),
    "point_mass_tree": (TREE, ProposalLaw.POINT_MASS),
    "iid_tree": (TREE, ProposalLaw.IID_SIBLINGS),
    "tree_without_replacement": (TREE, ProposalLaw.SIBLINGS_WITHOUT_REPLACEMENT),
}

TINY = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=24,
    rope_theta=10000.0,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    max_positions=64,
    tie_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
)
# Random weights are too small for laws that vary and for layers that matter.
SCALE = 15.0
NOISE = 0.3  # of the draft model, relative to each weight

# Every warp with a prompt of its own. The prompts of the Llama repeat themselves, so that a drafter which
# looks for repetitions finds some; at temperature 0 the drafts are wrong within three tokens.
WARPS = (
    (0.0, 0, 1.0, 0.0),
    (0.5, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (1.5, 0, 1.0, 0.0),
    (1.0, 4, 1.0, 0.0),
    (0.7, 0, 0.8, 0.0),
    (1.3, 0, 1.0, 0.15),
    (1.2, 6, 0.9, 0.05),
)
TOY_PROMPTS = ((5,), (1, 2), (3,), (7, 0, 5), (2,), (4, 4), (6,), (0, 1))
LLAMA_PROMPTS = (
    (1, 2, 1, 2, 1),
    (3, 4, 3, 4),
    (5, 0, 5, 0, 5, 0),
    (6, 7, 6),
    (2, 2, 2),
    (7, 1, 3, 7, 1, 3, 7),
    (0, 4, 0, 4, 0),
    (5, 6, 5),
)


class Subject(NamedTuple):
    """A drafter on a target for which `law_of` enumerates every group's law of three tokens [V, V, V]."""

    name: str
    drafter: Drafter
    target: Target
    params: ModelParams
    groups: tuple[Group, ...]
    law_of: Callable[[Group], np.ndarray]


def toys() -> dict[str, Subject]:
    """Drafters of every law from a table that resembles the target's."""
    target_table, draft_table = random_tables()
    target = tabulated_target(jnp.asarray(target_table, jnp.float32))
    return {
        name: Subject(
            name,
            tree_drafter(jnp.asarray(draft_table, jnp.float32), parents, law),
            target,
            ModelParams({}, {}),
            groups_of(TOY_PROMPTS),
            functools.partial(tabulated_law, target_table),
        )
        for name, (parents, law) in TOYS.items()
    }


def random_tables() -> tuple[np.ndarray, np.ndarray]:
    """The logits of a target and of a drafter that resembles it, [V + 1, V, V]."""
    rng = np.random.default_rng(0)
    target = 1.2 * rng.normal(size=(VOCAB + 1, VOCAB, VOCAB))
    return target, target + 0.8 * rng.normal(size=target.shape)


def groups_of(prompts: tuple[tuple[int, ...], ...]) -> tuple[Group, ...]:
    """Every warp with its prompt."""
    return tuple(Group(*warp, prompt) for warp, prompt in zip(WARPS, prompts, strict=True))


def examples() -> dict[str, tuple[ModuleType, Any]]:
    """Every drafter of the package as its own examples configure it: modules and configs by name."""
    found: dict[str, tuple[ModuleType, Any]] = {}
    for name in module_names("drafters"):
        module = find_module("drafters", name)
        found |= {example: (module, config) for example, config in module.EXAMPLES.items()}
    return found


def modules(chosen: Mapping[str, tuple[ModuleType, Any]]) -> dict[str, Subject]:
    """Drafter modules under their configs; ConfigError where one does not fit.

    One that learns gets the weights that it starts from, and one that takes another model's weights from a
    `source` a noisy copy of the target's.
    """
    target = make_target(TINY)
    weights = jax.tree.map(lambda leaf: SCALE * leaf if leaf.ndim > 1 else leaf, init_params(TINY, seed=0))
    width = max(map(len, LLAMA_PROMPTS)) + NEW_TOKENS - 1
    law_of = functools.cache(functools.partial(model_law, target, weights, width=width))
    subjects = {}
    for name, (module, config) in chosen.items():
        drafter, drafter_weights = made_up(module, config, target, weights, NOISE)
        params = ModelParams(weights, drafter_weights)
        subjects[name] = Subject(name, drafter, target, params, groups_of(LLAMA_PROMPTS), law_of)
    return subjects


def made_up(
    module: ModuleType, config: Any, target: Target, weights: Params, noise: float
) -> tuple[Drafter, Params]:
    """A drafter of the module, and weights with which its drafts are neither all right nor all wrong."""
    if hasattr(config, "inner"):
        has_model = hasattr(config, "source")
        base = noisy_copy(weights, noise) if has_model else weights
        part = find_module("drafters", config.inner["name"])
        inner, inner_weights = made_up(part, drafter_config(config.inner), target, base, noise)
        drafter = compose(module, config, target, inner, target if has_model else None)
        return drafter, {"inner": inner_weights} | ({"model": base} if has_model else {})
    if not hasattr(module, "trainable"):
        drafter = module.build(config, target, target.config)
        return drafter, noisy_copy(weights, noise) if hasattr(config, "source") else {}
    trainable = module.trainable(config, module.Training(), target)
    learned, fixed = trainable.init(jax.random.key(1), weights, np.arange(target.vocab_size))
    rng = np.random.default_rng(2)
    # Some of them start at 0, and a factor would leave them there.
    learned = jax.tree.map(lambda w: w + noise * rng.normal(size=w.shape).astype(w.dtype), learned)
    return module.build(config, target), draft_vocab.complete(learned | fixed, target, weights)


def noisy_copy(weights: Params, noise: float) -> Params:
    """The weights, each off by a factor."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda w: w * (1 + noise * rng.normal(size=w.shape)).astype(w.dtype), weights)
