"""A Llama-family config.json as a `LlamaConfig`; what it does not say is refused, not guessed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.errors import CheckpointError
from specjax.models.llama import LlamaConfig, RopeScaling

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
REQUIRED = object()  # a field without a default


def parse_config(config: Any, source: str) -> LlamaConfig:
    """Return the architecture that a config.json describes; `source` names the file in messages.

    Raises CheckpointError naming the field that is absent, of the wrong type or not supported.
    """
    fields = Fields(config, source)
    architectures = fields.config.get("architectures")
    if architectures not in [[name] for name in ARCHITECTURES]:
        raise CheckpointError(
            f"{source}: 'architectures' is {architectures}; supported are {', '.join(ARCHITECTURES)}."
        )
    # An absent field means what the architecture's own code takes it to mean, where that follows from
    # the other fields. Mistral's code has numbers of its own for two of them, so there both must be said.
    mistral = architectures[0] == "MistralForCausalLM"
    if mistral and "sliding_window" not in fields.config:
        raise CheckpointError(f"{source}: field 'sliding_window' is absent; add it, null for full attention.")
    if (window := fields.config.get("sliding_window")) is not None:
        raise CheckpointError(
            f"{source}: 'sliding_window' is {window}; only full attention (null) is supported."
        )
    if (activation := fields.get("hidden_act", str)) != "silu":
        raise CheckpointError(f"{source}: 'hidden_act' is '{activation}'; only 'silu' is supported.")
    heads = fields.get("num_attention_heads", int)
    hidden = fields.get("hidden_size", int)
    head_dim = fields.get("head_dim", int, None)
    if head_dim is None and hidden % heads:
        raise CheckpointError(
            f"{source}: 'head_dim' is absent and 'hidden_size' {hidden} does not divide by {heads} heads."
        )
    theta, scaling = _rope(fields)
    parsed = LlamaConfig(
        vocab_size=fields.get("vocab_size", int),
        hidden_size=hidden,
        num_layers=fields.get("num_hidden_layers", int),
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads", int, REQUIRED if mistral else heads),
        head_dim=hidden // heads if head_dim is None else head_dim,
        intermediate_size=fields.get("intermediate_size", int),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=fields.get("rms_norm_eps", float),
        max_positions=fields.get("max_position_embeddings", int),
        tie_embeddings=fields.get("tie_word_embeddings", bool, False),
        attention_bias=fields.get("attention_bias", bool, False),
        mlp_bias=fields.get("mlp_bias", bool, False),
    )
    if heads % parsed.num_kv_heads:
        raise CheckpointError(
            f"{source}: 'num_key_value_heads' is {parsed.num_kv_heads}, which does not divide {heads} heads."
        )
    return parsed


class Fields:
    """A JSON object whose fields are asked for by name and type."""

    def __init__(self, config: Any, source: str) -> None:
        if not isinstance(config, Mapping):
            raise CheckpointError(f"{source} holds no JSON object; download it again.")
        self.config, self.source = config, source

    def get(self, name: str, kind: type, default: Any = REQUIRED) -> Any:
        """Return a field as `kind`; absent or null it is `default`, or an error where there is none."""
        value = self.config.get(name)
        if value is None:
            if default is REQUIRED:
                raise CheckpointError(
                    f"{self.source}: field '{name}' is absent; it has no safe default, so add it."
                )
            return default
        # An integer in JSON is a fine float; to Python, a bool is an int.
        kinds = (int, float) if kind is float else (kind,)
        if isinstance(value, bool) != (kind is bool) or not isinstance(value, kinds):
            raise CheckpointError(f"{self.source}: field '{name}' is {value!r}, not a {kind.__name__}.")
        typed = kind(value)
        if kind in (int, float) and not typed > 0:
            raise CheckpointError(f"{self.source}: field '{name}' is {value}, which is not positive.")
        return typed


def _rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Read theta and the scaling from `rope_parameters`, or from the older `rope_theta`, `rope_scaling`."""
    name = "rope_parameters" if fields.config.get("rope_parameters") is not None else "rope_scaling"
    parameters = fields.config.get(name)
    rope = Fields({} if parameters is None else parameters, f"{fields.source}, {name}")
    theta = (rope if "rope_theta" in rope.config else fields).get("rope_theta", float)
    for place in (fields, rope):
        if (factor := place.get("partial_rotary_factor", float, 1.0)) != 1.0:
            raise CheckpointError(
                f"{place.source}: 'partial_rotary_factor' is {factor}; only full rotation is supported."
            )
    kind = "default" if parameters is None else rope.config.get("rope_type", rope.config.get("type"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CheckpointError(
            f"{rope.source}: rope type {kind!r} is not supported; 'default' and 'llama3' are."
        )
    return theta, RopeScaling(
        factor=rope.get("factor", float),
        low_freq_factor=rope.get("low_freq_factor", float),
        high_freq_factor=rope.get("high_freq_factor", float),
        original_max_position_embeddings=rope.get("original_max_position_embeddings", int),
    )
