"""config.json: both spellings of the rotary settings, and no guesses."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from specjax.checkpoints.hf_config import parse_config
from specjax.errors import CheckpointError
from specjax.models.llama import RopeScaling
from tests.checkpoints.files import TINY, hf_config

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALING = RopeScaling(8.0, 1.0, 4.0, 8192)


def test_config_as_written_today() -> None:
    assert parse_config(hf_config(), "config.json") == TINY


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"rope_parameters": None, "rope_theta": 10000.0}, None),
        ({"rope_parameters": None, "rope_theta": 10000, "rope_scaling": {"rope_type": "default"}}, None),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 10000.0}, None),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3}}, SCALING),
        (
            {
                "rope_parameters": None,
                "rope_theta": 10000.0,
                "rope_scaling": {"rope_type": "llama3", **LLAMA3},
            },
            SCALING,
        ),
        (
            {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
            SCALING,
        ),
    ],
)
def test_rotary_settings_in_every_spelling(changes: dict[str, Any], scaling: RopeScaling | None) -> None:
    expected = dataclasses.replace(TINY, rope_scaling=scaling)
    assert parse_config(hf_config(**changes), "config.json") == expected


def test_absent_fields_mean_what_follows_from_the_others() -> None:
    absent = {"num_key_value_heads", "head_dim", "attention_bias", "mlp_bias", "tie_word_embeddings"}
    parsed = parse_config(hf_config(TINY, **dict.fromkeys(absent)), "config.json")
    assert parsed == dataclasses.replace(TINY, num_kv_heads=4, tie_embeddings=False)


def test_mistral_with_full_attention() -> None:
    config = hf_config(architectures=["MistralForCausalLM"]) | {"sliding_window": None}
    assert parse_config(config, "config.json") == TINY


@pytest.mark.parametrize(
    "field",
    [
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
        *("rms_norm_eps", "max_position_embeddings", "hidden_act"),
    ],
)
def test_absent_field_is_named(field: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: field '{field}' is absent"):
        parse_config(hf_config(TINY, **{field: None}), "config.json")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_parameters": None}, "field 'rope_theta' is absent"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
            "rope_parameters: field 'factor' is absent",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type 'yarn' is not supported"),
        (
            {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "linear"}},
            "rope type 'linear'",
        ),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope type None"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5"),
        (
            {"architectures": ["Qwen2ForCausalLM"]},
            "'architectures' is ['Qwen2ForCausalLM']; supported are Llama",
        ),
        ({"architectures": None}, "'architectures' is None"),
        ({"architectures": ["MistralForCausalLM"]}, "'sliding_window' is absent"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, "'sliding_window' is 4096"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"hidden_size": "256"}, "'hidden_size' is '256', not a int"),
        ({"vocab_size": True}, "'vocab_size' is True"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings' is 1"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' is nan"),
        ({"num_key_value_heads": 3}, "'num_key_value_heads' is 3"),
        ({"head_dim": None, "hidden_size": 250}, "'head_dim' is absent"),
    ],
)
def test_misfit_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(words)):
        parse_config(hf_config(**changes), "config.json")
