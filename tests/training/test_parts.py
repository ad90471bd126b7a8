"""The measure of a drafter's weights, its folder, and the lines of metrics."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode
from specjax.errors import CheckpointError
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.training import export
from specjax.training.history import LINES, History
from specjax.training.measure import make_measure
from specjax.types import ModelParams, Params, Target
from specjax.verify import greedy
from tests.training import toy_drafter

WEIGHTS = {"fc": {"weight": jnp.arange(6.0).reshape(2, 3) / 7}, "layers": {0: {"norm": jnp.ones(3)}}}


def test_measure_is_decoding_and_is_compiled_once(tiny_target: Target, tiny_params: Params) -> None:
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    plain = Method(tiny_target)
    warp, keys = make_warp(2, temperature=0.0), decode.row_keys(0, range(2))
    settings = {"max_new_tokens": 10, "warp": warp, "keys": keys}
    request, state = decode.start(plain, ModelParams(tiny_params, {}), prompts, **settings)
    state, _ = decode.generate(plain, ModelParams(tiny_params, {}), request, state)
    written = decode.new_tokens(state, prompts)

    drafter = toy_drafter.build(toy_drafter.Config(draft_length=3), tiny_target)
    method = Method(tiny_target, drafter, greedy.verify)
    measure = make_measure(method, prompts, max_new_tokens=10, stop_tokens=())
    table = np.zeros((32, 32), np.float32)
    before = decode.generate._cache_size()
    wrong = (written[0][0] + 1) % 32
    table[:, wrong] = 1
    for row in written:
        assert wrong not in row
    nothing = measure(ModelParams(tiny_params, {"table": jnp.asarray(table)}))
    assert nothing.tokens_per_step == 1
    assert nothing.acceptance == (0.0, None, None)
    for prompt, row in zip(prompts, written, strict=True):
        for token, following in zip((prompt[-1], *row), row, strict=False):
            table[token, following] = 2
    known = measure(ModelParams(tiny_params, {"table": jnp.asarray(table)}))
    assert decode.generate._cache_size() == before + 1
    assert known.tokens_per_step > 1.5
    expected = toy_decoding(written, prompts, table, depth=3)
    assert known.tokens_per_step == pytest.approx(expected)
    emitted, steps = np.array(known.counts).T
    assert len(emitted) == len(prompts) and emitted.sum() / steps.sum() == known.tokens_per_step


def toy_decoding(written: list[list[int]], prompts: list[list[int]], table: np.ndarray, depth: int) -> float:
    """Tokens a pass when chains of the table's are compared with what the target writes."""
    steps = 0
    for prompt, row in zip(prompts, written, strict=True):
        at, token = 0, prompt[-1]
        while at < len(row):
            steps += 1
            for _ in range(depth + 1):
                draft = table[token].argmax()
                token, at = row[at], at + 1
                if at == len(row) or draft != token:
                    break
    return sum(map(len, written)) / steps


def test_drafters_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    weights = WEIGHTS | {"d2t": jnp.arange(4)}
    export.write_drafter(folder, {"fc": WEIGHTS["fc"]}, {"drafter": "of before"})
    export.write_drafter(folder, weights, {"drafter": "mine"})
    found, about = export.read_drafter(folder)
    assert about == {"drafter": "mine"}
    assert found["fc"]["weight"].dtype == jnp.bfloat16
    assert found["d2t"].dtype == jnp.int32
    whole = export.fit(found, weights, "mine")
    assert jax.tree.structure(whole) == jax.tree.structure(weights)
    for read, given in zip(jax.tree.leaves(whole), jax.tree.leaves(weights), strict=True):
        assert read.dtype == given.dtype
        np.testing.assert_allclose(read, given, rtol=4e-3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter"]


def test_weights_of_another_drafter_are_refused(tmp_path: Path) -> None:
    export.write_drafter(tmp_path / "drafter", WEIGHTS, {})
    found, _ = export.read_drafter(tmp_path / "drafter")
    other = {"fc": {"weight": jnp.ones((3, 3))}, "layers": WEIGHTS["layers"]}
    with pytest.raises(
        CheckpointError, match=r"fc.weight of 'mine' is \(2, 3\) and the drafter's is \(3, 3\)"
    ):
        export.fit(found, other, "mine")
    with pytest.raises(CheckpointError, match="layers.0.norm of 'mine' is .* and the drafter's is absent"):
        export.fit(found, {"fc": WEIGHTS["fc"]}, "mine")
    with pytest.raises(CheckpointError, match="no folder of a trained drafter"):
        export.read_drafter(tmp_path)
    (tmp_path / "drafter" / export.WEIGHTS).write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="no folder of a trained drafter"):
        export.read_drafter(tmp_path / "drafter")


def test_history_forgets_the_steps_that_were_lost(tmp_path: Path) -> None:
    history = History(tmp_path, -1)
    for step in range(4):
        history.write(step, {"loss": 1.0 / (step + 1), "acceptance": None})
    history.close()
    with (tmp_path / LINES).open("a") as file:
        file.write('{"step": 1')  # torn
    history = History(tmp_path, 2)
    history.write(3, {"loss": 7.0})
    history.close()
    lines = [json.loads(line) for line in (tmp_path / LINES).read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert lines[3] == {"step": 3, "loss": 7.0}
    assert lines[0] == {"step": 0, "loss": 1.0}
