"""Drafters of the frequent tokens only: their law is the whole one's, cut; the text stays the target's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specjax import build, draft_vocab
from specjax.config import load_config, run_config, validate
from specjax.data import token_counts
from specjax.data.token_store import Sample, write_samples
from specjax.errors import ConfigError
from specjax.eval.exactness.sampling import Group, Sampler, fit
from specjax.eval.exactness.subjects import examples, modules
from specjax.step import Method
from specjax.testing import side_by_side, unverified
from specjax.verify import rejection
from tests.model_folder import write_model
from tests.test_drafter_dtype import first_laws, num_int8, text_of, write_learned

pytestmark = pytest.mark.quick_compile

ROOT = Path(__file__).parent.parent
SIZE = 48
THINNED = {"name": "self_speculative", "skip_layers": (1,), "draft_length": 2}
COMPLETE = {"name": "draft_model", "source": "", "draft_length": 2}
NGRAM = {"name": "ngram", "draft_length": 1, "max_ngram": 2}
CASCADE = {"name": "cascade", "inner": NGRAM, "source": "", "draft_length": 2}
# Drafters with a head, and where their draft vocabulary lies; of learned ones the case there.
CASES = {
    "complete model": (COMPLETE, ""),
    "thinned target": (THINNED, ""),
    "cascade": (CASCADE, "model"),
    "cascade of a thinned model": (CASCADE | {"inner": THINNED}, "inner"),
    "adaptive": ({"name": "adaptive", "inner": THINNED, "costs": (1.0, 1.1)}, "inner"),
    "draft_model over all tokens": (None, ""),
    "draft_model": (None, ""),
    "eagle": (None, ""),
    "eagle3": (None, ""),
    "medusa": (None, ""),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder."""
    return write_model(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> build.LoadedTarget:
    """The target of that folder."""
    return build.build_target(str(folder))


@pytest.fixture(scope="module")
def greedy_text(loaded: build.LoadedTarget) -> list[list[int]]:
    """What the target writes at temperature 0."""
    return text_of(loaded, None, {})


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, greedy_text: list[list[int]]) -> str:
    """A folder of token files in which all tokens of that text but one are frequent."""
    folder = tmp_path_factory.mktemp("texts")
    *frequent, missing = sorted({token for text in greedy_text for token in text})
    drawn = np.random.default_rng(0).choice(np.delete(np.arange(320), missing), 400)
    for number, tokens in enumerate((drawn, np.repeat(frequent, 50))):
        write_samples(folder / f"tokens-{number}.array_record", [sample(tokens)])
    return str(folder)


def sample(tokens, num_given: int = 0) -> Sample:
    """A text of which all but the first tokens were written by the target."""
    tokens = np.asarray(tokens, np.int32)
    return Sample(tokens, np.arange(len(tokens)) >= num_given, 0.0, "drawn")


def fields_of(case: str, loaded: build.LoadedTarget, folder: Path) -> dict:
    """The drafter's fields, its weights written to the folder where they are learned; "" is the target's."""
    if (fields := CASES[case][0]) is None:
        return write_learned(folder / "drafter", case, loaded)
    return fields | ({"source": loaded.source} if "source" in fields else {})


@pytest.mark.parametrize("case", CASES)
def test_every_head_is_cut(case: str, loaded: build.LoadedTarget, texts: str, tmp_path: Path) -> None:
    weights = build.build_drafter(fields_of(case, loaded, tmp_path), loaded, None, SIZE, (texts,))[1]
    own = weights[place] if (place := CASES[case][1]) else weights
    tokens = np.asarray(own[draft_vocab.TOKENS])
    assert 0 < len(tokens) <= SIZE and (np.diff(tokens) > 0).all()
    heads = [own[draft_vocab.HEAD]] if draft_vocab.HEAD in own else []
    heads += [part["lm_head"] for part in (own, *own.get("heads", {}).values()) if "lm_head" in part]
    assert heads and all(head["weight"].shape == (len(tokens), 32) for head in heads)


