"""A drafter's weights in another type than the target's: what is drafted changes a little, the text never."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import build
from specjax.config import drafter_config, run_config
from specjax.decode import generate, new_tokens, row_keys, start
from specjax.errors import ConfigError
from specjax.modules import find_module
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.training.export import write_drafter
from specjax.types import Context, Drafter, ModelParams
from specjax.verify import greedy
from tests.model_folder import write_model

pytestmark = pytest.mark.quick_compile

PROMPTS = [[5, 9, 20], [7, 8, 9, 10, 11, 12]]
LEARNED = {
    "draft_model": ({}, {"draft_vocab_size": 200}),
    "draft_model over all tokens": ({}, {}),
    "eagle": ({}, {"draft_vocab_size": 200}),
    "eagle3": ({"draft_vocab_size": 200, "state_layers": (0, 1)}, {}),
    "medusa": ({"own_unembedding": True}, {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder."""
    return write_model(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> build.LoadedTarget:
    """The target of that folder."""
    return build.build_target(str(folder))


def write_learned(folder: Path, case: str, loaded: build.LoadedTarget) -> dict:
    """The fields of a drafter in `folder` whose weights all matter."""
    name, (fields, training) = case.split()[0], LEARNED[case]
    module, config = find_module("drafters", name), drafter_config({"name": name, "draft_length": 2} | fields)
    settings = module.Training(**training)
    trainable = module.trainable(config, settings, loaded.target)
    parts = trainable.init(jax.random.key(0), loaded.params, np.arange(loaded.target.vocab_size))
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda w: w + 0.05 * rng.normal(size=w.shape).astype(w.dtype), parts[0])
    about = {"config": dataclasses.asdict(config), "training": dataclasses.asdict(settings)}
    write_drafter(folder, weights | parts[1], {"drafter": name, **about})
    return {"name": name, "draft_length": 2, "source": str(folder)}


def begin(loaded: build.LoadedTarget, drafter: Drafter | None, weights):
    """What greedy decoding of the prompts begins with."""
    method = Method(loaded.target, drafter, None if drafter is None else greedy.verify)
    params = ModelParams(loaded.params, weights)
    options = {"max_new_tokens": 12, "warp": make_warp(2), "keys": row_keys(0, range(2))}
    return method, params, *start(method, params, PROMPTS, **options)


def text_of(loaded: build.LoadedTarget, drafter: Drafter | None, weights) -> list[list[int]]:
    """What greedy decoding writes."""
    return new_tokens(generate(*begin(loaded, drafter, weights))[0], PROMPTS)


def first_laws(loaded: build.LoadedTarget, drafter: Drafter, weights) -> np.ndarray:
    """The laws [B, V], at temperature 1, of the first drafts."""
    _, params, _, state = begin(loaded, drafter, weights)
    context = Context(state.tokens, state.length, make_warp(2, temperature=1.0))
    draft, _ = jax.jit(drafter.propose)(params, state.keys, state.draft_state, context)
    return np.asarray(draft.probs)[:, 0]


def num_int8(weights) -> int:
    """How many of the weights are in int8."""
    return sum(leaf.size for leaf in jax.tree.leaves(weights) if leaf.dtype == jnp.int8)


@pytest.fixture(scope="module")
def greedy_text(loaded: build.LoadedTarget) -> list[list[int]]:
    """What plain decoding writes."""
    return text_of(loaded, None, {})


@pytest.mark.parametrize("case", LEARNED)
def test_int8_drafts_nearly_the_same(case: str, loaded: build.LoadedTarget, tmp_path: Path) -> None:
    fields = write_learned(tmp_path / "learned", case, loaded)
    wide, narrow = (build.build_drafter(fields, loaded, dtype) for dtype in (None, "int8"))
    matrices = sum(leaf.size for leaf in jax.tree.leaves(wide[1]) if leaf.ndim == 2)
    if case == "draft_model over all tokens":
        matrices += loaded.target.vocab_size * loaded.config.hidden_size  # the target's head
    assert (num_int8(wide[1]), num_int8(narrow[1])) == (0, matrices)
    expected, laws = (first_laws(loaded, *built) for built in (wide, narrow))
    assert np.corrcoef(laws.ravel(), expected.ravel())[0, 1] > 0.99
    assert np.abs(laws - expected).max() > 1e-6, "the weights must have been rounded"


