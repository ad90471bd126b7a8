"""The certificate: its statistics, its verdicts, and the command that writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from specjax import run
from specjax.config import run_config
from specjax.eval.exactness import certificate, statistics, subjects
from specjax.eval.exactness.reference import worst_total_variation
from specjax.eval.exactness.sampling import Group, fit, model_law, tabulated_law, warped
from specjax.modules import module_names
from specjax.sampling import make_warp, warp_probs
from specjax.tasks import exactness
from specjax.testing import tabulated_target
from specjax.types import ProposalLaw

pytestmark = pytest.mark.quick_compile

ROOT = Path(__file__).parents[3]
CONFIG = f"--config={ROOT}/configs/exactness.py"
FIELDS = {
    "drafter",
    "rule",
    "lossless",
    "warp",
    "samples",
    "chi_square",
    "degrees_of_freedom",
    "p_value",
    "total_variation",
    "kl",
    "negative_control_p_value",
    "exact_total_variation",
    "verdict",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep what is compiled here out of the user's cache."""
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def certificate_of(workdir: Path) -> dict[str, Any]:
    return json.loads((workdir / "certificate.json").read_text())


def test_chi_square_is_pearsons() -> None:
    counts, law = np.array([[30, 50], [20, 100]]), np.array([[0.2, 0.2], [0.1, 0.5]])
    found = statistics.chi_square(counts, law)
    wanted = stats.chisquare(counts.ravel(), law.ravel() * 200)
    assert found == pytest.approx((wanted.statistic, 3, wanted.pvalue))


def test_pooling_leaves_no_rare_cell_and_loses_nothing() -> None:
    expected = np.array([40.0, 0.5, 7.0, 1.5, 51.0])
    counts, pooled = statistics.pool(np.array([41, 1, 6, 2, 50]), expected)
    # 0.5 and 1.5 together are still rare, so the 7 goes with them.
    assert sorted(pooled) == [9.0, 40.0, 51.0] and sorted(counts) == [9, 41, 50]
    few = statistics.chi_square(np.array([2, 1]), np.array([0.5, 0.5]))
    assert (few.degrees_of_freedom, few.p_value) == (0, 1.0)


def test_a_token_that_the_law_excludes_is_never_a_chance() -> None:
    law = np.zeros((2, 2, 2))
    law[0, 1, 1] = 1.0
    assert fit(np.array([[0, 1, 1]] * 9), law) == (0.0, 0, 1.0)
    assert fit(np.array([[0, 1, 1]] * 9 + [[0, 1, 0]]), law).p_value == 0
    assert fit(np.array([[0, 1, 1]] * 9 + [[0, 1, 65]]), law).p_value == 0  # not even in the vocabulary
    assert statistics.kl(np.array([0.5, 0.5]), np.array([1.0, 0.0])) == np.inf


def test_holm_rejects_in_turn_and_stops() -> None:
    # 0.01 <= 0.05 / 4 and 0.013 <= 0.05 / 3, but 0.03 > 0.05 / 2; Bonferroni would reject the first alone.
    assert statistics.holm([0.03, 0.01, 0.04, 0.013], 0.05) == [False, True, False, True]
    assert statistics.holm([], 0.05) == []


def test_power_is_what_it_says() -> None:
    rng = np.random.default_rng(0)
    law = rng.dirichlet(np.full(12, 5.0))
    smallest = statistics.smallest_total_variation(4_000, 11, level=0.01, power=0.9)
    # The shape that is hardest to find: in proportion to the law, up in one half and down in the other.
    signs = np.where(np.isin(np.arange(12), np.argsort(law)[::2]), 1.0, -1.0)
    gain, loss = law[signs > 0].sum(), law[signs < 0].sum()
    off = law * (1 + smallest * np.where(signs > 0, 1 / gain, -1 / loss))
    found = [statistics.chi_square(rng.multinomial(4_000, off), law).p_value < 0.01 for _ in range(600)]
    assert np.mean(found) > 0.86
    assert statistics.smallest_total_variation(4_000, 0, level=0.01, power=0.9) == pytest.approx(
        np.log(10) / 4_000, rel=1e-3
    )


@pytest.mark.parametrize("warp", subjects.WARPS)
def test_the_independent_warp_agrees_with_the_one_that_decodes(warp: tuple) -> None:
    logits = np.random.default_rng(0).normal(size=(50, subjects.VOCAB))
    group = Group(*warp, prompt=(0,))
    wanted = jax.jit(warp_probs)(jnp.asarray(logits, jnp.float32)[None], make_warp(1, *warp))[0]
    np.testing.assert_allclose([warped(row, group) for row in logits], wanted, atol=1e-6)


