"""From a config to what decodes: the target, a drafter and a rule, found by module name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int
from ml_collections import ConfigDict

from specjax import draft_vocab
from specjax.build_learned import build_learned, is_learned
from specjax.build_learned import export_drafter as export_drafter  # offered beside `build_drafter`
from specjax.config import drafter_config, rule_options
from specjax.data import token_counts
from specjax.data.earlier_outputs import read_outputs
from specjax.data.tokenizer import Tokenizer
from specjax.errors import ConfigError, nearest
from specjax.models.functional import keep_layers
from specjax.models.layers import activation_dtype
from specjax.models.llama import LlamaConfig
from specjax.models.quantize import quantize_products
from specjax.modules import Rule, check_fit, compose, find_module, make_rule
from specjax.step import Method
from specjax.targets import LoadedTarget, build_target
from specjax.types import Drafter, ModelParams, Params, Target

DTYPES = ("float32", "bfloat16", "float16", "int8")


class Built(NamedTuple):
    """All that one config asks for: how to decode, with which weights, and whether the rule is lossless."""

    loaded: LoadedTarget
    method: Method
    params: ModelParams
    lossless: bool


DraftTokens = Int[Array, "K"] | None  # all that may be drafted, in rising order; None is every token


def build_drafter(
    fields: Mapping[str, Any],
    loaded: LoadedTarget,
    dtype: str | None = None,
    draft_vocab_size: int | None = None,
    draft_vocab_from: Sequence[str] = (),
) -> tuple[Drafter, Params]:
    """The drafter that `fields` names and its weights, those of the checkpoint in its field `source`.

    They are in `dtype`, or in the target's. Only the `draft_vocab_size` tokens are drafted that come most
    often in the token files of `draft_vocab_from`, or in those that the package counted. Raises ConfigError
    where a field, the type or that size does not fit or the vocabularies differ, and CheckpointError.
    """
    check_draft_vocab(fields, draft_vocab_size, draft_vocab_from)
    return _build(fields, loaded, dtype, _draft_tokens(loaded, draft_vocab_size, draft_vocab_from))


def _build(
    fields: Mapping[str, Any], loaded: LoadedTarget, dtype: str | None, tokens: DraftTokens
) -> tuple[Drafter, Params]:
    config = drafter_config(fields)
    module = find_module("drafters", fields["name"])
    own_dtype = drafter_dtype(fields, dtype, loaded.target.dtype)
    if hasattr(config, "inner"):
        return _compose(module, config, loaded, dtype, tokens)
    if is_learned(module, config):
        return build_learned(fields["name"], module, config, loaded, own_dtype, tokens)
    if not hasattr(config, "source"):
        weights = _head(tokens, loaded.target, loaded.params) | _earlier(module, config, loaded)
        return module.build(config, loaded.target), weights
    weights, architecture = _complete_model(config.source, loaded, own_dtype, tokens)
    return module.build(config, loaded.target._replace(dtype=own_dtype), architecture), weights


def _complete_model(
    source: str, loaded: LoadedTarget, dtype: jnp.dtype, tokens: DraftTokens
) -> tuple[Params, LlamaConfig]:
    """The weights of a complete model, to draft `tokens`, and its architecture.

    Where it is the target itself in the same type, it is not loaded a second time.
    """
    model = loaded
    if source != loaded.source or dtype != loaded.target.dtype:
        model = build_target(source, dtype)
        _check_same_tokens(source, model.tokenizer, loaded)
    # Drafters do not stack their layers; unstacked weights are shared, not copied.
    weights = keep_layers(model.params, tuple(range(model.config.num_layers)))
    return weights | _head(tokens, model.target, model.params), model.config


def _head(tokens: DraftTokens, model: Target, params: Params) -> Params:
    """What stands beside the weights of a complete model that is to draft only `tokens`."""
    if tokens is None:
        return {}
    head = draft_vocab.complete({draft_vocab.TOKENS: tokens}, model, params)
    # Rows of a model in int8 are as exact in int8 as they were.
    return jax.device_put(quantize_products(head)) if model.dtype == jnp.int8 else head


def _earlier(module: ModuleType, config: Any, loaded: LoadedTarget) -> Params:
    """The earlier outputs that a drafter's config names, as its weights."""
    if not getattr(config, "earlier", ()):
        return {}
    tokens = read_outputs(config.earlier, config.num_earlier, loaded.target.vocab_size)
    return {module.EARLIER: jax.device_put(tokens)}


def _compose(
    module: ModuleType, config: Any, loaded: LoadedTarget, dtype: str | None, tokens: DraftTokens
) -> tuple[Drafter, Params]:
    """A drafter made of another one, which drafts for the target or for the model in the field `source`."""
    base = loaded
    if hasattr(config, "source"):
        own_dtype = drafter_dtype(MODEL, dtype, loaded.target.dtype)
        base = _model_between(config.source, loaded, own_dtype, tokens)
    takes_dtype = dtype is not None and _has_weights(drafter_config(config.inner))
    takes_tokens = tokens is not None and _has_unembedding(config.inner)
    inner, weights = _build(
        config.inner, base, dtype if takes_dtype else None, tokens if takes_tokens else None
    )
    drafter = compose(module, config, loaded.target, inner, None if base is loaded else base.target)
    return drafter, {"inner": weights} | ({} if base is loaded else {"model": base.params})


