"""From a config to parts that fit: weights shared, pairs checked, tokenizers compared."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from specjax import build
from specjax.checkpoints import source as checkpoints
from specjax.config import drafter_config, run_config
from specjax.errors import ConfigError
from specjax.models.functional import pack
from specjax.modules import find_module, lossless_rules, module_names
from specjax.types import Drafter, ProposalLaw
from tests.model_folder import write_model

NGRAM = {"name": "ngram", "draft_length": 2, "max_ngram": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder."""
    return write_model(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> build.LoadedTarget:
    """The target of that folder."""
    return build.build_target(str(folder))


@pytest.mark.parametrize("fields", [{"name": "draft_model"}, {"name": "cascade", "inner": NGRAM}])
@pytest.mark.parametrize("stacked", [False, True])
def test_target_that_drafts_for_itself_is_loaded_once(
    fields: dict, stacked: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: list[str] = []
    load = checkpoints.load
    monkeypatch.setattr(checkpoints, "load", lambda name, *args: sources.append(name) or load(name, *args))
    config = run_config()
    config.target = str(folder)
    config.stacked_layers = stacked
    config.drafter = fields | {"source": str(folder), "draft_length": 2}
    built = build.build_method(config)
    assert sources == [str(folder)]
    assert built.lossless
    assert built.method.drafter is not None and built.method.drafter.max_depth == 2
    own = jax.tree.leaves(built.params.drafter)
    if not stacked:
        assert all(a is b for a, b in zip(own, jax.tree.leaves(built.params.target), strict=True))
    published = jax.tree.leaves(pack(load(str(folder)).params))
    assert [leaf.shape for leaf in own] == [leaf.shape for leaf in published]


def test_another_source_brings_its_own_weights_and_architecture(
    folder: Path, loaded: build.LoadedTarget, tmp_path: Path
) -> None:
    smaller = write_model(tmp_path / "smaller", seed=1, num_layers=1)
    fields = {"name": "draft_model", "source": str(smaller), "draft_length": 2}
    drafter, params = build.build_drafter(fields, loaded)
    assert drafter.law is ProposalLaw.CHAIN
    assert list(params["layers"]) == [0]


def test_drafter_without_a_source_has_no_weights(loaded: build.LoadedTarget) -> None:
    fields = {"name": "self_speculative", "draft_length": 2, "skip_layers": [1]}
    drafter, params = build.build_drafter(fields, loaded)
    assert drafter.num_nodes == 3
    assert params == {}


def test_vocabularies_of_one_size_with_other_tokens_are_refused(
    loaded: build.LoadedTarget, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", text=["pack my box with five dozen liquor jugs"] * 3)
    fields = {"name": "draft_model", "source": str(other), "draft_length": 2}
    with pytest.raises(ConfigError, match="shares the target's tokenizer"):
        build.build_drafter(fields, loaded)


def test_rule_that_cannot_judge_a_drafter_is_refused_with_those_that_can() -> None:
    rule = find_module("verify", "rejection")
    build.check_pair("ngram", proposals(ProposalLaw.POINT_MASS), "rejection", rule)
    with pytest.raises(
        ConfigError, match=r"a tree of point_mass: rules that can are multi_round, target_only"
    ):
        build.check_pair("wide", proposals(ProposalLaw.POINT_MASS, num_nodes=4), "rejection", rule)
    with pytest.raises(ConfigError, match=r"'rejection' cannot judge the drafter 'mine'.*target_only"):
        build.check_pair("mine", proposals(ProposalLaw.IID_SIBLINGS), "rejection", rule)
    narrow = SimpleNamespace(LAWS=frozenset({ProposalLaw.CHAIN}))
    with pytest.raises(ConfigError, match=r"point_mass: rules that can are .*rejection"):
        build.check_pair("ngram", proposals(ProposalLaw.POINT_MASS), "narrow", narrow)


def proposals(law: ProposalLaw, num_nodes: int = 3) -> Drafter:
    """What a pair is judged by, of a drafter of depth 2."""
    return Drafter(None, None, None, num_nodes, max_depth=2, law=law)


def test_lossless_rules_hold_at_any_temperature() -> None:
    assert "greedy" not in lossless_rules()
    assert {"rejection", "target_only"} <= set(lossless_rules(ProposalLaw.CHAIN))
    assert "rejection" not in lossless_rules(ProposalLaw.SIBLINGS_WITHOUT_REPLACEMENT)


def test_every_drafter_and_rule_is_found_by_its_name() -> None:
    for room in ("drafters", "verify"):
        for name in module_names(room):
            assert find_module(room, name).__name__ == f"specjax.{room}.{name}"


def test_module_that_is_no_drafter_says_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match="'specjax.errors' has no Config and no build"):
        find_module("drafters", "specjax.errors")


def test_lists_become_the_tuples_that_a_drafter_declares() -> None:
    config = drafter_config({"name": "self_speculative", "draft_length": 1, "skip_layers": [1, 2]})
    assert config.skip_layers == (1, 2)
