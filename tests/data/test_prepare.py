"""Texts that others wrote, by the command: what the trainer reads, how it goes on, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import run
from specjax.build import LoadedTarget, build_target
from specjax.data import batches, feature_store, shards, token_store
from specjax.data.features import recording
from specjax.data.prompts import load_prompts
from specjax.data.self_written import Job, Settings, write
from specjax.data.token_store import Sample
from specjax.trees.topology import chain_mask
from specjax.types import ModelParams
from tests.caches import with_kernels
from tests.model_folder import END, write_model

pytestmark = pytest.mark.quick_compile

CONFIG = """
from specjax.config import run_config

def get_config():
    config = run_config("prepare")
    config.target = {folder!r} + "/target"
    config.documents = ({folder!r} + "/text.txt",)
    config.conversations = ({folder!r} + "/chats.jsonl",)
    config.tokens = ({folder!r} + "/written",)
    config.max_length, config.batch_size, config.shard_size = 70, 4, 9
    config.features = {features!r}
    return config
"""
FEATURES = ("last_hidden", "hidden.1")
WRITING = Settings(batch_size=8, capacity=96, max_new_tokens=16, top_p=1.0, seed=0, stop_tokens=(0,))
ANSWERS = ["sat on the mat", "the dog sat on the log"]
# Features are kept in bfloat16, of 8 bits.
CLOSE = {"rtol": 2**-7, "atol": 2e-3}


def chat(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": words} for i, words in enumerate(contents)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepare")
    write_model(folder / "target")
    (folder / "text.txt").write_text("the cat sat on the mat and the dog sat on seven logs\n" * 50)
    lines = [
        chat("one two", ANSWERS[0], "three", ANSWERS[1]),
        {"messages": chat("four five", ANSWERS[0])},
        chat(load_prompts("default")[0].turns[0], "no evaluation prompt trains"),
        chat("the cat " * 100, "beyond the longest text"),
        chat("nobody answers"),
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "config.py").write_text(CONFIG.format(folder=str(folder), features=FEATURES))
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedTarget:
    return build_target(str(folder / "target"))


@pytest.fixture(scope="module")
def recorded(folder: Path, loaded: LoadedTarget) -> list[dict[str, np.ndarray]]:
    """Texts that the target wrote, and the features that were kept on the way."""
    (folder / "written").mkdir()
    jobs = [Job(number, tuple(range(10, 14 + 3 * number)), number % 2) for number in range(8)]
    method = recording(loaded.target, FEATURES)
    done = sorted(
        write(method, ModelParams(loaded.params, {}), jobs, WRITING), key=lambda one: one.job.number
    )
    samples = []
    for one in done:
        tokens = np.asarray(one.tokens, np.int32)
        supervised = np.arange(len(tokens)) >= len(one.job.prompt)
        samples.append(Sample(tokens, supervised, one.job.temperature, "self"))
    token_store.write_samples(folder / "written" / f"tokens-00000{token_store.SUFFIX}", samples)
    return [one.features for one in done]


def prepare(folder: Path, workdir: Path, *more: str) -> int:
    return run.main([f"--config={folder / 'config.py'}", f"--workdir={workdir}", *more])


@pytest.fixture(scope="module")
def finished(folder: Path, recorded: list[dict[str, np.ndarray]]) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECJAX_CACHE", str(with_kernels(folder / "cache")))
        assert prepare(folder, folder / "texts") == 0
    return folder / "texts"


def texts_of(folder: Path) -> list[Sample]:
    return [one for path in token_store.token_files(folder) for one in token_store.read_samples(path)]


def features_of(folder: Path) -> list[dict[str, np.ndarray]]:
    found = []
    for path in token_store.token_files(folder):
        row = 0
        for one in token_store.read_samples(path):
            end = row + len(one.tokens) - 1
            part = feature_store.read_features(feature_store.features_path(path), FEATURES, row, end)
            found.append({name: values.astype(np.float32) for name, values in part.items()})
            row = end
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_each_kind_of_text_has_its_own_mask(finished: Path, folder: Path, loaded: LoadedTarget) -> None:
    tokenizer, texts = loaded.tokenizer, texts_of(finished)
    assert tokenizer is not None
    documents, chats = ([one for one in texts if one.source == name] for name in ("text", "chats"))
    assert all(one.supervised.all() for one in documents)
    covered = [token for one in documents for token in one.tokens]
    assert tokenizer.decode(covered) == (folder / "text.txt").read_text()
    assert [len(one.tokens) for one in documents[:-1]] == [70] * (len(documents) - 1)
    said = [tokenizer.decode(one.tokens[one.supervised], skip_special_tokens=False) for one in chats]
    assert said == [f"{ANSWERS[0]}{END}{ANSWERS[1]}{END}", f"{ANSWERS[0]}{END}"]
    for before, after in zip(texts_of(folder / "written"), texts[-8:], strict=True):
        np.testing.assert_array_equal(before.tokens, after.tokens)
        np.testing.assert_array_equal(before.supervised, after.supervised)
        assert before[2:] == after[2:]


def test_features_are_those_of_one_pass_over_the_texts(finished: Path, loaded: LoadedTarget) -> None:
    texts, features = texts_of(finished), features_of(finished)
    assert len({len(one.tokens) for one in texts}) > 4
    size = max(len(one.tokens) for one in texts)
    tokens = jnp.asarray([np.pad(one.tokens, (0, size - len(one.tokens))) for one in texts])
    positions = jnp.broadcast_to(jnp.arange(size), tokens.shape)
    cache, mask = loaded.target.init_cache(*tokens.shape), chain_mask(*tokens.shape)
    forward = jax.jit(loaded.target.forward, static_argnums=5)
    out = forward(loaded.params, tokens, positions, mask, cache, FEATURES)
    for row, found in enumerate(features):
        for name, values in found.items():
            expected = np.asarray(out.features[name][row, : len(values) + 1])
            np.testing.assert_allclose(values, expected[:-1], **CLOSE, err_msg=name)
            assert not np.allclose(values, expected[1:], **CLOSE)


def test_features_are_those_that_writing_records(finished: Path, recorded) -> None:
    for found, expected in zip(features_of(finished)[-8:], recorded, strict=True):
        for name in FEATURES:
            np.testing.assert_allclose(found[name], expected[name].astype(np.float32), **CLOSE)


def test_the_trainer_reads_the_folder(finished: Path) -> None:
    texts = batches.load_texts([str(finished)], 64, batches.ANSWERS, 320)
    assert len(texts) == len(texts_of(finished)) and batches.stored_among(texts, FEATURES) == FEATURES
    batch = next(
        batches.make_batches(texts, FEATURES, num_rows=4, max_length=64, seed=0, process=0, num_processes=1)
    )
    assert batch.tokens.shape == (4, 64) and batch.supervised.any()
    for name in FEATURES:
        assert batch.features[name].shape == (4, 64, 32)
        has_some = np.abs(batch.features[name].astype(np.float32)).max(axis=-1) > 0
        np.testing.assert_array_equal(has_some.sum(axis=1), batch.length - 1)


def test_a_killed_run_goes_on_to_the_same_bytes(
    folder: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = token_store.write_samples

    def killed(path: Path, samples) -> None:
        if path.stem.endswith("1"):
            raise KeyboardInterrupt
        whole(path, samples)

    with monkeypatch.context() as patch:
        patch.setattr(token_store, "write_samples", killed)
        assert prepare(folder, tmp_path) == 130
    (first,) = token_store.token_files(tmp_path)
    # The features of the second shard were written, and its tokens were not.
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    before = first.stat().st_mtime_ns
    assert prepare(folder, tmp_path) == 0
    assert contents(tmp_path) == contents(finished) and len(contents(tmp_path)) > 6
    assert first.stat().st_mtime_ns == before


def test_other_configs_and_other_texts_are_refused(
    folder: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(finished)
    assert prepare(folder, finished, "--config.shard_size=8") == 2
    assert "differs in shard_size" in capsys.readouterr().err
    changed = tmp_path / "text.txt"
    shutil.copy(folder / "text.txt", changed)
    arguments = [f"--config.documents=('{changed}',)", "--config.features=()", "--config.tokens=()"]
    assert prepare(folder, tmp_path / "out", *arguments) == 0
    changed.write_text("one two three")
    assert prepare(folder, tmp_path / "out", *arguments) == 2
    assert "differs in texts_sha256" in capsys.readouterr().err
    # Features would take the place of the files that they are made from.
    source = f"--config.tokens=('{finished}',)"
    assert prepare(folder, finished, source) == 2
    assert contents(finished) == before


def test_what_is_left_out_and_what_it_takes_is_said(
    folder: Path, recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(folder, tmp_path, "--config.documents=()", "--config.per_file=1") == 0
    shown = capsys.readouterr()
    err = " ".join(shown.err.split())
    assert "1 of 5 chats hold an evaluation prompt" in err
    assert "2 of 4 chats are left out, as assistant says nothing in their first 70 tokens" in err
    assert "the features will take 0.0 GB" in err and "2/2 texts" in err and "tokens/s" in err
    assert shown.out.startswith("2 texts, ")


def test_a_full_disk_is_refused_before_anything_is_written(
    folder: Path,
    recorded,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shards.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert prepare(folder, tmp_path) == 2
    assert "has room for 0.0 GB" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config.documents=('none.txt',)", "no file none.txt"),
        ("--config.documents=('{folder}/chats.jsonl',)", "end in .txt or .zip"),
        ("--config.conversations=('{folder}/text.txt',)", "end in .jsonl"),
        ("--config.conversations=('{folder}/bad.jsonl',)", "bad.jsonl:1: no chat"),
        ("--config.conversations=('{folder}/silent.jsonl',)", "no text is left"),
        ("--config.tokens=('{folder}/target',)", "holds no *.array_record"),
        ("--config.tokens=('{folder}/foreign',)", "hold the token 320"),
        ("--config.tokens=('{folder}/long',)", "300 tokens and the target has 256 positions"),
        ("--config.supervise_roles=()", "supervise_roles is empty"),
        ("--config.max_length=1", "max_length is 1"),
        ("--config.shard_size=0", "shard_size is 0"),
        ("--config.features=('nonsense',)", "no feature 'nonsense'"),
        ("", "there are no texts"),
    ],
)
def test_refusals(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, message: str
) -> None:
    (folder / "bad.jsonl").write_text('{"text": "the cat"}')
    (folder / "silent.jsonl").write_text(json.dumps(chat("nobody answers")))
    for name, tokens in (("foreign", [1, 320]), ("long", [1] * 300)):
        (folder / name).mkdir(exist_ok=True)
        sample = Sample(np.asarray(tokens, np.int32), np.ones(len(tokens), bool), 0.0, name)
        token_store.write_samples(folder / name / f"tokens-00000{token_store.SUFFIX}", [sample])
    kind = flag.partition("=")[0].removeprefix("--config.")
    others = {"documents", "conversations", "tokens"} - {kind}
    if kind in ("supervise_roles", "max_length", "shard_size", "features"):
        others.remove("conversations")
    empty = [f"--config.{name}=()" for name in sorted(others)]
    arguments = [flag.format(folder=folder)] if flag else []
    assert prepare(folder, tmp_path, *empty, *arguments) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