MODEL = {"name": "draft_model", "draft_length": 1}


def _model_between(source: str, loaded: LoadedTarget, dtype: jnp.dtype, tokens: DraftTokens) -> LoadedTarget:
    """The complete model, or the one that was learned between the target's ends, of that source."""
    module, config = find_module("drafters", "draft_model"), drafter_config({**MODEL, "source": source})
    if is_learned(module, config):
        _, weights = build_learned("draft_model", module, config, loaded, dtype, tokens)
        model = module.between_ends(loaded.target, len(weights["layers"]))
        return loaded._replace(target=model, params=ModelParams(loaded.params, weights), source=source)
    weights, architecture = _complete_model(source, loaded, dtype, tokens)
    model = module.complete_target(source, architecture, loaded.target._replace(dtype=dtype))
    return loaded._replace(target=model, params=weights, config=architecture, source=source)


def _has_weights(config: Any) -> bool:
    """Whether a drafter, or the one that it is made of, has weights of its own."""
    return hasattr(config, "source") or (
        hasattr(config, "inner") and _has_weights(drafter_config(config.inner))
    )


def _has_unembedding(fields: Mapping[str, Any]) -> bool:
    """Whether a drafter, or the one that it is made of, scores tokens with a head that can lose some."""
    module, config = find_module("drafters", fields["name"]), drafter_config(fields)
    own = hasattr(config, "source") or getattr(module, "TAKES_DRAFT_VOCAB", False)
    return own or (hasattr(config, "inner") and _has_unembedding(config.inner))


def check_draft_vocab(fields: Mapping[str, Any], size: int | None, sources: Sequence[str]) -> None:
    """Raise ConfigError, before any model is loaded, where a drafter cannot be kept to `size` tokens.

    `sources` are the files, or folders of files, that say which.
    """
    if size is None:
        if sources:
            raise ConfigError("draft_vocab_from is set and draft_vocab_size is not: say how many to draft")
        return
    if size < 1:
        raise ConfigError(f"draft_vocab_size is {size}: give at least 1")
    if not _has_unembedding(fields):
        raise ConfigError(
            f"draft_vocab_size is {size} and the drafter '{fields['name']}' scores no tokens with an "
            "unembedding: leave it out"
        )
    token_counts.files_of(sources)


def _draft_tokens(loaded: LoadedTarget, size: int | None, sources: Sequence[str]) -> DraftTokens:
    """The `size` tokens that come most often; ConfigError where nobody counted, or there are not so many."""
    if size is None:
        return None
    vocab_size = loaded.target.vocab_size
    counts = (
        token_counts.count_written(sources, vocab_size)
        if sources
        else token_counts.packaged(loaded.tokenizer, vocab_size)
    )
    return draft_vocab.choose(counts, size)[draft_vocab.TOKENS]


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
    if not _has_weights(config):
        raise ConfigError(
            f"drafter_dtype is '{dtype}' and the drafter '{fields['name']}' has no weights of its own: "
            "leave it out"
        )
    computing = activation_dtype(target_dtype)
    shares = is_learned(module, config) or getattr(config, "share_cache", False)
    if shares and activation_dtype(jnp.dtype(dtype)) != computing:
        fitting = [name for name in DTYPES if activation_dtype(jnp.dtype(name)) == computing]
        raise ConfigError(
            f"drafter_dtype is '{dtype}' and the target computes in {computing}, which a drafter that shares "
            f"its embedding or cache must too: choose one of {', '.join(fitting)}, or another dtype for the "
            "target"
        )
    return jnp.dtype(dtype)


def build_verify(name: str, options: Mapping[str, Any] = MappingProxyType({})) -> Rule:
    """The rule of that name under its options; ConfigError if there is none or an option does not fit."""
    return make_rule(find_module("verify", name), rule_options(name, options))


def build_method(config: ConfigDict) -> Built:
    """Build all that a validated config asks for; ConfigError where its parts do not fit each other."""
    return build_on(build_target(config.target, jnp.dtype(config.dtype), config.stacked_layers), config)


def build_on(loaded: LoadedTarget, fields: Mapping[str, Any]) -> Built:
    """A drafter and a rule for a target that is there: `drafter` and `verify`, and what goes with them."""
    drafter, drafter_params = build_drafter(
        fields["drafter"],
        loaded,
        fields.get("drafter_dtype"),
        fields.get("draft_vocab_size"),
        fields.get("draft_vocab_from", ()),
    )
    name = fields["verify"]
    check_pair(fields["drafter"]["name"], drafter, name, find_module("verify", name))
    rule = build_verify(name, fields.get("verify_options", {}))
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
