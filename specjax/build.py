"""From a config to what decodes: the target, a drafter and a rule, found by module name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from specjax import draft_vocab, zoo
from specjax.checkpoints import source as checkpoints
from specjax.checkpoints.drafters import load_drafter
from specjax.checkpoints.drafters_eagle import EMBEDDING
from specjax.checkpoints.drafters_export import to_published
from specjax.checkpoints.drafters_files import HUB, fetch, is_published
from specjax.config import drafter_config, rule_options
from specjax.data.tokenizer import Tokenizer
from specjax.errors import ConfigError
from specjax.models.functional import keep_layers, make_target, pack, stack_layers
from specjax.models.llama import LlamaConfig
from specjax.models.quantize import quantize
from specjax.modules import Rule, check_fit, find_module, make_rule
from specjax.proposals import TreeConfig
from specjax.step import Method
from specjax.training.export import fit, read_drafter
from specjax.types import Drafter, ModelParams, Params, Target


class LoadedTarget(NamedTuple):
    """A target with its weights on the device."""

    target: Target
    params: Params
    tokenizer: Tokenizer | None
    config: LlamaConfig
    source: str


class Built(NamedTuple):
    """All that one config asks for: how to decode, with which weights, and whether the rule is lossless."""

    loaded: LoadedTarget
    method: Method
    params: ModelParams
    lossless: bool


def build_target(source: str, dtype: Any = jnp.float32, stacked: bool = False) -> LoadedTarget:
    """Load a target onto the device, its weights in `dtype`; CheckpointError if it cannot be read.

    In int8 they are quantised from float32, and activations and caches are float32.
    """
    checkpoint, params = _load(source, dtype)
    target = make_target(checkpoint.config, dtype=dtype, stacked=stacked)
    params = stack_layers(params) if stacked else params
    return LoadedTarget(target, params, checkpoint.tokenizer, checkpoint.config, source)


def build_drafter(fields: Mapping[str, Any], loaded: LoadedTarget) -> tuple[Drafter, Params]:
    """The drafter that `fields` names and its weights, those of the checkpoint in its field `source`.

    Raises ConfigError where a field does not fit or the vocabularies differ, and CheckpointError.
    """
    config = drafter_config(fields)
    module = find_module("drafters", fields["name"])
    if hasattr(module, "trainable"):
        return _build_learned(fields["name"], module, config, loaded)
    if not hasattr(config, "source"):
        return module.build(config, loaded.target), {}
    if config.source == loaded.source:
        every_layer = tuple(range(loaded.config.num_layers))
        # Drafters do not stack their layers; unstacked weights are shared, not copied.
        params = keep_layers(loaded.params, every_layer)
        return module.build(config, loaded.target, loaded.config), params
    checkpoint, params = _load(config.source, loaded.target.dtype)
    _check_same_tokens(config.source, checkpoint.tokenizer, loaded)
    drafter = module.build(config, loaded.target, checkpoint.config)
    return drafter, params


def _build_learned(
    name: str, module: ModuleType, config: Any, loaded: LoadedTarget
) -> tuple[Drafter, Params]:
    """A drafter with weights that were trained; they decide what the config leaves open."""
    learned = _load_learned(name, module, config, loaded)

    def make(target: Target) -> Drafter:
        return module.build(learned.config, target, learned.architecture)

    weights = jax.device_put(learned.weights)
    has_own = EMBEDDING in weights
    drafter = with_own_embedding(make, loaded.target) if has_own else make(loaded.target)
    if "lm_head" not in weights:
        weights = draft_vocab.complete(weights, loaded.target, loaded.params)
    return drafter, weights


class _Learned(NamedTuple):
    """A trained drafter; no architecture of its own means that it is like the target's layers."""

    config: Any
    architecture: Any
    weights: Params


def _load_learned(name: str, module: ModuleType, config: Any, loaded: LoadedTarget) -> _Learned:
    """The drafter in the folder, of either kind, that a config's source names."""
    source = config.source
    if source is None:
        known = ", ".join(zoo.PREFIX + known for known in zoo.names()) or "none yet"
        raise ConfigError(
            f"the drafter '{name}' needs weights: set drafter.source to a folder that specjax.train wrote, "
            f"to a published drafter (a folder, or hf:owner/name), or to one of the zoo's ({known})"
        )
    folder = fetch(source) if source.startswith(HUB) else zoo.folder(source)
    if is_published(folder):
        found = load_drafter(folder, name, loaded.target, source)
        config = dataclasses.replace(config, **_agreed(config, found.fields, source))
        return _Learned(config, found.architecture, found.weights)
    given, about = read_drafter(folder)
    if about.get("drafter") != name:
        raise ConfigError(
            f"'{source}' holds weights for the drafter '{about.get('drafter')}', not for '{name}'"
        )
    own = [field for field in dataclasses.fields(config) if field.name not in _SHAPE]
    config = dataclasses.replace(
        config,
        **{
            field.name: _as_tuple(about["config"][field.name])
            for field in own
            if getattr(config, field.name) == field.default and field.name in about["config"]
        },
    )
    training = module.Training(**{key: _as_tuple(value) for key, value in about["training"].items()})
    trainable = module.trainable(config, training, loaded.target)
    counts = np.zeros(loaded.target.vocab_size, np.int32)
    template = jax.eval_shape(lambda key: trainable.init(key, loaded.params, counts), jax.random.key(0))
    return _Learned(config, None, fit(given, template[0] | template[1], source))


