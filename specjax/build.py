"""From a config to what decodes: the target, a drafter and a rule, found by module name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from specjax import draft_vocab, zoo
from specjax.checkpoints import source as checkpoints
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
    """A drafter with the weights that training wrote; they decide what the config leaves open."""
    if config.source is None:
        known = ", ".join(zoo.PREFIX + known for known in zoo.names()) or "none yet"
        raise ConfigError(
            f"the drafter '{name}' needs weights: set drafter.source to a folder that specjax.train wrote, "
            f"or to one of the zoo's ({known})"
        )
    given, about = read_drafter(zoo.folder(config.source))
    if about.get("drafter") != name:
        raise ConfigError(
            f"'{config.source}' holds weights for the drafter '{about.get('drafter')}', not for '{name}'"
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
    weights = fit(given, template[0] | template[1], config.source)
    return module.build(config, loaded.target), draft_vocab.complete(weights, loaded.target, loaded.params)


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