def test_the_law_of_a_model_is_that_of_the_table_behind_it() -> None:
    table, _ = subjects.random_tables()
    target = tabulated_target(jnp.asarray(table, jnp.float32))
    for group in subjects.groups_of(subjects.TOY_PROMPTS):
        law = tabulated_law(table, group)
        assert law.sum() == pytest.approx(1)
        np.testing.assert_allclose(model_law(target, {}, group, width=6), law, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "law", "is_exact"),
    [
        ("rejection", {"lenience": 1.0}, ProposalLaw.CHAIN, True),
        ("rejection", {"lenience": 0.5}, ProposalLaw.CHAIN, False),
        ("traversal", {}, ProposalLaw.IID_SIBLINGS, True),
        ("traversal", {}, ProposalLaw.SIBLINGS_WITHOUT_REPLACEMENT, False),
        ("traversal_without_replacement", {}, ProposalLaw.SIBLINGS_WITHOUT_REPLACEMENT, True),
        ("my.rule", {}, ProposalLaw.CHAIN, None),
        ("rejection", {}, ProposalLaw.IID_SIBLINGS, None),
    ],
)
def test_exact_total_variation(name: str, options: dict, law: ProposalLaw, is_exact: bool | None) -> None:
    found = worst_total_variation(
        name, tuple(options.items()), law, is_chain=False, is_greedy=False, instances=30, seed=0
    )
    assert found is None if is_exact is None else (found == 0) == is_exact


