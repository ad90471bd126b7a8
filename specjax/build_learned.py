"""Drafters whose weights were trained or published: read, made ready to decode, and exported."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax import draft_vocab, zoo
from specjax.checkpoints.drafters import load_drafter
from specjax.checkpoints.drafters_export import to_published
from specjax.checkpoints.drafters_files import CONFIG, HUB, fetch, is_published
from specjax.checkpoints.drafters_found import Published
from specjax.checkpoints.export import save_folder
from specjax.checkpoints.names import flatten
from specjax.checkpoints.source import Checkpoint
from specjax.config import drafter_config
from specjax.errors import ConfigError
from specjax.models.eagle import EMBEDDING
from specjax.models.functional import unpack
from specjax.models.quantize import quantize_products
from specjax.modules import find_module
from specjax.proposals import TreeConfig
from specjax.targets import LoadedTarget
from specjax.training.export import fit, read_drafter
from specjax.types import Drafter, Params, Target


def is_learned(module: ModuleType, config: Any) -> bool:
    """Whether the drafter's weights are those that its module learns, and not those of a complete model."""
    if not hasattr(module, "trainable"):
        return False
    if not getattr(module, "TAKES_MODELS", False) or config.source is None:
        return True
    folder = Path(config.source)
    is_trained = (folder / CONFIG).exists() and not is_published(folder)
    return is_trained or config.source.startswith(zoo.PREFIX)


def build_learned(
    name: str,
    module: ModuleType,
    config: Any,
    loaded: LoadedTarget,
    dtype: Any,
    tokens: Int[Array, "K"] | None = None,
) -> tuple[Drafter, Params]:
    """A drafter with weights that were trained, in `dtype`; they decide what the config leaves open.

    Of the tokens that it was trained to draft it keeps those among `tokens`, where these are given.
    """
    learned = _load_learned(name, module, config, loaded)

    drafter = module.build(learned.config, loaded.target, learned.architecture)
    weights = learned.weights if tokens is None else draft_vocab.keep(learned.weights, tokens)
    weights = _ready(weights, loaded, is_int8=dtype == jnp.int8)
    return drafter, jax.device_put(weights)


def _ready(weights: Params, loaded: LoadedTarget, is_int8: bool) -> Params:
    """Weights as decoding wants them: with the rows of the head at hand, and in int8 if that is wanted."""
    if not any("lm_head" in name.split(".") for name in flatten(weights)):
        # In int8 the head is to be read in int8 too, and a target in float has none such.
        whole = is_int8 and loaded.target.dtype != jnp.int8
        weights = draft_vocab.complete(weights, loaded.target, loaded.params, whole=whole)
    if not is_int8:
        return weights
    looked_up = {name: part for name, part in weights.items() if name == EMBEDDING}
    return quantize_products({k: v for k, v in weights.items() if k not in looked_up}) | looked_up


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
    found = read_source(name, source, loaded.target)
    if isinstance(found, Published):
        return _Learned(found.settle(config, source), found.architecture, found.weights)
    given, about = found
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


class Trained(NamedTuple):
    """Weights that specjax.train wrote, on the host, and what it wrote about them."""

    weights: Params
    about: Mapping[str, Any]


def read_source(name: str, source: str, target: Target) -> Published | Trained:
    """What a folder, "hf:owner/name" or "zoo:NAME" holds for the drafter `name`.

    Raises ConfigError where it is another drafter's, and CheckpointError where it cannot be read.
    """
    folder = fetch(source) if source.startswith(HUB) else zoo.folder(source)
    if is_published(folder):
        return load_drafter(folder, name, target, source)
    found = Trained(*read_drafter(folder))
    if (known := found.about.get("drafter")) != name:
        raise ConfigError(f"'{source}' holds weights for the drafter '{known}', not for '{name}'")
    return found


def export_drafter(fields: Mapping[str, Any], loaded: LoadedTarget, folder: Path) -> None:
    """Write the trained drafter that `fields` names in its published format, in the type of the target.

    A draft model becomes a complete one. Raises ConfigError and CheckpointError where it cannot be read, and
    CheckpointError where `folder` exists.
    """
    config = drafter_config(fields)
    module = find_module("drafters", fields["name"])
    if not is_learned(module, config):
        raise ConfigError(f"the drafter '{fields['name']}' has no weights of its own to export")
    config, architecture, weights = _load_learned(fields["name"], module, config, loaded)
    if hasattr(module, "complete_model"):
        architecture, params = module.complete_model(weights, loaded.target, loaded.params)
        params = unpack(jax.tree.map(np.asarray, params), architecture)
        save_folder(Checkpoint(architecture, params, loaded.tokenizer, loaded.source), folder)
        return
    layers: tuple[int, ...] = ()
    if hasattr(module, "layers_of"):
        layers = module.layers_of(config, loaded.target)
        architecture, weights = module.with_own_head(
            layers, architecture or module.like(config, loaded.target), weights, loaded.target, loaded.params
        )
    elif hasattr(module, "like"):
        architecture = architecture or module.like(loaded.target)
    base = loaded.source.removeprefix(HUB)
    to_published(folder, weights, architecture, base=base, state_layers=layers)


# The fields of a learned drafter that its weights do not depend on.
_SHAPE = {"source", *(field.name for field in dataclasses.fields(TreeConfig))}


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