@pytest.mark.parametrize("case", ["complete model", "thinned target", "cascade"])
def test_a_pruned_law_is_the_whole_one_restricted_and_renormalised(
    case: str, loaded: build.LoadedTarget, texts: str, tmp_path: Path
) -> None:
    fields, place = fields_of(case, loaded, tmp_path), CASES[case][1]
    whole = build.build_drafter(fields, loaded)
    drafter, weights = build.build_drafter(fields, loaded, None, SIZE, (texts,))
    own = weights[place] if place else weights
    expected, found = first_laws(loaded, *whole), first_laws(loaded, drafter, weights)
    kept = np.isin(np.arange(expected.shape[1]), own[draft_vocab.TOKENS])
    assert (found[:, ~kept] == 0).all() and (expected[:, ~kept].sum(1) > 0.01).all()
    cut = np.where(kept, expected, 0)
    np.testing.assert_allclose(found, cut / cut.sum(1, keepdims=True), atol=2e-6)


@pytest.mark.parametrize("case", ["complete model", "thinned target"])
def test_the_greedy_text_holds_tokens_that_are_never_drafted(
    case: str, loaded: build.LoadedTarget, texts: str, tmp_path: Path, greedy_text: list[list[int]]
) -> None:
    fields = fields_of(case, loaded, tmp_path)
    drafter, weights = build.build_drafter(fields, loaded, None, SIZE, (texts,))
    assert not np.isin(np.concatenate(greedy_text), weights[draft_vocab.TOKENS]).all()
    assert text_of(loaded, drafter, weights) == greedy_text


def test_tokens_mapped_wrongly_are_noticed(loaded: build.LoadedTarget, texts: str) -> None:
    drafter, weights = build.build_drafter(THINNED, loaded, None, SIZE, (texts,))
    shifted = weights | {draft_vocab.TOKENS: weights[draft_vocab.TOKENS] + 1}
    right, wrong = (first_laws(loaded, drafter, tried) for tried in (weights, shifted))
    assert np.abs(right - wrong).max() > 0.01


def test_a_vocabulary_of_its_own_is_cut_further(
    loaded: build.LoadedTarget, texts: str, tmp_path: Path
) -> None:
    fields = write_learned(tmp_path / "drafter", "eagle3", loaded)
    before, after = (build.build_drafter(fields, loaded, None, *vocab)[1] for vocab in ((), (SIZE, (texts,))))
    frequent = np.argsort(-token_counts.count_written([texts], 320), kind="stable")[:SIZE]
    wanted = np.intersect1d(before["d2t"], frequent)
    np.testing.assert_array_equal(after["d2t"], wanted)
    rows = after["lm_head"]["weight"]
    np.testing.assert_array_equal(rows, before["lm_head"]["weight"][np.searchsorted(before["d2t"], wanted)])


def test_rows_at_hand_are_in_the_type_of_the_model(loaded: build.LoadedTarget, texts: str) -> None:
    fields = COMPLETE | {"source": loaded.source}
    head = build.build_drafter(fields, loaded, "int8", SIZE, (texts,))[1][draft_vocab.HEAD]
    assert num_int8(head) == SIZE * 32


def not_zero_elsewhere(keys, draft, target_probs, *, max_depth):
    """Broken: the rule is told a law that gives something to tokens which are never drafted."""
    wrong = 0.75 * draft.probs + 0.25 / draft.probs.shape[-1]
    return rejection.verify(keys, draft._replace(probs=wrong), target_probs, max_depth=max_depth)