GOOD = {
    "lossless": True,
    "samples": 100,
    "degrees_of_freedom": 7,
    "p_value": 0.3,
    "exact_total_variation": 0.0,
    "negative_control_p_value": 0.0,
}


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "exact"),
        ({"exact_total_variation": None}, "exact"),
        ({"p_value": 0.02}, "exact"),  # as one of four, that is a chance
        ({"p_value": 0.001}, "FAILED: not the target's law"),
        ({"exact_total_variation": 0.001}, "FAILED: not exact in the rational reference"),
        ({"negative_control_p_value": 0.01}, "FAILED: control not rejected"),
        ({"lossless": False, "p_value": 0.0, "exact_total_variation": 0.3}, "lossy, as declared"),
        ({"lossless": False, "negative_control_p_value": 0.01}, "FAILED: control not rejected"),
        # At temperature 0 all drafts were right.
        ({"degrees_of_freedom": 0, "p_value": 1.0, "negative_control_p_value": 1.0}, "exact"),
    ],
)
def test_verdicts(change: dict[str, Any], verdict: str) -> None:
    rows = certificate.judged([GOOD, GOOD, GOOD, {**GOOD, **change}])
    assert [row["verdict"] for row in rows] == ["exact"] * 3 + [verdict]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--config.samples=0"], "samples is 0: give at least 1"),
        (["--config.instances=0"], "instances is 0: give at least 1"),
        (["--config.seed=-1"], "seed is -1"),
        (["--config.task=exactnes"], "no task 'exactnes'; did you mean 'exactness'"),
        (["--config.sample=9"], "no field 'sample'"),
        (["--config.verify=rejecton"], "no rule 'rejecton'"),
        (["--config.verify_options={'lenience': 0.5}"], "verify_options is set and verify is not"),
        (["--config.drafter={'name': 'ngram', 'draft_length': 2}"], "needs the field 'max_ngram'"),
        (["--stream"], "--stream shows a text"),
        (
            [
                "--config.drafter={'name': 'draft_model', 'source': 'x', 'draft_length': 2, "
                "'branching': (2,), 'proposal': 'iid_siblings'}",
                "--config.verify=block",
            ],
            "the rule 'block' cannot judge the drafter 'draft_model'",
        ),
    ],
)
def test_bad_input_is_one_error(
    overrides: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main([CONFIG, f"--workdir={tmp_path}/out", *overrides]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("specjax: error: ") and shown.count("\n") == 1 and expected in shown


def test_rules_that_go_by_the_law_take_turns() -> None:
    toys, candidates = subjects.toys(), exactness.chosen_rules(run_config("exactness"))
    chosen = certificate.rules_in_turn([toys["chain"]] * 7 + [toys["iid_tree"]] * 2, candidates)
    names = [candidate.name for (candidate,) in chosen]
    sampled_in_turn = ["multi_round", "traversal"]
    without = ["traversal_without_replacement", "without_replacement"]
    assert sorted(names[:6]) == sorted(["block", "rejection", *sampled_in_turn, *without])
    assert names[6] == names[0] and sorted(names[7:]) == sampled_in_turn


def test_an_interrupted_run_goes_on_and_a_finished_one_is_only_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []
    few = dict(list(subjects.examples().items())[:2])
    monkeypatch.setattr(subjects, "examples", lambda: few)

    def measure(subject: Any, candidates: Any, settings: Any, report: Any) -> list[dict[str, Any]]:
        measured.append(subject.name)
        if len(measured) == 3:
            raise KeyboardInterrupt
        about = {"drafter": subject.name, "samples": settings.samples, "total_variation": 0.1, "kl": None}
        return [
            {**GOOD, **about, "rule": c.name, "warp": g.warp_name, "chi_square": None}
            for c, g in certificate.pairs_of(subject, candidates)
        ]

    monkeypatch.setattr(exactness, "measure", measure)
    monkeypatch.setattr(exactness, "AT_ONCE", 1)
    arguments = [CONFIG, f"--workdir={tmp_path}/out", "--config.samples=7"]
    assert run.main(arguments) == 130
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {"config.json", "measurements.partial.jsonl"}
    names = [*subjects.TOYS, *few]
    assert run.main(arguments) == 0
    # The third was interrupted; the fourth may have been begun before that was heard of.
    assert set(names[2:]) <= set(measured[3:])
    assert not {names[0], names[1]} & set(measured[2:])
    assert f"2 of {len(names)} drafters were finished before" in capsys.readouterr().err

    assert {path.name for path in out.iterdir()} == {
        "certificate.json",
        "certificate.md",
        "config.json",
        "measurements.jsonl",
    }
    written = certificate_of(out)
    assert written.keys() == {"rows", "passed", "settings", "environment"}
    assert all(row.keys() == FIELDS for row in written["rows"])
    assert list(dict.fromkeys(row["drafter"] for row in written["rows"])) == names
    assert written["settings"]["samples"] == 7 and written["passed"]
    count = len(measured)
    assert run.main(arguments) == 0
    assert len(measured) == count and certificate_of(out) == written
    monkeypatch.setattr(exactness, "code_digest", lambda modules: "another")
    assert run.main(arguments) == 2
    assert "code_sha256" in capsys.readouterr().err


LIAR = '''
"""Drafts like the thinned target and reports a law that is not the one it drew from."""
import jax.numpy as jnp
from specjax.drafters import self_speculative

Config = self_speculative.Config

def build(config, target, architecture=None):
    drafter = self_speculative.build(config, target, architecture)
    def propose(*args):
        draft, state = drafter.propose(*args)
        return draft._replace(probs=jnp.full_like(draft.probs, 1 / target.vocab_size)), state
    return drafter._replace(propose=propose)
'''
OWN_RULE = '''
"""The rejection rule under a name of one's own."""
from specjax.types import ProposalLaw
from specjax.verify.rejection import verify

LOSSLESS, LAWS, CHAINS_ONLY = True, {ProposalLaw.CHAIN}, True
'''


def test_own_drafter_that_reports_a_wrong_law_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_modules").mkdir()
    (tmp_path / "my_modules" / "liar.py").write_text(LIAR)
    (tmp_path / "my_modules" / "rule.py").write_text(OWN_RULE)
    monkeypatch.syspath_prepend(tmp_path)
    drafter = "{'name': 'my_modules.liar', 'draft_length': 2, 'skip_layers': (1,)}"
    arguments = [CONFIG, f"--workdir={tmp_path}/out", f"--config.drafter={drafter}", "--config.samples=1000"]
    assert run.main([*arguments, "--config.verify=my_modules.rule"]) == 1
    written = certificate_of(tmp_path / "out")
    assert not written["passed"]
    verdicts = {row["warp"]: row["verdict"] for row in written["rows"]}
    assert len(verdicts) == len(subjects.WARPS)
    assert verdicts["T=1"] == "FAILED: not the target's law"
    assert all(row["exact_total_variation"] is None for row in written["rows"])
    assert "FAILED" in capsys.readouterr().out
    assert "FAILED" in (tmp_path / "out" / "certificate.md").read_text()


@pytest.mark.slow
def test_quick_certificate(tmp_path: Path) -> None:
    assert run.main([CONFIG, f"--workdir={tmp_path}/out"]) == 0
    rows = certificate_of(tmp_path / "out")["rows"]
    assert {row["drafter"] for row in rows} == {*subjects.TOYS, *subjects.examples()}
    assert {row["rule"] for row in rows if row["drafter"] in subjects.TOYS} == set(module_names("verify"))
    assert {row["warp"] for row in rows if row["rule"] == "greedy"} == {"T=0"}
    # Of the drafters each has its row under every warp, by one rule.
    own = [row for row in rows if row["drafter"] not in subjects.TOYS]
    assert len(own) == len({(row["drafter"], row["warp"]) for row in own})
    assert len(own) == len(subjects.examples()) * len(subjects.WARPS)
    assert {row["verdict"] for row in rows} == {"exact", "lossy, as declared"}
    assert all(row["negative_control_p_value"] < certificate.CONTROL_LEVEL for row in rows)
    for row in rows:
        assert row["lossless"] == (row["rule"] != "typical")