def _agreed(config: Any, found: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Fields as the files have them; ConfigError where the config says otherwise."""
    for field in dataclasses.fields(config):
        given = getattr(config, field.name)
        if field.name in found and given not in (field.default, found[field.name]):
            raise ConfigError(
                f"drafter.{field.name} is {given} and '{source}' has {found[field.name]}: leave the field out"
            )
    return found


def export_drafter(fields: Mapping[str, Any], loaded: LoadedTarget, folder: Path) -> None:
    """Write the trained drafter that `fields` names in its published format, in the type of the target.

    Raises ConfigError and CheckpointError where it cannot be read, and CheckpointError where `folder` exists.
    """
    config = drafter_config(fields)
    module = find_module("drafters", fields["name"])
    if not hasattr(module, "trainable"):
        raise ConfigError(f"the drafter '{fields['name']}' has no weights of its own to export")
    config, architecture, weights = _load_learned(fields["name"], module, config, loaded)
    layers: tuple[int, ...] = ()
    if hasattr(module, "layers_of"):
        layers = module.layers_of(config, loaded.target)
        architecture = architecture or module.like(config, loaded.target)
    elif hasattr(module, "like"):
        architecture = architecture or module.like(loaded.target)
    base = loaded.source.removeprefix(HUB)
    to_published(folder, weights, architecture, base=base, state_layers=layers)


class _Beside(NamedTuple):
    """The target's weights, and an embedding in place of its own."""

    target: Params
    embedding: Params


def with_own_embedding(make: Callable[[Target], Drafter], target: Target) -> Drafter:
    """The drafter that `make` builds on a target, reading tokens through its weights' own embedding."""

    def embed(params: _Beside, tokens: jax.Array) -> jax.Array:
        # As the target's embedding does, negative tokens read row 0, and nobody reads the result.
        return jnp.take(params.embedding["weight"], jnp.maximum(tokens, 0), axis=0)

    drafter = make(
        target._replace(
            embed=embed,
            unembed=lambda params, hidden: target.unembed(params.target, hidden),
            head_rows=lambda params, tokens: target.head_rows(params.target, tokens),
        )
    )

    def beside(params: ModelParams) -> ModelParams:
        return params._replace(target=_Beside(params.target, params.drafter[EMBEDDING]))

    return drafter._replace(
        init=lambda params, *rest: drafter.init(beside(params), *rest),
        propose=lambda params, *rest: drafter.propose(beside(params), *rest),
        observe=lambda params, *rest: drafter.observe(beside(params), *rest),
    )


# The fields of a learned drafter that its weights do not depend on.
_SHAPE = {"source", *(field.name for field in dataclasses.fields(TreeConfig))}


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def build_verify(name: str, options: Mapping[str, Any] = MappingProxyType({})) -> Rule:
    """The rule of that name under its options; ConfigError if there is none or an option does not fit."""
    return make_rule(find_module("verify", name), rule_options(name, options))


def build_method(config: ConfigDict) -> Built:
    """Build all that a validated config asks for; ConfigError where its parts do not fit each other."""
    loaded = build_target(config.target, jnp.dtype(config.dtype), config.stacked_layers)
    drafter, drafter_params = build_drafter(config.drafter, loaded)
    check_pair(config.drafter.name, drafter, config.verify, find_module("verify", config.verify))
    rule = build_verify(config.verify, config.verify_options)
    method = Method(loaded.target, drafter, rule.verify)
    return Built(loaded, method, ModelParams(loaded.params, drafter_params), rule.lossless)


def check_pair(drafter_name: str, drafter: Drafter, name: str, rule: ModuleType) -> None:
    """Raise ConfigError, naming rules that fit, where a rule may not judge a drafter's proposals."""
    check_fit(drafter_name, drafter.law, not drafter.is_chain, name, rule)


def _load(source: str, dtype: Any) -> tuple[checkpoints.Checkpoint, Params]:
    """A checkpoint, and its weights as the modules hold them, on the device."""
    is_int8 = dtype == jnp.int8
    checkpoint = checkpoints.load(source, jnp.float32 if is_int8 else dtype)
    params = pack(checkpoint.params)
    return checkpoint, jax.device_put(quantize(params) if is_int8 else params)


def _check_same_tokens(source: str, drafts: Tokenizer | None, loaded: LoadedTarget) -> None:
    """Vocabularies of one size may still differ, and every draft would then be refused."""
    if drafts is None or loaded.tokenizer is None:
        return
    own, target = ({i: t for t, i in k.inner.get_vocab().items()} for k in (drafts, loaded.tokenizer))
    for i in sorted(own.keys() & target.keys()):
        if own[i] != target[i]:
            raise ConfigError(
                f"token {i} is {own[i]!r} for the draft model '{source}' and {target[i]!r} for the target "
                f"'{loaded.source}': choose a draft model that shares the target's tokenizer"
            )
