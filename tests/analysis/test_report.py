"""What is recorded of every round, and how a page tells it."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.analysis import plots, report
from specjax.analysis.plots import Bar
from specjax.analysis.report import ACCEPTED, BONUS, PLAIN, RESAMPLED, Page, Pass, Text
from specjax.decode import generate, new_tokens, row_keys, start, trace
from specjax.drafters import ngram
from specjax.eval.tables import Table
from specjax.report import passes_of
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.testing import tabulated_target, tree_drafter
from specjax.trees.topology import paths_of
from specjax.types import DecodeState, ModelParams, Params, ProposalLaw, Request, Target
from specjax.verify import rejection, without_replacement

pytestmark = pytest.mark.quick_compile

PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [7, 8], [5, 5, 5, 5]]
STOP = 9
ROUNDS = 14
UNEVEN = (-1, 0, 0, 1, 1, 3)  # node 2 is a leaf at depth 1, the deepest is at 3


def methods(target: Target) -> dict[str, Method]:
    """Without a draft, with a chain that is often empty, and with trees."""
    table = np.random.default_rng(3).normal(size=(33, 32, 32))
    drafts = table + 0.5 * np.random.default_rng(4).normal(size=table.shape)
    toy = tabulated_target(jnp.asarray(2 * table, jnp.float32))
    law = ProposalLaw.SIBLINGS_WITHOUT_REPLACEMENT
    lookup = ngram.build(ngram.Config(draft_length=3, max_ngram=2), target)
    return {
        "plain": Method(toy),
        "chain": Method(target, lookup, rejection.verify),
        "tree": Method(
            toy, tree_drafter(jnp.asarray(2 * drafts, jnp.float32), UNEVEN, law), without_replacement.verify
        ),
    }


def begin(method: Method, params: ModelParams) -> tuple[Request, DecodeState]:
    return start(
        method,
        params,
        PROMPTS,
        max_new_tokens=12,
        warp=make_warp(len(PROMPTS), 0.7),
        keys=row_keys(1, range(len(PROMPTS))),
        stop_tokens=[STOP],
        capacity=64,
    )


@pytest.fixture(scope="module", params=["plain", "chain", "tree"])
def recorded(request: pytest.FixtureRequest, tiny_target: Target, tiny_params: Params) -> tuple[str, dict]:
    """A method's name, and what it wrote and counted: recorded, and by `generate`."""
    method, params = methods(tiny_target)[request.param], ModelParams(tiny_params, {})
    _, rounds = trace(method, params, *begin(method, params), num_rounds=ROUNDS)
    state, stats = generate(method, params, *begin(method, params))
    return request.param, {
        "rounds": jax.device_get(rounds),
        "tokens": new_tokens(state, PROMPTS),
        "stats": jax.device_get(stats),
    }


def check_trees(passes: list[Pass], pending: int) -> None:
    """Every tree grows from the last token, and its path goes from parents to children."""
    for done in passes:
        assert done.tokens[0] == pending, "the tree does not grow from the pending token"
        path = tuple(done.path[: done.num_accepted + 1])
        assert path in paths_of(done.parents), "the path is none of the tree's"
        pending = done.emitted[-1]


def test_recorded_tokens_are_those_of_generate_and_the_tree_holds_the_path(
    recorded: tuple[str, dict],
) -> None:
    name, found = recorded
    assert found["rounds"].tokens.shape == (ROUNDS, 3, {"plain": 1, "chain": 4, "tree": 6}[name])
    for row, prompt in enumerate(PROMPTS):
        passes = list(passes_of(found["rounds"], row))
        assert [token for done in passes for token in done.emitted] == found["tokens"][row]
        assert len(passes) == found["stats"].num_steps[row]
        check_trees(passes, prompt[-1])


def test_check_notices_a_path_that_is_none(recorded: tuple[str, dict]) -> None:
    _, found = recorded
    passes = list(passes_of(found["rounds"], 0))
    with pytest.raises(AssertionError, match="pending token"):
        check_trees(passes, pending=31)
    longer = [done._replace(path=[0, 0], num_accepted=1) for done in passes]
    with pytest.raises(AssertionError, match="none of the tree"):
        check_trees(longer, PROMPTS[0][-1])


def test_kinds_add_up_to_what_the_stats_count(recorded: tuple[str, dict]) -> None:
    name, found = recorded
    seen = set()
    for row in range(len(PROMPTS)):
        passes = list(passes_of(found["rounds"], row))
        tokens, steps = report.explain(passes, str)
        counts = report.count([Text("", "", tokens, steps)])
        assert [int(token.text) for token in tokens] == found["tokens"][row]
        assert sum(counts.values()) == found["stats"].num_emitted[row]
        assert counts[ACCEPTED] == found["stats"].accepted_at_depth[row].sum()
        # Every pass ends with a token of the target's own, but perhaps the last.
        assert len(steps) - (sum(counts.values()) - counts[ACCEPTED]) in (0, 1)
        seen |= {kind for kind, number in counts.items() if number}
    expected = {"plain": {PLAIN}, "chain": {PLAIN, ACCEPTED, RESAMPLED}, "tree": {ACCEPTED, RESAMPLED, BONUS}}
    assert seen - {BONUS} == expected[name] - {BONUS}