@pytest.mark.parametrize("case", ["draft_model", "eagle"])
def test_int8_keeps_the_greedy_text(
    case: str, loaded: build.LoadedTarget, greedy_text: list[list[int]], tmp_path: Path
) -> None:
    fields = write_learned(tmp_path / "learned", case, loaded)
    assert text_of(loaded, *build.build_drafter(fields, loaded, "int8")) == greedy_text


def test_drafter_of_an_int8_target_is_in_int8_unless_asked_otherwise(
    folder: Path, loaded: build.LoadedTarget, tmp_path: Path
) -> None:
    target = build.build_target(str(folder), jnp.int8)
    fields = write_learned(tmp_path / "learned", "eagle", loaded)
    assert num_int8(build.build_drafter(fields, target, "float32")[1]) == 0
    drafter, weights = build.build_drafter(fields, target)
    assert num_int8(weights) > 0
    assert text_of(target, drafter, weights) == text_of(target, None, {})


def test_complete_model_in_another_type_than_the_target(
    folder: Path, loaded: build.LoadedTarget, greedy_text: list[list[int]]
) -> None:
    fields = {"name": "draft_model", "source": str(folder), "draft_length": 2}
    for dtype in ("bfloat16", "int8"):
        drafter, weights = build.build_drafter(fields, loaded, dtype)
        assert weights["layers"][0]["mlp"]["down_proj"]["weight"].dtype == jnp.dtype(dtype)
    assert text_of(loaded, drafter, weights) == greedy_text


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_the_target_as_drafter_can_read_the_targets_cache(
    folder: Path, loaded: build.LoadedTarget, greedy_text: list[list[int]], dtype: str | None
) -> None:
    fields = {"name": "draft_model", "source": str(folder), "draft_length": 3, "share_cache": True}
    drafter, weights = build.build_drafter(fields, loaded, dtype)
    method, params, request, state = begin(loaded, drafter, weights)
    assert state.draft_state == {}  # no cache of its own, and no prompt was read
    state, stats = generate(method, params, request, state)
    assert new_tokens(state, PROMPTS) == greedy_text
    steps = stats.num_steps.tolist()
    if dtype is None:
        assert steps == [3, 3], "the very same model is right every time"
    assert max(steps) < 8, "most drafts are right"


def test_only_the_target_itself_can_read_its_cache(
    folder: Path, loaded: build.LoadedTarget, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", num_layers=1)
    fields = {"name": "draft_model", "source": str(other), "draft_length": 2, "share_cache": True}
    with pytest.raises(ConfigError, match="share_cache is for the target's own architecture"):
        build.build_drafter(fields, loaded)
    fields["source"] = str(folder)
    with pytest.raises(ConfigError, match="its embedding or cache must too"):
        build.build_drafter(fields, loaded, "bfloat16")


@pytest.mark.parametrize(
    ("fields", "dtype", "target_dtype", "named"),
    [
        ({"name": "eagle"}, "int4", "float32", "drafter_dtype is 'int4'; did you mean 'int8'"),
        ({"name": "ngram", "max_ngram": 2}, "int8", "float32", "'ngram' has no weights of its own: leave"),
        (
            {"name": "self_speculative", "skip_layers": (1,)},
            "int8",
            "float32",
            "'self_speculative' has no weights of its own",
        ),
        ({"name": "eagle"}, "int8", "bfloat16", "computes in bfloat16.*: choose one of bfloat16,"),
        (
            {"name": "draft_model"},
            "bfloat16",
            "float32",
            "computes in float32.*: choose one of float32, int8,",
        ),
        ({"name": "draft_model"}, "bfloat16", "int8", "computes in float32"),
    ],
)
def test_types_that_a_drafter_cannot_have_are_named(
    fields: dict, dtype: str, target_dtype: str, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        build.drafter_dtype(fields | {"draft_length": 2}, dtype, target_dtype)


def test_a_run_takes_the_type_of_the_drafter(folder: Path) -> None:
    config = run_config()
    config.target, config.drafter_dtype = str(folder), "int8"
    config.drafter = {"name": "draft_model", "source": str(folder), "draft_length": 2}
    built = build.build_method(config)
    assert num_int8(built.params.drafter) > 0 == num_int8(built.params.target)
