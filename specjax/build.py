"""From a config to what decodes: the target, a drafter and a rule, found by module name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from specjax.checkpoints import source as checkpoints
from specjax.config import drafter_config, rule_options
from specjax.data.tokenizer import Tokenizer
from specjax.errors import ConfigError
from specjax.models.functional import keep_layers, make_target, pack, stack_layers
from specjax.models.llama import LlamaConfig
from specjax.modules import Rule, check_fit, find_module, make_rule
from specjax.step import Method
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
    """Load a target onto the device; CheckpointError if it cannot be read."""
    checkpoint = checkpoints.load(source, dtype)
    params = jax.device_put(pack(checkpoint.params))
    target = make_target(checkpoint.config, dtype=dtype, stacked=stacked)
    params = stack_layers(params) if stacked else params
    return LoadedTarget(target, params, checkpoint.tokenizer, checkpoint.config, source)


def build_drafter(fields: Mapping[str, Any], loaded: LoadedTarget) -> tuple[Drafter, Params]:
    """The drafter that `fields` names and its weights, those of the checkpoint in its field `source`.

    Raises ConfigError where a field does not fit or the vocabularies differ, and CheckpointError.
    """
    config = drafter_config(fields)
    module = find_module("drafters", fields["name"])
    if not hasattr(config, "source"):
        return module.build(config, loaded.target), {}
    if config.source == loaded.source:
        every_layer = tuple(range(loaded.config.num_layers))
        # Drafters do not stack their layers; unstacked weights are shared, not copied.
        params = keep_layers(loaded.params, every_layer)
        return module.build(config, loaded.target, loaded.config), params
    checkpoint = checkpoints.load(config.source, loaded.target.dtype)
    _check_same_tokens(config.source, checkpoint.tokenizer, loaded)
    drafter = module.build(config, loaded.target, checkpoint.config)
    return drafter, jax.device_put(pack(checkpoint.params))


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