def test_a_pruned_drafter_keeps_the_law() -> None:
    name = "self_speculative"
    subject = modules({name: examples()[name]})[name]
    tokens = {draft_vocab.TOKENS: np.array([1, 3, 4, 6])}
    pruned = draft_vocab.complete(subject.params.drafter | tokens, subject.target, subject.params.target)
    group = Group(1.0, 0, 1.0, 0.0, (1, 2, 1, 2, 1), 1500)
    rules = (rejection.verify, unverified, not_zero_elsewhere)
    judge = side_by_side(list(rules), np.repeat(np.arange(len(rules)), group.rows).tolist())
    method = Method(subject.target, subject.drafter, judge)
    drawn = Sampler(method, subject.params._replace(drafter=pruned), [group] * len(rules)).draw(seed=1)
    exact, *broken = (fit(new, subject.law_of(group)).p_value for new in drawn)
    assert exact > 1e-5 and max(broken) < 1e-6


@pytest.mark.parametrize(
    ("drafter", "vocab", "named"),
    [
        (
            NGRAM,
            (SIZE,),
            "'ngram' scores no tokens with an unemb",
        ),
        (
            {"name": "adaptive", "inner": NGRAM, "costs": (1.1,)},
            (SIZE,),
            "leave it",
        ),
        (THINNED, (None, ("{texts}",)), "draft_vocab_from is set and draft_vocab_size is not"),
        (THINNED, (0, ("{texts}",)), "draft_vocab_size is 0: give at least 1"),
        (THINNED, (321, ("{texts}",)), "draft_vocab_size is 321: give 1 to 320"),
        (THINNED, (SIZE,), "of another tokenizer than the target's: set draft_vocab_from"),
        (THINNED, (SIZE, ("{empty}",)), "holds no \\*.array_record"),
        (THINNED, (SIZE, ("{empty}/prompt",)), "no token in .* is marked as written"),
        (THINNED, (SIZE, ("{empty}/foreign",)), "hold the token 400 and .* ends at 320"),
    ],
)
def test_vocabularies_that_cannot_be_are_refused(
    drafter: dict, vocab: tuple, named: str, loaded: build.LoadedTarget, texts: str, tmp_path: Path
) -> None:
    write_samples(tmp_path / "prompt", [sample([1, 2], num_given=2)])
    write_samples(tmp_path / "foreign", [sample([1, 400])])
    size, *rest = vocab
    sources = tuple(path.format(texts=texts, empty=tmp_path) for path in (rest[0] if rest else ()))
    with pytest.raises(ConfigError, match=named):
        build.build_drafter(drafter, loaded, None, size, sources)


def test_drafters_that_draft_none_of_the_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="drafts none of the tokens"):
        draft_vocab.keep({draft_vocab.TOKENS: np.array([1, 2])}, np.array([3]))


def test_a_run_takes_the_vocabulary_of_the_drafts(folder: Path, texts: str) -> None:
    config = run_config()
    config.target, config.drafter = str(folder), THINNED
    config.draft_vocab_size, config.draft_vocab_from = SIZE, (texts,)
    validate(config)
    assert len(build.build_method(config).params.drafter[draft_vocab.TOKENS]) == SIZE
    config.drafter = NGRAM
    with pytest.raises(ConfigError, match="no tokens with an unembedding"):
        validate(config)


@pytest.mark.parametrize("variant", ["", ":eagle"])
def test_the_config_is_valid(variant: str) -> None:
    validate(load_config(f"{ROOT}/configs/draft_vocab_llama.py{variant}"))


def test_packaged_counts_are_those_of_the_texts() -> None:
    counted = token_counts.count_written([str(ROOT / "experiments" / "self_written")], 49152)
    with np.load(token_counts.PACKAGED / "smollm2.npz") as packaged:
        np.testing.assert_array_equal(packaged["counts"], counted)


def test_counts_are_read_for_their_own_tokenizer_alone(
    loaded: build.LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_counts, "PACKAGED", tmp_path)
    token_counts.write_counts(tmp_path / "own.npz", np.arange(320), loaded.tokenizer)
    np.testing.assert_array_equal(token_counts.packaged(loaded.tokenizer, 320), np.arange(320))
    with pytest.raises(ConfigError, match="another tokenizer"):
        token_counts.packaged(None, 320)
