"""Published drafters compute what their formats say: parity with NumPy, and a control for each mistake."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.build import LoadedTarget, build_drafter
from specjax.checkpoints.drafters import load_drafter
from specjax.decode import generate, new_tokens, row_keys, start
from specjax.errors import CheckpointError, ConfigError
from specjax.models.functional import keep_layers, make_target
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.trees.topology import chain_mask
from specjax.types import ModelParams
from specjax.verify import target_only
from tests.checkpoints import drafter_files as files
from tests.checkpoints.drafter_files import DRAFTED, HIDDEN, write
from tests.checkpoints.drafter_target import assert_same, laws_of, load_target

pytestmark = pytest.mark.quick_compile

PROMPT = [3, 1, 4, 1, 5, 9, 2]
LAYERS = (2, 4, 5)  # of the target's 8, in the published choice


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    """The target."""
    return load_target()


@dataclasses.dataclass
class Read:
    """What the target makes of the prompt [T, ..]."""

    embedded: np.ndarray
    last: np.ndarray
    fused: np.ndarray


@pytest.fixture(scope="module")
def read(loaded: LoadedTarget) -> Read:
    names = ("last_hidden", *(f"hidden.{layer}" for layer in LAYERS))
    size = len(PROMPT)
    tokens, positions = jnp.asarray([PROMPT]), jnp.arange(size)[None]
    cache = loaded.target.init_cache(1, size)
    mask = chain_mask(1, size)
    features = loaded.target.forward(loaded.params, tokens, positions, mask, cache, names).features
    embedded = loaded.target.embed(loaded.params, tokens)[0]
    fused = np.concatenate([features[name][0] for name in names[1:]], -1)
    return Read(np.asarray(embedded), np.asarray(features["last_hidden"][0]), fused)


def drafted_laws(loaded: LoadedTarget, folder: Path, name: str) -> tuple[np.ndarray, int]:
    """The laws [2, V] that the built drafter drafts two tokens by, and the first of them."""
    fields = {"name": name, "source": str(folder), "draft_length": 2}
    return laws_of(loaded, *build_drafter(fields, loaded), PROMPT)


def expected_laws(
    states_of: Callable[..., np.ndarray],
    logits: Callable[[np.ndarray], np.ndarray],
    embedding: np.ndarray,
    states: np.ndarray,
    first: int,
) -> np.ndarray:
    """Input i is token i + 1 with the state of token i; the last output is the next state, as it is."""
    embedded = embedding[[*PROMPT[1:], first]]
    out = states_of(embedded[:-1], states[:-1])[-1:]
    out2 = states_of(embedded, np.concatenate((states[:-1], out)))[-1:]
    return files.softmax(logits(np.concatenate((out, out2))))


EAGLE_FAULTS = (
    "state before embedding",
    "norm at the input",
    "norm at the output",
    "residual dropped",
    "biases dropped",
    "theta of the target",
    "no rope scaling",
)
EAGLE3_FAULTS = (
    "state before embedding",
    "state not normed",
    "other residual",
    "residual dropped",
    "norm never",
    "norm twice",
    "ids not mapped",
    "theta of the target",
    "no rope scaling",
)


@pytest.mark.parametrize("embedding", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_eagle_computes_what_its_format_says(
    loaded: LoadedTarget, read: Read, tmp_path: Path, bias: bool, embedding: bool
) -> None:
    about, tensors = files.eagle(bias, embedding)
    laws, first = drafted_laws(loaded, write(tmp_path / "eagle", about, tensors), "eagle")
    head = np.asarray(loaded.params["lm_head"]["weight"])
    table = tensors.get("embed_tokens.weight", np.asarray(loaded.params["embed_tokens"]["weight"]))

    def expected(table: np.ndarray, fault: str = "") -> np.ndarray:
        def states_of(embedded: np.ndarray, states: np.ndarray) -> np.ndarray:
            return files.eagle_states(about, tensors, embedded, states, fault)

        return expected_laws(states_of, lambda out: out @ head.T, table, read.last, first)

    np.testing.assert_allclose(laws, expected(table), atol=2e-5)
    for fault in EAGLE_FAULTS if bias else ():
        assert np.abs(laws - expected(table, fault)).max() > 1e-3, fault
    if embedding:
        of_target = np.asarray(loaded.params["embed_tokens"]["weight"])
        assert np.abs(laws - expected(of_target)).max() > 1e-3, "the target's embedding used"


@pytest.mark.parametrize("kind", ["reduced", "full", "wider", "normed residual"])
def test_eagle3_computes_what_its_format_says(
    loaded: LoadedTarget, read: Read, tmp_path: Path, kind: str
) -> None:
    hidden = 2 * HIDDEN if kind == "wider" else HIDDEN
    is_normed = True if kind == "normed residual" else None
    about, tensors = files.eagle3(hidden, reduced=kind != "full", norm_before_residual=is_normed)
    published = (files.speculators(about), files.respelled(tensors)) if is_normed else (about, tensors)
    laws, first = drafted_laws(loaded, write(tmp_path / "eagle3", *published), "eagle3")
    table = tensors.get("embed_tokens.weight", np.asarray(loaded.params["embed_tokens"]["weight"]))

    def expected(fault: str = "") -> np.ndarray:
        def states_of(embedded: np.ndarray, states: np.ndarray) -> np.ndarray:
            return files.eagle3_states(about, tensors, embedded, states, fault)

        def logits(out: np.ndarray) -> np.ndarray:
            return files.eagle3_logits(tensors, out, fault)

        return expected_laws(states_of, logits, table, read.fused @ tensors["fc.weight"].T, first)

    np.testing.assert_allclose(laws, expected(), atol=2e-5)
    if kind in ("reduced", "normed residual"):
        for fault in EAGLE3_FAULTS:
            assert np.abs(laws - expected(fault)).max() > 1e-3, fault
    if kind != "full":
        assert set(np.flatnonzero(laws[0])) <= set(DRAFTED)


def test_other_spelling_and_order_are_the_same_drafter(loaded: LoadedTarget, tmp_path: Path) -> None:
    about, tensors = files.eagle3()
    expected = load_drafter(write(tmp_path / "one", about, tensors), "eagle3", loaded.target, "it")
    folder = write(tmp_path / "two", about, tensors | files.out_of_order(tensors))
    assert_same(load_drafter(folder, "eagle3", loaded.target, "it"), expected)
    folder = write(tmp_path / "three", files.speculators(about), files.respelled(tensors))
    assert_same(load_drafter(folder, "eagle3", loaded.target, "it"), expected)


@pytest.mark.parametrize("own", [False, True])
def test_medusa_computes_what_its_format_says(
    loaded: LoadedTarget, read: Read, tmp_path: Path, own: bool
) -> None:
    about, tensors = files.medusa(own=own)
    folder = write(tmp_path / "medusa", about, tensors, "medusa_lm_head.safetensors")
    laws, _ = drafted_laws(loaded, folder, "medusa")
    for head, law in enumerate(laws):
        x = read.last[-2]  # of the token before the pending one
        for layer in range(2):
            y = tensors[f"{head}.{layer}.linear.weight"] @ x + tensors[f"{head}.{layer}.linear.bias"]
            x = x + y / (1 + np.exp(-y))
        unembedding = tensors.get(f"{head}.2.weight", np.asarray(loaded.params["lm_head"]["weight"]))
        np.testing.assert_allclose(law, files.softmax(unembedding @ x), atol=2e-5)


def test_captured_states_are_the_inputs_of_their_layers(loaded: LoadedTarget, tmp_path: Path) -> None:
    folder = write(tmp_path / "eagle3", *files.eagle3())
    drafter, _ = build_drafter({"name": "eagle3", "source": str(folder), "draft_length": 2}, loaded)
    assert drafter.features == tuple(f"hidden.{layer}" for layer in LAYERS)
    tokens, positions = jnp.asarray([PROMPT]), jnp.arange(len(PROMPT))[None]
    mask = chain_mask(1, len(PROMPT))

    def run(num_layers: int, names: tuple[str, ...]) -> dict[str, jax.Array]:
        target = make_target(dataclasses.replace(loaded.config, num_layers=num_layers))
        params = keep_layers(loaded.params, tuple(range(num_layers)))
        cache = target.init_cache(1, len(PROMPT))
        return target.forward(params, tokens, positions, mask, cache, names).features

    whole = run(8, ("hidden.1", "hidden.2", "hidden.3"))
    # A model of the layers 0 and 1 ends with what enters layer 2, normalised.
    ending = np.asarray(run(2, ("last_hidden",))["last_hidden"][0])
    weight = np.asarray(loaded.params["norm"]["weight"])
    normed = {name: files.rms(np.asarray(states[0]), weight, 1e-6) for name, states in whole.items()}
    np.testing.assert_allclose(normed["hidden.2"], ending, atol=1e-4)
    for wrong in ("hidden.1", "hidden.3"):
        assert np.abs(normed[wrong] - ending).max() > 0.01


def test_layers_to_capture_are_those_that_the_config_names(loaded: LoadedTarget, tmp_path: Path) -> None:
    about, tensors = files.eagle3()
    folder = write(tmp_path / "eagle3", about | {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, tensors)
    fields = {"name": "eagle3", "source": str(folder), "draft_length": 2}
    assert build_drafter(fields, loaded)[0].features == ("hidden.1", "hidden.3", "hidden.6")
    with pytest.raises(ConfigError, match=r"state_layers is \(0, 1\) and .* has \(1, 3, 6\)"):
        build_drafter(fields | {"state_layers": (0, 1)}, loaded)


def test_head_of_the_draft_stays_its_own(loaded: LoadedTarget, tmp_path: Path) -> None:
    about, tensors = files.eagle3()
    folder = write(tmp_path / "eagle3", about, tensors | files.out_of_order(tensors))
    _, weights = build_drafter({"name": "eagle3", "source": str(folder), "draft_length": 2}, loaded)
    np.testing.assert_array_equal(weights["d2t"], DRAFTED)
    np.testing.assert_array_equal(weights["lm_head"]["weight"], tensors["lm_head.weight"])
    assert "head" not in weights


def test_architecture_is_that_of_the_drafter(loaded: LoadedTarget, tmp_path: Path) -> None:
    about, tensors = files.eagle()
    folder = write(tmp_path / "eagle", about, tensors)
    layer = load_drafter(folder, "eagle", loaded.target, "it").architecture.layer
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.intermediate_size) == (4, 2, 4, 40)
    assert layer.rms_norm_eps == files.EPS != loaded.config.rms_norm_eps
    assert (layer.rope_theta, layer.rope_scaling.factor, layer.max_positions) == (700.0, 8.0, 256)
    # Without one, what EAGLE's own code takes.
    about = {name: value for name, value in about.items() if not name.startswith("rope")}
    folder = write(tmp_path / "old", about, tensors)
    assert load_drafter(folder, "eagle", loaded.target, "it").architecture.layer.rope_theta == 10000.0
    folder = write(tmp_path / "partial", about | {"partial_rotary_factor": 0.5}, tensors)
    with pytest.raises(CheckpointError, match="'partial_rotary_factor' is 0.5"):
        load_drafter(folder, "eagle", loaded.target, "it")


def test_heads_are_counted_from_the_tensors(loaded: LoadedTarget, tmp_path: Path) -> None:
    about, tensors = files.medusa(heads=3, layers=2)
    found = load_drafter(write(tmp_path / "medusa", about, tensors), "medusa", loaded.target, "it")
    assert found.fields == {"num_heads": 3, "num_layers": 2, "own_unembedding": True}
    fields = {"name": "medusa", "source": str(tmp_path / "medusa"), "draft_length": 4}
    with pytest.raises(ConfigError, match="a head for each of the 4 tokens"):
        build_drafter(fields, loaded)


def test_texts_of_a_drafter_with_an_embedding_of_its_own_are_the_targets(
    loaded: LoadedTarget, tmp_path: Path
) -> None:
    source = str(write(tmp_path / "eagle3", *files.eagle3(2 * HIDDEN)))
    tree = {"draft_length": 2, "branching": (2, 2), "num_nodes": 5, "proposal": "point_mass"}
    drafter, weights = build_drafter({"name": "eagle3", "source": source, **tree}, loaded)
    texts = []
    for method in (Method(loaded.target), Method(loaded.target, drafter, target_only.verify)):
        params, keys = ModelParams(loaded.params, weights), row_keys(0, range(2))
        prompts, warp = [PROMPT, PROMPT[:3]], make_warp(2)
        request, state = start(method, params, prompts, max_new_tokens=12, warp=warp, keys=keys)
        state, _ = generate(method, params, request, state)
        texts.append(new_tokens(state, prompts))
    assert texts[0] == texts[1]
