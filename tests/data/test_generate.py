"""Writing texts by the command: what it keeps, how it goes on, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specjax import run
from specjax.data import feature_store, instructions, token_store
from specjax.data.tokenizer import from_folder
from tests.caches import with_kernels
from tests.model_folder import write_model

pytestmark = pytest.mark.quick_compile

CONFIG = """
from specjax.config import run_config

def get_config():
    config = run_config("generate")
    config.target = {target!r}
    config.instructions = ({requests!r},)
    config.self_prompts = 16
    config.max_new_tokens, config.max_prompt_tokens = 12, 160
    config.batch_size, config.shard_size = 8, 8
    config.features = ("last_hidden",)
    return config
"""
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "mat", "dog", "log")
REQUESTS = [f"the cat sat on {word}" for word in WORDS]


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    target, requests = write_model(folder / "target"), folder / "requests.jsonl"
    # One comes twice, and one is an evaluation prompt of the package.
    packaged = json.loads(
        (Path(instructions.__file__).parent / "prompts" / "default.jsonl").read_text().split("\n")[0]
    )
    lines = [*REQUESTS, REQUESTS[0].upper(), packaged["turns"][0]]
    requests.write_text("\n".join(map(json.dumps, lines)))
    (folder / "config.py").write_text(CONFIG.format(target=str(target), requests=str(requests)))
    return folder


def generate(experiment: Path, workdir: Path, *more: str) -> int:
    return run.main([f"--config={experiment / 'config.py'}", f"--workdir={workdir}", *more])


@pytest.fixture(scope="module")
def finished(experiment: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECJAX_CACHE", str(with_kernels(experiment / "cache")))
        assert generate(experiment, experiment / "texts") == 0
    return experiment / "texts"


def texts_of(folder: Path) -> list[token_store.Sample]:
    return [one for path in token_store.token_files(folder) for one in token_store.read_samples(path)]


def test_every_request_is_answered_once_and_no_evaluation_prompt(experiment: Path, finished: Path) -> None:
    tokenizer = from_folder(experiment / "target")
    texts = texts_of(finished)
    given = [one for one in texts if one.source == "requests"]
    prompts = {tokenizer.decode(one.tokens[~one.supervised], skip_special_tokens=False) for one in given}
    assert prompts == {f"<|user|>{text}<|end|><|assistant|>" for text in REQUESTS}
    own = [one for one in texts if one.source == "self"]
    assert 0 < len(own) <= 16 and len(given) + len(own) == len(texts)
    assert {one.temperature for one in texts} == {0.0, 1.0}
    for one in texts:
        changes = np.flatnonzero(np.diff(one.supervised))
        assert len(changes) == 1 and one.supervised[-1] and one.supervised.sum() <= 12


def test_features_stand_beside_the_tokens(finished: Path) -> None:
    for path in token_store.token_files(finished):
        rows = sum(len(one.tokens) - 1 for one in token_store.read_samples(path))
        found = feature_store.read_features(feature_store.features_path(path), ["last_hidden"], 0, rows)
        assert found["last_hidden"].shape == (rows, 32)
        assert np.isfinite(found["last_hidden"].astype(np.float32)).all()


def test_what_is_missing_is_written_again_and_nothing_else(experiment: Path, finished: Path) -> None:
    files = token_store.token_files(finished)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
    assert len(files) > 1
    files[1].unlink()
    assert generate(experiment, finished) == 0
    assert files[1].read_bytes() == before[files[1]][0]
    assert files[0].stat().st_mtime_ns == before[files[0]][1]


def test_another_config_is_refused(
    experiment: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(experiment, finished, "--config.seed=5") == 2
    assert "differs in seed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config.batch_size=12", "a multiple of 8"),
        ("--config.temperatures=()", "temperatures is empty"),
        ("--config.instructions=('none.jsonl',)", "no file none.jsonl"),
        ("--config.max_new_tokens=0", "max_new_tokens is 0"),
        ("--config.features=('nonsense',)", "no feature 'nonsense'"),
    ],
)
def test_bad_settings_are_refused(
    experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, message: str
) -> None:
    assert generate(experiment, tmp_path, flag) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("*.array_record"))


def test_nothing_to_answer_is_refused(
    experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(experiment, tmp_path, "--config.instructions=()", "--config.self_prompts=0") == 2
    assert "there are no prompts" in capsys.readouterr().err
