"""From a config to what decodes: the target, a drafter and a rule, found by module name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp
from ml_collections import ConfigDict

from specjax.build_learned import build_learned, is_learned
from specjax.build_learned import export_drafter as export_drafter  # offered beside `build_drafter`
from specjax.config import drafter_config, rule_options
from specjax.data.tokenizer import Tokenizer
from specjax.errors import ConfigError, nearest
from specjax.models.functional import keep_layers
from specjax.models.layers import activation_dtype
from specjax.modules import Rule, check_fit, find_module, make_rule
from specjax.step import Method
from specjax.targets import LoadedTarget, build_target, load_model
from specjax.types import Drafter, ModelParams, Params

DTYPES = ("float32", "bfloat16", "float16", "int8")


class Built(NamedTuple):
    """All that one config asks for: how to decode, with which weights, and whether the rule is lossless."""

    loaded: LoadedTarget
    method: Method
    params: ModelParams
    lossless: bool


def build_drafter(
    fields: Mapping[str, Any], loaded: LoadedTarget, dtype: str | None = None
) -> tuple[Drafter, Params]:
    """The drafter that `fields` names and its weights, those of the checkpoint in its field `source`.

    They are in `dtype`, or in the target's. Raises ConfigError where a field or the type does not fit or the
    vocabularies differ, and CheckpointError.
    """
    config = drafter_config(fields)
    module = find_module("drafters", fields["name"])
    own_dtype = drafter_dtype(fields, dtype, loaded.target.dtype)
    if is_learned(module, config):
        return build_learned(fields["name"], module, config, loaded, own_dtype)
    if not hasattr(config, "source"):
        return module.build(config, loaded.target), {}
    target = loaded.target._replace(dtype=own_dtype)
    if config.source == loaded.source and own_dtype == loaded.target.dtype:
        every_layer = tuple(range(loaded.config.num_layers))
        # Drafters do not stack their layers; unstacked weights are shared, not copied.
        params = keep_layers(loaded.params, every_layer)
        return module.build(config, target, loaded.config), params
    checkpoint, params = load_model(config.source, own_dtype)
    _check_same_tokens(config.source, checkpoint.tokenizer, loaded)
    return module.build(config, target, checkpoint.config), params


def drafter_dtype(fields: Mapping[str, Any], dtype: str | None, target_dtype: Any) -> jnp.dtype:
    """The type of a drafter's weights: `dtype`, or the target's where that is None.

    Raises ConfigError, before any model is loaded, where the drafter cannot have it.
    """
    target_dtype = jnp.dtype(target_dtype)
    if dtype is None:
        return target_dtype
    if dtype not in DTYPES:
        raise ConfigError(
            f"drafter_dtype is '{dtype}'{nearest(dtype, DTYPES)}: choose one of {', '.join(DTYPES)}"
        )
    module, config = find_module("drafters", fields["name"]), drafter_config(fields)
    if not hasattr(config, "source"):
        raise ConfigError(
            f"drafter_dtype is '{dtype}' and the drafter '{fields['name']}' has no weights of its own: "
            "leave it out"
        )
    computing = activation_dtype(target_dtype)
    if is_learned(module, config) and activation_dtype(jnp.dtype(dtype)) != computing:
        fitting = [name for name in DTYPES if activation_dtype(jnp.dtype(name)) == computing]
        raise ConfigError(
            f"drafter_dtype is '{dtype}' and the target computes in {computing}, which a drafter that shares "
            f"its embedding must too: choose one of {', '.join(fitting)}, or another dtype for the target"
        )
    return jnp.dtype(dtype)


def build_verify(name: str, options: Mapping[str, Any] = MappingProxyType({})) -> Rule:
    """The rule of that name under its options; ConfigError if there is none or an option does not fit."""
    return make_rule(find_module("verify", name), rule_options(name, options))


def build_method(config: ConfigDict) -> Built:
    """Build all that a validated config asks for; ConfigError where its parts do not fit each other."""
    loaded = build_target(config.target, jnp.dtype(config.dtype), config.stacked_layers)
    drafter, drafter_params = build_drafter(config.drafter, loaded, config.get("drafter_dtype"))
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
