"""Speculative sampling in JAX: every drafter, every verification rule and every tree under one contract."""

from specjax.build import build_method, build_target
from specjax.checkpoints.source import load
from specjax.config import run_config
from specjax.decode import (
    DecodeStats,
    generate,
    new_tokens,
    prefill,
    prepare,
    rollout,
    row_keys,
    start,
    stream,
    stream_text,
)
from specjax.errors import CheckpointError, ConfigError, SpecjaxError
from specjax.models.functional import make_target, pack
from specjax.sampling import make_warp
from specjax.step import Method, autoregressive_step, speculative_step, step
from specjax.types import (
    NO_PARENT,
    NO_TOKEN,
    ROOT,
    Context,
    DecodeState,
    Draft,
    Drafter,
    ForwardOutput,
    KVCache,
    ModelParams,
    ProposalLaw,
    Request,
    StepInfo,
    Target,
    Verdict,
    Verify,
    Warp,
)

__all__ = [
    "NO_PARENT",
    "NO_TOKEN",
    "ROOT",
    "CheckpointError",
    "ConfigError",
    "Context",
    "DecodeState",
    "DecodeStats",
    "Draft",
    "Drafter",
    "ForwardOutput",
    "KVCache",
    "Method",
    "ModelParams",
    "ProposalLaw",
    "Request",
    "SpecjaxError",
    "StepInfo",
    "Target",
    "Verdict",
    "Verify",
    "Warp",
    "autoregressive_step",
    "build_method",
    "build_target",
    "generate",
    "load",
    "make_target",
    "make_warp",
    "new_tokens",
    "pack",
    "prefill",
    "prepare",
    "rollout",
    "row_keys",
    "run_config",
    "speculative_step",
    "start",
    "step",
    "stream",
    "stream_text",
]