CHAIN = {"tokens": [1, 2, 3], "parents": [-1, 0, 1], "path": [0, 1, 2], "next_token": 8}
TREE = {"tokens": [1, 2, 3, 4], "parents": [-1, 0, 0, 1], "path": [0, 2, 0], "next_token": 8}


@pytest.mark.parametrize(
    ("done", "kinds", "nodes"),
    [
        (Pass(**CHAIN, num_accepted=2, num_emitted=3), [ACCEPTED, ACCEPTED, BONUS], ["1", "2", "3", "8"]),
        (Pass(**CHAIN, num_accepted=1, num_emitted=2), [ACCEPTED, RESAMPLED], ["1", "2", "3", "8"]),
        (Pass(**CHAIN, num_accepted=0, num_emitted=1), [RESAMPLED], ["1", "2", "3", "8"]),
        # What a stop token or the limit cut off is not shown.
        (Pass(**CHAIN, num_accepted=2, num_emitted=2), [ACCEPTED, ACCEPTED], ["1", "2", "3"]),
        (Pass(**CHAIN, num_accepted=1, num_emitted=1), [ACCEPTED], ["1", "2", "3"]),
        # A leaf has no drafts that could have been refused, however deep others are.
        (Pass(**TREE, num_accepted=1, num_emitted=2), [ACCEPTED, BONUS], ["1", "2", "3", "4", "8"]),
        # Nodes that hold no draft are left out.
        (
            Pass([1, -1, 3, -1], [-1, 0, 0, 1], [0, 2], 8, num_accepted=1, num_emitted=2),
            [ACCEPTED, BONUS],
            ["1", "3", "8"],
        ),
        (Pass([1, -1], [-1, 0], [0, 0], 8, num_accepted=0, num_emitted=1), [PLAIN], ["1", "8"]),
        (Pass([1], [-1], [0], 8, num_accepted=0, num_emitted=1), [PLAIN], ["1", "8"]),
    ],
)
def test_how_a_token_came(done: Pass, kinds: list[str], nodes: list[str]) -> None:
    tokens, (step,) = report.explain([done], str)
    assert [token.kind for token in tokens] == kinds
    assert [node.text for node in step.nodes] == nodes
    assert [int(token.text) for token in tokens] == done.emitted
    assert [step.nodes[token.node].text for token in tokens] == [token.text for token in tokens]
    assert all(node.parent < number for number, node in enumerate(step.nodes))
    shown = {node.kind for node in step.nodes[1:]} - {"refused"}
    assert shown == set(kinds)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the", "·the"),
        ("\n\n", "⏎⏎"),
        ("\t", "⇥"),
        ("", "∅"),
        ("\x1b", "\\u001b"),
        ("\u202e\u200b", "\\u202e\\u200b"),
        ("<|end|>", "<|end|>"),
        ("é日", "é日"),
    ],
)
def test_nothing_is_invisible(text: str, shown: str) -> None:
    assert report.visible(text) == shown


HOSTILE = "<script>alert('&\")</script>"


def a_page(text: str) -> str:
    """A page on which `text` stands wherever a run's own words can."""
    tokens, steps = report.explain([Pass(**CHAIN, num_accepted=1, num_emitted=2)], lambda token: text)
    table = Table(text, (text, "x"), [(text, "1")])
    return report.render(
        Page(text, {text: text}, [table], [text], [], [Text(text, text, tokens, steps, text)])
    )


def test_whatever_comes_from_a_run_is_escaped() -> None:
    page = a_page(HOSTILE)
    assert HOSTILE not in page and "alert(" in page
    assert page.count("<script") == a_page("word").count("<script") == 2
    assert "&lt;script&gt;" in page and "\\u003cscript\\u003e" in page


def test_page_asks_for_nothing_and_names_what_is_seen() -> None:
    page = a_page("word")
    assert re.findall(r"""(?:src|href)=["'](?!data:)""", page) == [] and "@import" not in page
    (group,) = re.findall(r'<div class="text" role="group" aria-labelledby="(.+?)"', page)
    assert f'id="{group}"' in page
    labels = re.findall(
        r'<button type="button" class="token (\w+)" tabindex="(-?\d)".*aria-label="(.+?)"', page
    )
    assert labels == [(ACCEPTED, "0", "word, accepted, pass 1"), (RESAMPLED, "-1", "word, resampled, pass 1")]
    picture = report.picture(b"x", "image/png", "what it shows")
    assert picture.source == "data:image/png;base64,eA=="


def test_bars_have_their_intervals_and_a_figure_is_the_same_every_time() -> None:
    series = {"a": {"x": Bar(1.5, (1.2, 1.9)), "y": Bar(0.5)}, "b": {"y": Bar(2.0)}}
    figures = [plots.bars(series, y_label="speed-up", reference=1.0) for _ in range(2)]
    (axes,) = figures[0].axes
    assert [bar.get_height() for bar in axes.patches] == [1.5, 0.5, 2.0]
    (interval,) = axes.collections
    assert interval.get_segments()[0][:, 1].tolist() == [1.2, 1.9]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["x", "y"]
    first, second = map(plots.svg, figures)
    assert first == second and first.count("<svg") == 1 and "speed-up" in first
